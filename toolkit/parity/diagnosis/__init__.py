"""The diagnosis: from the pattern of what differs to its likely cause, in words.

The rules run from the first thing that can go wrong in a step to the last: samples, starting weights, forward pass,
gradients, clipping, update, copies, and only then the steps that follow. The first that holds is the diagnosis:
whatever lies behind it differs as a consequence.
"""

from collections.abc import Callable

from toolkit.parity.diagnosis.case import Case
from toolkit.parity.diagnosis.cause import Cause, Diagnosis
from toolkit.parity.diagnosis.forward import (
    forward_pass,
    not_finite,
    number_of_updates,
    samples,
    starting_weights,
    token_weighting,
)
from toolkit.parity.diagnosis.gradient import (
    constant_factor,
    first_norm,
    reported_norm,
    unequal_weights,
    wrong_gradients,
)
from toolkit.parity.diagnosis.update import copies, first_update, growth, schedule, second_forward_pass

__all__ = ["RULES", "Case", "Cause", "Diagnosis", "diagnose"]

RULES: tuple[Callable[[Case], Diagnosis | None], ...] = (
    samples,
    starting_weights,
    number_of_updates,
    not_finite,
    token_weighting,
    constant_factor,
    forward_pass,
    unequal_weights,
    wrong_gradients,
    reported_norm,
    first_norm,
    schedule,
    first_update,
    copies,
    second_forward_pass,
    growth,
)


def diagnose(case: Case) -> Diagnosis:
    """What the first rule says that explains the case."""
    for rule in RULES:
        found = rule(case)
        if found is not None:
            return found
    return Diagnosis(cause=Cause.UNKNOWN, sentence="what differs has no pattern that is known here.")
