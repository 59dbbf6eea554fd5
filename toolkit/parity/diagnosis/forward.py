"""Rules for everything before the gradients: samples, initial weights, and the forward pass of the first step."""

import math

import numpy as np

from toolkit.parity.diagnosis.cause import Diagnosis, diagnosis
from toolkit.parity.parity_run import whole_difference
from toolkit.parity.result import ParityResult
from toolkit.parity.tolerance import relative
from toolkit.units import some

_PRINTED = 1e-5
"""Relative bound within which a loss counts as the one that a mistake would give."""


def samples(diff: ParityResult) -> Diagnosis | None:
    """Detect other samples than the baseline's, by the fingerprint of each batch."""
    step = diff.other_samples_from
    if step is None:
        return None
    own, other = diff.run.batches[step - 1], diff.baseline.batches[step - 1]
    step = diff.run.curve.step(step)
    return diagnosis("samples of ranks" if "!=" in own else "samples", step=step, own=own, other=other)


def initial_weights(diff: ParityResult) -> Diagnosis | None:
    """Detect weights that differ before the first step, from the baseline's or between ranks."""
    diverged = sorted(diff.run.diverged_at_start)
    if diverged:
        return diagnosis("replicas at start", names=some(diverged))
    other = other_weights(diff)
    if not other:
        return None
    gap, count = whole_difference(diff.run.initial, diff.baseline.initial), len(diff.baseline.initial)
    return diagnosis("initial weights", names=some(other), count=len(other), all=count, gap=gap)


def other_weights(diff: ParityResult) -> list[str]:
    """Return the parameters that start from other weights than the baseline's."""
    own = diff.run.initial
    return [
        name
        for name, value in diff.baseline.initial.items()
        if name not in own
        or own[name].shape != value.shape
        or not np.allclose(own[name], value, rtol=4 * diff.bounds.unit, atol=0)
    ]


def number_of_updates(diff: ParityResult) -> Diagnosis | None:
    """Detect more or fewer updates than global batches."""
    updates, steps = len(diff.run.learning_rates), len(diff.run.curve)
    if not updates or updates == steps:
        return None
    return diagnosis("number of updates", updates=updates, steps=steps)


def not_finite(diff: ParityResult) -> Diagnosis | None:
    """Detect a loss or a norm that is NaN or infinite while the baseline's is not."""
    own, other = diff.run.curve, diff.baseline.curve
    series = (("loss", own.losses, other.losses), ("gradient norm", own.grad_norms, other.grad_norms))
    lost = [
        (place, name, number, wanted)
        for name, numbers, baseline in series
        for place, (number, wanted) in enumerate(zip(numbers, baseline, strict=False), start=1)
        if not math.isfinite(number) and math.isfinite(wanted)
    ]
    if not lost:
        return None
    place, name, number, wanted = min(lost, key=lambda one: one[0])
    weights = diff.run.parameters
    damaged = [key for key, value in weights.items() if not np.isfinite(value).all()]
    after, count = "", f"; {len(damaged)} of {len(weights)} parameters not finite" if weights else ""
    if damaged:
        after = f" The update was applied: {some(damaged)} are no longer finite."
    elif weights:  # a finished run keeps none
        after = " The update was skipped: the weights are finite."
    step = own.step(place)
    return diagnosis("not finite", name=name, step=step, number=number, wanted=wanted, after=after, count=count)


def token_weighting(diff: ParityResult) -> Diagnosis | None:
    """Detect the loss of equally weighted micro-batches that have different numbers of target tokens."""
    parts = diff.micro_batches
    if not parts or diff.loss_is_right:
        return None
    reported, right = diff.run.curve.losses[0], diff.baseline.curve.losses[0]
    unweighted = sum(loss / max(1, targets) for loss, targets in parts) / len(parts)
    if relative(reported, unweighted) > _PRINTED or relative(unweighted, right) < _PRINTED:
        return None
    return diagnosis("unweighted loss", reported=reported, unweighted=unweighted, right=right)


def forward_pass(diff: ParityResult) -> Diagnosis | None:
    """Find the first layer whose output differs, if the first step's loss does."""
    if diff.loss_is_right:
        return None
    start = diff.baseline.curve.step(1)
    gap = f"loss of step {start}: {diff.run.curve.losses[0]:.6f}, baseline {diff.baseline.curve.losses[0]:.6f}"
    if start > 1:
        return diagnosis("first logged loss", gap=gap)
    names = list(diff.baseline.outputs)
    if not names or not diff.run.outputs:
        return diagnosis("first loss", gap=gap)
    gaps = {name: relative(diff.run.outputs.get(name, math.nan), diff.baseline.outputs[name]) for name in names}
    first = next((name for name in names if not gaps[name] <= diff.bounds.output), None)
    if first is None:
        return diagnosis("after the layers", gap=gap)
    if first == names[0]:
        return diagnosis("embedding", first=first, size=gaps[first], gap=gap)
    before = "the embeddings agree" if first == names[1] else f"{names[names.index(first) - 1]} agrees"
    return diagnosis("layer", first=first, before=before, size=gaps[first], gap=gap)
