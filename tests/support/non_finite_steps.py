"""Training steps whose loss or gradient is not finite."""

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from engine_states import Values, build, everything
from torch import nn

from toolkit.config.recipe import Recipe
from toolkit.engines.base import Engine
from toolkit.engines.pipeline_engine import PipelineEngine
from toolkit.errors import NonFiniteError

BAD, STEPS = 2, 5
Curve = list[tuple[float, float]]


class _NanBackward(torch.autograd.Function):
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
    peers = 1 if engine.partition is None else dist.get_world_size(engine.partition.groups.tensor)
    is_broken = not dist.is_initialized() or dist.get_rank() >= dist.get_world_size() - peers

    def broken(loss_sum: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def watched(first: Any, second: torch.Tensor) -> torch.Tensor:
            if next(calls) != BAD * micro_batches or not is_broken:
                return loss_sum(first, second)
            if what == "loss":
                return loss_sum(first, second) + math.inf
            if isinstance(first, nn.Module):  # the head and hidden states, else logits and labels
                return loss_sum(first, _NanBackward.apply(second))
            return loss_sum(_NanBackward.apply(first), second)

        return watched

    if engine.head_loss is not None:
        engine.head_loss.compute = broken(engine.head_loss.compute)  # type: ignore[method-assign]
    elif isinstance(engine, PipelineEngine):
        engine.partition.loss_sum = broken(engine.partition.loss_sum)  # type: ignore[method-assign]
    else:
        engine._loss_sum = broken(engine._loss_sum)  # type: ignore[attr-defined]


def train_around(recipe: Recipe, what: str) -> tuple[Curve, Values, int, str]:
    """Train all steps except BAD, which fails if `what` is set and is skipped otherwise."""
    engine, loader, rate = build(recipe)
    if what:
        break_step(engine, loader.batch.accumulation, what)
    curve, message = [], ""
    with loader.prefetch(0) as ahead:
        for step in range(STEPS):
            micro_batches = loader.micro_batches(step, ahead)
            if step == BAD and not what:
                for _ in micro_batches:
                    pass
                continue
            tokens = loader.target_tokens(step)
            try:
                result = engine.train_step(micro_batches, target_tokens=tokens, learning_rate=rate(step))
            except NonFiniteError as error:
                assert step == BAD
                message = str(error)
                continue
            curve.append((result.loss, result.grad_norm))
    return curve, everything(engine), engine.states.updates, message
