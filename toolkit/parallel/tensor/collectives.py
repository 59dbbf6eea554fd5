"""Megatron's autograd functions: each pairs a collective with its counterpart in the backward pass.

Names follow the papers. f and g are those of Shoeybi et al. 2019 ("Megatron-LM", fig. 3): f copies forward and reduces
backward, g reduces forward and copies backward. Their counterparts for sequence parallelism, g-bar with all-gather and
reduce-scatter, are those of Korthikanti et al. 2022 ("Reducing Activation Recomputation", fig. 5).

Every function takes the tensor-parallel process group; with one rank it does nothing. `later`, where the backward pass
is a sum, has the weight gradients that are computed meanwhile (toolkit/parallel/tensor/overlapped_gradients.py).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from toolkit.parallel.tensor.overlapped_gradients import OverlappedGradients

Group = dist.ProcessGroup
_Call = Callable[..., torch.Tensor]


def copy_to_tensor_ranks(x: torch.Tensor, group: Group, later: OverlappedGradients | None = None) -> torch.Tensor:
    """f: identity, for x that is the same on every rank and enters sharded computation. Backward: all-reduce."""
    return _apply("copy", x, group, later=later)


def reduce_from_tensor_ranks(x: torch.Tensor, group: Group) -> torch.Tensor:
    """g: all-reduce of partial sums. Backward: identity."""
    return _apply("reduce", x, group)


def gather_from_tensor_ranks(x: torch.Tensor, group: Group, *, dim: int = -1) -> torch.Tensor:
    """All-gather along `dim`, for computation that is replicated. Backward: this rank's slice."""
    return _apply("gather", x, group, dim)


def scatter_to_tensor_ranks(x: torch.Tensor, group: Group, *, dim: int = -1) -> torch.Tensor:
    """Take this rank's slice of a replicated tensor along `dim`. Backward: all-gather."""
    return _apply("scatter", x, group, dim)


def gather_sequence(
    x: torch.Tensor, group: Group, *, dim: int = 1, later: OverlappedGradients | None = None
) -> torch.Tensor:
    """All-gather along the sequence, for computation that is sharded. Backward: reduce-scatter."""
    return _apply("gather_sequence", x, group, dim, later=later)


def reduce_scatter_sequence(x: torch.Tensor, group: Group, *, dim: int = 1) -> torch.Tensor:
    """Reduce-scatter along the sequence. Backward: all-gather."""
    return _apply("reduce_scatter_sequence", x, group, dim)


def _apply(
    name: str, x: torch.Tensor, group: Group, dim: int = 0, *, later: OverlappedGradients | None = None
) -> torch.Tensor:
    if group.size() == 1:
        return x
    result: torch.Tensor
    if later is None:
        result = _Collective.apply(x, group, dim, *_PAIRS[name])
    else:
        later.is_awaited = True
        result = _SumBesideProducts.apply(x, group, dim, *_PAIRS[name], later, *later.weights)
    return result


class _Collective(torch.autograd.Function):
    """A collective, and its counterpart for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int, call: _Call, counterpart: _Call) -> torch.Tensor:
        ctx.group = group
        ctx.dim = dim
        ctx.counterpart = counterpart
        return call(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return ctx.counterpart(gradients[0], ctx.group, ctx.dim), None, None, None, None


class _SumBesideProducts(torch.autograd.Function):
    """A collective whose counterpart is a sum. Backward: the gradients of `weights` are computed while that runs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: Group,
        dim: int,
        call: _Call,
        counterpart: _Call,
        later: OverlappedGradients,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.group = group
        ctx.dim = dim
        ctx.counterpart = counterpart
        ctx.later = later
        return call(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        of_weights: list[torch.Tensor | None] = []
        total = ctx.counterpart(
            gradients[0], ctx.group, ctx.dim, meanwhile=lambda: of_weights.extend(ctx.later.compute())
        )
        return total, None, None, None, None, None, *of_weights


def _identity(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return x.view_as(x)


def all_reduce(
    x: torch.Tensor, group: Group, dim: int = 0, *, meanwhile: Callable[[], None] | None = None
) -> torch.Tensor:
    """Return the sum over the ranks; `meanwhile` is called between its start and the wait for it."""
    # A copy: autograd may still need the caller's tensor.
    total = x.contiguous().clone()
    if meanwhile is None:
        dist.all_reduce(total, group=group)
    else:
        work = dist.all_reduce(total, group=group, async_op=True)
        meanwhile()
        work.wait()
    return total


def _own_slice(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    size = x.shape[dim]
    assert size % group.size() == 0, f"{size} is not divisible by {group.size()}"
    part = size // group.size()
    # A copy, as in _all_gather: a slice that is contiguous already would be a view.
    return x.narrow(dim, group.rank() * part, part).clone(memory_format=torch.contiguous_format)


def _all_gather(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    # Collectives concatenate along the first dim.
    first = x.movedim(dim, 0).contiguous()
    out = first.new_empty((first.shape[0] * group.size(), *first.shape[1:]))
    dist.all_gather_into_tensor(out, first, group=group)
    # A copy: models add to the result in place, which autograd forbids for views created in a function.
    return out.movedim(0, dim).clone(memory_format=torch.contiguous_format)


def _reduce_scatter(
    x: torch.Tensor, group: Group, dim: int, *, meanwhile: Callable[[], None] | None = None
) -> torch.Tensor:
    first = x.movedim(dim, 0).contiguous()
    assert first.shape[0] % group.size() == 0, f"{first.shape[0]} does not split into {group.size()}"
    out = first.new_empty((first.shape[0] // group.size(), *first.shape[1:]))
    if meanwhile is None:
        dist.reduce_scatter_tensor(out, first, group=group)
    else:
        work = dist.reduce_scatter_tensor(out, first, group=group, async_op=True)
        meanwhile()
        work.wait()
    return out.movedim(0, dim).clone(memory_format=torch.contiguous_format)


_PAIRS: dict[str, tuple[_Call, _Call]] = {
    "copy": (_identity, all_reduce),
    "reduce": (all_reduce, _identity),
    "gather": (_all_gather, _own_slice),
    "scatter": (_own_slice, _all_gather),
    "gather_sequence": (_all_gather, _reduce_scatter),
    "reduce_scatter_sequence": (_reduce_scatter, _all_gather),
}
"""The forward and the backward function of each collective above."""
