"""Patches of DeepSpeed, one function each: what is wrong, the version it was seen in, and the upstream issue.

tests/engines/test_deepspeed_patches.py runs DeepSpeed without each patch and fails when the fault is gone: then delete
the patch. Two corrections stand elsewhere, as methods of the class that they belong to: `StagePipeline` in
parallel/pipeline/pipeline_module.py tells DeepSpeed how to sum and count tied parameters, and `NvmeStates` in
engines/nvme.py releases the buffers of a sub-group before DeepSpeed uses them.
"""

import copy
import importlib
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer, compiler, utils
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero import leaf_module_config, stage3, stage_1_and_2
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import override

from toolkit.config.layout import Layout
from toolkit.engines.gradient_norm import full_grad_norm, scale_down, total_norm
from toolkit.engines.host_read import HostNumbers, read_together, skipping_unless, skips_on_device
from toolkit.model_init.model_partition import ModelPartition
from toolkit.parallel.groups import ParallelGroups


def skip_shared_memory_op() -> None:
    """Do not compile the shared-memory collective for CPU ranks.

    DeepSpeed 0.19.8 builds it whenever ranks start on a CPU (deepspeed/comm/torch.py `build_shm_op`): over a minute,
    and it needs a compiler. The collectives of gloo work. No issue is known.
    """
    if get_accelerator().device_name() == "cpu":  # DS_ACCELERATOR may be unset: DeepSpeed looks for a GPU by itself
        # Written before it is read: reading it first probes every op, a second per rank with a compiler.
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon without compiling it: it is imported for every optimizer, and used by none here.

    DeepSpeed 0.19.8 asks whether an optimizer is Muon (deepspeed/runtime/zero/utils.py), and the module compiles three
    functions when it is imported, which imports TorchInductor: a sixth of a rank's start. No issue is known.
    """
    with mock.patch.object(compiler, "compile", return_value=lambda function: function):
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


@contextmanager
def no_block_is_a_leaf() -> Iterator[None]:
    """Let `deepspeed.initialize` reduce the gradients of mixtral, qwen2_moe and qwen3_moe as those of other models.

    DeepSpeed 0.19.8 takes their blocks for leaves of ZeRO-3 (deepspeed/runtime/zero/leaf_module_config.py), and reduces
    gradients in a backward hook of the block. If all that comes before is frozen, the block's input has no
    gradient, and PyTorch calls the hook before the parameters have theirs: zeros are reduced, and then sizes differ. A
    leaf is for experts that a rank may not run; here every rank runs each parameter. No issue is known.
    """
    with mock.patch.object(leaf_module_config, "DEFAULT_LEAF_MODULE_CLASSES", []):
        yield


@contextmanager
def quiet_stdout(*, unless: bool) -> Iterator[None]:
    """Suppress stdout inside, unless `unless`.

    DeepSpeed 0.19.8 writes some of its start-up reports with print (deepspeed/runtime/pipe/module.py,
    deepspeed/runtime/pipe/topology.py), which no log level suppresses. No issue is known.
    """
    if unless:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


TESTED_WITH_ZERO = frozenset({"sgd", "lion", "muon", "adafactor"})
"""Optimizers that DeepSpeed does not know of, and whose updates under ZeRO are held to those of one plain process."""


@contextmanager
def without_untested_warning(optimizer: str) -> Iterator[None]:
    """Leave out DeepSpeed's warning of an untested optimizer where the toolkit's tests have the `optimizer`.

    DeepSpeed 0.19.8 warns of every class that it does not list (deepspeed/runtime/engine.py
    `_do_optimizer_sanity_check`), also once `zero_allow_untested_optimizer` has been set. No issue is known.
    """

    def is_shown(record: logging.LogRecord) -> bool:
        return "untested optimizer" not in str(record.msg)

    if optimizer not in TESTED_WITH_ZERO:
        yield
        return
    deepspeed.utils.logger.addFilter(is_shown)
    try:
        yield
    finally:
        deepspeed.utils.logger.removeFilter(is_shown)


def fix_gradient_norms(engine: Any, partition: ModelPartition | None) -> None:
    """Compute the gradient norms with the precision of fp32, and over all ranks.

    - On CPUs torch.linalg.vector_norm, and so DeepSpeed 0.19.8's `clip_grad_norm_` (deepspeed/runtime/utils.py) and
      BF16_Optimizer, sum squares in long fp32 chains: 0.5 % too small for a vocabulary of 50,257 x 768.
      https://github.com/pytorch/pytorch/issues/169237
    - `clip_grad_norm_` averages the norms of the data-parallel ranks instead of reducing the parts of the model.
      https://github.com/deepspeedai/DeepSpeed/issues/8475 (there for experts)
    - BF16_Optimizer.get_grads_for_norm fails on a rank that counts no tensor, such as the second tensor-parallel rank
      of a stage with only tied copies. Fixed for ZeRO 1 and 2 only: https://github.com/deepspeedai/DeepSpeed/pull/5148
    - ZeRO-3 takes for granted that a group of expert-parallel ranks contains the tensor-parallel ones, and does not sum
      the experts' norms over those (deepspeed/runtime/zero/stage3.py `_grad_norm_counts_every_rank`): too small, and
      differently on each of them, so that replicas drift apart. No issue is known.
    - BF16_Optimizer sums the norm of experts over other ranks than those of its other parameters
      (deepspeed/runtime/utils.py `get_norm_with_moe_layers`): in a pipeline without tensor parallelism, stages wait for
      each other for ever. Here the experts' norm is one of the others, summed over expert-parallel ranks before. No
      issue is known.
    """

    def clip_by_full_norm() -> None:
        norm = full_grad_norm(engine.module.parameters(), partition)
        scale_down(engine.module.parameters(), engine.gradient_clipping(), norm)

    engine.clip_fp32_gradients = clip_by_full_norm
    optimizer = engine.optimizer
    _take_norms_at_once(optimizer)
    if hasattr(optimizer, "_grad_norm_counts_every_rank"):
        optimizer._grad_norm_counts_every_rank = lambda parameters, group: False
    if not isinstance(optimizer, BF16_Optimizer):
        return
    gradients = optimizer.get_grads_for_norm
    device = optimizer.fp32_groups_flat_partition[0].device

    def exact_norms(for_clipping: bool = False) -> Any:
        if for_clipping:
            # The rank updates this part alone: the gradients of the others' parts are about to be cleared.
            return optimizer.fp32_groups_gradient_flat_partition
        counted, experts = gradients()
        norms = [total_norm(counted)] if counted else []
        if partition is not None and optimizer.has_moe_layers:
            of_experts = total_norm([tensor for tensors in experts.values() for tensor in tensors])
            square = of_experts.to(device).square()
            dist.all_reduce(square, group=partition.groups.expert)
            norms.append(square.sqrt())
        return norms or [torch.zeros(1, device=device)], {}

    optimizer.get_grads_for_norm = exact_norms


def _take_norms_at_once(optimizer: Any) -> None:
    """Let ZeRO 1, 2 and 3 read every gradient once for norm and overflow, in one call for those of a group.

    DeepSpeed 0.19.8 reads it twice to look for values that are not finite (`has_overflow` in
    deepspeed/runtime/zero/stage_1_and_2.py and stage3.py), copies it to fp64, and reads the copy. Where a gradient is
    not finite the norm is not, for which DeepSpeed skips the step as well. `_foreach_norm` in fp64 has the bits of the
    copy's norm. With an offloaded optimizer, gradients are elsewhere. No issue is known.
    """
    if isinstance(optimizer, BF16_Optimizer):
        return
    is_zero3 = hasattr(optimizer, "_get_param_partition_group")
    if not hasattr(optimizer, "get_grad_norm_direct") or _is_offloaded(optimizer):
        return
    if getattr(optimizer, "compute_grad_norm", True):
        optimizer.has_overflow = lambda partition_gradients=True: False

    def norm_of_group(gradients: Iterable[torch.Tensor], parameters: Sequence[Any], norm_type: float = 2) -> Any:
        unpadded = [gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)]
        counted = [
            gradient
            for gradient, parameter in zip(unpadded, parameters, strict=False)
            if not getattr(parameter, "ds_pipe_replicated", False)
            and (is_model_parallel_parameter(parameter) or optimizer.model_parallel_rank == 0)
        ]
        square = torch.zeros((), dtype=torch.float64, device=get_accelerator().current_device_name())
        if counted:
            square = torch.stack(torch._foreach_norm(counted, norm_type, dtype=torch.float64)).square().sum()
        expert_group = None
        if is_zero3:
            group = optimizer._get_param_partition_group(parameters[0])
            expert_group = optimizer._autoep_expert_parallel_group(parameters)
        else:
            # ZeRO 1 and 2 sum the norms of experts over expert-parallel ranks themselves.
            group = optimizer.dp_process_group
            square = square.float()
        dist.all_reduce(square, group=group)
        optimizer._model_parallel_all_reduce(tensor=square, op=dist.ReduceOp.SUM)
        if expert_group is not None:
            dist.all_reduce(square, group=expert_group)
        norm = square.sqrt()
        # DeepSpeed's mark of a norm that is not finite is -1.
        return torch.where(torch.isfinite(norm), norm, -1.0)

    optimizer.get_grad_norm_direct = norm_of_group


def overwrite_first_gradients(optimizer: Any) -> None:
    """Let the first gradient of a step overwrite that of the step before in BF16_Optimizer (ZeRO-1 in bf16).

    DeepSpeed 0.19.8 fills its fp32 gradients with zeros twice a step, in `step` and in `zero_grad`, on each rank those
    of all replicas, and adds the first gradient to zeros (deepspeed/runtime/bf16_optimizer.py). Here only what a step
    has no gradient of is filled with zeros, before gradients are summed over replicas. No issue is known.
    """
    if not isinstance(optimizer, BF16_Optimizer):
        return
    add = optimizer._update_hp_grad
    take_for_reduction = optimizer.get_grads_for_reduction

    def forget() -> None:
        optimizer.fp32_groups_has_gradients = [[False] * len(group) for group in optimizer.fp32_groups_gradients]

    @torch.no_grad()
    def overwrite_or_add(parameter: Any, group: int, index: int, clear_lp_grads: bool) -> None:
        has_gradients = optimizer.fp32_groups_has_gradients[group]
        if parameter.grad is None or has_gradients[index]:
            add(parameter, group, index, clear_lp_grads)
            return
        gradient = optimizer.fp32_groups_gradients[group][index]
        gradient.copy_(parameter.grad.view_as(gradient))
        parameter._hp_grad = gradient
        has_gradients[index] = True
        if clear_lp_grads:
            parameter.grad.zero_()

    @torch.no_grad()
    def complete_for_reduction() -> Any:
        for gradients, flags in zip(optimizer.fp32_groups_gradients, optimizer.fp32_groups_has_gradients, strict=True):
            missing = [gradient for gradient, is_there in zip(gradients, flags, strict=True) if not is_there]
            if missing:
                torch._foreach_zero_(missing)
        return take_for_reduction()

    optimizer.clear_hp_grads = forget
    optimizer._update_hp_grad = overwrite_or_add
    optimizer.get_grads_for_reduction = complete_for_reduction


def join_gradients_in_place(optimizer: Any) -> None:
    """Let ZeRO-3 update from the buffer in which it accumulates gradients.

    DeepSpeed 0.19.8 copies the shards of a sub-group into one tensor (deepspeed/runtime/zero/stage3.py
    `_prepare_fp32_grad_for_sub_group`), although they lie one behind the other in `grad_partitions_flat_buffer`. The
    next step's first gradients overwrite that buffer. With an offloaded optimizer nothing is joined. No issue is known.
    """
    if not hasattr(optimizer, "grad_partitions_flat_buffer") or _is_offloaded(optimizer):
        return
    prepare = optimizer._prepare_fp32_grad_for_sub_group
    copy_together = optimizer.flatten

    def view_together(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        first = tensors[0]
        end = first.data_ptr()
        for tensor in tensors:
            if tensor.data_ptr() != end or not tensor.is_contiguous() or tensor.dtype != first.dtype:
                together: torch.Tensor = copy_together(tensors)
                return together
            end += tensor.nbytes
        return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))

    def prepare_without_copy(sub_group: int) -> None:
        optimizer.flatten = view_together
        try:
            prepare(sub_group)
        finally:
            optimizer.flatten = copy_together

    optimizer._prepare_fp32_grad_for_sub_group = prepare_without_copy


def _is_offloaded(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False))


class HostRead:
    """The one read of a step: `totals`, fp64, and the norm by which DeepSpeed decides whether to take the update."""

    refused = False
    """Whether the norm was not finite, or DeepSpeed's mark of such a norm, -1."""

    def __init__(self, totals: torch.Tensor, scale: float) -> None:
        self._unread = totals
        self._scale = scale
        self._totals: list[float] | None = None
        self._read: torch.Tensor | None = None
        self._norm = math.nan

    def is_invalid(self, norm: torch.Tensor | float) -> bool:
        """Return what DeepSpeed's `is_invalid_grad_norm` does: whether a norm is not finite, or marked by -1."""
        self.refused = _is_invalid(self._value(norm))
        return self.refused

    def finish(self) -> None:
        """Called behind DeepSpeed's step."""

    def norm(self, reported: torch.Tensor | float) -> float:
        """Return the norm that DeepSpeed reports once it has divided by the loss scale."""
        if self._read is not None and self._scale == 1 and isinstance(reported, torch.Tensor):
            return self._norm
        return self._value(reported)

    def totals(self) -> list[float]:
        """Return the totals, which are read here where no norm was."""
        if self._totals is None:
            self._totals = self._unread.tolist()
        return self._totals

    def _value(self, norm: torch.Tensor | float) -> float:
        if norm is self._read:
            return self._norm
        if not isinstance(norm, torch.Tensor) or self._totals is not None:
            return float(norm)
        self._read = norm
        self._totals, self._norm = read_together(self._unread, norm)
        return self._norm


