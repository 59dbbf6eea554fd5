"""A step whose loss or gradient is not finite leaves no trace: training goes on as if it had not been there."""

import math
from collections.abc import Callable
from itertools import count, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_states import Values, assert_same_bits, build, cell, changes, everything

from toolkit.errors import NonFiniteError
from toolkit.parity.strategy import Strategy
from toolkit.recipe import Recipe
from toolkit.train.engines import reference_engine
from toolkit.train.engines.base import Engine
from toolkit.train.engines.pipeline_engine import PipelineEngine
from toolkit.train.engines.reference_engine import ReferenceEngine

BAD, STEPS = 2, 5
Curve = list[tuple[float, float]]

STRATEGIES = (
    *("reference", "ddp", "fsdp", "z0", "z1", "z2", "z3", "z1-offload", "z2-offload", "z3-offload", "u2-z1", "u2-z3"),
    *("tp2-z0", "tp2-z1", "tp2-z2", "tp2-z3", "pp2-z0", "pp2-z1", "tp2-pp2-z0", "tp2-pp2-z1"),
)
DAILY = {
    *(("z0", "loss", "fp32"), ("z1", "gradient", "bf16"), ("z2-offload", "loss", "bf16"), ("z3", "loss", "fp32")),
    *(("fsdp", "gradient", "fp32"), ("pp2-z1", "loss", "bf16"), ("pp2-z0", "gradient", "fp32")),
    *(("tp2-pp2-z1", "loss", "fp32"), ("reference", "loss", "fp32"), ("u2-z3", "gradient", "fp32")),
}
FP32_ONLY = ("reference", "tp2-z0", "pp2-z0", "tp2-pp2-z0")


class _NotANumberBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        broken = gradient.clone()
        broken.view(-1)[0] = math.nan
        return broken


def break_step(engine: Engine, micro_batches: int, what: str) -> None:
    """On the last rank and its tensor-parallel peers, in the first micro-batch of step BAD. An infinite loss whose own
    gradient is finite is the harder case: nothing but a check keeps it from the weights."""
    calls = count()
    peers = 1 if engine.cut is None else dist.get_world_size(engine.cut.groups.tensor)
    is_broken = not dist.is_initialized() or dist.get_rank() >= dist.get_world_size() - peers

    def broken(loss_sum: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def watched(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            if next(calls) != BAD * micro_batches or not is_broken:
                return loss_sum(logits, labels)
            if what == "loss":
                return loss_sum(logits, labels) + math.inf
            return loss_sum(_NotANumberBackward.apply(logits), labels)

        return watched

    if isinstance(engine, PipelineEngine):
        engine.cut.loss_sum = broken(engine.cut.loss_sum)  # type: ignore[method-assign]
    elif isinstance(engine, ReferenceEngine):
        reference_engine.token_loss_sum = broken(reference_engine.token_loss_sum)  # type: ignore[assignment]
    else:
        engine._loss_sum = broken(engine._loss_sum)  # type: ignore[attr-defined]


def train_around(recipe: Recipe, what: str) -> tuple[Curve, Values, int, str]:
    """Train all steps but BAD, which fails where `what` is broken, and is left out where nothing is."""
    engine, feed, rate = build(recipe)
    if what:
        break_step(engine, feed.batch.accumulation, what)
    curve, message = [], ""
    with feed.prefetch(0) as ahead:
        for step in range(STEPS):
            micro_batches = feed.micro_batches(step, ahead)
            if step == BAD and not what:
                for _ in micro_batches:
                    pass
                continue
            tokens = feed.target_tokens(step)
            try:
                result = engine.train_step(micro_batches, target_tokens=tokens, learning_rate=rate(step))
            except NonFiniteError as error:
                assert step == BAD
                message = str(error)
                continue
            curve.append((result.loss, result.grad_norm))
    return curve, everything(engine), engine.states.updates, message


@pytest.mark.parametrize(
    ("name", "what", "precision"),
    [
        cell(*case, daily=case in DAILY)
        for case in product(STRATEGIES, ("loss", "gradient"), ("fp32", "bf16"))
        if case[2] == "fp32" or case[0] not in FP32_ONLY
    ],
)
def test_a_step_that_is_not_finite_leaves_no_trace(
    name: str, what: str, precision: str, make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]
) -> None:
    strategy = Strategy.parse(name)
    recipe = strategy.apply(make_recipe(**changes("adamw"), precision=precision), 2)
    broken = ranks(train_around, strategy.world_size(2), recipe, what)
    whole = ranks(train_around, strategy.world_size(2), recipe, "")
    for (curve, values, updates, message), (wanted_curve, wanted, wanted_updates, nothing) in zip(
        broken, whole, strict=True
    ):
        assert message.startswith("the loss is" if what == "loss" else "the gradient norm is"), message
        assert nothing == ""
        assert curve == wanted_curve
        assert updates == wanted_updates
        assert_same_bits(values, wanted)
