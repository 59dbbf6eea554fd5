"""DDP and FSDP2 through accelerate: the strategies that users compare with DeepSpeed."""

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
from typing_extensions import override

from toolkit.config.job import Job
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines.base import StepResult, gradient_error
from toolkit.engines.compiled_layers import CompiledLayers
from toolkit.engines.dropout import DropoutStream
from toolkit.engines.full_forward import DataParallelEngine
from toolkit.engines.gradient_norm import clip_gradients
from toolkit.engines.optimizer import connect_optimizer, parameter_groups, torch_optimizer
from toolkit.engines.optimizer_states import PlainStates, state_kinds
from toolkit.engines.routing import find_routing
from toolkit.errors import RunError


class AccelerateEngine(DataParallelEngine):
    """An `Accelerator` around the model: DistributedDataParallel, or fully_shard (FSDP2) with `sharded`."""

    def __init__(self, job: Job, model: PreTrainedModel, device: torch.device) -> None:
        recipe = job.recipe
        self.device = device
        self.dropout = DropoutStream(model, device)
        self.dp = job.layout.dp
        self.sources = len(recipe.data.labels)
        self.accumulation = job.batch.accumulation
        self.grad_clip = recipe.train.grad_clip
        self.routing = find_routing(job, model, device)
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
            # Otherwise accelerate divides the loss by a number from the environment.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            cpu=device.type == "cpu",
            mixed_precision="bf16" if recipe.precision == "bf16" else "no",
            fsdp_plugin=plugin,
        )
        if plugin is not None and device.type == "cpu":
            # accelerate 1.15 silently ignores the plugin on CPU ranks and uses DDP (state.py); no issue is known.
            self.accelerator.state.distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = plugin
        self.model = model
        optimizer = torch_optimizer(recipe, parameter_groups(self.named_parameters(), recipe.optimizer))
        prepared, self.optimizer = self.accelerator.prepare(model, optimizer)
        base = getattr(self.optimizer, "optimizer", self.optimizer)
        states = PlainStates(base, state_kinds(recipe.optimizer.name, recipe.optimizer.momentum))
        self._wrapped: Any = prepared
        self.model = self.accelerator.unwrap_model(prepared)
        self.states = connect_optimizer(states, self.named_parameters())
        if recipe.train.compile:
            self.compiled = CompiledLayers(self.model)
        self._wrapped.train()
        is_sharded = any(isinstance(parameter, DTensor) for parameter in self.model.parameters())
        if is_sharded != sharded:
            reason = f"accelerate built {'FSDP' if is_sharded else 'DDP'} instead"
            raise RunError.of("train.engine", recipe.train.engine, reason, "unset ACCELERATE_* in the environment")

    @override
    def _full(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in super()._full(*arguments, **options):
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    @override
    def _forward(self, batch: MicroBatch) -> Any:
        return self._wrapped(**batch.inputs(), use_cache=False)

    @override
    def _accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.accelerator.no_sync(self._wrapped)

    @override
    def _backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    @override
    def _update(self, loss: float) -> StepResult:
        norm = clip_gradients(self.model.parameters(), self.grad_clip)
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise gradient_error(norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(loss=loss, grad_norm=norm)


def _forget_launcher_settings() -> None:
    """Remove the engine that `accelerate launch` set in the environment: the recipe selects the engine."""
    chosen = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")
    for name in list(os.environ):
        if name in chosen or name.startswith(("ACCELERATE_DYNAMO_", "FSDP_")):
            del os.environ[name]
