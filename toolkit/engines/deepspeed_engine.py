"""DeepSpeed ZeRO 0-3, and what every engine around `deepspeed.initialize` shares."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.utils import safe_get_full_grad
from torch import nn
from transformers import PreTrainedModel
from typing_extensions import override

from toolkit.config.job import Job
from toolkit.config.pipeline_schedules import SPLITTING
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines import deepspeed_patches
from toolkit.engines.base import DistributedEngine, Update
from toolkit.engines.compiled_layers import CompiledLayers
from toolkit.engines.context_slices import ContextSlices
from toolkit.engines.dropout import DropoutStream
from toolkit.engines.full_forward import DataParallelEngine
from toolkit.engines.gradient_norm import full_grad_norm
from toolkit.engines.host_read import read_together, update_if_finite
from toolkit.engines.optimizer import connect_optimizer, parameter_groups, torch_optimizer
from toolkit.engines.optimizer_states import deepspeed_states, state_kinds
from toolkit.engines.routing import find_routing
from toolkit.model_init.model_partition import ModelPartition
from toolkit.parallel.experts.deepspeed_groups import declare_experts
from toolkit.parallel.gather import Names
from toolkit.parallel.groups import ModelParallelUnit, context_group

deepspeed_patches.skip_shared_memory_op()
deepspeed_patches.import_muon_uncompiled()

_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""The state of DeepSpeed's loss scaler."""


class DeepSpeedBase(DistributedEngine):
    """An engine around `deepspeed.initialize`; `engine` is what that returns."""

    engine: Any
    dropout: DropoutStream

    def _initialize(self, job: Job, config: Mapping[str, Any], module: Any, mpu: Any = None) -> None:
        """Build the DeepSpeed engine of `module`, which contains `self.model`; sets `engine`, `optimizer`, `states`."""
        recipe = job.recipe
        self._zero_stage = job.layout.zero_stage
        if self.partition is not None:
            declare_experts(self.model, self.partition.groups)
        if recipe.train.compile:
            self.compiled = CompiledLayers(
                self.model,
                zero_stage=self._zero_stage,
                is_stage=job.layout.pp > 1,
                splits_backward=job.layout.schedule in SPLITTING,
            )
        groups = parameter_groups(self.named_parameters(), recipe.optimizer)
        client = None if "optimizer" in config else torch_optimizer(recipe, groups, on_gpu=self.device.type == "cuda")
        quiet = deepspeed_patches.quiet_stdout(unless=recipe.log.level == "debug")
        tested = deepspeed_patches.without_untested_warning(recipe.optimizer.name)
        with quiet, tested, deepspeed_patches.no_block_is_a_leaf():
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=module,
                model_parameters=None if client else groups,
                optimizer=client,
                config=dict(config),
                mpu=mpu,
            )
        # zero.Init has moved the parameters only.
        for part in self.model.modules():
            part._buffers.update({k: None if v is None else v.to(self.device) for k, v in part._buffers.items()})
        if self.routing is not None:
            self.routing.keep_biases_exact()
        deepspeed_patches.fix_gradient_norms(self.engine, self.partition)
        deepspeed_patches.overwrite_first_gradients(self.optimizer)
        deepspeed_patches.join_gradients_in_place(self.optimizer)
        kinds = state_kinds(recipe.optimizer.name, recipe.optimizer.momentum)
        states = deepspeed_states(self.optimizer, self._zero_stage, kinds)
        self.states = connect_optimizer(states, self.named_parameters(), self.partition)

    def _zero_update(self, totals: torch.Tensor, step: Callable[[], None]) -> Update:
        """Take a `step` of ZeRO 1, 2 or 3, which decides by its norm; the host reads `totals` where it reads that."""
        with deepspeed_patches.one_host_read(self.optimizer, totals, fp16=self._fp16) as read:
            step()
        reported = self.engine.get_global_grad_norm()
        norm = math.nan if reported is None else read.norm(reported)
        return Update(totals=read.totals(), grad_norm=norm, skipped=read.refused or not self.engine.was_step_applied())

    @override
    def release_gathered_weights(self) -> None:
        if self._zero_stage == 3:
            self.engine.empty_partition_cache()

    @override
    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._full(self.trained_names(), safe_get_full_grad, dtype=torch.float32)

    @override
    def loss_scale(self) -> dict[str, float]:
        autocast, scaler = self._scalers()
        if autocast:
            state = autocast.state_dict()
            return {"scale": float(state["scale"]), "growth_tracker": float(state["_growth_tracker"])}
        return {name: float(getattr(scaler, name)) for name in _SCALER_FIELDS if hasattr(scaler, name)}

    @override
    def load_loss_scale(self, state: Mapping[str, float]) -> None:
        # From a scaler of the other kind only the scale is used.
        scale = state.get("scale", state.get("cur_scale"))
        if scale is None:
            return
        autocast, scaler = self._scalers()
        if autocast:
            tracker = int(state.get("growth_tracker", 0))
            autocast.load_state_dict(autocast.state_dict() | {"scale": scale, "_growth_tracker": tracker})
        elif scaler is not None:
            scaler.cur_scale = scale
            for name in _SCALER_FIELDS[1:]:
                if name in state:
                    setattr(scaler, name, int(state[name]))

    def _scalers(self) -> tuple[Any, Any]:
        """Return PyTorch's GradScaler under autocast and DeepSpeed's own loss scaler, either or both None."""
        scaler = getattr(self.engine.optimizer, "loss_scaler", None) if self.engine.fp16_enabled() else None
        return self.engine.torch_autocast_z0_gradscaler, scaler


