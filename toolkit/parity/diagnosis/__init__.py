"""The diagnosis: find the likely cause of a difference from its pattern.

The rules run in the order in which things can go wrong in a step: samples, initial weights, forward pass, gradients,
clipping, update, replicas, and only then the following steps. The first rule that matches is the diagnosis: whatever
comes later differs as a consequence.
"""

from collections.abc import Callable

from toolkit.parity.diagnosis import experts, forward, gradient, update
from toolkit.parity.diagnosis.cause import Cause, Diagnosis, diagnosis
from toolkit.parity.result import ParityResult

__all__ = ["RULES", "Cause", "Diagnosis", "diagnose"]

RULES: tuple[Callable[[ParityResult], Diagnosis | None], ...] = (
    forward.samples,
    experts.weights_at_start,
    forward.initial_weights,
    forward.number_of_updates,
    forward.not_finite,
    forward.token_weighting,
    gradient.constant_factor,
    experts.routers,
    experts.between_router_and_experts,
    forward.forward_pass,
    experts.gradients,
    gradient.unequal_weights,
    gradient.wrong_gradients,
    experts.norm,
    gradient.reported_norm,
    gradient.first_norm,
    update.schedule,
    update.first_update,
    update.diverged_replicas,
    update.second_forward_pass,
    update.growth,
)


def diagnose(diff: ParityResult) -> Diagnosis:
    """Return what the first matching rule says."""
    for rule in RULES:
        found = rule(diff)
        if found is not None:
            return found
    return diagnosis("pattern")
