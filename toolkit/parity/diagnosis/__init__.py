"""The diagnosis: find the likely cause of a difference from its pattern.

The rules run in the order in which things can go wrong in a step: samples, initial weights, forward pass, gradients,
clipping, update, replicas, and only then the following steps. The first rule that matches is the diagnosis: whatever
comes later differs as a consequence.
"""

from collections.abc import Callable

from toolkit.parity.diagnosis import bias, experts, forward, gradient, objective, samples, update
from toolkit.parity.diagnosis.cause import Cause, Diagnosis, diagnosis
from toolkit.parity.result import ParityResult

__all__ = ["RULES", "Cause", "Diagnosis", "diagnose"]

RULES: tuple[Callable[[ParityResult], Diagnosis | None], ...] = (
    objective.targets,
    forward.samples,
    experts.weights_at_start,
    forward.initial_weights,
    forward.dropout_masks,
    forward.number_of_updates,
    forward.not_finite,
    objective.inputs,
    objective.coefficients,
    samples.token_weighting,
    samples.labels,
    gradient.constant_factor,
    samples.sample_weights,
    experts.routers,
    experts.between_router_and_experts,
    forward.positions,
    forward.shared_attention,
    forward.precision,
    bias.in_first_step,
    forward.forward_pass,
    experts.gradients,
    samples.weight_gradients,
    gradient.unequal_weights,
    gradient.wrong_gradients,
    experts.norm,
    gradient.reported_norm,
    gradient.first_norm,
    update.schedule,
    gradient.of_later_step,
    update.first_update,
    update.diverged_replicas,
    objective.later_coefficients,
    bias.after_first_update,
    update.second_forward_pass,
    update.growth,
)


def diagnose(diff: ParityResult) -> Diagnosis:
    """Return what the first matching rule says."""
    for rule in RULES:
        likely_cause = rule(diff)
        if likely_cause is not None:
            return likely_cause
    return diagnosis("pattern")
