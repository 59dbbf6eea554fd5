"""Where a parameter lies in DeepSpeed's flat partitions, for each ZeRO stage.

ZeRO 1 and 2: a parameter group is one flat vector, cut into as many equal parts as there are ranks; a parameter may
begin on one rank and end on the next. Each rank's file says which part of which parameter it holds, and where
(`param_slice_mappings`); the parts follow each other in the order of ranks.

ZeRO 3: each parameter is cut by itself, into parts of ceil(numel / ranks), the last ones padded; a rank's flat vector
of a sub-group is the concatenation of its parts, in the order of `param_shapes`.

Source: deepspeed/utils/zero_to_fp32.py and deepspeed/checkpoint/ds_to_universal.py of DeepSpeed 0.19.8.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.checkpoint.exchange.scanned_pickle import FragmentAddress
from toolkit.checkpoint.names import is_safe_name

MASTER = "fp32"
STATE_KINDS = ("exp_avg", "exp_avg_sq", "momentum_buffer")

Shapes = dict[str, tuple[int, ...]]


class PartitionError(ValueError):
    """A checkpoint whose numbers do not fit together."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """`numel` values from `start` on of what `rank` holds of `group`."""

    rank: int
    group: int
    start: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class Partitions:
    """The flat vectors of all ranks, and where each parameter lies in them.

    `flat[kind][rank][group]` is a vector; `parts[name]` are the places of a parameter, in order.
    """

    flat: Mapping[str, Sequence[Sequence[torch.Tensor]]]
    parts: Mapping[str, Sequence[Part]]
    shapes: Shapes

    def __post_init__(self) -> None:
        for name, parts in self.parts.items():
            held = 0
            for part in parts:
                length = min(vectors[part.rank][part.group].numel() for vectors in self.flat.values())
                if min(part.start, part.numel) < 0 or part.start + part.numel > length:
                    raise PartitionError(f"rank {part.rank} has too few values for {name}")
                held += part.numel
            if held != math.prod(self.shapes[name]):
                raise PartitionError(f"{name} {list(self.shapes[name])} has {held} values")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of optimizer states."""
        return tuple(kind for kind in self.flat if kind != MASTER)

    def read(self, kind: str, name: str) -> torch.Tensor:
        """A whole parameter, or state of it, in fp32. A copy."""
        vectors = self.flat[kind]
        parts = [vectors[part.rank][part.group].narrow(0, part.start, part.numel) for part in self.parts[name]]
        return torch.cat([part.float() for part in parts]).view(self.shapes[name])


def shapes_of(groups: Any) -> list[Shapes]:
    """`param_shapes` of a model's file: for each group, its parameters in order."""
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise PartitionError("it has no param_shapes: it is not of a ZeRO engine")
    return [{name: shape_of(name, shape) for name, shape in group.items()} for group in groups]


def shape_of(name: object, shape: object) -> tuple[int, ...]:
    """A checked shape."""
    if not is_safe_name(name):
        raise PartitionError("a parameter's name cannot be printed")
    if not isinstance(shape, Sequence) or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
        raise PartitionError(f"{name} has no shape")
    return tuple(shape)


def by_slices(optimizers: Sequence[Mapping[str, Any]], groups: Sequence[Shapes]) -> Partitions:
    """ZeRO 1 and 2. `optimizers`: of each rank, what its file holds."""
    parts: dict[str, list[Part]] = {name: [] for shapes in groups for name in shapes}
    for rank, optimizer in enumerate(optimizers):
        mappings = optimizer.get("param_slice_mappings")
        if not isinstance(mappings, list) or len(mappings) != len(groups):
            raise PartitionError("it does not say where its parameters lie: made by a DeepSpeed before 0.7")
        for group, mapping in enumerate(mappings):
            for name, address in mapping.items():
                if name not in groups[group] or not isinstance(address, FragmentAddress):
                    raise PartitionError(f"group {group} of rank {rank} has a parameter that the model has not")
                start, numel = address.__dict__.get("start"), address.__dict__.get("numel")
                if type(start) is not int or type(numel) is not int:
                    raise PartitionError(f"rank {rank} does not say where {name} lies")
                parts[name].append(Part(rank=rank, group=group, start=start, numel=numel))
    flat = _flat(optimizers, "single_partition_of_fp32_groups", "base_optimizer_state", len(groups))
    return Partitions(flat=flat, parts=parts, shapes=_all(groups))


def by_parameters(optimizers: Sequence[Mapping[str, Any]], groups: Sequence[Shapes]) -> Partitions:
    """ZeRO 3. `groups` are its sub-groups."""
    ranks = len(optimizers)
    parts: dict[str, list[Part]] = {}
    for group, shapes in enumerate(groups):
        offset = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            part = -(-numel // ranks)
            parts[name] = [
                Part(rank=rank, group=group, start=offset, numel=max(0, min(part, numel - rank * part)))
                for rank in range(ranks)
            ]
            offset += part
    flat = _flat(optimizers, "fp32_flat_groups", "optimizer_state_dict", len(groups))
    return Partitions(flat=flat, parts=parts, shapes=_all(groups))


def updates_of(optimizer: Any) -> int | None:
    """How many updates an optimizer's state dict has counted; None where it does not count."""
    if isinstance(optimizer, list):
        states, param_groups = optimizer, []
    else:
        states, param_groups = list(optimizer["state"].values()), optimizer.get("param_groups", [])
    for place in (*states, *param_groups):
        step = place.get("step") if isinstance(place, Mapping) else None
        if isinstance(step, torch.Tensor | int | float):
            return int(step)
    return None


def _flat(
    optimizers: Sequence[Mapping[str, Any]], masters: str, states: str, groups: int
) -> dict[str, list[list[torch.Tensor]]]:
    flat: dict[str, list[list[torch.Tensor]]] = {MASTER: [_vectors(one.get(masters), groups) for one in optimizers]}
    held = [_states(one.get(states)) for one in optimizers]
    for kind in STATE_KINDS:
        if all(len(found) == groups and all(kind in state for state in found) for found in held):
            flat[kind] = [_vectors([state[kind] for state in found], groups) for found in held]
    return flat


def _states(optimizer: Any) -> list[Mapping[str, Any]]:
    """One for each group; an elastic checkpoint has a list of them, any other what PyTorch's state_dict() gives."""
    states = optimizer if isinstance(optimizer, list) else None
    if states is None and isinstance(optimizer, Mapping) and isinstance(optimizer.get("state"), Mapping):
        states = [optimizer["state"][key] for key in sorted(optimizer["state"])]
    if states is None or not all(isinstance(state, Mapping) for state in states):
        raise PartitionError("it has no state of the optimizer")
    return states


def _vectors(values: Any, groups: int) -> list[torch.Tensor]:
    if not isinstance(values, list | tuple) or len(values) != groups:
        raise PartitionError(f"it has no fp32 weights for {groups} parameter groups")
    for value in values:
        is_plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu"
        if not is_plain or not value.is_floating_point() or value.dim() != 1:
            raise PartitionError("its flat partitions are not vectors of numbers")
    return list(values)


def _all(groups: Sequence[Shapes]) -> Shapes:
    return {name: shape for shapes in groups for name, shape in shapes.items()}
