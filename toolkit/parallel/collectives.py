"""The autograd pairs of Megatron: what communicates forward does not backward, and the other way round.

Names follow the papers. f and g are those of Shoeybi et al. 2019 ("Megatron-LM", fig. 3): f copies forward and reduces
backward, g reduces forward and copies backward. Their counterparts for sequence parallelism, g-bar with all-gather and
reduce-scatter, are those of Korthikanti et al. 2022 ("Reducing Activation Recomputation", fig. 5).

Every function takes the process group of the tensor-parallel axis; a group of one rank costs nothing.
"""

from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup


def copy_to_tensor_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """f: x is the same on every rank and each rank uses it for its share of the work. Backward: the sum."""
    return _Copy.apply(x, group) if group.size() > 1 else x


def reduce_from_tensor_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """g: x is one rank's share of a sum. Forward: the sum, on every rank. Backward: the gradient as it is."""
    return _Reduce.apply(x, group) if group.size() > 1 else x


def gather_from_tensor_ranks(x: torch.Tensor, group: Group, *, dim: int = -1) -> torch.Tensor:
    """The ranks' slices of `dim` put together, for work that every rank repeats. Backward: this rank's slice."""
    return _Gather.apply(x, group, dim) if group.size() > 1 else x


def scatter_to_tensor_ranks(x: torch.Tensor, group: Group, *, dim: int = -1) -> torch.Tensor:
    """This rank's slice of `dim` of what is the same everywhere. Backward: the slices' gradients put together."""
    return _Scatter.apply(x, group, dim) if group.size() > 1 else x


def gather_sequence(x: torch.Tensor, group: Group, *, dim: int = 1) -> torch.Tensor:
    """The ranks' slices of the sequence put together, for work that is split. Backward: reduce-scatter."""
    return _GatherSequence.apply(x, group, dim) if group.size() > 1 else x


def reduce_scatter_sequence(x: torch.Tensor, group: Group, *, dim: int = 1) -> torch.Tensor:
    """This rank's slice of the sequence of a sum over ranks. Backward: all-gather."""
    return _ReduceScatterSequence.apply(x, group, dim) if group.size() > 1 else x


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(gradients[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own_slice(gradients[0], ctx.group, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _own_slice(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_gather(gradients[0], ctx.group, ctx.dim), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _reduce_scatter(gradients[0], ctx.group, ctx.dim), None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        return _reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_gather(gradients[0], ctx.group, ctx.dim), None, None


def _all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    # A copy: the caller's tensor may be needed by others, in autograd above all.
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _own_slice(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    size = x.shape[dim]
    assert size % group.size() == 0, f"{size} does not split into {group.size()}"
    part = size // group.size()
    # A copy, as in _all_gather: a slice that is contiguous already would be a view.
    return x.narrow(dim, group.rank() * part, part).clone(memory_format=torch.contiguous_format)


def _all_gather(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    # Collectives concatenate along the first dim.
    first = x.movedim(dim, 0).contiguous()
    out = first.new_empty((first.shape[0] * group.size(), *first.shape[1:]))
    dist.all_gather_into_tensor(out, first, group=group)
    # A tensor of its own: models add to results in place, which autograd forbids for views made in a function.
    return out.movedim(0, dim).clone(memory_format=torch.contiguous_format)


def _reduce_scatter(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    first = x.movedim(dim, 0).contiguous()
    assert first.shape[0] % group.size() == 0, f"{first.shape[0]} does not split into {group.size()}"
    out = first.new_empty((first.shape[0] // group.size(), *first.shape[1:]))
    dist.reduce_scatter_tensor(out, first, group=group)
    return out.movedim(0, dim).clone(memory_format=torch.contiguous_format)
