"""Rules for what is done with a right gradient: learning rate, clipping, weight decay, optimizer, and later steps."""

import math
from collections.abc import Sequence

import numpy as np

from toolkit.parity.diagnosis.case import Case
from toolkit.parity.diagnosis.cause import SAME_RATIO, Cause, Diagnosis, largest, some
from toolkit.parity.tolerance import FP32_UNIT, relative

JUMP = 30.0
"""Rounding grows by less than this from one step to the next; a mistake that sets in grows by more."""
_NOISE = 1e-4
"""Of the largest element of a gradient, what is as good as nothing: rounding, and some more."""


def schedule(case: Case) -> Diagnosis | None:
    """Another learning rate."""
    step = case.other_rates_from
    if step is None:
        return None
    own, other = case.trial.learning_rates[step - 1], case.baseline.learning_rates[step - 1]
    return Diagnosis(
        cause=Cause.SCHEDULE,
        sentence=f"the learning rate of step {step} is not the baseline's: another schedule, or a scheduler of the "
        "engine's own that steps beside it.",
        evidence=f"{own:.6g}, baseline {other:.6g}",
    )


def first_update(case: Case) -> Diagnosis | None:
    """The first gradient is right and the first update is not."""
    rows = [row for row in case.updates if row.name in case.wrong_updates]
    if not rows or case.trial.update_step != case.baseline.update_step:
        return None
    evidence = largest(rows, len(case.updates), "updates")
    parts = [_parts(case, row.name) for row in rows]
    factors = [factor for factor, _, _ in parts]
    if all(rest < 0.02 for _, _, rest in parts):
        decays = [decay for _, decay, _ in parts]
        if max(abs(factor - 1) for factor in factors) < SAME_RATIO and any(decays):
            groups = "norms and biases" if all(case.is_vector(row.name) for row in rows) else some(_names(case))
            return Diagnosis(
                cause=Cause.WEIGHT_DECAY,
                sentence=f"the first update differs by a multiple of the weights themselves, in {groups}: weight decay "
                "applies to other parameters, or with another strength.",
                evidence=evidence,
            )
        middle = float(np.median(factors))
        if max(abs(factor - middle) for factor in factors) < 0.01 * abs(middle):
            return Diagnosis(
                cause=Cause.CLIPPING,
                sentence=f"gradients and learning rate are right, and the first update is {middle:.4g} times the "
                "baseline's everywhere: the gradient is clipped by another norm, or not at all.",
                evidence=evidence,
            )
    if case.trial.torn:
        if all(rest < 0.2 for _, _, rest in parts):
            return Diagnosis(
                cause=Cause.CLIPPING,
                sentence=f"gradients and learning rate are right, and updates are {min(factors):.4g} to "
                f"{max(factors):.4g} times the baseline's: each rank clips by the norm of what it holds, and copies "
                f"drift apart ({some(sorted(case.trial.torn))}).",
                evidence=evidence,
            )
        return None
    return Diagnosis(
        cause=Cause.OPTIMIZER,
        sentence="gradients and learning rate are right, and the first update is not: another optimizer, or other "
        "betas, eps or bias correction.",
        evidence=evidence,
    )


def copies(case: Case) -> Diagnosis | None:
    """Ranks that drift apart."""
    torn = sorted(case.trial.torn)
    if not torn:
        return None
    return Diagnosis(
        cause=Cause.COPIES,
        sentence=f"ranks that should hold the same parameter drift apart: {some(torn)}. They are updated from "
        "different gradients, norms or learning rates.",
    )


def second_forward_pass(case: Case) -> Diagnosis | None:
    """The weights after the first update are right, and the loss that they give is not."""
    step = case.baseline.update_step
    if (
        case.bounds.unit > FP32_UNIT
        or case.wrong_updates
        or not case.trial.first_updates
        or min(len(case.trial.curve), len(case.baseline.curve)) <= step
    ):
        return None
    own, other = case.trial.curve.losses[step], case.baseline.curve.losses[step]
    # The weights agree to rounding; so does the loss, if the same is computed.
    if relative(own, other) <= 10 * max(case.bounds.update, case.bounds.curve.at(step)[0]):
        return None
    return Diagnosis(
        cause=Cause.FORWARD,
        sentence=f"the weights after step {step} are right and the loss of step {step + 1} is not: the forward pass "
        "goes wrong in what was zero at the start, so look at how biases are added.",
        evidence=f"loss {own:.6f}, baseline {other:.6f}",
    )


