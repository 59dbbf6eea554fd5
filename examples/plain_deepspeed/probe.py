"""Instrumentation for the comparison: records gradients before DeepSpeed clips them, and its norm."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import clip_grad_norm_
from torch import nn

from toolkit.config.recipe import Recipe
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines.base import Engine
from toolkit.errors import RunError


class Script(Engine):
    """A user's script in the form that `toolkit.parity.run.train_in_memory` runs. It only trains."""

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Raise RunError."""
        raise RunError("this script only trains: set train.eval_every=0.")


class Probe:
    """Hook between DeepSpeed's last reduction and its update: every kind of engine calls `_take_model_step`."""

    def __init__(self, script: Script, engine: Any) -> None:
        self._engine = engine
        self._norm: float | None = None
        update = engine._take_model_step

        def record_first(*arguments: Any, **options: Any) -> None:
            script.before_update()
            if not engine.zero_optimization():
                # ZeRO-0 reports no norm. This is the function that it clips with, told not to clip.
                self._norm = float(clip_grad_norm_(engine.module.parameters(), math.inf, mpu=engine.mpu))
            update(*arguments, **options)

        engine._take_model_step = record_first

    def norm(self) -> float:
        """Return the gradient norm that DeepSpeed clipped by in the last step."""
        reported = self._norm if self._norm is not None else self._engine.get_global_grad_norm()
        return math.nan if reported is None else float(reported)


def make_optimizer(recipe: Recipe, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """PyTorch's SGD or AdamW without weight decay."""
    if recipe.optimizer.name == "sgd":
        return torch.optim.SGD(parameters, lr=recipe.optimizer.lr)
    return torch.optim.AdamW(parameters, lr=recipe.optimizer.lr, weight_decay=0.0)


def mean_over_ranks(value: torch.Tensor) -> float:
    """Return the loss averaged over all ranks, as scripts log it."""
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
