"""Rules for the use of a right gradient: learning rate, clipping, weight decay, optimizer, and later steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.parity.diagnosis.cause import SAME_RATIO, Diagnosis, diagnosis, worst_of
from toolkit.parity.result import ParityResult
from toolkit.parity.tolerance import FP32_UNIT, relative
from toolkit.units import some

EXPLAINED = 0.5
"""A multiple of the weights leaves less than this of the difference of two updates, if it is another weight decay."""
JUMP = 30.0
"""Rounding grows by less than this factor from one step to the next; a mistake that sets in grows by more."""


def schedule(diff: ParityResult) -> Diagnosis | None:
    """Detect another learning rate."""
    step = diff.other_rates_from
    if step is None:
        return None
    rate = diff.run.learning_rates[step - 1]
    baseline_rate = diff.baseline.learning_rates[step - 1]
    return diagnosis("schedule", step=diff.baseline.curve.step(step), run=rate, baseline=baseline_rate)


def first_update(diff: ParityResult) -> Diagnosis | None:
    """Detect a wrong first update after a right first gradient."""
    rows = [row for row in diff.updates if row.name in diff.wrong_updates]
    if not rows or diff.run.update_step != diff.baseline.update_step:
        return None
    evidence = worst_of(rows, len(diff.updates), "updates")
    fits = [_fit(diff, row.name) for row in rows]
    factors = [fit.factor for fit in fits]
    if all(fit.rest < 0.02 for fit in fits):
        if max(abs(factor - 1) for factor in factors) < SAME_RATIO:
            # AdamW makes a whole step of a gradient that is rounding, as of biases of keys, and Muon makes small
            # singular values as large as the others.
            explained = sum(fit.decay != 0.0 and fit.rest < EXPLAINED * fit.difference for fit in fits)
            if 2 * explained < len(fits):
                return None
            only_vectors = all(diff.is_vector(row.name) for row in rows)
            groups = "norms and biases" if only_vectors else some(sorted(diff.wrong_updates))
            return diagnosis("weight decay", groups=groups, evidence=evidence)
        middle = float(np.median(factors))
        if max(abs(factor - middle) for factor in factors) < 0.01 * abs(middle):
            return diagnosis("clipping", middle=middle, evidence=evidence)
    if diff.run.diverged:
        if all(fit.rest < 0.2 for fit in fits):
            return diagnosis(
                "clipping of shards",
                least=min(factors),
                most=max(factors),
                names=some(sorted(diff.run.diverged)),
                evidence=evidence,
            )
        return None
    return diagnosis("first update", evidence=evidence)


def diverged_replicas(diff: ParityResult) -> Diagnosis | None:
    """Detect replicas of a parameter that diverge."""
    diverged = sorted(diff.run.diverged)
    if not diverged:
        return None
    return diagnosis("replicas", names=some(diverged))


def second_forward_pass(diff: ParityResult) -> Diagnosis | None:
    """Detect a wrong loss from the right weights after the first update."""
    step = diff.baseline.update_step
    if (
        diff.bounds.unit > FP32_UNIT
        or diff.wrong_updates
        or not diff.run.first_updates
        or min(len(diff.run.curve), len(diff.baseline.curve)) <= step
    ):
        return None
    loss = diff.run.curve.losses[step]
    baseline_loss = diff.baseline.curve.losses[step]
    # The weights agree to rounding, so the loss of the same forward pass does too.
    if relative(loss, baseline_loss) <= 10 * max(diff.bounds.update, diff.bounds.curve.at(step)[0]):
        return None
    initial = diff.baseline.initial
    if initial and all(value.any() for value in initial.values()):
        return diagnosis("stale weights", step=step, after=step + 1, run=loss, baseline=baseline_loss)
    return diagnosis("second forward pass", step=step, after=step + 1, run=loss, baseline=baseline_loss)


def growth(diff: ParityResult) -> Diagnosis | None:
    """Tell a difference that sets in later from one that grew out of rounding. The first step is right."""
    curve = diff.run.curve
    baseline_curve = diff.baseline.curve
    shared = min(len(curve), len(baseline_curve))
    first = diff.curves.first_diverging_step
    if first is not None and first > shared:
        shorter = curve.label if len(curve) == shared else baseline_curve.label
        return diagnosis("shorter", shorter=shorter, step=curve.step(shared))
    if first is None:
        return diagnosis("last update")
    quantity = "loss"
    values = curve.losses
    baseline_values = baseline_curve.losses
    floor = diff.bounds.unit
    if diff.curves.first_loss_beyond is None:
        quantity = "gradient norm"
        values = curve.grad_norms
        baseline_values = baseline_curve.grad_norms
        floor = diff.bounds.curve.at(0)[1]
    gaps = [relative(values[i], baseline_values[i]) for i in range(shared)]
    place, jump = largest_jump(gaps, floor=floor)
    step = curve.step(place)
    start = curve.step(1)
    if jump < JUMP:
        return diagnosis("growth", first=gaps[0], start=start, largest=max(gaps), jump=jump)
    return diagnosis("jump", start=start, step=step, quantity=quantity, gap=gaps[place - 1], jump=jump)


def largest_jump(gaps: Sequence[float], *, floor: float) -> tuple[int, float]:
    """Return the step of the steepest rise (from 1), and its factor over the largest difference before it."""
    highest = floor
    steepest = (1, 0.0)
    for step, gap in enumerate(gaps, start=1):
        if highest:
            rise = gap / highest
        else:
            rise = math.inf if gap else 0.0
        if step > 1 and rise > steepest[1]:
            steepest = (step, rise)
        highest = max(highest, gap)
    return steepest


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """An update as `factor` times the baseline's and `decay` times the weights, by least squares."""

    factor: float
    decay: float
    rest: float
    """What the fit leaves of the update (0 to 1)."""
    difference: float
    """What the baseline's update leaves of it."""


def _fit(diff: ParityResult, name: str) -> _Fit:
    update = diff.run.first_updates.get(name)
    baseline_update = diff.baseline.first_updates.get(name)
    weights = diff.baseline.initial.get(name)
    unknown = _Fit(factor=math.nan, decay=0.0, rest=1.0, difference=1.0)
    if update is None or baseline_update is None or weights is None or update.shape != baseline_update.shape:
        return unknown
    wanted = update.astype(np.float64).ravel()
    terms = np.stack([value.astype(np.float64).ravel() for value in (baseline_update, weights)], axis=1)
    if not np.isfinite(wanted).all() or not wanted.any():
        return unknown
    factors = np.linalg.lstsq(terms, wanted, rcond=None)[0]
    size = float(np.linalg.norm(wanted))
    return _Fit(
        factor=float(factors[0]),
        decay=float(factors[1]),
        rest=float(np.linalg.norm(wanted - terms @ factors)) / size,
        difference=float(np.linalg.norm(wanted - terms[:, 0])) / size,
    )
