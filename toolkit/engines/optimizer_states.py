"""Optimizer states of each parameter, read and written the same way however they are sharded.

A kind is a name of PyTorch's optimizers (`exp_avg`, `exp_avg_sq`, `momentum_buffer`) or MASTER: the fp32 weight that is
updated. Values are gathered over the replicas, but remain this rank's shard under tensor and pipeline parallelism.
Reading and writing are collective over the replicas: all must access the same parameters in the same order.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from typing_extensions import override

from toolkit.models.hidden_matrices import is_hidden_matrix
from toolkit.parallel.shard import Shard

MASTER = "master"

KINDS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw8bit": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "sgd": ("momentum_buffer",),
    # Muon keeps the first for matrices, and the others for all else.
    "muon": ("momentum_buffer", "exp_avg", "exp_avg_sq"),
    # Adafactor keeps the last for vectors, and the others for all else.
    "adafactor": ("row_var", "col_var", "variance"),
}


class OptimizerStates(ABC):
    """The states of one engine's optimizer. `base` is the optimizer that holds them, torch's or DeepSpeed's."""

    are_in_memory = True
    """Whether states and sharded weights are in memory between steps, and not on a drive."""

    def __init__(self, base: Any, kinds: Iterable[str]) -> None:
        self.base = base
        self.kinds = tuple(kinds)

    @abstractmethod
    def read(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        """Return the value in fp32, in the shape of `shard`, gathered over replicas."""

    def shard(self, shard: Shard, kind: str) -> Shard:
        """Return what this rank has of a state, given what it has of the parameter: by default the same."""
        return shard

    @abstractmethod
    def extent(self, parameter: nn.Parameter, kind: str = MASTER) -> tuple[int, int]:
        """Return (first element, elements) of the flattened value on this rank. It never changes."""

    @abstractmethod
    def local(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        """Return those elements, flat and in fp32, valid until training continues. Not a collective call."""

    @contextmanager
    def opened(self, kind: str, *, writes: bool = False) -> Iterator[None]:
        """Prepare for `read` and, if `writes`, for `write` of this kind, one parameter after the other."""
        yield

    @abstractmethod
    def write(self, parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
        """Set the value. MASTER also sets the weight that the forward pass uses."""

    @property
    def updates(self) -> int:
        """The number of updates so far, for Adam's bias correction. 0 if the optimizer does not count."""
        return next((int(state["step"]) for state in self.base.state.values() if "step" in state), 0)

    @updates.setter
    def updates(self, count: int) -> None:
        self.create()
        for tensor, state in self.base.state.items():
            if "step" in state:
                state["step"] = _count(self.base, tensor, count)

    def create(self) -> None:
        """Create the states that the first update would create: zeros."""
        for index, group in enumerate(self.base.param_groups):
            kinds = self.kinds
            if set(kinds) == set(KINDS["muon"]):
                kinds = KINDS["sgd" if group["muon"] else "adamw"]
            for tensor in self.held(index):
                self._create_for(tensor, kinds)

    def keeps(self, kind: str, name: str, shape: Sequence[int]) -> bool:
        """Whether there is a state of this kind of a parameter that trains."""
        if kind == MASTER or set(self.kinds) != set(KINDS["muon"]):
            return True
        return (kind == "momentum_buffer") == is_hidden_matrix(name, shape)

    def held(self, group: int) -> Iterable[torch.Tensor]:
        """Return the tensors of an optimizer group that are the keys of the states."""
        parameters: list[torch.Tensor] = self.base.param_groups[group]["params"]
        return parameters

    def placements(self) -> Iterator[tuple[torch.Tensor, nn.Parameter, int]]:
        """Yield each tensor that is updated with a parameter of it, and the first element of that parameter there.

        The same on all replicas, also where one has nothing of a parameter.
        """
        for group in self.base.param_groups:
            yield from ((parameter, parameter, 0) for parameter in group["params"])

    def _create_for(self, tensor: torch.Tensor, kinds: Iterable[str]) -> None:
        state = self.base.state[tensor]
        for kind in kinds:
            if kind not in state or state[kind] is None:
                state[kind] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
        if "exp_avg_sq" in kinds and "step" not in state:
            state["step"] = _count(self.base, tensor, 0)


class PlainStates(OptimizerStates):
    """A torch optimizer over the parameters themselves, which may be DTensors (FSDP2)."""

    @override
    def read(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        value = self._value(parameter, kind)
        return (value.full_tensor() if isinstance(value, DTensor) else value).float()

    @override
    def extent(self, parameter: nn.Parameter, kind: str = MASTER) -> tuple[int, int]:
        value = parameter.detach()
        if not isinstance(value, DTensor):
            return 0, value.numel()
        shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        # Sharded along the first dimension alone, so a rank's rows are contiguous.
        assert shape[1:] == value.shape[1:], value.placements
        width = math.prod(shape[1:])
        return offset[0] * width, shape[0] * width

    @override
    def local(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        value = self._value(parameter, kind)
        return (value.to_local() if isinstance(value, DTensor) else value).float().reshape(-1)

    @override
    def write(self, parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
        held = self._value(parameter, kind)
        if isinstance(held, DTensor):
            value = value.to(held.device, held.dtype)
            # Every rank has the full value: each keeps its part, and nothing is sent.
            part = distribute_tensor(value, held.device_mesh, held.placements, src_data_rank=None)
            held.to_local().copy_(part.to_local())
        else:
            held.copy_(value)

    def _value(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        if kind == MASTER:
            return parameter.detach()
        if kind not in self.base.state[parameter]:
            self.create()
        value: torch.Tensor = self.base.state[parameter][kind]
        return value


class _WrappedStates(OptimizerStates):
    """The states of an optimizer inside DeepSpeed's `wrapper`, which does not know of frozen parameters."""

    def __init__(self, wrapper: Any, kinds: Iterable[str]) -> None:
        super().__init__(wrapper.optimizer, kinds)
        self._wrapper = wrapper
        self._frozen = PlainStates(self.base, ())


class ZeroStates(_WrappedStates):
    """DeepSpeed's ZeRO 1 and 2 and BF16_Optimizer: each rank has a partition of the flat fp32 weights and states."""

    @override
    def create(self) -> None:
        # Imported here, because other engines do not need DeepSpeed.
        from toolkit.engines.deepspeed_patches import link_optimizer_states

        super().create()
        link_optimizer_states(self._wrapper, self._partitions(), self.base.state)

    @override
    def held(self, group: int) -> Iterable[torch.Tensor]:
        """Return the flat partition of the group."""
        return self._partitions()[group : group + 1]

    @override
    def placements(self) -> Iterator[tuple[torch.Tensor, nn.Parameter, int]]:
        groups = getattr(self._wrapper, "bit16_groups", None) or self._wrapper.bf16_groups
        for partition, group in zip(self._partitions(), groups, strict=True):
            for parameter in group:
                mapping = parameter._hp_mapping  # None where other ranks hold all of it
                yield partition, parameter, 0 if mapping is None else mapping.hp_fragment_address.start

    def _partitions(self) -> list[torch.Tensor]:
        partitions: list[torch.Tensor] | None = getattr(self._wrapper, "single_partition_of_fp32_groups", None)
        if partitions is None:
            partitions = self._wrapper.fp32_groups_flat_partition
        return partitions

    @override
    def read(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        if not parameter.requires_grad:
            return self._frozen.read(parameter, kind)
        value: torch.Tensor = parameter.get_full_hp_param(self._key(parameter, kind))  # type: ignore[attr-defined]
        return value

    @override
    def extent(self, parameter: nn.Parameter, kind: str = MASTER) -> tuple[int, int]:
        if not parameter.requires_grad:
            return self._frozen.extent(parameter)
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        return (0, 0) if mapping is None else (mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel)

    @override
    def local(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        if not parameter.requires_grad:
            return self._frozen.local(parameter, kind)
        key = self._key(parameter, kind)
        fragment: torch.Tensor = parameter._hp_mapping.get_hp_fragment(key)  # type: ignore[attr-defined]
        return fragment.detach().float()

    @override
    def write(self, parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
        if parameter.requires_grad:
            parameter.set_full_hp_param(value, self._key(parameter, kind))  # type: ignore[attr-defined]
        if kind == MASTER:
            parameter.detach().copy_(value)

    def _key(self, parameter: nn.Parameter, kind: str) -> str | None:
        """Return DeepSpeed's name of a kind, after linking the parameter to its states."""
        if kind == MASTER:
            return None
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]  # None where other ranks hold all of it
        if mapping is not None and kind not in (mapping.optim_fragment or ()):
            self.create()
        return kind


class Zero3States(_WrappedStates):
    """DeepSpeed's ZeRO 3: each rank has a partition of every parameter."""

    @override
    def held(self, group: int) -> Iterable[torch.Tensor]:
        """Yield the group's flat sub-groups: the optimizer's own group contains one of them at a time."""
        owners = self._wrapper.sub_group_to_group_id
        yield from (flat for i, flat in enumerate(self._wrapper.fp32_partitioned_groups_flat) if owners[i] == group)

    @override
    def placements(self) -> Iterator[tuple[torch.Tensor, nn.Parameter, int]]:
        wrapper = self._wrapper
        for flat, parameters in zip(wrapper.fp32_partitioned_groups_flat, wrapper.fp16_groups, strict=True):
            offset = 0
            for parameter in parameters:
                yield flat, parameter, offset
                offset += parameter.ds_tensor.numel()

    @override
    def read(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        if not parameter.requires_grad:
            from deepspeed.zero import GatheredParameters  # here, because other engines do not need DeepSpeed

            with GatheredParameters([parameter]):
                return parameter.detach().float().clone()
        self.create()
        whole: torch.Tensor = self._wrapper.get_full_hp_param(parameter, None if kind == MASTER else kind)
        return whole.view(parameter.ds_shape)  # type: ignore[attr-defined]

    @override
    def extent(self, parameter: nn.Parameter, kind: str = MASTER) -> tuple[int, int]:
        each = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        count = parameter.ds_numel  # type: ignore[attr-defined]
        start = min(self._wrapper._get_param_partition_rank(parameter) * each, count)
        return start, min(each, count - start)  # the last ranks' partitions are padded

    @override
    def local(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        if not parameter.requires_grad:
            frozen: torch.Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
            return frozen.detach().float().reshape(-1)[: self.extent(parameter)[1]]
        self.create()
        part: torch.Tensor = self._wrapper.get_local_fp32_param(parameter, None if kind == MASTER else kind)
        return part.detach().float().reshape(-1)[: self.extent(parameter)[1]]

    @override
    def write(self, parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
        self.create()
        shard: torch.Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
        start, length = self.extent(parameter)
        part = value.new_zeros(shard.numel())  # the last ranks' partitions are padded
        part[:length] = value.flatten()[start : start + length]
        if parameter.requires_grad:
            self._wrapper.set_local_hp_param(part, parameter, None if kind == MASTER else kind)
        if kind == MASTER:
            shard.data.copy_(part)
            if parameter.numel() == value.numel():  # small ones are replicated
                parameter.data.copy_(value)


def deepspeed_states(optimizer: Any, zero_stage: int, kinds: Iterable[str]) -> OptimizerStates:
    """Return the states of the optimizer that `deepspeed.initialize` returned."""
    if getattr(optimizer, "swap_optimizer", False) or getattr(optimizer, "params_in_nvme_and_cpu", False):
        from toolkit.engines.nvme import NvmeStates  # which extends those of ZeRO 3

        return NvmeStates(optimizer, kinds)
    if zero_stage == 3:
        return Zero3States(optimizer, kinds)
    if zero_stage == 0:
        return PlainStates(getattr(optimizer, "optimizer", optimizer), kinds)
    return ZeroStates(optimizer, kinds)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: FSDP2 shards it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_kinds(name: str, momentum: float) -> tuple[str, ...]:
    """Return the kinds of state that the optimizer `name` keeps per parameter."""
    return () if name == "sgd" and not momentum else KINDS[name]


def _count(base: Any, tensor: torch.Tensor, count: int) -> Any:
    if not isinstance(base, torch.optim.Adam):
        return count  # DeepSpeed's own Adam counts in plain integers
    on_device = any(group.get("fused") or group.get("capturable") for group in base.param_groups)
    return torch.tensor(float(count), device=tensor.device if on_device else "cpu")