class LateHostRead(HostRead):
    """The read behind an update that the optimizer skips on the device where the norm is not finite.

    DeepSpeed is told that every norm is valid. Where the norm is not, its step scales the gradients by a meaningless
    factor, and copies weights that have not changed; the gradients are dropped afterwards.
    """

    def __init__(self, totals: torch.Tensor, optimizer: Any, patches: ExitStack) -> None:
        super().__init__(totals, scale=1.0)
        self._optimizer = optimizer
        self._patches = patches
        self._numbers: HostNumbers | None = None

    @override
    def is_invalid(self, norm: torch.Tensor | float) -> bool:
        if self._numbers is None and isinstance(norm, torch.Tensor):
            self._numbers = HostNumbers(self._unread, norm)
            is_valid = torch.isfinite(norm) & (norm >= 0)
            self._patches.enter_context(skipping_unless(is_valid, self._optimizer))
        return False

    @override
    def finish(self) -> None:
        if self._numbers is not None:
            self._totals, self._norm = self._numbers.read()
            self.refused = _is_invalid(self._norm)

    @override
    def norm(self, reported: torch.Tensor | float) -> float:
        if self._numbers is None:
            return super().norm(reported)
        # DeepSpeed reports infinity for an update that it has skipped.
        return math.inf if self.refused else self._norm


