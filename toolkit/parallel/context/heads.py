"""Heads for positions: ranks that hold parts of the same positions get all of these, of a share of the heads each.

An all-to-all before attention and one after it (Jacobs et al. 2023, DeepSpeed-Ulysses, section 3). Between such groups
keys and values travel as without them, so that heads stay inside a node and the ring goes between nodes.

Dims: b samples, h heads, n positions of a rank, u ranks that exchange heads, d size of a head.
"""

import math
from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor


def to_heads(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[b, h, n, d] -> [b, h/u, u n, d], positions in the order of the ranks."""
    exchanged: Tensor = _Exchanged.apply(tensor, group, True)
    return exchanged


def to_positions(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[b, h/u, u n, d] -> [b, h, n, d]."""
    exchanged: Tensor = _Exchanged.apply(tensor, group, False)
    return exchanged


def repeated(tensor: Tensor, ranks: int) -> Tensor:
    """Repeat key-value heads [b, g, n, d] until so many ranks can share them equally. Their gradients are summed."""
    return tensor.repeat_interleave(ranks // math.gcd(ranks, tensor.shape[1]), dim=1)


def own_heads(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's share of what each head has one of, [h] -> [h/u]."""
    return values.tensor_split(group.size())[group.rank()]


class _Exchanged(torch.autograd.Function):
    """One way, and the gradient the other."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, splits_heads: bool) -> Tensor:
        ctx.group = group
        ctx.splits_heads = splits_heads
        return _exchange(tensor, group, splits_heads=splits_heads)

    @staticmethod
    def backward(ctx: Any, *received: Tensor) -> Any:
        return _exchange(received[0], ctx.group, splits_heads=not ctx.splits_heads), None, None


def _exchange(tensor: Tensor, group: dist.ProcessGroup, *, splits_heads: bool) -> Tensor:
    split = 1 if splits_heads else 2
    joined = 2 if splits_heads else 1
    sent = torch.stack(tensor.chunk(group.size(), dim=split))  # [u, b, ...]
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=group)
    return torch.cat(arrived.unbind(), dim=joined)
