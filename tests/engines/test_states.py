"""Optimizer states and master weights: read under Hugging Face names in one layout, written in another, bit for bit."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from engine_states import BEFORE, Outcome, assert_same_bits, cell, changes, resumed_run, whole_run

from toolkit.config.strategy import Strategy


@pytest.fixture(scope="module")
def saved(make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]) -> Callable[..., Outcome]:
    """A run in some layout, once."""
    known: dict[tuple[str, ...], Outcome] = {}

    def of(name: str, optimizer: str = "adamw", precision: str = "fp32") -> Outcome:
        key = (name, optimizer, precision)
        if key not in known:
            strategy = Strategy.parse(name)
            recipe = strategy.apply(make_recipe(**changes(optimizer), precision=precision), 2)
            known[key] = ranks(whole_run, strategy.world_size(2), recipe)[0]
        return known[key]

    return of


OFFLOADED = ("z1-offload", "z3-offload")


def is_allowed(optimizer: str, *layouts: str) -> bool:
    return optimizer not in ("muon", "adafactor") or not set(layouts) & set(OFFLOADED)


LAYOUTS = (
    *("reference", "z0", "z1", "z2", "z3", "ddp", "fsdp", *OFFLOADED),
    *("tp2-z1", "tp2-z3", "tp2-sp-z2", "pp2-z0", "pp2-z1", "tp2-pp2-z1"),
)
PAIRS = [("z3", other) for other in LAYOUTS] + [(other, "tp2-pp2-z1") for other in LAYOUTS]
CASES = [
    (*pair, name) for pair in sorted({*PAIRS}) for name in ("adamw", "muon", "adafactor") if is_allowed(name, *pair)
]
DAILY_CASES = {
    *(("z3", "tp2-pp2-z1", "muon"), ("tp2-z3", "tp2-pp2-z1", "adafactor"), ("z3", "reference", "adamw")),
    *(("fsdp", "tp2-pp2-z1", "adamw"), ("z3", "tp2-sp-z2", "muon")),
}
DAILY = {("z1", "sgd", "fp32"), ("z3-offload", "adamw", "bf16"), ("tp2-z3", "lion", "fp32")}


@pytest.mark.parametrize(("one", "other", "optimizer"), [cell(*case, daily=case in DAILY_CASES) for case in CASES])
def test_states_of_one_layout_continue_in_another(
    one: str,
    other: str,
    optimizer: str,
    saved: Callable[..., Outcome],
    make_recipe: Callable[..., Any],
    ranks: Callable[..., list[Any]],
) -> None:
    strategy = Strategy.parse(other)
    recipe = strategy.apply(make_recipe(**changes(optimizer)), 2)
    before, curve, _ = saved(one, optimizer)
    found, continued, _ = ranks(resumed_run, strategy.world_size(2), recipe, before)[0]
    assert_same_bits(found[0], before[0])
    assert found[1] == before[1] == BEFORE
    for (loss, norm), (wanted_loss, wanted_norm) in zip(continued, curve, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-6)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "optimizer", "precision"),
    [
        cell(*case, daily=case in DAILY)
        for case in product(LAYOUTS, ("adamw", "sgd", "lion", "muon", "adafactor"), ("fp32", "bf16"))
        if is_allowed(case[1], case[0])
        if case[2] == "fp32" or case[0] not in ("reference", "pp2-z0")  # which have no bf16
    ],
)
def test_a_layout_continues_its_own_states_bit_for_bit(
    name: str,
    optimizer: str,
    precision: str,
    saved: Callable[..., Outcome],
    make_recipe: Callable[..., Any],
    ranks: Callable[..., list[Any]],
) -> None:
    strategy = Strategy.parse(name)
    recipe = strategy.apply(make_recipe(**changes(optimizer), precision=precision), 2)
    before, curve, after = saved(name, optimizer, precision)
    _, continued, end = ranks(resumed_run, strategy.world_size(2), recipe, before)[0]
    assert continued == curve
    assert_same_bits(end, after)
