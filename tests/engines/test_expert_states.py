"""States of a mixture's experts: read as whole tensors in one layout, written in another, bit for bit."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from daily import daily
from engine_states import BEFORE, Outcome, assert_same_bits, changes, resumed_run, whole_run

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy

LAYOUTS = (
    *("reference", "dp4-ep2-z0", "dp4-ep2-z1", "dp4-ep4-z2", "dp4-ep2-z3", "pp2-dp2-ep2-z1"),
    *("tp2-z3-inner", "tp2-dp2-ep2-z1-sp", "tp2-dp2-ep2-z3", "tp2-pp2-z1"),
)
DAILY = {("dp4-ep2-z1", "tp2-pp2-z1"), ("pp2-dp2-ep2-z1", "tp2-dp2-ep2-z3")}
MIXTURE = {
    "name_or_path": "mixtral-8x7b",
    "overrides": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 321,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 8,
    },
}


@pytest.fixture(scope="module")
def saved(make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]) -> Callable[[str], Outcome]:
    """A run in some layout, once."""
    known: dict[str, Outcome] = {}

    def of(name: str) -> Outcome:
        if name not in known:
            known[name] = ranks(whole_run, Strategy.parse(name).world_size(1), recipe_of(name, make_recipe))[0]
        return known[name]

    return of


def recipe_of(name: str, make_recipe: Callable[..., Recipe]) -> Recipe:
    fields = {name: value for name, value in changes("adamw").items() if not name.startswith("overrides")}
    return Strategy.parse(name).apply(make_recipe(**fields, model=MIXTURE), 1)


@pytest.mark.parametrize(
    "pair", daily(product(LAYOUTS, LAYOUTS), lambda i, pair: pair in DAILY), ids=lambda pair: " to ".join(pair)
)
def test_experts_of_one_layout_continue_in_another(
    pair: tuple[str, str],
    saved: Callable[[str], Outcome],
    make_recipe: Callable[..., Recipe],
    ranks: Callable[..., list[Any]],
) -> None:
    one, other = pair
    before, curve, after = saved(one)
    found, continued, end = ranks(
        resumed_run, Strategy.parse(other).world_size(1), recipe_of(other, make_recipe), before
    )[0]
    assert_same_bits(found[0], before[0])
    assert found[1] == before[1] == BEFORE
    if one == other:
        assert continued == curve
        assert_same_bits(end, after)
    for (loss, norm), (wanted_loss, wanted_norm) in zip(continued, curve, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-6)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)
