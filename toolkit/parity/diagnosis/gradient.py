"""Rules for the first step's gradients, where the loss tells nothing: a factor, a group of parameters, the norm."""

import math
from collections.abc import Sequence

import numpy as np

from toolkit.parity.diagnosis.case import Case
from toolkit.parity.diagnosis.cause import (
    SAME_DIRECTION,
    SAME_RATIO,
    Cause,
    Diagnosis,
    common_ratio,
    fraction,
    largest,
    some,
)
from toolkit.parity.gradients import GradientRow
from toolkit.parity.tolerance import relative


def constant_factor(case: Case) -> Diagnosis | None:
    """Every gradient points the right way and has the same wrong length."""
    factor = common_ratio(case.gradients)
    if factor is None or abs(factor - 1) < SAME_RATIO or len(case.wrong_gradients) < len(case.gradients) / 2:
        return None
    if any(_is_right(case, row) for row in case.gradients):
        return None  # a group of parameters, however many they are
    loss = "the reported loss is right" if case.loss_is_right else "the reported loss is off too"
    return Diagnosis(
        cause=Cause.SCALING,
        sentence=f"every gradient is {factor:.4g} times the baseline's, and {loss}: a factor of the loss, of gradient "
        f"accumulation or of the average over ranks ({fraction(factor)}) is missing or applied twice.",
        evidence=f"ratio {factor:.6f} for all {len(case.gradients)} parameters",
    )