def growth(case: Case) -> Diagnosis | None:
    """The first step is right. Does the difference set in later, or has it grown from rounding?"""
    own, other = case.trial.curve, case.baseline.curve
    shared = min(len(own), len(other))
    first = case.report.first_diverging_step
    if first is not None and first > shared:
        shorter = own.label if len(own) == shared else other.label
        return Diagnosis(cause=Cause.UNKNOWN, sentence=f"{shorter} ends at step {shared}, and the other goes on.")
    if first is None:
        share, name = _share_in_noise(case)
        if share > 0.9:
            return Diagnosis(
                cause=Cause.CHAOS,
                sentence="losses and gradient norms agree in every step; the weights that do not have no gradient but "
                f"rounding ({name}; a key's bias is such), which Adam makes as large as any other. Not a mistake of "
                "the strategy; lower the learning rate to compare more sharply.",
                evidence=f"{100 * share:.0f} % of the squared difference",
            )
        return Diagnosis(
            cause=Cause.OPTIMIZER,
            sentence="losses and gradient norms agree in every step, and the trained weights do not: look at the last "
            "update, at parameters that no gradient reaches, and at weight decay.",
        )
    what, series, floor = "loss", (own.losses, other.losses), case.bounds.unit
    if case.report.first_loss_beyond is None:
        what, series, floor = "gradient norm", (own.grad_norms, other.grad_norms), case.bounds.curve.at(0)[1]
    gaps = [relative(series[0][i], series[1][i]) for i in range(shared)]
    step, jump = largest_jump(gaps, floor=floor)
    if jump < JUMP:
        return Diagnosis(
            cause=Cause.CHAOS,
            sentence="the difference begins at rounding level and grows from step to step without a jump: training at "
            "this learning rate amplifies rounding. Not a mistake of the strategy; lower the learning rate to compare "
            "more sharply.",
            evidence=f"{gaps[0]:.1e} in step 1, {max(gaps):.1e} at most, never more than {jump:.1f} times in a step",
        )
    return Diagnosis(
        cause=Cause.OPTIMIZER,
        sentence=f"the first step is right and step {step} is not: what an update leaves behind differs (optimizer "
        "state, weight decay, a skipped or doubled update), or clipping by another norm, which Adam hides in its first "
        "step: compare with optimizer.name=sgd to see it.",
        evidence=f"the {what} differs by {gaps[step - 1]:.1e} in step {step}, {jump:.0f} times more than before",
    )


def largest_jump(gaps: Sequence[float], *, floor: float) -> tuple[int, float]:
    """(step, how many times the largest difference before it) of the steepest rise; steps count from 1."""
    highest, steepest = floor, (1, 0.0)
    for step, gap in enumerate(gaps, start=1):
        rise = gap / highest if highest else math.inf if gap else 0.0
        if step > 1 and rise > steepest[1]:
            steepest = (step, rise)
        highest = max(highest, gap)
    return steepest


def _share_in_noise(case: Case) -> tuple[float, str]:
    """How much of the weights' squared difference lies in elements whose first gradient is noise beside the others.

    Also the parameter that has most of it.
    """
    noise, whole = {}, 0.0
    for name, gradient in case.baseline.first_gradients.items():
        own, other = case.trial.parameters.get(name), case.baseline.parameters.get(name)
        if own is None or other is None or own.shape != gradient.shape:
            return 0.0, name
        gap = np.square(own.astype(np.float64) - other)
        size = np.abs(gradient)
        noise[name] = float(gap[size < _NOISE * size.max()].sum())
        whole += float(gap.sum())
    return sum(noise.values()) / max(whole, 1e-300), max(noise, key=lambda name: noise[name], default="")


def _parts(case: Case, name: str) -> tuple[float, float, float]:
    """An update as a * the baseline's + b * the weights, by least squares: a, b, and what is left of it (0 to 1)."""
    own, other = case.trial.first_updates.get(name), case.baseline.first_updates.get(name)
    weights = case.baseline.initial.get(name)
    if own is None or other is None or weights is None or own.shape != other.shape:
        return math.nan, 0.0, 1.0
    wanted = own.astype(np.float64).ravel()
    terms = np.stack([value.astype(np.float64).ravel() for value in (other, weights)], axis=1)
    if not np.isfinite(wanted).all() or not wanted.any():
        return math.nan, 0.0, 1.0
    factors = np.linalg.lstsq(terms, wanted, rcond=None)[0]
    rest = float(np.linalg.norm(wanted - terms @ factors) / np.linalg.norm(wanted))
    return float(factors[0]), float(factors[1]), rest


def _names(case: Case) -> list[str]:
    return sorted(case.wrong_updates)
