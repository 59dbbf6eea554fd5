"""Moments of 8 bits, read and written in fp32 with the same bits; with bitsandbytes, trained in every layout."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_states import assert_same_bits, build, changes, resumed_run, train, whole_run

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.engines.optimizer_states import MASTER
from toolkit.engines.optimizers.adamw8bit import _decode, _encode, round_again

STEPS = 30

TABLE = torch.cat([-torch.linspace(0, 0.993, 128).square().flip(0), torch.linspace(0, 1, 129)[1:].square()])


@pytest.mark.parametrize("signed", [True, False])
def test_decoded_moments_are_encoded_with_the_same_bits(signed: bool) -> None:
    """Also of blocks whose largest magnitude was negative, of zeros, and of the last one, which is shorter."""
    torch.manual_seed(0)
    table = TABLE if signed else torch.linspace(0, 1, 256).square()
    codes = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    codes[:256] = torch.randint(0, 100, (256,), dtype=torch.uint8)
    codes[0] = 0 if signed else 255
    codes[256], codes[512], codes[900] = 255, 255, 255
    state = {f"{part}{i}": None for part in ("state", "absmax", "qmap") for i in (1, 2)}
    kind, number = ("exp_avg", 1) if signed else ("exp_avg_sq", 2)
    scales = torch.rand(4)
    scales[2] = 0
    state |= {f"state{number}": codes.clone(), f"absmax{number}": scales.clone(), f"qmap{number}": table}
    moments = _decode(state, kind, 0, 1000)
    assert torch.equal(_decode(state, kind, 300, 500), moments[300:800])
    state[f"state{number}"].zero_()
    state[f"absmax{number}"].zero_()
    _encode(state, kind, moments)
    assert torch.equal(_decode(state, kind, 0, 1000), moments)
    keeps = torch.arange(1000) // 256 != 2
    assert torch.equal(state[f"state{number}"][keeps], codes[keeps])
    assert torch.equal(state[f"absmax{number}"], scales)


def test_rounding_again_moves_moments_by_about_one_code_and_another_seed_elsewhere() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rounded = []
    for seed in (1, 2):
        state = {"state1": torch.zeros(1000, dtype=torch.uint8), "absmax1": torch.zeros(4), "qmap1": TABLE}
        _encode(state, "exp_avg", values)
        before = _decode(state, "exp_avg", 0, 1000)
        round_again(SimpleNamespace(state={"w": state}), torch.Generator().manual_seed(seed))
        rounded.append(_decode(state, "exp_avg", 0, 1000))
        # Codes of larger magnitudes are further apart, and those of a block with twice the scale at most twice.
        widest = float(TABLE.diff().max()) * float(values.abs().max())
        assert 0 < (rounded[-1] - before).abs().max() <= widest
    assert not torch.equal(*rounded)


LAYOUTS = ("reference", "z1", "z3", "ddp", "pp2-z1", "tp2-z1", "tp2-pp2-z1")
MORE_LAYOUTS = ("z0", "z2", "pp2-z0", "tp2-z0", "tp2-z3", "tp2-sp-z2")
"""Between those of LAYOUTS: `make test-all` trains them too."""
EVERY_LAYOUT = [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.whole) for name in MORE_LAYOUTS)]


@pytest.fixture(scope="module")
def run(make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]]) -> Callable[..., Any]:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

    def call(work: Callable[..., Any], layout: str, *arguments: Any, optimizer: str = "adamw8bit") -> Any:
        strategy = Strategy.parse(layout)
        recipe = strategy.apply(make_recipe(**changes(optimizer) | {"train__steps": STEPS}), 2)
        return ranks(work, strategy.world_size(2), recipe, *arguments)[0]

    return call


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_a_layout_resumes_with_the_same_bits(layout: str, run: Callable[..., Any]) -> None:
    before, curve, after = run(whole_run, layout)
    found, continued, end = run(resumed_run, layout, before)
    assert_same_bits(found[0], before[0])
    assert continued == curve
    assert_same_bits(end, after)


def trained(recipe: Recipe) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine, loader, rate = build(recipe)
    curve = train(engine, loader, rate, 0, STEPS)
    return [loss for loss, _ in curve], {name: value.clone() for name, value in engine.full_states(MASTER)}


@pytest.fixture(scope="module")
def in_one_process(run: Callable[..., Any]) -> dict[str, Any]:
    return {optimizer: run(trained, "reference", optimizer=optimizer) for optimizer in ("adamw", "adamw8bit")}


@pytest.mark.parametrize("layout", EVERY_LAYOUT[1:])
def test_layouts_differ_about_as_much_as_8_bits_from_32(
    layout: str, run: Callable[..., Any], in_one_process: dict[str, Any]
) -> None:
    curve, weights = run(trained, layout)
    (exact, exact_weights), (ours, our_weights) = in_one_process["adamw"], in_one_process["adamw8bit"]

    def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
        return float(sum((one[name] - other[name]).square().sum() for name in one)) ** 0.5

    assert max(map(abs, map(float.__sub__, curve, ours))) <= 2 * max(map(abs, map(float.__sub__, exact, ours)))
    assert apart(weights, our_weights) <= 1.5 * apart(exact_weights, our_weights)


@pytest.mark.parametrize(("one", "other"), [("z3", "pp2-z1"), ("pp2-z1", "z2")])
def test_another_layout_rounds_moments_to_its_own_blocks(one: str, other: str, run: Callable[..., Any]) -> None:
    before, curve, _ = run(whole_run, one)
    found, continued, _ = run(resumed_run, other, before)
    assert_same_bits({MASTER: found[0][MASTER]}, {MASTER: before[0][MASTER]})
    for kind, values in before[0].items():
        wanted = torch.cat([value.flatten() for value in values.values()])
        kept = torch.cat([found[0][kind][name].flatten() for name in values])
        assert (kept - wanted).norm() <= 0.01 * wanted.norm()
    assert continued[0] == pytest.approx(curve[0], rel=1e-6)