def unequal_weights(case: Case) -> Diagnosis | None:
    """Every gradient is a little off in direction, and micro-batches have different numbers of targets."""
    targets = [count for _, count in case.micro_batches]
    if not case.loss_is_right or len(set(targets)) < 2 or len(case.wrong_gradients) < len(case.gradients):
        return None
    large = [row for row in case.gradients if row.difference > 10 * case.bounds.gradient]
    if any(row.cosine < 0.8 or not 0.8 < row.ratio < 1.25 for row in large[: max(1, len(large) // 2)]):
        return None
    return Diagnosis(
        cause=Cause.TOKEN_WEIGHTING,
        sentence=f"the loss is right and every gradient points slightly elsewhere. The micro-batches have between "
        f"{min(targets)} and {max(targets)} target tokens: they are averaged as if they had equally many.",
        evidence=largest(case.gradients, len(case.gradients), "gradients"),
    )


def wrong_gradients(case: Case) -> Diagnosis | None:
    """The forward pass is right and some gradients are not: which?"""
    rows = [row for row in case.gradients if row.name in case.wrong_gradients]
    if not rows:
        return None
    evidence = largest(rows, len(case.gradients), "gradients")
    for cause, rule in (
        (Cause.TYING, _tables),
        (Cause.STAGES, _stages),
        (Cause.ALL_REDUCE, _vectors),
        (Cause.SLICE, _one_layer),
        (Cause.ALL_REDUCE, _one_kind),
        (Cause.ALL_REDUCE, _all_before),
    ):
        sentence = rule(case, rows)
        if sentence is not None:
            return Diagnosis(cause=cause, sentence=sentence, evidence=evidence)
    return Diagnosis(
        cause=Cause.BACKWARD,
        sentence=f"the loss is right and the gradients of {some(_names(rows))} are not: the backward pass differs.",
        evidence=evidence,
    )


def reported_norm(case: Case) -> Diagnosis | None:
    """The gradient is right, and the norm that the engine reports is not the gradient's."""
    gradients, reported = case.trial.first_gradients, case.trial.curve.grad_norms[0]
    true = math.sqrt(sum(float(np.sum(np.square(value, dtype=np.float64))) for value in gradients.values()))
    if not gradients or relative(reported, true) <= SAME_DIRECTION + 10 * case.bounds.curve.at(0)[1]:
        return None
    return Diagnosis(
        cause=Cause.CLIPPING,
        sentence=f"the engine's gradient norm is {reported / max(true, 1e-300):.4g} times that of its own gradient: "
        "parts are left out of it or counted twice, and clipping follows it.",
        evidence=f"reported {reported:.6f}, of the gathered gradient {true:.6f}",
    )


def first_norm(case: Case) -> Diagnosis | None:
    """Finished runs keep no gradients: the loss of the first step is right and its norm is not."""
    own, other = case.trial.curve.grad_norms[0], case.baseline.curve.grad_norms[0]
    if case.gradients or not case.loss_is_right or relative(own, other) <= case.bounds.curve.at(0)[1]:
        return None
    ratio = f"{own / other:.4g} times" if other and math.isfinite(own / other) else "not"
    return Diagnosis(
        cause=Cause.BACKWARD,
        sentence=f"the loss of step 1 is right, and its gradient norm is {ratio} the baseline's: a factor of the loss "
        "or of the average over ranks, a wrong backward pass, or a norm that leaves parts out. dstk compare --recipe "
        "looks at each gradient.",
        evidence=f"{own:.6g}, baseline {other:.6g}",
    )


def _is_right(case: Case, row: GradientRow) -> bool:
    """Length and direction are the baseline's, and there is something that has them."""
    same = abs(row.ratio - 1) < SAME_RATIO and 1 - row.cosine < SAME_DIRECTION
    return same and bool(np.any(case.baseline.first_gradients[row.name]))


def _tables(case: Case, rows: Sequence[GradientRow]) -> str | None:
    if not all(case.is_table(row.name) for row in rows):
        return None
    return (
        f"only {some(_names(rows))}: the embedding. Its gradient has two parts, from the lookup and from the head; "
        "where they are tied across ranks or stages both must be added up."
    )


def _stages(case: Case, rows: Sequence[GradientRow]) -> str | None:
    """One factor on all that lies before some layer. Tied tables get a right part from the other end."""
    inside = [row for row in rows if case.layer_of[row.name] is not None]
    factor, wrong = common_ratio(inside), {case.layer_of[row.name] for row in inside}
    before = set(range(len(wrong)))
    whole = {name for name, layer in case.layer_of.items() if layer in before}
    if factor is None or wrong != before or before == case.layers or not whole <= case.wrong_gradients:
        return None
    return (
        f"everything up to layer {len(before) - 1} is {factor:.4g} times the baseline's and the layers behind it are "
        f"right: the gradient is scaled ({fraction(factor)}) where it passes from a pipeline stage to the one before."
    )


def _vectors(case: Case, rows: Sequence[GradientRow]) -> str | None:
    if not all(case.is_vector(row.name) for row in rows):
        return None
    return (
        f"only norms and biases ({some(case.kinds(_names(rows)))}): every tensor-parallel rank holds them whole and "
        "sees a part of their gradient. The sum over these ranks is missing, or taken twice."
    )


def _one_layer(case: Case, rows: Sequence[GradientRow]) -> str | None:
    inside = {case.layer_of[row.name] for row in rows}
    if len(inside) != 1 or None in inside or len(case.layers) < 2:
        return None
    return (
        f"only layer {inside.pop()} ({some(_names(rows))}): this layer is cut differently from the others, or a part "
        "of it is frozen or not synchronised."
    )


def _one_kind(case: Case, rows: Sequence[GradientRow]) -> str | None:
    kinds = case.kinds(_names(rows))
    inside = {case.layer_of[row.name] for row in rows}
    if inside != case.layers or len(kinds) > len(case.kinds(case.layer_of)) / 2:
        return None
    if any(case.layer_of[row.name] is None for row in rows) or len(rows) < len(kinds) * len(case.layers):
        return None
    return (
        f"only {some(kinds)}, in every layer: what several ranks hold together, such as shared key-value heads, needs "
        "the sum of their gradients."
    )


def _all_before(case: Case, rows: Sequence[GradientRow]) -> str | None:
    """Right from some place on, wrong before it."""
    order = [name for name in case.baseline.initial if not case.is_table(name)]
    wrong = [name in case.wrong_gradients for name in order]
    if all(wrong) or not any(wrong):
        return None
    last = max(place for place, is_wrong in enumerate(wrong) if is_wrong)
    depth = case.layer_of[order[last]]
    # Within the layer itself both kinds may occur; every layer before it is wrong throughout.
    if depth is None or not all(
        is_wrong
        for name, is_wrong in zip(order[:last], wrong, strict=False)
        if (case.layer_of[name] or 0) < depth and case.layer_of[name] is not None
    ):
        return None
    return (
        f"gradients are right behind {order[last]} and wrong before it: on the way back a gradient of activations is "
        "not summed over the tensor-parallel ranks, or summed twice (Megatron's f and g)."
    )


def _names(rows: Sequence[GradientRow]) -> list[str]:
    return sorted(row.name for row in rows)
