"""What an optimizer keeps of each parameter, read and written the same way whoever shards it.

A kind is a name of PyTorch's optimizers (`exp_avg`, `exp_avg_sq`, `momentum_buffer`) or MASTER: the fp32 weight that is
updated. Values are whole over the replicas, and still this rank's share under tensor parallelism and pipelines. Reading
and writing are collective calls over the replicas: all of them must ask for the same parameters in the same order.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

MASTER = "master"

KINDS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "sgd": ("momentum_buffer",),
}


class OptimizerStates(ABC):
    """The states of one engine's optimizer. `base` is the optimizer that holds them, a torch one or DeepSpeed's own."""

    def __init__(self, base: Any, kinds: Iterable[str]) -> None:
        self.base = base
        self.kinds = tuple(kinds)

    @abstractmethod
    def read(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        """The value, fp32, of the parameter's shape."""

    @abstractmethod
    def extent(self, parameter: nn.Parameter) -> tuple[int, int]:
        """(first element, elements) that this rank holds of the flattened value. It stays as it is."""

    @abstractmethod
    def local(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        """Those elements, flat and in fp32; to be read before training goes on. Not a collective call."""

    @abstractmethod
    def write(self, parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
        """Set it. MASTER also sets the weight that the forward pass uses."""

    @property
    def updates(self) -> int:
        """Updates that the optimizer has made; Adam corrects its bias by it. 0 where it does not count."""
        return next((int(state["step"]) for state in self.base.state.values() if "step" in state), 0)

    @updates.setter
    def updates(self, count: int) -> None:
        self.create()
        for tensor, state in self.base.state.items():
            if "step" in state:
                state["step"] = _count(self.base, tensor, count)

    def create(self) -> None:
        """Make the states that the first update would make, as it would make them: zeros."""
        for group in self.base.param_groups:
            for tensor in self.held(group["params"]):
                self._create_for(tensor)

    def held(self, parameters: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The tensors of a group under which states are kept."""
        yield from parameters

    def _create_for(self, tensor: torch.Tensor) -> None:
        state = self.base.state[tensor]
        for kind in self.kinds:
            if kind not in state or state[kind] is None:
                state[kind] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
        if "exp_avg_sq" in self.kinds and "step" not in state:
            state["step"] = _count(self.base, tensor, 0)


class PlainStates(OptimizerStates):
    """A torch optimizer over the parameters themselves, which may be DTensors (FSDP2)."""

    def read(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        """See OptimizerStates."""
        self._create_for(parameter)
        value = parameter.detach() if kind == MASTER else self.base.state[parameter][kind]
        return (value.full_tensor() if isinstance(value, DTensor) else value).float()

    def extent(self, parameter: nn.Parameter) -> tuple[int, int]:
        """See OptimizerStates."""
        value = parameter.detach()
        if not isinstance(value, DTensor):
            return 0, value.numel()
        shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        # Cut along the first dimension alone, so a rank's rows follow each other.
        assert shape[1:] == value.shape[1:], value.placements
        width = math.prod(shape[1:])
        return offset[0] * width, shape[0] * width

    def local(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        """See OptimizerStates."""
        self._create_for(parameter)
        value = parameter.detach() if kind == MASTER else self.base.state[parameter][kind]
        return (value.to_local() if isinstance(value, DTensor) else value).float().reshape(-1)

    def write(self, parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
        """See OptimizerStates."""
        self._create_for(parameter)
        held = parameter.detach() if kind == MASTER else self.base.state[parameter][kind]
        if isinstance(held, DTensor):
            value = value.to(held.device, held.dtype)
            # Every rank has the whole: each takes its part, nobody sends.
            part = distribute_tensor(value, held.device_mesh, held.placements, src_data_rank=None)
            held.to_local().copy_(part.to_local())
        else:
            held.copy_(value)


class ZeroStates(OptimizerStates):
    """DeepSpeed's ZeRO 1 and 2 and BF16_Optimizer: each rank has a part of the flat fp32 weights and their states."""

    def __init__(self, wrapper: Any, kinds: Iterable[str]) -> None:
        super().__init__(wrapper.optimizer, kinds)
        self._wrapper = wrapper

    def create(self) -> None:
        """See OptimizerStates.

        Also links parameters to their parts of the states. DeepSpeed does so after the update of the first parameter
        group, when the others have no states yet, and never again.
        """
        # Here, because other engines than DeepSpeed's need no DeepSpeed.
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        super().create()
        wrapper = self._wrapper
        parameters = getattr(wrapper, "bit16_groups", None) or wrapper.bf16_groups
        for group, partition in zip(parameters, self.held([]), strict=True):
            lazy_init_hp_params_optimizer_state(group, partition, self.base.state)
        wrapper._hp_optimizer_states_linked = True

    def held(self, parameters: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The flat partitions, whatever the group names at the moment."""
        partitions = getattr(self._wrapper, "single_partition_of_fp32_groups", None)
        partitions = self._wrapper.fp32_groups_flat_partition if partitions is None else partitions
        # Asked once for each group, all are given: making a state twice changes nothing.
        yield from partitions

    def read(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        """See OptimizerStates."""
        value: torch.Tensor = parameter.get_full_hp_param(self._key(parameter, kind))  # type: ignore[attr-defined]
        return value

    def extent(self, parameter: nn.Parameter) -> tuple[int, int]:
        """See OptimizerStates."""
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        return (0, 0) if mapping is None else (mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel)

    def local(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        """See OptimizerStates."""
        key = self._key(parameter, kind)
        fragment: torch.Tensor = parameter._hp_mapping.get_hp_fragment(key)  # type: ignore[attr-defined]
        return fragment.detach().float()

    def write(self, parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
        """See OptimizerStates."""
        parameter.set_full_hp_param(value, self._key(parameter, kind))  # type: ignore[attr-defined]
        if kind == MASTER:
            parameter.detach().copy_(value)

    def _key(self, parameter: nn.Parameter, kind: str) -> str | None:
        """DeepSpeed's name of a kind, once the parameter is linked to it."""
        if kind == MASTER:
            return None
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]  # None where other ranks have all of it
        if mapping is not None and kind not in (mapping.optim_fragment or ()):
            self.create()
        return kind


class Zero3States(OptimizerStates):
    """DeepSpeed's ZeRO 3: each rank has a part of every parameter."""

    def __init__(self, wrapper: Any, kinds: Iterable[str]) -> None:
        super().__init__(wrapper.optimizer, kinds)
        self._wrapper = wrapper

    def held(self, parameters: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The flat sub-groups: the optimizer's own groups name one of them at a time."""
        yield from self._wrapper.fp32_partitioned_groups_flat

    def read(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        """See OptimizerStates."""
        self.create()
        whole: torch.Tensor = self._wrapper.get_full_hp_param(parameter, None if kind == MASTER else kind)
        return whole.view(parameter.ds_shape)  # type: ignore[attr-defined]

    def extent(self, parameter: nn.Parameter) -> tuple[int, int]:
        """See OptimizerStates."""
        each, count = parameter.ds_tensor.numel(), parameter.ds_numel  # type: ignore[attr-defined]
        start = min(self._wrapper._get_param_partition_rank(parameter) * each, count)
        return start, min(each, count - start)  # the last ranks' parts are padded

    def local(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        """See OptimizerStates."""
        self.create()
        part: torch.Tensor = self._wrapper.get_local_fp32_param(parameter, None if kind == MASTER else kind)
        if getattr(self._wrapper, "swap_optimizer", False):
            part = part.clone()  # it lies in a buffer that the next one is read into
        return part.detach().float().reshape(-1)[: self.extent(parameter)[1]]

    def write(self, parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
        """See OptimizerStates."""
        self.create()
        shard: torch.Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
        rank = self._wrapper._get_param_partition_rank(parameter)
        flat = value.flatten()
        start = min(rank * shard.numel(), flat.numel())
        part = flat.new_zeros(shard.numel())  # the last ranks' parts are padded
        own = flat[start : start + shard.numel()]
        part[: own.numel()] = own
        self._wrapper.set_local_hp_param(part, parameter, None if kind == MASTER else kind)
        if kind == MASTER:
            shard.data.copy_(part)
            if parameter.numel() == value.numel():  # small ones stay whole on every rank
                parameter.data.copy_(value)


def deepspeed_states(optimizer: Any, zero_stage: int, kinds: Iterable[str]) -> OptimizerStates:
    """For what `deepspeed.initialize` returned as the optimizer."""
    if zero_stage == 3:
        return Zero3States(optimizer, kinds)
    if zero_stage == 0:
        return PlainStates(getattr(optimizer, "optimizer", optimizer), kinds)
    return ZeroStates(optimizer, kinds)


def state_kinds(name: str, momentum: float) -> tuple[str, ...]:
    """What the optimizer `name` keeps of each parameter."""
    return () if name == "sgd" and not momentum else KINDS[name]


def _count(base: Any, tensor: torch.Tensor, count: int) -> Any:
    if not isinstance(base, torch.optim.Optimizer) or not type(base).__module__.startswith("torch."):
        return count  # DeepSpeed's own Adam counts in plain integers
    on_device = any(group.get("fused") or group.get("capturable") for group in base.param_groups)
    return torch.tensor(float(count), device=tensor.device if on_device else "cpu")
