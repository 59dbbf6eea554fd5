"""Tolerance: how far two curves of the same recipe may lie apart, and where the number comes from.

Two sources, and never a guess: what reordering fp32 sums can do in one step (`rounding_bound`), and what the baseline
does to itself when only its rounding changes (`Tolerance.envelope`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Self

from toolkit.parity.curve import LossCurve
from toolkit.recipe import Precision

FP32_RELATIVE = 1e-6
"""What our own engines are held to, per step, on the small models of the tests.

Tighter than `rounding_bound` allows: 17 units of fp32 roundoff (2^-24), and far less than any wrong factor, lost term
or wrong sample would cause.
"""

FP32_UNIT = 2.0**-24
UNIT_ROUNDOFF: Mapping[Precision, float] = {"fp32": FP32_UNIT, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""The largest relative error of one rounding: 2^-p with p bits of significand, the hidden one counted."""
ENVELOPE_FACTOR = 4.0
"""A few reruns show less than the largest spread there can be: three or four samples of a maximum."""

_LANES = 8
_ROUNDINGS_A_LAYER = 6
"""Products in series: query-key-value, scores, weighted values, output; up, down."""
_ROUNDINGS_BESIDE_LAYERS = 4
"""Embedding, final norm, head, softmax."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """The sizes of a model that rounding depends on."""

    layers: int
    longest_sum: int
    """The longest dimension that is summed over: the width of a product, the vocabulary in the softmax."""
    largest_tensor: int
    """Elements of the largest parameter."""


@dataclass(frozen=True, kw_only=True)
class RoundingBound:
    """Relative differences in fp32 between two correct computations of one step."""

    loss: float
    gradient: float
    """Of any part of the gradient, over the norm of the whole."""
    grad_norm: float
    """Of the norm that an engine reports: it is itself a long sum."""


def rounding_bound(extent: Extent) -> RoundingBound:
    """What another order of summation can do to one step in fp32.

    Rounding errors of a sum of k terms in blocks or pairs add up over log2(k) levels (Higham, Accuracy and Stability of
    Numerical Algorithms, 2nd ed., section 4.2), and over the d products that stand in series between the embedding and
    the loss: d * log2(k) roundings of at most u = 2^-24 each. They are unrelated, so they grow like the root of their
    number (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41, 2019).
    With a standard deviation of u / sqrt(3) each, two computations differ by sqrt(2/3) u sqrt(d log2 k); the bound is
    three times that. The gradient passes 2d products. A norm is in addition a sum over n squares in 8 lanes, whose
    root halves the error: 3/2 u sqrt(n / 8).

    Known error: an average over many tokens cancels most of it; small models show a tenth of the bound.
    """
    products = _ROUNDINGS_A_LAYER * extent.layers + _ROUNDINGS_BESIDE_LAYERS
    levels = math.log2(max(2, extent.longest_sum))
    loss = 3 * math.sqrt(2 / 3) * FP32_UNIT * math.sqrt(products * levels)
    gradient = math.sqrt(2) * loss
    norm = 1.5 * FP32_UNIT * math.sqrt(extent.largest_tensor / _LANES)
    return RoundingBound(loss=loss, gradient=gradient, grad_norm=gradient + norm)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Relative bounds of each step's loss and gradient norm; the last value holds for all later steps."""

    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    source: str

    @classmethod
    def fp32(cls) -> Self:
        """What our own engines are held to."""
        return cls(loss=(FP32_RELATIVE,), grad_norm=(FP32_RELATIVE,), source=f"fp32 summation order: {FP32_RELATIVE:g}")

    @classmethod
    def envelope(cls, reruns: Sequence[LossCurve], *, factor: float = 2.0) -> Self:
        """Measured: reruns of one strategy that differ in rounding only, and how far they get from each other.

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
            source=f"{factor:g} x the spread of {len(reruns)} reruns that round differently",
        )

    def at_least(self, bound: RoundingBound) -> "Tolerance":
        """The same, but never below what one step of reordered sums can do."""
        return Tolerance(
            loss=tuple(max(bound.loss, value) for value in self.loss),
            grad_norm=tuple(max(bound.grad_norm, value) for value in self.grad_norm),
            source=f"{self.source}, at least {bound.loss:.1e} (loss) and {bound.grad_norm:.1e} (norm): fp32 rounding",
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
