"""Tolerance: how far two curves of the same recipe may differ, and where the number comes from.

There are two sources: the effect of reordered fp32 sums in one step (`rounding_bound`), and how far the baseline moves
when only its rounding changes (`Tolerance.envelope`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Self

from toolkit.config.recipe import Precision
from toolkit.parity.parity_run import LossCurve

FP32_RELATIVE = 1e-6
"""The bound that our own engines must meet in each step on the small models of the tests.

Tighter than `rounding_bound` allows: 17 units of fp32 roundoff (2^-24), and far less than any wrong factor, lost term
or wrong sample would cause.
"""

FP32_UNIT = 2.0**-24
UNIT_ROUNDOFF: Mapping[Precision, float] = {"fp32": FP32_UNIT, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""The largest relative error of one rounding: 2^-p with p bits of significand, the hidden one counted."""
ENVELOPE_FACTOR = 4.0
"""A few reruns underestimate the largest possible spread: they are three or four samples of a maximum."""

_LANES = 8
_ROUNDINGS_A_LAYER = 6
"""Products in series: query-key-value, scores, weighted values, output; up, down."""
_ROUNDINGS_BESIDE_LAYERS = 4
"""Embedding, final norm, head, softmax."""


@dataclass(frozen=True, kw_only=True)
class ModelExtent:
    """The sizes of a model that rounding depends on."""

    layers: int
    longest_sum: int
    """The longest dimension of a sum: the width of a product, the vocabulary in the softmax."""
    largest_tensor: int
    """Elements of the largest parameter."""


@dataclass(frozen=True, kw_only=True)
class RoundingBound:
    """Relative differences in fp32 between two correct computations of one step."""

    loss: float
    gradient: float
    """Bound of any part of the gradient, over the norm of the whole."""
    grad_norm: float
    """Bound of the norm that an engine reports, which is itself a long sum."""


def rounding_bound(extent: ModelExtent) -> RoundingBound:
    """Bound the effect of another order of summation on one step in fp32.

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
    """Relative bounds of each step's loss and gradient norm; the last value applies to all later steps."""

    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    source: str

    @classmethod
    def constant(cls, bound: float, source: str) -> Self:
        """Return one bound for loss and gradient norm of every step."""
        return cls(loss=(bound,), grad_norm=(bound,), source=source)

    @classmethod
    def fp32(cls, bound: float = FP32_RELATIVE) -> Self:
        """Return the bound of our own engines."""
        return cls.constant(bound, f"fp32 summation order: {bound:g}")

    @classmethod
    def envelope(cls, reruns: Sequence[LossCurve], *, factor: float = 2.0) -> Self:
        """Measure a tolerance from reruns of one strategy that differ in rounding only.

        The bound of a step is `factor` times the largest pairwise difference up to that step: rounding differences of
        one step feed the next, so the envelope never shrinks.
        """
        assert len(reruns) >= 2

        def spread(series: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
            steps = (max(relative(a, b) for a, b in combinations(step, 2)) for step in zip(*series, strict=False))
            return tuple(factor * value for value in accumulate(steps, max)) or (0.0,)

        return cls(
            loss=spread([rerun.losses for rerun in reruns]),
            grad_norm=spread([rerun.grad_norms for rerun in reruns]),
            source=f"{factor:g} x the spread of {len(reruns)} reruns that round differently",
        )

    def at_least(self, bound: RoundingBound) -> "Tolerance":
        """Return this tolerance, raised to at least `bound` in each step."""
        return Tolerance(
            loss=tuple(max(bound.loss, value) for value in self.loss),
            grad_norm=tuple(max(bound.grad_norm, value) for value in self.grad_norm),
            source=f"{self.source}, at least {bound.loss:.1e} (loss) and {bound.grad_norm:.1e} (norm): fp32 rounding",
        )

    def at(self, step: int) -> tuple[float, float]:
        """Return the bounds of loss and gradient norm at `step` (from 0)."""
        return self.loss[min(step, len(self.loss) - 1)], self.grad_norm[min(step, len(self.grad_norm) - 1)]


def relative(value: float, reference: float) -> float:
    """Return |value - reference| / |reference|; infinite if one of them is not finite."""
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.inf
    return abs(value - reference) / max(abs(reference), 1e-300) if value != reference else 0.0


@dataclass(frozen=True, kw_only=True)
class CurveComparison:
    """Two curves, step by step. Differences are relative; steps count from 1."""

    label: str
    baseline: str
    steps: int
    max_loss_difference: float
    max_norm_difference: float
    first_loss_beyond: int | None
    """The first step whose loss is beyond its bound."""
    first_norm_beyond: int | None
    tolerance: Tolerance

    @property
    def first_diverging_step(self) -> int | None:
        """The first step in which the loss or the gradient norm is beyond its bound."""
        return min((step for step in (self.first_loss_beyond, self.first_norm_beyond) if step), default=None)

    @property
    def passed(self) -> bool:
        """Whether every step stayed within its bound."""
        return self.first_diverging_step is None

    def __str__(self) -> str:
        result = "same" if self.passed else f"differs from step {self.first_diverging_step} on"
        return (
            f"{self.label} against {self.baseline}, {self.steps} steps: {result}. Largest relative difference: "
            f"loss {self.max_loss_difference:.1e}, gradient norm {self.max_norm_difference:.1e} "
            f"({self.tolerance.source})"
        )


def compare_curves(curve: LossCurve, baseline: LossCurve, tolerance: Tolerance) -> CurveComparison:
    """Compare step by step. If one curve is shorter, the two differ from the step after its end."""
    losses = [relative(a, b) for a, b in zip(curve.losses, baseline.losses, strict=False)]
    norms = [relative(a, b) for a, b in zip(curve.grad_norms, baseline.grad_norms, strict=False)]
    end = None if len(curve) == len(baseline) else len(losses) + 1
    return CurveComparison(
        label=curve.label,
        baseline=baseline.label,
        steps=len(losses),
        max_loss_difference=max(losses, default=0.0),
        max_norm_difference=max(norms, default=math.nan),
        first_loss_beyond=next((i + 1 for i, gap in enumerate(losses) if gap > tolerance.at(i)[0]), end),
        first_norm_beyond=next((i + 1 for i, gap in enumerate(norms) if gap > tolerance.at(i)[1]), end),
        tolerance=tolerance,
    )