def _is_invalid(norm: float) -> bool:
    return not math.isfinite(norm) or norm < 0


@contextmanager
def one_host_read(optimizer: Any, totals: torch.Tensor, *, fp16: bool) -> Iterator[HostRead]:
    """Let the host wait for the device once in a step of ZeRO: for the norm, and `totals` with it.

    It waits behind the update where the optimizer can skip that on the device (toolkit/engines/host_read.py), but not
    in fp16, where the host changes the loss scale by the norm.

    DeepSpeed 0.19.8 reads the norm to decide whether to take the update, again for each group that it scales
    (deepspeed/runtime/zero/stage_1_and_2.py `unscale_and_clip_grads`), and the coefficient of clipping
    (deepspeed/runtime/utils.py `clip_tensors_by_global_norm`), and the norms of experts (`get_norm_with_moe_layers`,
    there). It waits as well to send a GPU the number -1 (`mask_nan_or_inf_with_val_inplace`, there). No issue is known.
    """
    with ExitStack() as patches:
        if skips_on_device(optimizer) and not fp16:
            read: HostRead = LateHostRead(totals, optimizer, patches)
        else:
            read = HostRead(totals, scale=float(getattr(optimizer, "loss_scale", 1.0)))
        for module in (bf16_optimizer, stage_1_and_2, stage3):
            patches.enter_context(mock.patch.object(module, "is_invalid_grad_norm", read.is_invalid))
        for module in (utils, stage_1_and_2, stage3):
            patches.enter_context(mock.patch.object(module, "mask_nan_or_inf_with_val_inplace", _mark_invalid))
        patches.enter_context(mock.patch.object(bf16_optimizer, "clip_tensors_by_global_norm", _clip_at_once))
        patches.enter_context(mock.patch.object(bf16_optimizer, "get_norm_with_moe_layers", _with_experts_already))
        yield read
    read.finish()