class DeepSpeedEngine(DeepSpeedBase, DataParallelEngine):
    """A DeepSpeed engine with our training step; with `partition`, on this rank's tensor-parallel shard."""

    _is_repeating = False
    """Whether a micro-batch is computed that belongs to no step."""

    def __init__(
        self,
        job: Job,
        config: Mapping[str, Any],
        model: PreTrainedModel,
        device: torch.device,
        partition: ModelPartition | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.partition = partition
        sequence_group = partition.groups.tensor if partition is not None and job.layout.sequence_parallel else None
        self.dropout = DropoutStream(model, device, sequence_group=sequence_group)
        self.dp = job.layout.replicas
        self.sources = len(job.recipe.data.labels)
        self.accumulation = job.batch.accumulation
        self.grad_clip = job.recipe.train.grad_clip
        self.keeps_casts = job.layout.zero_stage == 0 and self.accumulation > 1
        self._fp16 = job.recipe.precision == "fp16"
        if job.layout.cp > 1:
            self.context = ContextSlices(
                job, context_group(job.layout) if partition is None else partition.groups.context
            )
        self.routing = find_routing(job, model, device, sequence_group, self.context)
        if self.context is None and job.recipe.attends_in_blocks:
            self.context = ContextSlices(job, None)
        self._initialize(job, config, model, mpu=self._parallel_unit())
        self.engine.train()

    @override
    def full_parameters(self, names: Names | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        if self._zero_stage < 3:
            return super().full_parameters(names)
        return self._full(names, lambda parameter: parameter.detach().clone(), opened=deepspeed.zero.GatheredParameters)

    def _parallel_unit(self) -> Any:
        """Return DeepSpeed's `mpu`; None if all ranks are replicas."""
        return None if self.partition is None else ModelParallelUnit(self.partition.groups)

    @override
    def _forward(self, batch: MicroBatch) -> Any:
        if not self._is_repeating:
            return self.engine(**batch.inputs(), use_cache=False)
        # DeepSpeed takes every backward pass through the output of its forward pass for a part of a step.
        with autocast_if_enabled(self.engine):
            return self.engine.module(**batch.inputs(), use_cache=False)

    @override
    def repeat(self, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        self._is_repeating = True
        try:
            return super().repeat(micro_batch)
        finally:
            self._is_repeating = False

    @override
    def _backward(self, loss: torch.Tensor) -> None:
        # The loss is already a share of the global batch's: DeepSpeed must not divide by the accumulation again.
        self.engine.backward(loss, scale_wrt_gas=False)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    @override
    def _update(self, totals: torch.Tensor) -> Update:
        micro_steps = self.engine.micro_steps + 1
        if self._zero_stage > 0:
            update = self._zero_update(totals, self.engine.step)
        else:
            update = self._plain_update(totals)
        if update.skipped:
            deepspeed_patches.clear_skipped_gradients(self.optimizer)
        if update.skipped and not self._fp16:
            deepspeed_patches.discard_gradients(self.engine, micro_steps=micro_steps)
        return update

    def _plain_update(self, totals: torch.Tensor) -> Update:
        """Take a step of ZeRO-0, where DeepSpeed reports no norm: gradients are plain fp32 averages."""
        scaled_norm = full_grad_norm(self.model.parameters(), self.partition)
        scaler = self.engine.torch_autocast_z0_gradscaler
        if scaler is None:
            with deepspeed_patches.known_norm(self.engine, scaled_norm):
                return update_if_finite(self.optimizer, totals, scaled_norm, self.engine.step)
        values, norm = read_together(totals, scaled_norm / scaler.get_scale())
        skipped = not math.isfinite(norm)
        if skipped:
            # Each rank's scaler decides by the gradients that the rank has, and experts are not on all ranks.
            next(p.grad for p in self.model.parameters() if p.grad is not None).fill_(math.nan)
        self.engine.step()  # the scaler skips by itself
        return Update(totals=values, grad_norm=norm, skipped=skipped)

    @override
    def _loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super()._loss_sum(logits, labels) if self.partition is None else self.partition.loss_sum(logits, labels)

    @override
    def _sample_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.partition is None:
            return super()._sample_losses(logits, labels)
        return self.partition.loss_sum(logits, labels, by_sample=True)

    @override
    def _token_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.partition is None:
            return super()._token_losses(logits, labels)
        return self.partition.token_losses(logits, labels)

    @override
    def _sum_over_replicas(self, values: torch.Tensor) -> None:
        # Tensor-parallel ranks count the same samples.
        dist.all_reduce(values, group=None if self.partition is None else self.partition.groups.data)


_CALLED_FOR_EACH_EXPERT = ("DbrxExperts", "LongcatFlashExperts", "Step3p7Experts")
"""Classes that call a module once for each expert that has tokens, so on some ranks more often than on others.

ZeRO-3 gathers where a module is called, so ranks would wait for different collectives. As a unit it is gathered once.
"""


def zero3_sharder(config: Mapping[str, Any], partition: ModelPartition | None = None, *, ulysses: int = 1) -> Any:
    """Return a function that shards a module's parameters over the replicas as soon as they have their values.

    Ranks that share sequences (`ulysses`) hold different shards, like replicas.
    """
    unit = None if partition is None else ModelParallelUnit(partition.groups)
    settings = deepspeed_patches.zero_init_config(config, ulysses=ulysses)
    first: Any = None

    def shard(module: nn.Module) -> None:
        nonlocal first
        for part in module.modules():
            if type(part).__name__ in _CALLED_FOR_EACH_EXPERT:
                part._z3_leaf = True  # type: ignore[assignment]  # DeepSpeed's mark of a unit of ZeRO-3
        # Without the first one's swapper each call makes one, which removes the files of those before, and groups of
        # hpZ cannot be made twice. The dtype is the config's: where the accelerator has no fp16, DeepSpeed 0.19.8 takes
        # an argument of fp32 for bf16.
        made = deepspeed.zero.Init(
            module=module,
            config_dict_or_path=settings,
            mpu=unit,
            data_parallel_group=None if partition is None else partition.groups.data,
            param_swapper=first and first.param_swapper,
            zero_param_parallel_group=first and first.zero_param_process_group,
        )
        if first is None and made.param_swapper is not None:
            deepspeed_patches.reserve_for_shards(made.param_swapper, made.dp_world_size)
        first = first or made

    return shard


def model_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of the parameters under a DeepSpeed config."""
    if config["bf16"]["enabled"]:
        return torch.bfloat16
    return torch.float16 if config["fp16"]["enabled"] else torch.float32
