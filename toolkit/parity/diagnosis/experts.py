"""Rules for mixtures: what is wrong in experts alone, from routers on backward, or between a router and its experts."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from toolkit.parity.diagnosis.cause import Diagnosis, common_ratio, diagnosis, fraction, worst_of
from toolkit.parity.diagnosis.forward import other_weights
from toolkit.parity.parity_run import BEFORE_EXPERTS, Tensors
from toolkit.parity.result import ParityResult
from toolkit.parity.tolerance import relative
from toolkit.units import some

_SAME_NORM = 1e-5
"""Relative bound within which a norm counts as that of a part of the gradient."""


@dataclass(frozen=True, kw_only=True)
class _Mixture:
    """The parameters of a mixture by their role."""

    experts: frozenset[str]
    """Names of parameters whose first dimension is the expert."""
    routers: frozenset[str]
    """Names of parameters that stand beside experts and have a row for each of them."""

    @classmethod
    def of(cls, tensors: Tensors) -> Self:
        blocks = {
            name.partition(".experts.")[0]: value.shape[0] for name, value in tensors.items() if ".experts." in name
        }
        inside = {name: block for name in tensors for block in blocks if name.startswith(f"{block}.")}
        experts = {name for name, block in inside.items() if name.startswith(f"{block}.experts.")}
        routers = {name for name, block in inside.items() if tensors[name].shape[0] == blocks[block]} - experts
        return cls(experts=frozenset(experts), routers=frozenset(routers))


def weights_at_start(diff: ParityResult) -> Diagnosis | None:
    """Detect experts that start from other weights while everything else starts from the baseline's."""
    wrong = set(other_weights(diff))
    mixture = _Mixture.of(diff.baseline.initial)
    if not wrong or not wrong <= mixture.experts or diff.run.diverged_at_start:
        return None
    return diagnosis("experts at start", names=some(sorted(wrong)))


def between_router_and_experts(diff: ParityResult) -> Diagnosis | None:
    """Detect a layer whose experts get the right input and whose output is wrong."""
    if diff.loss_is_right:
        return None
    first = diff.first_wrong_output
    names = list(diff.baseline.outputs)
    if first is None or names[max(0, names.index(first) - 1)] != f"{first}{BEFORE_EXPERTS}":
        return None
    size = relative(diff.run.outputs.get(first, math.nan), diff.baseline.outputs[first])
    return diagnosis("experts of a layer", first=first, size=size)


def routers(diff: ParityResult) -> Diagnosis | None:
    """Detect gradients that are wrong from the last router on backward: in it, and not in the experts behind it."""
    mixture = _Mixture.of(diff.baseline.initial)
    layers = {name: diff.layer_of.get(name) for name in mixture.experts | mixture.routers}
    last = max((layer for layer in layers.values() if layer is not None), default=None)
    behind = {name for name in mixture.experts if layers[name] == last}
    there = {name for name in mixture.routers if layers[name] == last}
    if not there & diff.wrong_gradients or behind & diff.wrong_gradients:
        return None
    rows = [row for row in diff.gradients if row.name in mixture.routers & diff.wrong_gradients]
    names = some(sorted(row.name for row in rows))
    evidence = worst_of(rows, len(diff.gradients), "gradients")
    diverged = mixture.routers & diff.run.diverged
    return diagnosis("routers that diverge" if diverged else "auxiliary loss", names=names, evidence=evidence)


def gradients(diff: ParityResult) -> Diagnosis | None:
    """Detect gradients that are wrong in experts only."""
    mixture = _Mixture.of(diff.baseline.initial)
    wrong = diff.wrong_gradients
    if not wrong or not wrong <= mixture.experts:
        return None
    rows = [row for row in diff.gradients if row.name in wrong]
    factor = common_ratio(rows)
    evidence = worst_of(rows, len(diff.gradients), "gradients")
    if factor is None:
        return diagnosis("experts averaged", evidence=evidence)
    return diagnosis("experts scaled", factor=factor, fraction=fraction(factor), evidence=evidence)


def norm(diff: ParityResult) -> Diagnosis | None:
    """Detect a reported norm that counts no experts, those of one rank, or a mean over ranks."""
    gradients = diff.run.first_gradients
    reported = [*diff.run.curve.grad_norms, 0.0][0]
    mixture = _Mixture.of(gradients)
    by_expert = [
        np.square(gradients[name], dtype=np.float64).reshape(len(gradients[name]), -1).sum(1)
        for name in mixture.experts
    ]
    if len({len(squares) for squares in by_expert}) != 1:
        return None
    others = sum(float(np.sum(np.square(gradients[n], dtype=np.float64))) for n in gradients.keys() - mixture.experts)
    experts = np.sum(by_expert, axis=0)
    if relative(reported, math.sqrt(others + experts.sum())) <= _SAME_NORM:
        return None
    counted = "no experts" if relative(reported, math.sqrt(others)) <= _SAME_NORM else ""
    for ranks in (n for n in range(2, len(experts) + 1) if len(experts) % n == 0 and not counted):
        norms = np.sqrt(others + experts.reshape(ranks, -1).sum(1))
        if min(relative(reported, rank_norm) for rank_norm in norms) <= _SAME_NORM:
            counted = f"the experts of one of {ranks} ranks"
        elif relative(reported, norms.mean()) <= _SAME_NORM:
            counted = f"a mean over {ranks} ranks, of which each counts its own experts"
    right = math.sqrt(others + experts.sum())
    return diagnosis("norm of experts", counted=counted, reported=reported, right=right) if counted else None
