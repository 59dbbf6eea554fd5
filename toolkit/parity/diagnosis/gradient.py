"""Rules for the first step's gradients: a common factor, a group of parameters, the reported norm."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from toolkit.parity.diagnosis.cause import (
    SAME_DIRECTION,
    SAME_RATIO,
    Diagnosis,
    common_ratio,
    diagnosis,
    fraction,
    worst_of,
)
from toolkit.parity.diagnosis.samples import is_sum_of_samples
from toolkit.parity.parity_run import TensorDifference, tensor_differences
from toolkit.parity.result import ParityResult
from toolkit.parity.tolerance import FP32_UNIT, relative
from toolkit.units import some

_EXPLAINED = 0.02
"""Share of a difference that an earlier gradient may leave unexplained."""


def constant_factor(diff: ParityResult) -> Diagnosis | None:
    """Detect gradients that all point the right way and have the same wrong length."""
    factor = common_ratio(diff.gradients)
    if factor is None or abs(factor - 1) < SAME_RATIO or len(diff.wrong_gradients) < len(diff.gradients) / 2:
        return None
    right = (row for row in diff.gradients if abs(row.ratio - 1) < SAME_RATIO and 1 - row.cosine < SAME_DIRECTION)
    if any(np.any(diff.baseline.first_gradients[row.name]) for row in right):
        return None  # a group of parameters, however large
    loss = "the reported loss is right" if diff.loss_is_right else "the reported loss is off too"
    return diagnosis("constant factor", factor=factor, loss=loss, fraction=fraction(factor), count=len(diff.gradients))


def unequal_weights(diff: ParityResult) -> Diagnosis | None:
    """Detect gradients that are all slightly off in direction while micro-batches differ in target tokens."""
    targets = [count for _, count in diff.micro_batches]
    if not diff.loss_is_right or len(set(targets)) < 2 or len(diff.wrong_gradients) < len(diff.gradients):
        return None
    large = [row for row in diff.gradients if row.difference > 10 * diff.bounds.gradient]
    if any(row.cosine < 0.8 or not 0.8 < row.ratio < 1.25 for row in large[: max(1, len(large) // 2)]):
        return None
    if is_sum_of_samples(diff.baseline):
        return None  # `sample_weights` would have found the weights
    return diagnosis(
        "unequal weights",
        fewest=min(targets),
        most=max(targets),
        evidence=worst_of(diff.gradients, len(diff.gradients), "gradients"),
    )


def wrong_gradients(diff: ParityResult) -> Diagnosis | None:
    """Find the group of parameters whose gradients are wrong, if the forward pass is right."""
    rows = [row for row in diff.gradients if row.name in diff.wrong_gradients]
    if not rows:
        return None
    evidence = worst_of(rows, len(diff.gradients), "gradients")
    for rule in (_tables, _stages, _vectors, _one_layer, _one_kind, _whole_layers_before, _all_before):
        group = rule(diff, rows)
        if group is not None:
            return replace(group, evidence=evidence)
    return diagnosis("backward pass", names=some(_names(rows)), evidence=evidence)


def of_later_step(diff: ParityResult) -> Diagnosis | None:
    """Detect a wrong gradient in the step of the first update, after a warm-up from zero: weights have not changed."""
    step = diff.run.update_step
    gradients = diff.run.update_gradients
    baseline_gradients = diff.baseline.update_gradients
    if not gradients or not baseline_gradients or step != diff.baseline.update_step or diff.bounds.unit > FP32_UNIT:
        return None
    # The bound is of the first step; rounding in another batch may be larger.
    rows = [
        row
        for row in tensor_differences(gradients, baseline_gradients)
        if not row.difference <= 10 * diff.bounds.gradient
    ]
    if not rows:
        return None
    evidence = worst_of(rows, len(baseline_gradients), "gradients")
    share = _share_of_first(diff)
    if share is not None:
        return diagnosis("gradient not zeroed", step=step, share=share, evidence=evidence)
    return diagnosis("later gradient", step=step, names=some(_names(rows)), evidence=evidence)


def _share_of_first(diff: ParityResult) -> float | None:
    """Return how much of the first gradient is in that of the first update by mistake; None if that is not it."""
    gradients = diff.run.update_gradients
    baseline_gradients = diff.baseline.update_gradients
    first = diff.baseline.first_gradients
    if gradients.keys() != first.keys() or baseline_gradients.keys() != first.keys():
        return None
    inner = square = rest = 0.0
    for name, value in first.items():
        gap = (gradients[name].astype(np.float64) - baseline_gradients[name]).ravel()
        direction = value.astype(np.float64).ravel()
        inner += float(gap @ direction)
        square += float(direction @ direction)
        rest += float(gap @ gap)
    is_explained = rest - inner**2 / max(square, 1e-300) <= _EXPLAINED**2 * rest
    return inner / square if is_explained and square else None


def reported_norm(diff: ParityResult) -> Diagnosis | None:
    """Detect a reported gradient norm that is not the norm of the (right) gradient."""
    gradients = diff.run.first_gradients
    reported = [*diff.run.curve.grad_norms, 0.0][0]
    true = math.sqrt(sum(float(np.sum(np.square(value, dtype=np.float64))) for value in gradients.values()))
    if not gradients or relative(reported, true) <= SAME_DIRECTION + 10 * diff.bounds.curve.at(0)[1]:
        return None
    return diagnosis("reported norm", ratio=reported / max(true, 1e-300), reported=reported, true=true)


def first_norm(diff: ParityResult) -> Diagnosis | None:
    """Detect a wrong first norm beside a right loss in finished runs, which keep no gradients."""
    if diff.gradients or not diff.loss_is_right or diff.curves.first_norm_beyond != 1:
        return None
    norm = diff.run.curve.grad_norms[0]
    baseline_norm = diff.baseline.curve.grad_norms[0]
    ratio = f"{norm / baseline_norm:.4g} times" if baseline_norm and math.isfinite(norm / baseline_norm) else "not"
    return diagnosis("first norm", step=diff.run.curve.step(1), ratio=ratio, run=norm, baseline=baseline_norm)


def _tables(diff: ParityResult, rows: Sequence[TensorDifference]) -> Diagnosis | None:
    if not all(diff.is_table(row.name) for row in rows):
        return None
    factor = common_ratio(rows)
    if factor is not None and round(factor) > 1 and abs(factor - round(factor)) < SAME_RATIO:
        return diagnosis("tables counted twice", names=some(_names(rows)), factor=round(factor))
    return diagnosis("tables", names=some(_names(rows)))


def _stages(diff: ParityResult, rows: Sequence[TensorDifference]) -> Diagnosis | None:
    """Detect one factor on all parameters before some layer. Tied tables get a right part from the head."""
    inside = [row for row in rows if diff.layer_of[row.name] is not None]
    factor = common_ratio(inside)
    wrong = {diff.layer_of[row.name] for row in inside}
    before = set(range(len(wrong)))
    whole = {name for name, layer in diff.layer_of.items() if layer in before}
    if factor is None or wrong != before or before == diff.layers or not whole <= diff.wrong_gradients:
        return None
    return diagnosis("stages", last=len(before) - 1, factor=factor, fraction=fraction(factor))


def _vectors(diff: ParityResult, rows: Sequence[TensorDifference]) -> Diagnosis | None:
    if not all(diff.is_vector(row.name) for row in rows):
        return None
    return diagnosis("vectors", kinds=some(diff.kinds(_names(rows))))


def _one_layer(diff: ParityResult, rows: Sequence[TensorDifference]) -> Diagnosis | None:
    inside = {diff.layer_of[row.name] for row in rows}
    if len(inside) != 1 or None in inside or len(diff.layers) < 2:
        return None
    return diagnosis("one layer", layer=inside.pop(), names=some(_names(rows)))


def _one_kind(diff: ParityResult, rows: Sequence[TensorDifference]) -> Diagnosis | None:
    kinds = diff.kinds(_names(rows))
    inside = {diff.layer_of[row.name] for row in rows}
    if inside != diff.layers or len(kinds) > len(diff.kinds(diff.layer_of)) / 2:
        return None
    if any(diff.layer_of[row.name] is None for row in rows) or len(rows) < len(kinds) * len(diff.layers):
        return None
    return diagnosis("one kind", kinds=some(kinds))


def _whole_layers_before(diff: ParityResult, rows: Sequence[TensorDifference]) -> Diagnosis | None:
    """Detect gradients that are right from one layer on and wrong in all layers before it, without exception.

    A mistake of tensor parallelism has right and wrong gradients in the layer where it begins.
    """
    wrong = {row.name for row in rows}
    inside = {diff.layer_of[name] for name in wrong} - {None}
    before = set(range(len(inside)))
    whole = {name for name, layer in diff.layer_of.items() if layer in before}
    outside = {name for name in wrong if diff.layer_of[name] is None}
    if inside != before or before == diff.layers or not whole <= wrong or not all(map(diff.is_table, outside)):
        return None
    return diagnosis("messages", first=len(before), last=len(before) - 1)


def _all_before(diff: ParityResult, rows: Sequence[TensorDifference]) -> Diagnosis | None:
    """Detect gradients that are right from some layer on and wrong before it."""
    order = [name for name in diff.baseline.initial if not diff.is_table(name)]
    wrong = [name in diff.wrong_gradients for name in order]
    if all(wrong) or not any(wrong):
        return None
    last = max(place for place, is_wrong in enumerate(wrong) if is_wrong)
    depth = diff.layer_of[order[last]]
    # The layer itself may have both kinds; every layer before it must be wrong throughout.
    if depth is None or not all(
        is_wrong
        for name, is_wrong in zip(order[:last], wrong, strict=False)
        if (diff.layer_of[name] or 0) < depth and diff.layer_of[name] is not None
    ):
        return None
    return diagnosis("all before", last=order[last])


def _names(rows: Sequence[TensorDifference]) -> list[str]:
    return sorted(row.name for row in rows)
