"""Layers: from passes whose seconds follow from known rates, exactly these rates."""

from dataclasses import replace

import pytest

from toolkit.calibrate import layers
from toolkit.calibrate.layers import Layer, _Beyond, _line
from toolkit.hardware import CoreRates, Gpu, gpu
from toolkit.models.shape import ModelShape
from toolkit.planner.execution import Execution
from toolkit.planner.layer_time import RankWork, head_seconds, layer_seconds
from toolkit.planner.passes import Passes

LAYER = Layer(hidden=128, vocab=512, small=(1, 8), large=(2, 64))
PRODUCTS = ((64, 64, 64, 5e9), (256, 256, 256, 2e10))
RATES = {
    "layer_bytes_per_second": (6e9, 4e9),
    "layer_seconds": (1.5e-4, 2.5e-4),
    "loss_bytes_per_second": (3e9, 2e9),
}
"""Forward and backward."""


def a_rank(**rates: tuple[float, float]) -> Gpu:
    """A core with these rates; the products and the attention are always the same."""
    core = CoreRates(products={"fp32": PRODUCTS}, attention={"fp32": (4e9, 3e9)}, **rates)
    return replace(gpu("a100-80gb"), core=core, kernel_seconds=1e-6)


UNKNOWN = a_rank(layer_bytes_per_second=(1e9, 1e9), layer_seconds=(0.0, 0.0), loss_bytes_per_second=(1e9, 1e9))


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes take what the time model gives a rank with RATES."""
    rank = a_rank(**RATES)

    def work(size: tuple[int, int]) -> RankWork:
        return RankWork(tokens=size[0] * size[1], seq_len=size[1], tp=1, sequence_parallel=False)

    def layer_passes(model: object, size: tuple[int, int], seconds: float) -> Passes:
        # The time model counts `layer_seconds` among the host's seconds, beside those of kernels.
        forward, backward = RATES["layer_seconds"]
        kernels = layer_seconds(rank, shape_of(model), work(size), Execution(precision="fp32"))
        return kernels + Passes(forward=forward, backward=backward)

    def head_passes(model: object, size: tuple[int, int], seconds: float) -> Passes:
        return head_seconds(rank, shape_of(model), work(size), Execution(precision="fp32"))

    def shape_of(model: object) -> ModelShape:
        return ModelShape.from_config(model.config.to_dict())  # type: ignore[attr-defined]

    monkeypatch.setattr(layers, "_layer_passes", layer_passes)
    monkeypatch.setattr(layers, "_head_passes", head_passes)


@pytest.mark.parametrize("field", RATES)
def test_rates_are_those_by_which_the_time_model_explains_the_passes(planted: None, field: str) -> None:
    assert LAYER.rates(UNKNOWN, 1.0)[field] == pytest.approx(RATES[field], rel=1e-6)


def test_what_was_assumed_before_does_not_matter(planted: None) -> None:
    assumed = {name: (2 * forward + 1e-5, 3 * backward + 1e-5) for name, (forward, backward) in RATES.items()}
    assumed["layer_seconds"] = (0.0, 0.0)
    rates = LAYER.rates(a_rank(**assumed), 1.0)
    assert rates == {name: pytest.approx(pair, rel=1e-6) for name, pair in RATES.items()}


class TestLine:
    def test_it_goes_through_both_measurements(self) -> None:
        rate, overhead = _line(_Beyond(seconds=3.0, moved_bytes=10.0), _Beyond(seconds=7.0, moved_bytes=30.0))
        assert (rate, overhead) == (5.0, 1.0)

    def test_a_smaller_measurement_that_was_quick_leaves_no_negative_overhead(self) -> None:
        _, overhead = _line(_Beyond(seconds=1.0, moved_bytes=10.0), _Beyond(seconds=7.0, moved_bytes=30.0))
        assert overhead == 0.0

    @pytest.mark.parametrize("seconds", [2.0, 3.0, 9.0, -1.0])
    def test_a_larger_one_that_took_no_longer_gives_a_positive_rate(self, seconds: float) -> None:
        rate, overhead = _line(_Beyond(seconds=9.0, moved_bytes=10.0), _Beyond(seconds=seconds, moved_bytes=30.0))
        assert 0 < rate < float("inf")
        assert overhead >= 0


def test_a_layers_time_is_that_of_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_layer_passes", lambda model, size, seconds: Passes(forward=2.0, backward=5.0))
    assert layers.layer_times(64, (1, 8), 1.0) == 7.0


def test_passes_of_a_layer_and_of_a_head_train_all_of_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []

    def pass_seconds(call, leaves, seconds):
        leaves = list(leaves)
        call().sum().backward()
        assert all(leaf.grad is not None for leaf in leaves)
        trained.append(len(leaves))
        return 1.0, 2.0

    monkeypatch.setattr(layers, "pass_seconds", pass_seconds)
    model = layers.gpt2(64)
    assert layers._layer_passes(model, (1, 8), 1.0) == Passes(forward=1.0, backward=2.0)
    assert layers._head_passes(model, (1, 8), 1.0) == Passes(forward=1.0, backward=2.0)
    inputs = 1
    norm_and_head = 3
    assert trained == [inputs + len(list(model.transformer.h[0].parameters())), inputs + norm_and_head]
