"""DeepSpeed ZeRO 0-3, with the repairs that its numbers need (each named where it is made)."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import safe_get_full_grad
from torch import nn
from transformers import PreTrainedModel

from toolkit.batch import Batch
from toolkit.layout import Layout
from toolkit.parallel.gather import whole_parameters
from toolkit.parallel.groups import ModelParallelUnit
from toolkit.parallel.stage import ZERO
from toolkit.recipe import Recipe
from toolkit.train.cut import ModelCut
from toolkit.train.dropout import DropoutStream
from toolkit.train.engines.base import DataParallelEngine, MicroBatch, StepResult, refuse_gradient
from toolkit.train.engines.states import deepspeed_states, state_kinds
from toolkit.train.gradient_norm import total_norm
from toolkit.train.optimizer import parameter_groups, torch_optimizer

if os.environ.get("DS_ACCELERATOR") == "cpu":
    # DeepSpeed would compile a shared-memory collective for CPU ranks when it starts (over a minute, and it needs a
    # compiler); gloo's own does.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class DeepSpeedEngine(DataParallelEngine):
    """A `deepspeed.initialize` engine under our step; with `cut` on this rank's tensor-parallel share of the model."""

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        batch: Batch,
        config: Mapping[str, Any],
        model: PreTrainedModel,
        device: torch.device,
        cut: ModelCut | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.cut = cut
        split_sequence = cut is not None and layout.sequence_parallel
        self.dropout = DropoutStream(
            model, device, sequence_group=cut.groups.tensor if cut is not None and split_sequence else None
        )
        self.dp = layout.dp
        self.accumulation = batch.accumulation
        self.grad_clip = recipe.train.grad_clip
        self._fp16 = recipe.precision == "fp16"
        self._zero_stage = layout.zero_stage
        groups = parameter_groups(model, recipe.optimizer.weight_decay)
        buffers = keep_buffers(model)
        client = None if "optimizer" in config else torch_optimizer(recipe.optimizer, groups)
        with quiet_stdout(unless=recipe.log.level == "debug"):
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=model,
                model_parameters=None if client else groups,
                optimizer=client,
                config=dict(config),
                mpu=self._parallel_unit(),
            )
        restore_buffers(model, buffers, device)
        repair_norms(self.engine, self.cut)
        kinds = state_kinds(recipe.optimizer.name, recipe.optimizer.momentum)
        self.states = deepspeed_states(self.optimizer, layout.zero_stage, kinds)
        if recipe.train.compile:
            self.engine.compile()
        self.engine.train()

    def parameter_count(self) -> int:
        """See Engine.parameter_count."""
        return super().parameter_count() if self.cut is None else self.cut.parameter_count

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_parameters."""
        if self.cut is not None:
            opened = deepspeed.zero.GatheredParameters if self._zero_stage == 3 else nullcontext
            yield from whole_parameters(
                self.cut.names, self.model.parameters(), self.cut.groups, opened=lambda held: opened(held)
            )
            return
        for name, parameter in self.model.named_parameters():
            if self._zero_stage == 3:
                with deepspeed.zero.GatheredParameters([parameter]):
                    yield name, parameter.detach().clone()
            else:
                yield name, parameter.detach()

    def loss_scale(self) -> dict[str, float]:
        """See Engine.loss_scale."""
        return read_loss_scale(self.engine)

    def load_loss_scale(self, state: Mapping[str, float]) -> None:
        """See Engine.load_loss_scale."""
        write_loss_scale(self.engine, state)

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_gradients."""
        if self.cut is not None:
            yield from whole_parameters(
                self.cut.names, self.model.parameters(), self.cut.groups, values=safe_get_full_grad, dtype=torch.float32
            )
            return
        for name, parameter in self.model.named_parameters():
            gradient = safe_get_full_grad(parameter)
            yield name, torch.zeros_like(parameter) if gradient is None else gradient

    def _parallel_unit(self) -> Any:
        """What tells DeepSpeed which ranks do what; None where all of them are replicas."""
        return None if self.cut is None else ModelParallelUnit(self.cut.groups)

    def _logits(self, batch: MicroBatch) -> torch.Tensor:
        logits: torch.Tensor = self.engine(**batch.inputs(), use_cache=False).logits
        return logits

    def _backward(self, loss: torch.Tensor) -> None:
        # Our loss is already a share of the global batch's: DeepSpeed must not divide by the accumulation again.
        self.engine.backward(loss, scale_wrt_gas=False)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def _update(self, loss: float) -> StepResult:
        norm = self._plain_norm()
        if norm is None:
            self.engine.step()
            reported = self.engine.get_global_grad_norm()
            norm = math.nan if reported is None else float(reported)
            skipped = not self.engine.was_step_applied()
        else:
            skipped = not math.isfinite(norm)
            if self._fp16 or not skipped:
                self.engine.step()  # with a loss scaler, which skips by itself; else DeepSpeed would apply a NaN
        if skipped:
            forget_skipped_gradients(self.optimizer)
        if skipped and not self._fp16:
            self._discard_gradients()
            raise refuse_gradient(norm)
        return StepResult(loss=loss, grad_norm=norm, skipped=skipped)

    def _plain_norm(self) -> float | None:
        """The gradient norm where DeepSpeed reports none: ZeRO-0 keeps plain, already averaged fp32 gradients."""
        if self._zero_stage > 0:
            return None
        norm = plain_norm(self.model.parameters(), self.cut)
        scaler = self.engine.torch_autocast_z0_gradscaler
        return float(norm / scaler.get_scale() if scaler else norm)

    def _loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super()._loss_sum(logits, labels) if self.cut is None else self.cut.loss_sum(logits, labels)

    def _sum_over_replicas(self, values: torch.Tensor) -> None:
        # Tensor-parallel ranks count the same samples.
        dist.all_reduce(values, group=None if self.cut is None else self.cut.groups.data)

    def _set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def _discard_gradients(self) -> None:
        self.engine.zero_grad()
        if self._zero_stage == 0:
            self.engine.micro_steps += 1  # as engine.step() would have counted, or accumulation would end too late


