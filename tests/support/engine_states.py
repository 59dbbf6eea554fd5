"""Engines that tests train for a few steps: their optimizer states and master weights under Hugging Face names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.tokens.token_cache import prepare
from toolkit.engines.base import Engine
from toolkit.engines.factory import create_engine
from toolkit.engines.optimizer import learning_rate
from toolkit.engines.optimizer_states import MASTER
from toolkit.training.preflight import check_model, deepspeed_config, find_shape

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


def build(recipe: Recipe) -> tuple[Engine, MicroBatchLoader, Callable[[int], float]]:
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = check_model(recipe, CPU)
    job = Job.of(recipe, world, find_shape(model))
    config = deepspeed_config(job, model, CPU)
    corpus = prepare(recipe.data, progress=False)
    engine = create_engine(job, CPU, config, eos_id=corpus.eos_id)
    return engine, MicroBatchLoader.open(job, corpus, rank=rank), learning_rate(recipe)


def everything(engine: Engine) -> Values:
    return {
        kind: {name: value.clone() for name, value in engine.full_states(kind)}
        for kind in (MASTER, *engine.states.kinds)
    }


def train(
    engine: Engine, loader: MicroBatchLoader, rate: Callable[[int], float], first: int, last: int
) -> list[tuple[float, float]]:
    steps = []
    with loader.prefetch(first) as ahead:
        for step in range(first, last):
            tokens = loader.target_tokens(step)
            result = engine.train_step(
                loader.micro_batches(step, ahead), target_tokens=tokens, learning_rate=rate(step)
            )
            steps.append((result.loss, result.grad_norm))
    return steps


def whole_run(recipe: Recipe) -> Outcome:
    """Train, and keep the states of the middle."""
    engine, loader, rate = build(recipe)
    train(engine, loader, rate, 0, BEFORE)
    saved = everything(engine), engine.states.updates
    curve = train(engine, loader, rate, BEFORE, BEFORE + AFTER)
    return saved, curve, everything(engine)


def resumed_run(recipe: Recipe, saved: Saved) -> Outcome:
    """Continue from these states, with other weights before."""
    engine, loader, rate = build(recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": 1})}))
    values, updates = saved
    for kind in (MASTER, *engine.states.kinds):
        engine.load_states(kind, values[kind].__getitem__)
    engine.states.updates = updates
    found = everything(engine), engine.states.updates
    return found, train(engine, loader, rate, BEFORE, BEFORE + AFTER), everything(engine)


def assert_same_bits(found: Values, wanted: Values) -> None:
    assert found.keys() == wanted.keys()
    for kind in wanted:
        assert list(found[kind]) == list(wanted[kind])
        for name, value in wanted[kind].items():
            assert torch.equal(found[kind][name], value), f"{kind} of {name}"


def cell(*values: str, daily: bool) -> Any:
    """One case of a sweep: run every day, or only with the whole regression matrix."""
    return pytest.param(*values, marks=[] if daily else [pytest.mark.whole])