def _mark_invalid(input: torch.Tensor, device: torch.device | None = None, val: float = -1.0) -> None:
    """Fill in `val` where a norm is not finite, as DeepSpeed does, without a copy that waits for a GPU."""
    input.masked_fill_(~torch.isfinite(input), val)


def _clip_at_once(
    input_tensors: list[torch.Tensor], max_norm: float, global_norm: torch.Tensor, mpu: Any = None, eps: float = 1e-6
) -> torch.Tensor:
    """Scale gradients down to a norm of `max_norm`, as DeepSpeed does, and by exactly 1 where they are smaller."""
    coefficient = (max_norm / (global_norm + eps)).clamp(max=1.0)
    torch._foreach_mul_([tensor.detach() for tensor in input_tensors], coefficient)
    return global_norm


def _with_experts_already(norm: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Return the norm as it is: `fix_gradient_norms` counts experts among the other parameters."""
    return norm


@contextmanager
def known_norm(engine: Any, norm: torch.Tensor | None) -> Iterator[None]:
    """Let ZeRO-0 in fp32 clip by a norm that is known already, where it is: gradients are not read for it again."""
    clip = engine.clip_fp32_gradients
    if norm is not None:
        engine.clip_fp32_gradients = lambda: scale_down(engine.module.parameters(), engine.gradient_clipping(), norm)
    try:
        yield
    finally:
        engine.clip_fp32_gradients = clip


def equalize_norm_calls(optimizer: Any, groups: ParallelGroups) -> None:
    """Let pipeline stages with fewer parameter groups take part in every reduction of the gradient norm.

    DeepSpeed 0.19.8's ZeRO 1 reduces the norm once a group over all stages (deepspeed/runtime/zero/stage_1_and_2.py
    `scaled_global_norm`): where a stage trains no biases and norms, and another does, they wait for each other. No
    issue is known.
    """
    if not hasattr(optimizer, "bit16_groups"):
        return
    most = torch.tensor(len(optimizer.bit16_groups), device=optimizer.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.pipe)
    missing = int(most) - len(optimizer.bit16_groups)
    norm_of_group = optimizer.scaled_global_norm

    def norm_of_all(norm_type: int = 2) -> Any:
        norms = [norm_of_group(norm_type)]
        for _ in range(missing):
            square = torch.zeros_like(norms[0])
            optimizer._model_parallel_all_reduce(tensor=square, op=dist.ReduceOp.SUM)
            norms.append(square.sqrt())
        every = torch.stack(norms)
        # DeepSpeed's mark of a norm that is not finite is -1.
        is_valid = torch.isfinite(every).all() & (every >= 0).all()
        return torch.where(is_valid, torch.linalg.vector_norm(every), -1.0)

    if missing:
        optimizer.scaled_global_norm = norm_of_all


def reduce_in_the_buckets_there_are(optimizer: Any) -> None:
    """Let a pipeline reduce gradients in the buckets that its backward passes have made.

    DeepSpeed 0.19.8, ZeRO-1: `reduce_gradients` appends one more bucket of `reduce_bucket_size` elements to them
    (deepspeed/runtime/zero/stage_1_and_2.py), which nothing is ever written to. No issue is known.
    """
    reduce_gradients = optimizer.reduce_gradients

    def reduced(pipeline_parallel: bool = False) -> None:
        have_buffers = all(bucket.buffer for bucket in optimizer.ipg_buckets.values())
        reduce_gradients(pipeline_parallel=pipeline_parallel and not have_buffers)

    optimizer.reduce_gradients = reduced


def clear_skipped_gradients(optimizer: Any) -> None:
    """Drop the gradients of a skipped step, to which DeepSpeed would add those of the next one.

    DeepSpeed 0.19.8, ZeRO 1 and 2 in 16 bits with an offloaded optimizer: `step` returns on overflow without clearing
    `averaged_gradients` (deepspeed/runtime/zero/stage_1_and_2.py), so after one overflow every later step is skipped
    too. No issue is known; https://github.com/deepspeedai/DeepSpeed/issues/8415 is about the same branch.
    """
    if getattr(optimizer, "cpu_offload", False):
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None


def discard_gradients(engine: Any, *, micro_steps: int) -> None:
    """Discard the gradients of a step that is not taken, and count its micro-batches: `micro_steps` until now.

    DeepSpeed 0.19.8 counts micro-batches in `step` alone (deepspeed/runtime/engine.py), which is not called where
    ZeRO-0 would apply a NaN: the accumulation would end one micro-batch late ever after. No issue is known.
    """
    engine.zero_grad()
    engine.micro_steps = micro_steps


def link_optimizer_states(wrapper: Any, partitions: Iterable[torch.Tensor], state: Any) -> None:
    """Link the parameters of all groups to their fragments of the optimizer states (ZeRO 1 and 2, BF16_Optimizer).

    DeepSpeed 0.19.8 does so once, after the update of the first parameter group, when the others have no states yet
    (`_lazy_init_hp_params_optimizer_state` in deepspeed/runtime/zero/stage_1_and_2.py): safe_get_full_optimizer_state
    then fails for every other group. No issue is known.
    """
    parameters = getattr(wrapper, "bit16_groups", None) or wrapper.bf16_groups
    for group, partition in zip(parameters, partitions, strict=True):
        deepspeed.utils.lazy_init_hp_params_optimizer_state(group, partition, state)
    wrapper._hp_optimizer_states_linked = True


def zero_init_config(config: Mapping[str, Any], *, ulysses: int) -> dict[str, Any]:
    """Prepare `deepspeed.zero.Init`: start DeepSpeed's communication, and complete the config for Ulysses.

    DeepSpeed 0.19.8: zero.Init (deepspeed/runtime/zero/partition_parameters.py) assumes a single rank if only torch's
    process group exists, and checks the batch sizes of the config before it knows that ranks share sequences. No issue
    is known.
    """
    deepspeed.init_distributed()
    if ulysses > 1:
        return {**config, "sequence_parallel_size": ulysses}
    return dict(config)


def reserve_for_shards(swapper: Any, ranks: int) -> None:
    """Reserve the buffer through which weights are written back to NVMe for a rank's shards of a sub-group.

    DeepSpeed 0.19.8 reserves page-locked memory for whole parameters (deepspeed/runtime/zero/stage3.py
    `_create_fp16_partitions_with_defragmentation`): as many times too much as there are replicas. No issue is known.
    """
    reserve = swapper.reserve_partitioned_swap_space
    swapper.reserve_partitioned_swap_space = lambda sizes: reserve([-(-numel // ranks) for numel in sizes])


def read_to_any_address(op: Any) -> None:
    """Let files of NVMe be read into memory at any address, through a copy at an aligned one.

    DeepSpeed 0.19.8 reads past the kernel's cache, which takes addresses that are multiples of 512, and counts a read
    that the kernel refuses as done (csrc/aio): the gradient, or the weight, is what the buffer held before. Sub-groups
    are read piece by piece, where a piece begins behind parameters of any size. No issue is known.
    """
    if hasattr(op.aio_handle, "moved"):
        return

    class AnyAddress(op.aio_handle):  # type: ignore[misc]
        moved: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

        def async_pread(self, buffer: torch.Tensor, path: str, offset: int) -> Any:
            if buffer.data_ptr() % 512 == 0:
                return super().async_pread(buffer, path, offset)
            aligned = self.new_cpu_locked_tensor(buffer.numel(), buffer)
            self.moved += ((buffer, aligned),)
            return super().async_pread(aligned, path, offset)

        def wait(self) -> Any:
            count = super().wait()
            for buffer, aligned in self.moved:
                buffer.copy_(aligned)
                self.free_cpu_locked_tensor(aligned)
            self.moved = ()
            return count

    op.aio_handle = AnyAddress


def complete_attention_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy with the key-value heads and the head size, which some families' configs omit.

    DeepSpeed 0.19.8 reads both unconditionally (deepspeed/runtime/sequence_parallel/ulysses_sp.py): GPT-2 fails. No
    issue is known.
    """
    config = copy.deepcopy(config)
    if getattr(config, "num_key_value_heads", None) is None:
        config.num_key_value_heads = config.num_attention_heads
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def keep_heads_separate(attn_implementation: str) -> None:
    """Let Ulysses attention return its output as [b, s/u, heads, size].

    DeepSpeed 0.19.8 returns [b, s/u, heads * size] (deepspeed/runtime/sequence_parallel/ulysses_sp.py); an attention
    function of transformers keeps the heads in a dimension, which GPT-2 relies on. No issue is known.
    """
    exchange = ALL_ATTENTION_FUNCTIONS[attn_implementation]

    def attend(module: nn.Module, query: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        output, weights = exchange(module, query, *arguments, **options)  # query [b, heads, s/u, size]
        return output.reshape(*output.shape[:2], query.shape[1], -1), weights

    ALL_ATTENTION_FUNCTIONS[attn_implementation] = attend


def gradient_divisor(layout: Layout) -> int:
    """Return what DeepSpeed divides the sum of all ranks' gradients by under Ulysses.

    DeepSpeed 0.19.8 divides by dp under ZeRO 0, 1 and 2, and by dp * u under ZeRO 3. The former use `world size /
    sequence_parallel_size` (engine.py `_reduce_non_expert_gradients`, stage_1_and_2.py `average_tensor`). ZeRO-3
    reduces with `reduce_scatter_coalesced` (stage3.py `__avg_scatter_grads`), which divides by the size of its group,
    all ranks; with reduce_scatter=false it divides as the others do, but only buckets that are not too full, so the
    DeepSpeed config must not disable it. Adam hides such a factor; norms and SGD do not. No issue is known.
    """
    return layout.world_size if layout.zero_stage == 3 else layout.dp


def count_norms_on_all_ranks(optimizer: Any) -> None:
    """Let BF16_Optimizer (ZeRO-1 in bf16) take the norm on every Ulysses rank.

    DeepSpeed 0.19.8 treats the sequence group as a tensor-parallel one (deepspeed/runtime/bf16_optimizer.py): only its
    first rank counts the norm, and the others fail because they count nothing. But every rank holds the whole gradient.
    No issue is known.
    """
    if isinstance(optimizer, BF16_Optimizer):
        optimizer.mpu = None
