"""DDP and FSDP2 through accelerate: the strategies that users compare with DeepSpeed."""

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, GradientAccumulationPlugin
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from typing_extensions import override

from toolkit.config.job import Job
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines.base import Update
from toolkit.engines.compiled_layers import CompiledLayers
from toolkit.engines.dropout import DropoutStream
from toolkit.engines.full_forward import DataParallelEngine
from toolkit.engines.gradient_norm import clip_gradients
from toolkit.engines.host_read import update_if_finite
from toolkit.engines.optimizer import connect_optimizer, fill_missing_gradients, parameter_groups, torch_optimizer
from toolkit.engines.optimizer_states import PlainStates, state_kinds
from toolkit.engines.routing import find_routing
from toolkit.errors import RunError
from toolkit.parallel.model_structure import decoder_layer_list

_OF_AN_EXPERT = re.compile(r"\.experts\.\d+\.")
"""Matches parameters of a mixture that has a module for each expert."""


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
        self.keeps_casts = recipe.train.engine == "ddp" and self.accumulation > 1
        self.routing = find_routing(job, model, device)
        plugin = None
        if recipe.train.engine == "fsdp":
            is_bf16 = recipe.precision == "bf16"
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                # Decoder layers alone. What else a family wants on one device, its embeddings for example, may hold
                # weights that are tied to the head.
                transformer_cls_names_to_wrap=sorted({type(layer).__name__ for layer in decoder_layer_list(model)[1]}),
                reshard_after_forward=True,
                # accelerate's own policy would also sum gradients over ranks in 16 bits.
                mixed_precision_policy=MixedPrecisionPolicy(
                    param_dtype=torch.bfloat16 if is_bf16 else None, reduce_dtype=torch.float32 if is_bf16 else None
                ),
            )
        _forget_launcher_settings()
        self.accelerator = Accelerator(
            # Otherwise accelerate divides the loss by a number from the environment.
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            # Buffers are tables and counts that every rank computes alike: sending them would be a collective a step.
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
            cpu=device.type == "cpu",
            mixed_precision="bf16" if recipe.precision == "bf16" else "no",
            fsdp_plugin=plugin,
        )
        if plugin is not None and device.type == "cpu":
            # accelerate 1.15 silently ignores the plugin on CPU ranks and uses DDP (state.py); no issue is known.
            self.accelerator.state.distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = plugin
        self.model = model
        groups = parameter_groups(self.named_parameters(), recipe.optimizer)
        optimizer = torch_optimizer(recipe, groups, on_gpu=device.type == "cuda")
        prepared, self.optimizer = self.accelerator.prepare(model, optimizer)
        base = getattr(self.optimizer, "optimizer", self.optimizer)
        states = PlainStates(base, state_kinds(recipe.optimizer.name, recipe.optimizer.momentum))
        self._wrapped: Any = prepared
        self._is_first_step_of_ddp = isinstance(prepared, DistributedDataParallel)
        self.model = self.accelerator.unwrap_model(prepared)
        self.states = connect_optimizer(states, self.named_parameters())
        if recipe.train.compile:
            self.compiled = CompiledLayers(self.model)
        self._wrapped.train()
        is_sharded = any(isinstance(parameter, DTensor) for parameter in self.model.parameters())
        if is_sharded != (recipe.train.engine == "fsdp"):
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
    @contextmanager
    def _forward_only(self) -> Iterator[None]:
        with super()._forward_only():
            yield
        # FSDP keeps the root's weights whole for a backward pass: whoever reads them next would take them for shards.
        for module in self._wrapped.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @override
    def _accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        if self._is_first_step_of_ddp:
            return self._first_step_of_ddp(last=last)
        return nullcontext() if last else self._without_reduction()

    def _without_reduction(self) -> AbstractContextManager[None]:
        """A context whose backward passes add to local gradients alone."""
        context: AbstractContextManager[None] = self.accelerator.no_sync(self._wrapped)
        if isinstance(self._wrapped, DistributedDataParallel):
            context = self._wrapped.no_sync()  # accelerate's does nothing on one rank, where DDP reduces as well
        return context

    @contextmanager
    def _first_step_of_ddp(self, *, last: bool) -> Iterator[None]:
        """Compute a micro-batch of the first step, whose gradients are averaged after the `last` one, without DDP."""
        with self._without_reduction():
            yield
        if last:
            self._is_first_step_of_ddp = False
            self._average_first_gradients()

    @override
    def _backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    @override
    def _update(self, totals: torch.Tensor) -> Update:
        fill_missing_gradients(self.model.parameters())
        norm = clip_gradients(self.model.parameters(), self.grad_clip)
        update = update_if_finite(self.optimizer, totals, norm, self.optimizer.step)
        self.optimizer.zero_grad()
        return update

    def _average_first_gradients(self) -> None:
        """Average the gradients of the first step, and tell DDP whether some parameters have none.

        Some families have parameters that no loss depends on: the bias of an untied BERT head, for example, or an
        expert of its own without a token. DDP would wait for their gradients, unless it walks the graph of every
        forward pass, which takes time and is needed by few.
        """
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        has_gradient = torch.tensor([parameter.grad is not None for parameter in trained], device=self.device).int()
        dist.all_reduce(has_gradient, op=dist.ReduceOp.MIN)
        fill_missing_gradients(trained)
        for parameter in trained:
            assert parameter.grad is not None
            parameter.grad /= self.dp
            dist.all_reduce(parameter.grad)
        has_separate_experts = any(_OF_AN_EXPERT.search(name) for name, _ in self.named_parameters())
        if has_separate_experts or not has_gradient.all():
            device_ids = None if self.device.type == "cpu" else [self.device]
            self._wrapped = DistributedDataParallel(
                self.model, device_ids=device_ids, find_unused_parameters=True, broadcast_buffers=False
            )


def _forget_launcher_settings() -> None:
    """Remove the engine that `accelerate launch` set in the environment: the recipe selects the engine."""
    chosen = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")
    for name in list(os.environ):
        if name in chosen or name.startswith(("ACCELERATE_DYNAMO_", "FSDP_")):
            del os.environ[name]
