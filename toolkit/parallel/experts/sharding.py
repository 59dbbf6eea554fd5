"""ExpertSharder: which experts, or which part of every expert, a rank keeps.

It knows no family. Experts are one module of transformers' experts interface (`use_experts_implementation`), whose
parameters have the expert as their first dimension, and which describes their other dimensions itself.

- whole: each rank keeps whole experts. They are handed out in order over the expert-parallel ranks, and those of each
  over its tensor-parallel ranks, so a rank holds one run of the first dimension.
- inner: each tensor-parallel rank keeps a part of the intermediate dimension of all experts.
"""

from collections.abc import Iterator
from typing import Any, Self

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from toolkit.errors import LayoutError
from toolkit.parallel.experts.dispatch import ShardedExperts
from toolkit.parallel.experts.overlap import overlap_shared_expert
from toolkit.parallel.groups import ParallelGroups
from toolkit.parallel.shard import Block, Shard, mark, pieces_of, source_of
from toolkit.parallel.tensor.region import Region


class ExpertSharder:
    """Shards the experts of one model over `tensor` and `expert`. Raises LayoutError before anything is changed.

    `zero3`: the group over which ZeRO-3 shards the experts of a rank, if it does. `overlaps`: whether shared experts
    run during the exchange.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tensor: dist.ProcessGroup,
        expert: dist.ProcessGroup,
        *,
        inner: bool = False,
        sequence_parallel: bool = False,
        zero3: dist.ProcessGroup | None = None,
        overlaps: bool = False,
    ) -> None:
        self.tensor = tensor
        self.expert = expert
        self.inner = inner
        self.sequence_parallel = sequence_parallel
        self.zero3 = zero3
        self.overlaps = overlaps
        self.expert_shards = 1 if inner else tensor.size()
        self._check(model)

    @classmethod
    def of(cls, model: PreTrainedModel, groups: ParallelGroups) -> Self:
        """The sharder of a layout's groups."""
        layout = groups.layout
        return cls(
            model,
            groups.tensor,
            groups.expert,
            inner=layout.experts == "inner",
            sequence_parallel=layout.sequence_parallel,
            zero3=groups.expert_data if layout.zero_stage == 3 and layout.ep > 1 else None,
            overlaps=True,
        )

    def _check(self, model: PreTrainedModel) -> None:
        ep = self.expert.size()
        tp = self.tensor.size()
        family = model.config.model_type
        modules = [module for _, module in experts_in(model)]
        if not modules and (ep > 1 or self.inner):
            named = any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
            reason = "its experts do not use transformers' experts interface" if named else "it has no experts"
            if self.inner:
                settings = (("parallel.experts", "inner"), ("model_type", family))
                raise LayoutError.between(settings, reason, ("parallel.experts", "whole"))
            raise LayoutError.between((("parallel.ep", ep), ("model_type", family)), reason, ("parallel.ep", 1))
        for experts in modules:
            count = int(experts.num_experts)
            ranks = ep * self.expert_shards
            strange = [name for name, p in experts.named_parameters() if "." in name or p.shape[0] != count]
            sizes = (("parallel.ep", ep), ("parallel.tp", tp), ("model_type", family))
            if strange:
                reason = f"every expert has a share of experts.{strange[0]}, which cannot be sharded"
                raise LayoutError.between(sizes, reason, ("parallel.ep", 1), ("parallel.tp", 1))
            if count % ranks:
                reason = f"{count} experts cannot be shared out equally by {ranks} ranks"
                raise LayoutError.between(sizes, reason, f"choose a divisor of {count}")
            if self.inner and (width := _width(experts)) % tp:
                reason = f"experts of width {width} cannot be shared equally by {tp} ranks"
                raise LayoutError.between(sizes, reason, ("parallel.experts", "whole"))

    def shard_layer(self, layer: nn.Module, prefix: str) -> None:
        """Shard the experts of a decoder layer in place, if it has some. `prefix`: of the layer's parameter names."""
        if self.tensor.size() * self.expert.size() > 1:
            for path, experts in experts_in(layer):
                self._shard(experts, f"{prefix}.{path}")
                if self.overlaps and self.expert.size() > 1:
                    overlap_shared_expert(layer.get_submodule(path.rpartition(".")[0]), experts)

    def _shard(self, experts: Any, name: str) -> None:
        local = experts.num_experts // (self.expert.size() * self.expert_shards)
        for key, parameter in list(experts.named_parameters(recurse=False)):
            shape = tuple(parameter.shape)
            if self.inner:
                dim, pieces = self._inner_pieces(experts, key, shape)
            else:
                dim = 0
                pieces = (((self.expert.rank() * self.expert_shards + self.tensor.rank()) * local, local),)
            shard = Shard(
                name=f"{name}.{key}", shape=shape, dim=dim, pieces=pieces, over_experts=self.expert.size() > 1
            )
            local_part = nn.Parameter(shard.take(source_of(parameter)), requires_grad=parameter.requires_grad)
            setattr(experts, key, mark(local_part, shard))
            if self.expert.size() > 1:
                self._group(local_part)
        experts.num_experts = local
        region = Region(self.tensor, sequence_parallel=self.sequence_parallel, dropout=False)
        ShardedExperts.adopt(experts, region, self.expert, is_whole=not self.inner)

    def _inner_pieces(
        self, experts: Any, key: str, shape: tuple[int, ...]
    ) -> tuple[int | None, tuple[tuple[int, int], ...]]:
        """The sharded dimension of a parameter and what this rank keeps of it; no dimension: all of it."""
        is_bias = key.endswith("_bias")
        is_down = key.startswith("down_proj")
        if is_bias and is_down:
            return None, ()
        dim = 1 if is_bias or experts.is_transposed == is_down else 2
        # Gate and up are one after the other; or interleaved, unit by unit, or there is no gate.
        blocks = 2 if experts.has_gate and experts.is_concatenated and not is_down else 1
        width = _width(experts)
        block = Block(units=width, width=shape[dim] // (width * blocks))
        return dim, pieces_of([block] * blocks, self.tensor.rank(), self.tensor.size())

    def _group(self, parameter: nn.Parameter) -> None:
        """Tell DeepSpeed that other replicas hold other experts.

        ZeRO-3 shards, averages and counts what has these marks as it does the experts of its own AutoEP.
        """
        marks = {"allreduce": False, "group_name": group_name(self.expert)}
        if self.zero3 is not None:
            marks |= {
                "ds_zero_partition_process_group": self.zero3,
                "ds_zero_placement_family": "autoep_expert",
                "ds_zero_partition_group_name": group_name(self.expert),
            }
        vars(parameter).update(marks)


def experts_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield path and module of the experts on transformers' experts interface."""
    for path, inside in module.named_modules():
        if hasattr(inside, "_is_expert_parallel"):
            yield path, inside


def group_name(expert: dist.ProcessGroup) -> str:
    """DeepSpeed's name of a group of expert-parallel ranks, which it reads the size from."""
    return f"ep_size_{expert.size()}"


def _width(experts: Any) -> int:
    """The intermediate dimension."""
    return int(experts.down_proj.shape[1 if experts.is_transposed else 2])
