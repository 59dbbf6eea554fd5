"""Token dropping: an expert takes a limited number of a micro-batch's tokens, those with the largest router weights.

Switch Transformers (Fedus et al. 2022, section 2.2); the choice by weight is Megatron-LM's. A dropped (token, expert)
pair has weight 0, so the residual stream passes that token by. Which pairs are dropped depends on the micro-batch
alone: it is decided before any token is sent, and the same in every layout.

Dims: t tokens of a micro-batch, k experts of each, e experts.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.parallel.experts.dispatch import ShardedExperts
from toolkit.parallel.experts.sharding import experts_in
from toolkit.parallel.tensor import collectives as c


def limit_capacity(model: nn.Module, factor: float, count: int, sequence_group: dist.ProcessGroup | None) -> None:
    """Limit every expert of `model` to ceil(factor * t * k / count) tokens in training; validation drops none.

    `count`: experts of a layer, on all ranks. `sequence_group`: ranks that each route a part of the sequence.
    """
    for _, experts in experts_in(model):
        experts.register_forward_pre_hook(partial(_drop, factor=factor, count=count, group=sequence_group))


def _drop(
    experts: nn.Module, arguments: tuple[Any, ...], *, factor: float, count: int, group: dist.ProcessGroup | None
) -> tuple[Any, ...] | None:
    kept, capacity = None, None
    if experts.training:
        hidden, index, weights = arguments
        every, heavy = index, weights.detach()
        if group is not None:
            every, heavy = (c.gather_from_tensor_ranks(one, group, dim=0) for one in (every, heavy))
        capacity = math.ceil(factor * every.numel() / count)
        kept = keep_heaviest(every, heavy, count, capacity)
        own = kept if group is None else kept.chunk(group.size())[group.rank()]
        arguments = (hidden, index, weights * own)
    if isinstance(experts, ShardedExperts):
        experts.kept, experts.capacity = kept, capacity
    return arguments


def keep_heaviest(index: torch.Tensor, weights: torch.Tensor, count: int, capacity: int) -> torch.Tensor:
    """Return whether each pair [t, k] is kept: of each expert the `capacity` heaviest; of equal ones the first."""
    flat, places = index.flatten(), torch.arange(index.numel(), device=index.device)
    by_weight = torch.sort(weights.flatten(), descending=True, stable=True).indices
    experts, order = torch.sort(flat[by_weight], stable=True)
    starts = torch.searchsorted(experts, torch.arange(count, device=index.device, dtype=experts.dtype))
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[by_weight[order]] = places - starts[experts] < capacity
    return kept.view(index.shape)
