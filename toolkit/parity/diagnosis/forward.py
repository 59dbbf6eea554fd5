"""Rules for everything before the gradients: samples, initial weights, and the forward pass of the first step."""

import math
from operator import itemgetter

import numpy as np

from toolkit.parity.diagnosis.cause import Diagnosis, diagnosis
from toolkit.parity.parity_run import whole_difference
from toolkit.parity.result import ParityResult
from toolkit.parity.tolerance import relative
from toolkit.units import some

_SAME_POSITIONS = 1e-5
"""Relative difference of mean positions that says nothing: positions that are known by their cosines are rounded."""


def samples(diff: ParityResult) -> Diagnosis | None:
    """Detect other samples than the baseline's, by the fingerprint of each batch."""
    step = diff.other_samples_from
    if step is None:
        return None
    batch = diff.run.batches[step - 1]
    baseline_batch = diff.baseline.batches[step - 1]
    step = diff.run.curve.step(step)
    return diagnosis("samples of ranks" if "!=" in batch else "samples", step=step, run=batch, baseline=baseline_batch)


def initial_weights(diff: ParityResult) -> Diagnosis | None:
    """Detect weights that differ before the first step, from the baseline's or between ranks."""
    diverged = sorted(diff.run.diverged_at_start)
    if diverged:
        return diagnosis("replicas at start", names=some(diverged))
    names = other_weights(diff)
    if not names:
        return None
    gap = whole_difference(diff.run.initial, diff.baseline.initial)
    count = len(diff.baseline.initial)
    return diagnosis("initial weights", names=some(names), count=len(names), all=count, gap=gap)


def other_weights(diff: ParityResult) -> list[str]:
    """Return the parameters that start from other weights than the baseline's."""
    initial = diff.run.initial
    return [
        name
        for name, value in diff.baseline.initial.items()
        if name not in initial
        or initial[name].shape != value.shape
        or not np.allclose(initial[name], value, rtol=4 * diff.bounds.unit, atol=0)
    ]


def dropout_masks(diff: ParityResult) -> Diagnosis | None:
    """Detect ranks, layers or micro-batches that draw the same masks for different activations, or the reverse."""
    faults = diff.run.mask_faults
    if not faults:
        return None
    return diagnosis("dropout masks", faults="; ".join(faults[:3]), count=len(faults), masks=diff.run.masks_compared)


def number_of_updates(diff: ParityResult) -> Diagnosis | None:
    """Detect more or fewer updates than global batches."""
    updates = len(diff.run.learning_rates)
    steps = len(diff.run.curve)
    if not updates or updates == steps:
        return None
    return diagnosis("number of updates", updates=updates, steps=steps)


def not_finite(diff: ParityResult) -> Diagnosis | None:
    """Detect a loss or a norm that is NaN or infinite while the baseline's is not."""
    curve = diff.run.curve
    baseline_curve = diff.baseline.curve
    series = (
        ("loss", curve.losses, baseline_curve.losses),
        ("gradient norm", curve.grad_norms, baseline_curve.grad_norms),
    )
    lost = [
        (place, name, number, wanted)
        for name, numbers, baseline in series
        for place, (number, wanted) in enumerate(zip(numbers, baseline, strict=False), start=1)
        if not math.isfinite(number) and math.isfinite(wanted)
    ]
    if not lost:
        return None
    place, name, number, wanted = min(lost, key=itemgetter(0))
    weights = diff.run.parameters
    damaged = [key for key, value in weights.items() if not np.isfinite(value).all()]
    after = ""
    count = f"; {len(damaged)} of {len(weights)} parameters not finite" if weights else ""
    if damaged:
        after = f" The update was applied: {some(damaged)} are no longer finite."
    elif weights:  # a finished run keeps none
        after = " The update was skipped: the weights are finite."
    step = curve.step(place)
    return diagnosis("not finite", name=name, step=step, number=number, wanted=wanted, after=after, count=count)


def positions(diff: ParityResult) -> Diagnosis | None:
    """Detect other positions than the baseline's, if the first step's loss is wrong."""
    run_positions = diff.run.positions
    baseline_positions = diff.baseline.positions
    if diff.loss_is_right or not run_positions or not baseline_positions:
        return None
    gap = max(relative(*pair) for pair in zip(run_positions, baseline_positions, strict=True))
    if gap <= _SAME_POSITIONS:
        return None
    return diagnosis("positions", run=run_positions[0], baseline=baseline_positions[0])


def shared_attention(diff: ParityResult) -> Diagnosis | None:
    """Detect attention over shared sequences that does not do what a softmax over all visible keys does."""
    fault = diff.run.attention_fault
    return diagnosis("attention", fault=fault) if fault else None


def precision(diff: ParityResult) -> Diagnosis | None:
    """Detect decoder layers that compute in a dtype in which no layer of the baseline does."""
    others = sorted(diff.run.dtypes - diff.baseline.dtypes)
    if diff.loss_is_right or not others or not diff.baseline.dtypes:
        return None
    loss = diff.run.curve.losses[0]
    baseline_loss = diff.baseline.curve.losses[0]
    usual = some(sorted(diff.baseline.dtypes))
    return diagnosis("precision", others=some(others), usual=usual, run=loss, baseline=baseline_loss)


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
    first = diff.first_wrong_output
    if first is None:
        return diagnosis("after the layers", gap=gap)
    size = relative(diff.run.outputs.get(first, math.nan), diff.baseline.outputs[first])
    if first == names[0]:
        return diagnosis("embedding", first=first, size=size, gap=gap)
    before = "the embeddings agree" if first == names[1] else f"{names[names.index(first) - 1]} agrees"
    return diagnosis("layer", first=first, before=before, size=size, gap=gap)
