"""DDP and FSDP2 through accelerate: the strategies that users compare DeepSpeed with."""

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, GradientAccumulationPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from toolkit.batch import Batch
from toolkit.errors import RunError
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.train.dropout import DropoutStream
from toolkit.train.engines.base import DataParallelEngine, MicroBatch, StepResult, refuse_gradient
from toolkit.train.engines.states import PlainStates, state_kinds
from toolkit.train.gradient_norm import clip
from toolkit.train.optimizer import parameter_groups, torch_optimizer


class AccelerateEngine(DataParallelEngine):
    """An `Accelerator` around the model: DistributedDataParallel, or fully_shard (FSDP2) with `sharded`."""

    def __init__(
        self, recipe: Recipe, layout: Layout, batch: Batch, model: PreTrainedModel, device: torch.device
    ) -> None:
        self.device = device
        self.dropout = DropoutStream(model, device)
        self.dp = layout.dp
        self.accumulation = batch.accumulation
        self.grad_clip = recipe.train.grad_clip
        sharded = recipe.train.engine == "fsdp"
        low = torch.bfloat16 if recipe.precision == "bf16" else None
        plugin = (
            FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                reshard_after_forward=True,
                # accelerate's own policy would also sum gradients over ranks in 16 bits.
                mixed_precision_policy=MixedPrecisionPolicy(
                    param_dtype=low, reduce_dtype=torch.float32 if low else None
                ),
            )
            if sharded
            else None
        )
        _forget_launcher_settings()
        self.accelerator = Accelerator(
            # Given, or accelerate would divide the loss by what the environment says.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            cpu=device.type == "cpu",
            mixed_precision="bf16" if recipe.precision == "bf16" else "no",
            fsdp_plugin=plugin,
        )
        if plugin is not None and device.type == "cpu":
            # accelerate ignores the plugin on CPU ranks and falls back to DDP without a word.
            self.accelerator.state.distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = plugin
        optimizer = torch_optimizer(recipe.optimizer, parameter_groups(model, recipe.optimizer.weight_decay))
        prepared, self.optimizer = self.accelerator.prepare(model, optimizer)
        base = getattr(self.optimizer, "optimizer", self.optimizer)
        self.states = PlainStates(base, state_kinds(recipe.optimizer.name, recipe.optimizer.momentum))
        self._wrapped: Any = prepared
        self.model = self.accelerator.unwrap_model(prepared)
        if recipe.train.compile:
            self.model.compile()
        self._wrapped.train()
        is_sharded = any(isinstance(parameter, DTensor) for parameter in self.model.parameters())
        if is_sharded != sharded:
            raise RunError(
                f"train.engine={recipe.train.engine}: accelerate built {'FSDP' if is_sharded else 'DDP'} instead. "
                "Unset ACCELERATE_* in the environment."
            )

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_parameters."""
        for name, parameter in self.model.named_parameters():
            value = parameter.detach()
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_gradients."""
        for name, gradient in super().full_gradients():
            yield name, gradient.full_tensor() if isinstance(gradient, DTensor) else gradient

    def _logits(self, batch: MicroBatch) -> torch.Tensor:
        logits: torch.Tensor = self._wrapped(**batch.inputs(), use_cache=False).logits
        return logits

    def _accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.accelerator.no_sync(self._wrapped)

    def _backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def _update(self, loss: float) -> StepResult:
        norm = clip(self.model.parameters(), self.grad_clip)
        if not math.isfinite(norm):
            self._discard_gradients()
            raise refuse_gradient(norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(loss=loss, grad_norm=norm)

    def _set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def _discard_gradients(self) -> None:
        self.optimizer.zero_grad()


def _forget_launcher_settings() -> None:
    """`accelerate launch` leaves its own choice of engine in the environment; the recipe has already chosen."""
    chosen = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")
    for name in list(os.environ):
        if name in chosen or name.startswith(("ACCELERATE_DYNAMO_", "FSDP_")):
            del os.environ[name]
