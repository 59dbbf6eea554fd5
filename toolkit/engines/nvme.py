"""Offload to NVMe: a private directory for each rank, and optimizer states that are read and written in their files.

DeepSpeed keeps a rank's states in files of sub-groups, and brings one sub-group at a time into its buffers in host
memory: weight, gradient and two moments of up to 1e8 elements. Tensors below a MiB stay in host memory.
"""

import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from torch import nn
from torch.utils import cpp_extension
from typing_extensions import override

from toolkit.engines import deepspeed_patches
from toolkit.engines.optimizer_states import MASTER, Zero3States
from toolkit.errors import RunError
from toolkit.files import reason_of, remove_at_exit
from toolkit.units import format_bytes

FIELD = "parallel.nvme_path"
_PREFIX = "dstk-offload-"
_LOCK = "lock"
_SECTIONS = ("offload_optimizer", "offload_param")
_OPS = ("async_io", "pin_memory")
_SECONDS_OF_A_BUILD = 600.0


def use_private_directory(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed config with a directory of this process in place of nvme_path, which ends with it.

    DeepSpeed's files have the names of ranks: two runs on one node would write into each other's. A process that was
    killed leaves its directory; the next one on the node sees by its lock that nobody uses it, and removes it.
    """
    zero = dict(config["zero_optimization"])
    on_nvme = [name for name in _SECTIONS if zero.get(name, {}).get("device") == "nvme"]
    if not on_nvme:
        return dict(config)
    parent = Path(zero[on_nvme[0]]["nvme_path"])
    for op in _OPS:
        _await_other_build(op)
    try:
        with deepspeed_patches.quiet_stdout(unless=False):
            deepspeed_patches.read_to_any_address(AsyncIOBuilder().load(verbose=False))
    except Exception as error:  # whatever a compiler can fail with
        reason = f"DeepSpeed cannot compile its async_io here ({reason_of(error)})"
        raise RunError.of(FIELD, str(parent), reason, "apt install libaio-dev g++", "pip install ninja") from error
    try:
        _remove_abandoned(parent)
        # Under its name only when it is locked, so that nobody takes it for an abandoned one.
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
        fcntl.flock(os.open(new / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC), fcntl.LOCK_EX)
        directory = new.rename(parent / f"{_PREFIX}{new.name.removeprefix('.new-')}")
    except OSError as error:
        raise RunError.of(FIELD, str(parent), reason_of(error), "name a directory that you may write to") from error
    remove_at_exit(directory)
    for name in on_nvme:
        zero[name] = zero[name] | {"nvme_path": str(directory)}
    return {**config, "zero_optimization": zero}


def _await_other_build(op: str) -> None:
    """Wait while another process compiles the op; torch would also wait for one that was killed, forever."""
    lock = Path(cpp_extension._get_build_directory(op, verbose=False)) / "lock"
    while lock.exists():
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            return
        if age > _SECONDS_OF_A_BUILD:
            reason = f"a process that compiled DeepSpeed's {op} was killed {age / 60:.0f} minutes ago and left its lock"
            raise RunError.of(FIELD, "nvme", reason, f"rm {lock}")
        time.sleep(0.2)


def check_directory(parent: Path, needed_bytes: int = 0) -> None:
    """Raise RunError for a directory that cannot hold `needed_bytes` of this node."""
    advice = "name a directory on a drive of each node"
    if not parent.is_dir():
        raise RunError.of(FIELD, str(parent), f"{socket.gethostname()} has no such directory", advice)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RunError.of(FIELD, str(parent), f"you may not write to it on {socket.gethostname()}", advice)
    _remove_abandoned(parent)
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        reason = f"{format_bytes(needed_bytes)} are needed on {socket.gethostname()}, and {format_bytes(free)} are free"
        raise RunError.of(FIELD, str(parent), reason, advice, "take more nodes", ("parallel.offload_params", "cpu"))


def _remove_abandoned(parent: Path) -> None:
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            descriptor = os.open(lock, os.O_WRONLY)
        except OSError:  # of another user, or removed in this moment
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)


class NvmeStates(Zero3States):
    """DeepSpeed's ZeRO 3 with optimizer states, parameters or both on NVMe.

    DeepSpeed's own accessors read all files of a sub-group for every tensor. Here a sub-group stays in the buffers, and
    is written back if it changed, until another one or training needs them.
    """

    are_in_memory = False

    def __init__(self, wrapper: Any, kinds: Iterable[str]) -> None:
        super().__init__(wrapper, kinds)
        self._group = -1
        self._changed = False
        swapper = wrapper.optimizer_swapper
        if swapper is not None:
            # What DeepSpeed calls before it uses the buffers.
            for name in ("pre_backward", "swap_in_optimizer_state"):
                setattr(swapper, name, self._releasing(getattr(swapper, name)))

    @override
    def create(self) -> None:
        for group, tensor in enumerate(self._wrapper.fp32_partitioned_groups_flat):
            state = self.base.state.get(tensor, {})
            if all(kind in state for kind in self.kinds):
                continue
            self._bring(group)
            self._create_for(tensor, self.kinds)
            self._changed = True

    @override
    def read(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        if not parameter.requires_grad:
            return super().read(parameter, kind)
        part = self._part(parameter, kind).to(self._wrapper.device)
        whole: torch.Tensor = self._wrapper._fp32_state_allgather(parameter, part)
        return whole.view(parameter.ds_shape)  # type: ignore[attr-defined]

    @override
    def local(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        length = self.extent(parameter)[1]
        if parameter.requires_grad:
            # A copy: the buffer is reused for the next sub-group.
            return self._part(parameter, kind)[:length].detach().float().clone()
        return self._weights(parameter)[:length].float()

    @override
    def write(self, parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
        start, length = self.extent(parameter)
        part = value.new_zeros(parameter.ds_tensor.ds_numel)  # type: ignore[attr-defined]  # with padding
        part[:length] = value.flatten()[start : start + length]
        if parameter.requires_grad:
            self._part(parameter, kind).copy_(part)
            self._changed = True
        if kind == MASTER:
            self._weights(parameter, part)
            if parameter.numel() == value.numel():  # small ones are replicated
                parameter.data.copy_(value)

    @override
    def extent(self, parameter: nn.Parameter, kind: str = MASTER) -> tuple[int, int]:
        each = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        count = parameter.ds_numel  # type: ignore[attr-defined]
        start = min(self._wrapper._get_param_partition_rank(parameter) * each, count)
        return start, min(each, count - start)

    def _part(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        """Return this rank's elements of a state, in the optimizer's own memory or in a buffer."""
        self.create()
        group, start, length = self._wrapper.grad_position[self._wrapper.get_param_id(parameter)]
        self._bring(group)
        tensor = self._wrapper.fp32_partitioned_groups_flat[group]
        held: torch.Tensor = tensor.data if kind == MASTER else self.base.state[tensor][kind]
        return held.narrow(0, start, length)

    def _weights(self, parameter: nn.Parameter, new: torch.Tensor | None = None) -> torch.Tensor:
        """Return a flat copy of this rank's part of the weight that is used, or replace it by `new`."""
        shard: Any = parameter.ds_tensor  # type: ignore[attr-defined]
        swapper: Any = parameter.nvme_swapper if shard.final_location == "nvme" else None  # type: ignore[attr-defined]
        brought = swapper is not None and shard.status.name == "NOT_AVAILABLE"
        if brought:
            swapper.swap_in([parameter], async_op=False)
        if new is not None:
            shard.data.copy_(new)
        copy: torch.Tensor = shard.detach().flatten().clone()
        if brought and new is not None:
            swapper.swap_out_and_release([parameter])
        elif brought:
            swapper.remove_partition_and_release_buffers([parameter])
        return copy

    def _bring(self, group: int) -> None:
        """Read a sub-group's files into the buffers, if it has any and is not there."""
        if group == self._group:
            return
        self._release()
        if self._wrapper._swappable_optimizer_subgroup(group):
            self._wrapper._optimizer_states_and_gradient_swap_in(group)
        self._group = group

    def _release(self) -> None:
        """Give the buffers back, after writing to the files what changed."""
        group = self._group
        changed = self._changed
        self._group = -1
        self._changed = False
        if group >= 0 and self._wrapper._swappable_optimizer_subgroup(group):
            if changed:
                self._wrapper._optimizer_states_and_gradient_swap_out(group)
            else:
                self._wrapper._release_swap_buffers(group)

    def _releasing(self, function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self._release()
            return function(*arguments, **options)

        return call
