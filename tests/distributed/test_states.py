"""Optimizer states and master weights: read under Hugging Face names in one layout, written in another, bit for bit."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from toolkit.parity.strategy import Strategy
from toolkit.recipe import Recipe
from toolkit.train.data.tokens import prepare
from toolkit.train.engines.base import Engine
from toolkit.train.engines.factory import create_engine
from toolkit.train.engines.states import MASTER
from toolkit.train.feed import Feed
from toolkit.train.optimizer import learning_rate
from toolkit.train.preflight import check_model, deepspeed_config

BEFORE, AFTER = 4, 3
CPU = torch.device("cpu")
Values = dict[str, dict[str, torch.Tensor]]
Saved = tuple[Values, int]
Outcome = tuple[Saved, list[tuple[float, float]], Values]
"""(states after BEFORE steps, loss and norm of the AFTER steps that follow, states at the end)"""


def changes(optimizer: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"name": optimizer, "lr": 0.1 if optimizer == "sgd" else 3e-4, "weight_decay": 0.1}
    if optimizer == "sgd":
        settings["momentum"] = 0.9
    return {
        "optimizer": settings,
        "train__steps": BEFORE + AFTER,
        "train__grad_clip": 0.2,
        "data__packing": "padded",
        "overrides__vocab_size": 321,
        "overrides__n_layer": 4,
    }


def build(recipe: Recipe) -> tuple[Engine, Feed, Callable[[int], float]]:
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    layout = recipe.layout(world)
    batch = recipe.resolve_batch(layout)
    config = deepspeed_config(recipe, layout, batch, check_model(recipe, CPU), CPU)
    corpus = prepare(recipe.data, progress=False)
    engine = create_engine(recipe, layout, batch, CPU, config, eos_id=corpus.eos_id)
    return engine, Feed.open(recipe, layout, batch, corpus, rank=rank), learning_rate(recipe)


def everything(engine: Engine) -> Values:
    return {
        kind: {name: value.clone() for name, value in engine.full_states(kind)}
        for kind in (MASTER, *engine.states.kinds)
    }


def train(engine: Engine, feed: Feed, rate: Callable[[int], float], first: int, last: int) -> list[tuple[float, float]]:
    steps = []
    with feed.prefetch(first) as ahead:
        for step in range(first, last):
            tokens = feed.target_tokens(step)
            result = engine.train_step(feed.micro_batches(step, ahead), target_tokens=tokens, learning_rate=rate(step))
            steps.append((result.loss, result.grad_norm))
    return steps


def whole_run(recipe: Recipe) -> Outcome:
    engine, feed, rate = build(recipe)
    train(engine, feed, rate, 0, BEFORE)
    saved = everything(engine), engine.states.updates
    curve = train(engine, feed, rate, BEFORE, BEFORE + AFTER)
    return saved, curve, everything(engine)


def resumed_run(recipe: Recipe, saved: Saved) -> Outcome:
    engine, feed, rate = build(recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": 1})}))
    values, updates = saved
    for kind in (MASTER, *engine.states.kinds):
        engine.load_states(kind, values[kind].__getitem__)
    engine.states.updates = updates
    found = everything(engine), engine.states.updates
    return found, train(engine, feed, rate, BEFORE, BEFORE + AFTER), everything(engine)


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


def assert_same_bits(found: Values, wanted: Values) -> None:
    assert found.keys() == wanted.keys()
    for kind in wanted:
        assert list(found[kind]) == list(wanted[kind])
        for name, value in wanted[kind].items():
            assert torch.equal(found[kind][name], value), f"{kind} of {name}"


LAYOUTS = (
    *("reference", "z0", "z1", "z2", "z3", "ddp", "fsdp", "z1-offload", "z3-offload"),
    *("tp2-z1", "tp2-z3", "tp2-sp-z2", "pp2-z0", "pp2-z1", "tp2-pp2-z1"),
)
PAIRS = [("z3", other) for other in LAYOUTS] + [(other, "tp2-pp2-z1") for other in LAYOUTS]


DAILY_PAIRS = {("z3", "tp2-pp2-z1"), ("z3", "reference"), ("fsdp", "tp2-pp2-z1"), ("z3", "tp2-sp-z2")}
DAILY = {("z1", "sgd", "fp32"), ("z3-offload", "adamw", "bf16"), ("tp2-z3", "lion", "fp32")}


def cell(*values: str, daily: bool) -> Any:
    return pytest.param(*values, marks=[] if daily else [pytest.mark.whole])


@pytest.mark.parametrize(("one", "other"), [cell(*pair, daily=pair in DAILY_PAIRS) for pair in sorted(set(PAIRS))])
def test_states_of_one_layout_continue_in_another(
    one: str,
    other: str,
    saved: Callable[..., Outcome],
    make_recipe: Callable[..., Any],
    ranks: Callable[..., list[Any]],
) -> None:
    strategy = Strategy.parse(other)
    recipe = strategy.apply(make_recipe(**changes("adamw")), 2)
    before, curve, _ = saved(one)
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
        for case in product(LAYOUTS, ("adamw", "sgd", "lion"), ("fp32", "bf16"))
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
