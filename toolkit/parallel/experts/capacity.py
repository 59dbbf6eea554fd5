"""Token dropping: an expert takes a limited number of a micro-batch's tokens, those with the largest router weights.

Switch Transformers (Fedus et al. 2022, section 2.2); the choice by weight is Megatron-LM's. A dropped (token, expert)
pair has weight 0, so the residual stream passes that token by. Which pairs are dropped depends on the micro-batch
alone: it is decided before any token is sent, and the same in every layout.

Dims: t tokens of a micro-batch, k experts of each, e experts, r ranks that split a sequence, b samples, s positions.
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


def limit_capacity(
    model: nn.Module, factor: float, count: int, sequence_group: dist.ProcessGroup | None, *, samples: int
) -> None:
    """Limit every expert of `model` to ceil(factor * t * k / count) tokens in training; validation drops none.

    `count`: experts of a layer, on all ranks. `sequence_group`: ranks that each route a part of the sequences of the
    `samples` of a micro-batch.
    """
    drop = partial(_drop, factor=factor, count=count, group=sequence_group, samples=samples)
    for _, experts in experts_in(model):
        experts.register_forward_pre_hook(drop)


def _drop(
    experts: nn.Module,
    arguments: tuple[Any, ...],
    *,
    factor: float,
    count: int,
    group: dist.ProcessGroup | None,
    samples: int,
) -> tuple[Any, ...] | None:
    kept_pairs = None
    capacity = None
    if experts.training:
        hidden, index, weights = arguments
        all_indices = index
        all_weights = weights.detach()
        if group is not None:
            all_indices = _swap(c.gather_from_tensor_ranks(all_indices, group, dim=0), group.size(), samples)
            all_weights = _swap(c.gather_from_tensor_ranks(all_weights, group, dim=0), group.size(), samples)
        capacity = math.ceil(factor * all_indices.numel() / count)
        kept_pairs = keep_heaviest(all_indices, all_weights, count, capacity)
        if group is not None:
            kept_pairs = _swap(kept_pairs, samples, group.size())
        is_kept = kept_pairs if group is None else kept_pairs.chunk(group.size())[group.rank()]
        arguments = (hidden, index, weights * is_kept)
    if isinstance(experts, ShardedExperts):
        experts.kept_pairs = kept_pairs
        experts.capacity = capacity
    return arguments


def _swap(pairs: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """[outer * inner * s, k] -> [inner * outer * s, k]: from parts of ranks to samples, as one rank has them, and back.

    Of equally heavy pairs the first are kept, so that their order counts.
    """
    swapped: torch.Tensor = pairs.unflatten(0, (outer, inner, -1)).transpose(0, 1)
    return swapped.flatten(0, 2)


def keep_heaviest(index: torch.Tensor, weights: torch.Tensor, count: int, capacity: int) -> torch.Tensor:
    """Return whether each pair [t, k] is kept: of each expert the `capacity` heaviest; of equal ones the first."""
    expert_of_pair = index.flatten()
    places = torch.arange(index.numel(), device=index.device)
    by_weight = torch.sort(weights.flatten(), descending=True, stable=True).indices
    # Sorted by expert, and the pairs of each one by weight: `by_weight[order]` are their numbers.
    experts, order = torch.sort(expert_of_pair[by_weight], stable=True)
    first_places = torch.searchsorted(experts, torch.arange(count, device=index.device, dtype=experts.dtype))
    is_kept = torch.empty_like(expert_of_pair, dtype=torch.bool)
    is_kept[by_weight[order]] = places - first_places[experts] < capacity
    return is_kept.view(index.shape)
