"""Facts that DeepSpeed must know of expert-parallel ranks: their groups, and that a model has such parameters."""

from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups as registry
from torch import nn

from toolkit.parallel.experts.sharding import group_name
from toolkit.parallel.groups import ParallelGroups


class _HasExperts(MoE):  # type: ignore[misc]
    """DeepSpeed looks for an instance of its own layer. This one has no experts: it only tells that there are some."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 0

    def set_deepspeed_parallelism(self, *arguments: Any, **keywords: Any) -> None:
        """Create no groups: they are registered already."""


def declare_experts(model: nn.Module, groups: ParallelGroups) -> None:
    """Register the groups of `model`'s experts, before `deepspeed.initialize`; nothing where no rank shares them out.

    Under ZeRO-3 each parameter says so itself, and DeepSpeed refuses its own layer.
    """
    if groups.layout.ep == 1:
        return
    name = group_name(groups.expert)
    for table, ranks, group in (
        (registry._EXPERT_PARALLEL_GROUP, registry._EXPERT_PARALLEL_GROUP_RANKS, groups.expert),
        (registry._EXPERT_DATA_PARALLEL_GROUP, registry._EXPERT_DATA_PARALLEL_GROUP_RANKS, groups.expert_data),
    ):
        table.clear()
        table[name] = group
        ranks[name] = dist.get_process_group_ranks(group)
    if groups.layout.zero_stage < 3 and any(hasattr(p, "group_name") and p.requires_grad for p in model.parameters()):
        model.add_module("has_experts", _HasExperts())
