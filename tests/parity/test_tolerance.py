"""Tolerances: the bound of reordered fp32 sums against measured ones, and the envelope of reruns."""

import math
from dataclasses import replace

import numpy as np
import pytest

from toolkit.parity import LossCurve, Tolerance
from toolkit.parity.tolerance import (
    FP32_UNIT,
    UNIT_ROUNDOFF,
    ModelExtent,
    RoundingBound,
    relative,
    rounding_bound,
)

SMALL = ModelExtent(layers=2, longest_sum=512, largest_tensor=512 * 64)


def curve(*losses: float, norms: tuple[float, ...] | None = None) -> LossCurve:
    return LossCurve(label="x", losses=losses, grad_norms=norms or tuple(1.0 for _ in losses))


def in_blocks(terms: np.ndarray, lanes: int) -> np.float32:
    """A sum in fp32 as a machine with so many lanes makes it: pairwise over running sums."""
    lengthened = np.concatenate([terms, np.zeros(-len(terms) % lanes, np.float32)])
    sums = lengthened.reshape(-1, lanes)
    while len(sums) > 1:
        if len(sums) % 2:
            sums = np.concatenate([sums, np.zeros((1, lanes), np.float32)])
        sums = sums[::2] + sums[1::2]
    total = np.float32(0)
    for lane in sums[0]:
        total += lane
    return total


def chain(width: int, depth: int, seed: int, lanes: int) -> np.ndarray:
    """`depth` products of matrices in fp32, each sum in its own order."""
    chance = np.random.default_rng(seed)
    hidden = chance.normal(size=width).astype(np.float32)
    order = np.random.default_rng(lanes)
    for _ in range(depth):
        weights = (chance.normal(size=(width, width)) / math.sqrt(width)).astype(np.float32)
        turn = order.permutation(width)
        products = weights[:, turn] * hidden[turn]
        hidden = np.array([in_blocks(row, lanes) for row in products], np.float32)
    return hidden


class TestRoundingBound:
    @pytest.mark.parametrize("seed", range(5))
    def test_products_in_series_that_are_summed_in_other_orders_stay_below_it(self, seed: int) -> None:
        layers, width = 2, 64
        depth = 6 * layers + 4
        one, other = (chain(width, depth, seed, lanes).astype(np.float64) for lanes in (1, 8))
        gap = np.linalg.norm(one - other) / np.linalg.norm(one)
        assert (
            0 < gap <= rounding_bound(ModelExtent(layers=layers, longest_sum=width, largest_tensor=width * width)).loss
        )

    @pytest.mark.parametrize("seed", range(5))
    def test_norms_that_are_summed_in_other_orders_stay_below_it(self, seed: int) -> None:
        values = np.random.default_rng(seed).normal(size=SMALL.largest_tensor).astype(np.float32)
        exact = math.sqrt(float(np.sum(values.astype(np.float64) ** 2)))
        running = math.sqrt(float(np.cumsum(values.reshape(8, -1) ** 2, axis=1, dtype=np.float32)[:, -1].sum()))
        gap = relative(running, exact)
        assert 0 < gap <= rounding_bound(SMALL).grad_norm

    @pytest.mark.parametrize("field", ["layers", "longest_sum", "largest_tensor"])
    def test_it_never_falls_where_a_model_grows(self, field: str) -> None:
        larger = rounding_bound(replace(SMALL, **{field: 4 * getattr(SMALL, field)}))
        smaller = rounding_bound(SMALL)
        assert larger.grad_norm > smaller.grad_norm
        assert larger.loss >= smaller.loss

    def test_a_gradient_passes_twice_the_products(self) -> None:
        bound = rounding_bound(SMALL)
        assert bound.gradient == pytest.approx(math.sqrt(2) * bound.loss)

    def test_it_is_far_below_any_mistake(self) -> None:
        large = ModelExtent(layers=96, longest_sum=50_257, largest_tensor=50_257 * 12_288)
        assert rounding_bound(large).loss < 1e-4

    def test_a_sum_of_one_term_has_one(self) -> None:
        assert rounding_bound(ModelExtent(layers=1, longest_sum=1, largest_tensor=1)).loss > 0


class TestUnitRoundoff:
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    def test_it_is_half_the_distance_from_one_to_the_next_number(self, precision: str) -> None:
        import torch

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        assert UNIT_ROUNDOFF[precision] == torch.finfo(dtype).eps / 2  # type: ignore[index]


class TestEnvelope:
    def test_it_is_a_multiple_of_the_largest_pairwise_difference(self) -> None:
        envelope = Tolerance.envelope([curve(1.0), curve(1.01), curve(0.99)], factor=4)
        assert envelope.loss == (pytest.approx(4 * 0.02 / 0.99, rel=0.03),)

    def test_it_never_shrinks(self) -> None:
        envelope = Tolerance.envelope([curve(1, 1, 1), curve(1, 1.01, 1)])
        assert envelope.loss[1] == envelope.loss[2] > envelope.loss[0]

    def test_norms_have_their_own(self) -> None:
        envelope = Tolerance.envelope([curve(1.0, norms=(1.0,)), curve(1.0, norms=(1.1,))])
        assert envelope.loss == (0.0,)
        assert envelope.grad_norm[0] > 0.1

    def test_it_is_as_long_as_the_shortest_rerun(self) -> None:
        assert len(Tolerance.envelope([curve(1, 1, 1), curve(1, 1)]).loss) == 2

    def test_a_rerun_that_fails_allows_everything_from_there_on(self) -> None:
        assert Tolerance.envelope([curve(1, 1, 1), curve(1, math.nan, 1)]).loss == (0, math.inf, math.inf)

    def test_it_says_where_it_comes_from(self) -> None:
        source = Tolerance.envelope([curve(1), curve(1), curve(1)], factor=4).source
        assert source == "4 x the spread of 3 reruns that round differently"


class TestAtLeast:
    BOUND = RoundingBound(loss=1e-6, gradient=2e-6, grad_norm=3e-6)

    def test_what_is_lower_is_raised(self) -> None:
        raised = Tolerance(loss=(0.0, 1e-3), grad_norm=(0.0, 1e-3), source="s").at_least(self.BOUND)
        assert (raised.loss, raised.grad_norm) == ((1e-6, 1e-3), (3e-6, 1e-3))

    def test_it_says_so(self) -> None:
        raised = Tolerance(loss=(0.0,), grad_norm=(0.0,), source="s").at_least(self.BOUND)
        assert raised.source == "s, at least 1.0e-06 (loss) and 3.0e-06 (norm): fp32 rounding"


@pytest.mark.parametrize(
    ("value", "reference", "expected"),
    [
        (1.0, 1.0, 0),
        (0.0, 0.0, 0),
        (1.1, 1.0, 0.1),
        (-1.0, 1.0, 2),
        (math.nan, 1.0, math.inf),
        (1.0, math.inf, math.inf),
    ],
)
def test_relative_differences(value: float, reference: float, expected: float) -> None:
    assert relative(value, reference) == pytest.approx(expected)


def test_fp32_is_the_unit_of_the_bounds() -> None:
    assert UNIT_ROUNDOFF["fp32"] == FP32_UNIT
