"""Rules for biases of row-parallel layers: every rank has them, and they must be added once, after the all-reduce."""

import numpy as np

from toolkit.parity.diagnosis.cause import SAME_RATIO, Diagnosis, diagnosis, fraction
from toolkit.parity.parity_run import Tensors
from toolkit.parity.result import ParityResult

_ROUNDING = 1e-4
"""Relative difference of a mean output that says nothing."""
_EXPLAINED = 0.02
"""Share of the difference that a multiple of the bias may leave unexplained."""


def in_first_step(diff: ParityResult) -> Diagnosis | None:
    """Detect a bias that is counted wrongly in the first step, in weights that are continued: new biases are zero."""
    if diff.loss_is_right:
        return None
    return _counted_wrongly(diff, step=0, weights=diff.baseline.initial, when="in the first step")


def after_first_update(diff: ParityResult) -> Diagnosis | None:
    """Detect a bias that is counted wrongly in the first step whose biases are not zero any more."""
    changes = diff.baseline.first_updates
    step = diff.baseline.update_step
    weights = {name: value + changes[name] for name, value in diff.baseline.initial.items() if name in changes}
    return _counted_wrongly(diff, step=1, weights=weights, when=f"after the update of step {step}")


def _counted_wrongly(diff: ParityResult, *, step: int, weights: Tensors, when: str) -> Diagnosis | None:
    """Look at the first output that differs: its mean is off by a multiple of its bias."""
    if len(diff.run.mean_outputs) <= step or len(diff.baseline.mean_outputs) <= step:
        return None
    means = diff.run.mean_outputs[step]
    baseline_means = diff.baseline.mean_outputs[step]
    least = max(_ROUNDING, 8 * diff.bounds.unit)
    for name, mean in baseline_means.items():
        if name not in means or means[name].shape != mean.shape:
            continue
        gap = means[name] - mean
        if np.linalg.norm(gap) <= least * np.linalg.norm(mean):
            continue
        bias = weights.get(f"{name}.bias")
        if bias is None or not bias.any() or not np.isfinite(gap).all():
            return None
        direction = bias.astype(np.float64)
        factor = float(gap @ direction / (direction @ direction))
        if np.linalg.norm(gap - factor * direction) > _EXPLAINED * np.linalg.norm(gap):
            return None
        return _say(name, factor, when)
    return None


def _say(name: str, factor: float, when: str) -> Diagnosis:
    total = round(1 + factor)
    is_whole = abs(1 + factor - total) < 10 * SAME_RATIO
    if factor > 0 and is_whole:
        reason = (
            f"every one of {total} tensor-parallel ranks adds the bias before their outputs are summed; add it once, "
            "after the all-reduce"
        )
    elif is_whole and total == 0:
        reason = "the bias is not added at all"
    elif factor < 0:
        reason = f"only {fraction(1 + factor)} of the bias is added: it is divided by ranks that do not each add it"
    else:
        reason = "the bias is added with a factor"
    size = f"{abs(factor):.4g}"
    more = "more" if factor > 0 else "less"
    evidence = f"mean output of {name}: off by {factor:+.4f} x its bias, added {1 + factor:.4f} times"
    return diagnosis("bias", when=when, name=name, factor=size, more=more, reason=reason, evidence=evidence)
