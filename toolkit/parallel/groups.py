"""Groups: the process groups of one rank, made from a Layout, and the interface by which DeepSpeed asks for them."""

from dataclasses import dataclass
from typing import Self

import torch.distributed as dist

from toolkit.layout import Coordinate, Layout


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """Where this rank stands and with whom it talks. Every rank of the job must call `create`, in the same order."""

    layout: Layout
    rank: int
    tensor: dist.ProcessGroup
    """The tensor-parallel ranks of this pipeline stage and replica."""
    data: dist.ProcessGroup
    """The ranks with the same part of the model."""
    pipe: dist.ProcessGroup
    """The stages of one replica."""

    @classmethod
    def create(cls, layout: Layout) -> Self:
        """Make the groups of every rank (a collective call) and return this rank's."""
        tensor = [
            [layout.rank(pipe=pipe, data=data, model=model) for model in range(layout.tp)]
            for pipe in range(layout.pp)
            for data in range(layout.dp)
        ]
        data = [
            [layout.rank(pipe=pipe, data=data, model=model) for data in range(layout.dp)]
            for pipe in range(layout.pp)
            for model in range(layout.tp)
        ]
        pipe = [
            [layout.rank(pipe=pipe, data=data, model=model) for pipe in range(layout.pp)]
            for data in range(layout.dp)
            for model in range(layout.tp)
        ]
        own_tensor, _ = dist.new_subgroups_by_enumeration(tensor)
        own_data, _ = dist.new_subgroups_by_enumeration(data)
        own_pipe, _ = dist.new_subgroups_by_enumeration(pipe)
        return cls(layout=layout, rank=dist.get_rank(), tensor=own_tensor, data=own_data, pipe=own_pipe)

    @property
    def coordinate(self) -> Coordinate:
        """This rank's place."""
        return self.layout.coordinate(self.rank)

    @property
    def is_first_of_tensor(self) -> bool:
        """Whether this rank speaks for its tensor-parallel group where all of it knows the same."""
        return self.coordinate.model == 0


class ModelParallelUnit:
    """What `deepspeed.initialize(mpu=…)` asks for, for tensor parallelism without a pipeline."""

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = groups

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The tensor-parallel group."""
        return self._groups.tensor

    def get_model_parallel_rank(self) -> int:
        """Rank in the tensor-parallel group."""
        return self._groups.coordinate.model

    def get_model_parallel_world_size(self) -> int:
        """Size of the tensor-parallel group."""
        return self._groups.layout.tp

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The data-parallel group."""
        return self._groups.data

    def get_data_parallel_rank(self) -> int:
        """Rank in the data-parallel group."""
        return self._groups.coordinate.data

    def get_data_parallel_world_size(self) -> int:
        """Size of the data-parallel group."""
        return self._groups.layout.dp
