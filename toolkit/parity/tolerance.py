"""Tolerance: how far two curves of the same recipe may lie apart, and where the number comes from."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Self

from toolkit.parity.curve import LossCurve

FP32_RELATIVE = 1e-6
"""Per-step bound on loss and gradient norm in fp32.

A sum of n fp32 terms in another order differs by a relative error of about u*sqrt(n) to u*log2(n) (pairwise summation;
Higham, "Accuracy and Stability of Numerical Algorithms", ch. 4), u = 2^-24 = 6e-8: 1e-6 leaves 17 u for the reordering
of sums over micro-batches and ranks, and far less than any wrong factor, lost term or wrong sample would cause.
"""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Relative bounds of each step's loss and gradient norm; the last value holds for all later steps."""

    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    source: str

    @classmethod
    def fp32(cls) -> Self:
        """The bound of reordered fp32 sums."""
        return cls(loss=(FP32_RELATIVE,), grad_norm=(FP32_RELATIVE,), source=f"fp32 summation order: {FP32_RELATIVE:g}")

    @classmethod
    def envelope(cls, reruns: Sequence[LossCurve], *, factor: float = 2.0) -> Self:
        """Measured: reruns of one strategy that differ in summation order only, and how far they get from each other.

        The bound of a step is `factor` times the largest pairwise difference up to that step: rounding differences of
        one step feed the next, so the envelope never shrinks.
        """
        assert len(reruns) >= 2
        steps = min(map(len, reruns))
        loss = [max(relative(a.losses[i], b.losses[i]) for a, b in combinations(reruns, 2)) for i in range(steps)]
        norm = [
            max(relative(a.grad_norms[i], b.grad_norms[i]) for a, b in combinations(reruns, 2)) for i in range(steps)
        ]
        return cls(
            loss=tuple(factor * value for value in _running_max(loss)),
            grad_norm=tuple(factor * value for value in _running_max(norm)),
            source=f"{factor:g} x the spread of {len(reruns)} reruns in other summation orders",
        )

    def at(self, step: int) -> tuple[float, float]:
        """Bounds of loss and gradient norm at `step` (from 0)."""
        return self.loss[min(step, len(self.loss) - 1)], self.grad_norm[min(step, len(self.grad_norm) - 1)]


def relative(value: float, reference: float) -> float:
    """|value - reference| / |reference|; infinite where one of them is not finite."""
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.inf
    return abs(value - reference) / max(abs(reference), 1e-300) if value != reference else 0.0


def _running_max(values: Sequence[float]) -> list[float]:
    highest = 0.0
    out = []
    for value in values:
        highest = max(highest, value)
        out.append(highest)
    return out