_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def read_loss_scale(engine: Any) -> dict[str, float]:
    """The state of DeepSpeed's fp16 loss scaler, or of PyTorch's under autocast; empty in other precisions."""
    autocast = engine.torch_autocast_z0_gradscaler
    if autocast:
        state = autocast.state_dict()
        return {"scale": float(state["scale"]), "growth_tracker": float(state["_growth_tracker"])}
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if not engine.fp16_enabled() or scaler is None:
        return {}
    return {name: float(getattr(scaler, name)) for name in _SCALER_FIELDS if hasattr(scaler, name)}


def write_loss_scale(engine: Any, state: Mapping[str, float]) -> None:
    """Set what `read_loss_scale` returned; a state of the other kind of scaler gives its scale alone."""
    scale = state.get("scale", state.get("cur_scale"))
    if scale is None:
        return
    autocast = engine.torch_autocast_z0_gradscaler
    if autocast:
        tracker = int(state.get("growth_tracker", 0))
        autocast.load_state_dict(autocast.state_dict() | {"scale": scale, "_growth_tracker": tracker})
        return
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if not engine.fp16_enabled() or scaler is None:
        return
    scaler.cur_scale = scale
    for name in _SCALER_FIELDS[1:]:
        if name in state:
            setattr(scaler, name, int(state[name]))


def repair_norms(engine: Any, cut: ModelCut | None) -> None:
    """Let DeepSpeed take gradient norms to fp32's precision: `gradient_norm` says how it is lost on CPUs.

    BF16_Optimizer also fails where a rank counts no tensor at all: the second tensor-parallel rank of a stage with only
    tied copies.
    """
    engine.clip_fp32_gradients = lambda: nn.utils.clip_grads_with_norm_(
        engine.module.parameters(), engine.gradient_clipping(), plain_norm(engine.module.parameters(), cut)
    )
    optimizer = engine.optimizer
    if not isinstance(optimizer, BF16_Optimizer):
        return
    gradients = optimizer.get_grads_for_norm

    def counted_norms(for_clipping: bool = False) -> Any:
        found = gradients(for_clipping=for_clipping)
        if for_clipping:
            return found
        counted, experts = found
        if not counted:
            return [torch.zeros(1, device=optimizer.fp32_groups_flat_partition[0].device)], experts
        return [total_norm([tensor]) for tensor in counted], experts

    optimizer.get_grads_for_norm = counted_norms


def forget_skipped_gradients(optimizer: Any) -> None:
    """Drop the sums of a step that was skipped, which DeepSpeed adds the next step's gradients to.

    ZeRO 1 and 2 in 16 bits with an offloaded optimizer: after one overflow every later step would be skipped too.
    """
    if getattr(optimizer, "cpu_offload", False):
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None


def plain_norm(parameters: Iterable[nn.Parameter], cut: ModelCut | None) -> torch.Tensor:
    """The norm of the whole model's gradient, where gradients are plain tensors, averaged over replicas already.

    What several ranks hold counts once: a split parameter on its owners, any other on the first tensor-parallel rank,
    a tied copy on the first stage.
    """
    gradients = [p.grad for p in parameters if p.grad is not None and (cut is None or cut.counts(p))]
    norm = total_norm(gradients)
    if cut is None:
        return norm
    square = norm.to(cut.device, torch.float32).square()
    dist.all_reduce(square, group=cut.groups.tensor)
    dist.all_reduce(square, group=cut.groups.pipe)
    return square.sqrt()


def keep_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the buffers as they are before DeepSpeed touches the model."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers() if not name.endswith(ZERO)}


def restore_buffers(model: nn.Module, buffers: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """DeepSpeed casts the whole module; rotary frequencies in 16 bits would rotate long positions wrongly."""
    for name, value in buffers.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = value.to(device)


def zero3_sharder(
    config: Mapping[str, Any], dtype: torch.dtype, cut: ModelCut | None = None, *, ulysses: int = 1
) -> Any:
    """A function that shards a module's parameters over the replicas as soon as they have their values.

    Ranks that share sequences (`ulysses`) hold shards of their own, like replicas.
    """
    unit = None if cut is None else ModelParallelUnit(cut.groups)
    settings = dict(config)
    if ulysses > 1:
        # Only for the arithmetic of batch sizes: sharding starts before DeepSpeed knows the groups.
        settings["sequence_parallel_size"] = ulysses
    deepspeed.init_distributed()  # without its own group, zero.Init believes that there is one rank

    def shard(module: nn.Module) -> None:
        deepspeed.zero.Init(
            module=module,
            config_dict_or_path=settings,
            dtype=dtype,
            mpu=unit,
            data_parallel_group=None if cut is None else cut.groups.data,
        )

    return shard


def model_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype of parameters under a DeepSpeed config."""
    if config["bf16"]["enabled"]:
        return torch.bfloat16
    return torch.float16 if config["fp16"]["enabled"] else torch.float32


@contextmanager
def quiet_stdout(*, unless: bool) -> Iterator[None]:
    """Nothing reaches stdout inside, unless asked for."""
    """Some of DeepSpeed's start-up reports are plain prints that no log level reaches."""
    if unless:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield
