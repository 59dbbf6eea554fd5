"""The process groups of one rank, created from a Layout, and the interface in which DeepSpeed expects them."""

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from toolkit.config.layout import Coordinate, Layout


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """This rank's process groups. Every rank of the job must call `create`, in the same order."""

    layout: Layout
    rank: int
    tensor: dist.ProcessGroup
    """The tensor-parallel ranks of this pipeline stage and replica."""
    data: dist.ProcessGroup
    """The ranks with the same partition of the model."""
    pipe: dist.ProcessGroup
    """The stages of one replica."""
    expert: dist.ProcessGroup
    """Neighboring replicas of the same partition, which share out its experts."""
    expert_data: dist.ProcessGroup
    """The replicas with the same experts."""
    context: dist.ProcessGroup
    """The ranks of this stage that share each sequence, among those with the same partition."""

    @classmethod
    def create(cls, layout: Layout) -> Self:
        """Create the groups of every rank (a collective call) and return this rank's."""
        tensor = _new_groups(layout, "model", "sequence" if layout.ulysses > 1 else "tensor")
        data = _new_groups(layout, "data", "data")
        pipe = _new_groups(layout, "pipe", "pipeline")
        expert = _new_groups(layout, "expert", "expert")
        expert_data = _new_groups(layout, "expert_data", "data")
        context = context_group(layout)
        return cls(
            layout=layout,
            rank=dist.get_rank(),
            tensor=tensor,
            data=data,
            pipe=pipe,
            expert=expert,
            expert_data=expert_data,
            context=context,
        )

    def stage(self) -> dist.ProcessGroup:
        """The ranks of this pipeline stage, all replicas of it. A collective call, which may create the group."""
        if self.layout.pp == 1:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        return _new_groups(self.layout, "stage", "stage")

    def ends(self) -> dist.ProcessGroup | None:
        """The first and the last stage of a replica, which hold tied parameters; None elsewhere. A collective call."""
        pairs = [[ranks[0], ranks[-1]] for ranks in self.layout.ranks_along("pipe")]
        group: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(pairs, group_desc="ends")[0]
        return group

    @property
    def coordinate(self) -> Coordinate:
        """This rank's coordinate in the layout."""
        return self.layout.coordinate(self.rank)

    @property
    def is_first_of_tensor(self) -> bool:
        """Whether this is the first rank of its tensor-parallel group, which counts what the group replicates."""
        return self.coordinate.model == 0


def context_group(layout: Layout) -> dist.ProcessGroup:
    """The ranks that share each sequence with this one. A collective call."""
    return _new_groups(layout, "context", "context")


def heads_and_ring(layout: Layout) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Among the ranks that share each sequence, the cp_ulysses neighbors with which this one exchanges heads, and those
    with which it exchanges keys and values, one of each such group. A collective call."""
    shared = layout.ranks_along("context")
    ranks = layout.cp_ulysses
    heads, _ = dist.new_subgroups_by_enumeration(
        [group[first : first + ranks] for group in shared for first in range(0, layout.cp, ranks)], group_desc="context"
    )
    ring, _ = dist.new_subgroups_by_enumeration(
        [group[place::ranks] for group in shared for place in range(ranks)], group_desc="context"
    )
    return heads, ring


def _new_groups(layout: Layout, axis: Any, kind: str) -> dist.ProcessGroup:
    """Create the groups along an axis; return this rank's. `kind`: what they are called in traces."""
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(layout.ranks_along(axis), group_desc=kind)
    return group


def transfer_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which tensors must be to be sent: NCCL has no collectives for the host's memory."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class ModelParallelUnit:
    """The `mpu` of `deepspeed.initialize`, for tensor parallelism without a pipeline."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.tensor

    def get_model_parallel_rank(self) -> int:
        return self._groups.coordinate.model

    def get_model_parallel_world_size(self) -> int:
        return self._groups.layout.tp

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._groups.data

    def get_data_parallel_rank(self) -> int:
        return self._groups.coordinate.data

    def get_data_parallel_world_size(self) -> int:
        return self._groups.layout.replicas
