"""ShardedExperts: brings each token to the ranks that hold its experts, and the results back.

What is sent are rows: (token, expert) pairs, sorted by expert. Tensor-parallel ranks know the same tokens, so each
keeps the rows of its own experts and nothing is sent between them; expert-parallel ranks know different tokens, and
exchange rows in one all-to-all each way. On arrived rows the family's own forward pass runs, as if each were a token
with a single expert of weight 1, so its implementation (eager, batched_mm, grouped_mm) does not matter. The sender
multiplies by the router's weights.

Dims: t tokens, k experts of each, h hidden, e local experts, n expert-parallel ranks, r rows.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.parallel.experts.compiled_experts import call_in_graph
from toolkit.parallel.experts.overlap import Overlap, joined_class
from toolkit.parallel.tensor import collectives as c
from toolkit.parallel.tensor.region import Region


class ShardedExperts(nn.Module):
    """A family's module of experts on one rank, after `adopt`; the family's class is its second base."""

    num_experts: int
    region: Region
    expert: dist.ProcessGroup
    is_whole: bool
    """Whether tensor-parallel ranks hold different experts; if not, each holds a part of all of them."""
    kept_pairs: torch.Tensor | None = None
    """Pairs of a token and an expert [t, k] that are not dropped (capacity.py); None: all."""
    capacity: int | None = None
    """The most rows of an expert that a rank sends, and then the number that it sends, some of them empty."""
    overlap: Overlap | None = None
    """The overlap with the block's shared expert; None where the block has none that can run during the exchange."""
    number: torch.Tensor
    """Number of the module in the graphs of compiled layers, [1] (compiled_experts.py)."""
    outer_bias: nn.Parameter | None
    """Bias of the outputs, where the ranks' outputs are partial sums: it is added to the sum."""

    @staticmethod
    def adopt(experts: Any, region: Region, expert: dist.ProcessGroup, *, is_whole: bool) -> None:
        """Make a family's module, whose parameters are sharded already, one of this class."""
        # Another class, not a module around this one: the parameters keep their names, and the family's own forward
        # pass is called as the next one in line (`super().forward`).
        experts.__class__ = joined_class(ShardedExperts, type(experts))
        experts.region = region
        experts.expert = expert
        experts.is_whole = is_whole
        # In the module's own dict from the first pass on: a compiled layer is compiled again if that changes.
        experts.kept_pairs = None
        experts.capacity = None
        bias = None if is_whole else experts._parameters.pop("down_proj_bias", None)
        experts.register_parameter("outer_bias", bias)
        if bias is not None:
            experts.register_buffer("down_proj_bias", torch.zeros_like(bias), persistent=False)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [t, h], index of experts [t, k], weights [t, k] -> [t, h]."""
        if torch.compiler.is_compiling():
            return call_in_graph(self, hidden, index, weights)
        return self.route(hidden, index, weights)

    def route(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Do what `forward` says: how many rows a rank computes, the host reads."""
        bias = None if self.outer_bias is None else (weights.unsqueeze(2) * self.outer_bias[index]).sum(1)
        group = self.region.group
        hidden = self.region.enter(hidden, self)
        if self.region.sequence_parallel:
            index = c.gather_from_tensor_ranks(index, group, dim=0)
            weights = c.gather_sequence(weights, group, dim=0)
        else:
            # Each rank has the gradient of the weights of its own rows.
            weights = c.copy_to_tensor_ranks(weights, group)
        order, ids, counts = self._sorted(index.flatten())
        if self.capacity is None:
            pairs, out = self._exchange(hidden, order, ids, counts, index.shape[1])
        else:
            pairs, out = self._exchange_slots(hidden, order, counts, index.shape[1])
        weighted = out * weights.flatten()[pairs].unsqueeze(1)
        rows = weighted.new_zeros(index.numel(), hidden.shape[1])
        # Empty slots name a pair as well, the first, and have nothing to add to it.
        rows = rows.index_copy(0, pairs, weighted) if self.capacity is None else rows.index_add(0, pairs, weighted)
        result = self.region.leave(rows.view(*index.shape, -1).sum(1).to(hidden.dtype), self)
        return result if bias is None else result + bias.to(result.dtype)

    def _sorted(self, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (order of the rows, their expert among those counted here [t k], rows for each of these [n, e]).

        Counted are the experts of the tensor-parallel ranks of this number on all expert-parallel ranks. Rows for
        others come last.
        """
        local = self.num_experts
        ranks = self.expert.size()
        group = self.region.group
        if self.kept_pairs is not None:  # dropped pairs get the number after the last expert
            expert_shards = group.size() if self.is_whole else 1
            experts = experts.masked_fill(~self.kept_pairs.flatten(), local * ranks * expert_shards)
        if self.is_whole and group.size() > 1:
            owner = experts // local
            counted_here = (owner // group.size()) * local + experts % local
            experts = counted_here.masked_fill(owner % group.size() != group.rank(), local * ranks)
        ids, order = torch.sort(experts, stable=True)
        # Counted without a synchronization, unlike bincount.
        bounds = torch.searchsorted(ids, torch.arange(local * ranks + 1, device=ids.device, dtype=ids.dtype))
        return order, ids, bounds.diff().view(ranks, local)

    def _exchange(
        self, hidden: torch.Tensor, order: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, per_token: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the (token, expert) pairs of this rank's rows, and their outputs [r, h]."""
        if self.expert.size() == 1:
            if self.is_whole and self.region.group.size() > 1:
                here = row_counts(counts[None])[0][0]
                order = order[:here]
                ids = ids[:here]
            return order, self._compute(hidden[order // per_token], ids)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.expert)
        send, receive = row_counts(torch.stack([counts, arriving]))
        pairs = order[: sum(send)]
        rows = self._send(hidden[pairs // per_token], send, receive)
        local = torch.arange(self.num_experts, device=ids.device).repeat(self.expert.size())
        ids = local.repeat_interleave(arriving.flatten(), output_size=sum(receive))
        return pairs, exchange(self._compute(rows, ids), receive, send, self.expert)

    def _exchange_slots(
        self, hidden: torch.Tensor, order: torch.Tensor, counts: torch.Tensor, per_token: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do the same as `_exchange` with `capacity` slots for each expert: the host need not wait for sizes."""
        assert self.capacity is not None
        ranks = self.expert.size()
        slots = torch.arange(self.capacity, device=order.device)
        used = counts.flatten()
        is_used = (slots < used.unsqueeze(1)).flatten()
        places = ((used.cumsum(0) - used).unsqueeze(1) + slots).flatten()
        pairs = order[places.clamp(max=len(order) - 1)].masked_fill(~is_used, 0)
        rows = hidden[pairs // per_token] * is_used.unsqueeze(1)
        ids = torch.arange(self.num_experts, device=order.device).repeat_interleave(self.capacity).repeat(ranks)
        if ranks > 1:
            each = [len(rows) // ranks] * ranks
            out = self._compute(self._send(rows, each, each), ids)
            out = exchange(out, each, each, self.expert)
        else:
            out = self._compute(rows, ids)
        return pairs, out * is_used.unsqueeze(1)

    def _send(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Exchange rows; the block's shared expert runs meanwhile."""
        meanwhile = None if self.overlap is None else self.overlap.call_shared
        return exchange(rows, send, receive, self.expert, meanwhile)

    def _compute(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The family's forward pass on rows [r, h] with local experts [r]."""
        count = rows.shape[0]
        if count == 0:
            # One row that nobody sees: every parameter has a gradient, and every exchange its counterpart.
            rows = rows.sum(0, keepdim=True)
            ids = ids.new_zeros(1)
        out: torch.Tensor = super().forward(rows, ids.unsqueeze(1), rows.new_ones(rows.shape[0], 1))
        return out[:count]


def row_counts(counts: torch.Tensor) -> list[list[int]]:
    """Rows of all experts, from counts [m, n, e] -> [m][n] on the host, which waits for the device."""
    rows: list[list[int]] = counts.sum(2).tolist()
    return rows


def exchange(
    x: torch.Tensor,
    send: list[int],
    receive: list[int],
    group: dist.ProcessGroup,
    meanwhile: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Send runs of rows of these lengths to each rank, and call `meanwhile` before the wait for what arrives.

    Backward: their gradients are sent back, and what `meanwhile` computed has its backward pass before the wait.
    """
    transfer = _Transfer(send, receive, group)
    x = _Start.apply(x, transfer)
    if meanwhile is not None:
        meanwhile()
    out: torch.Tensor = _Finish.apply(x, transfer)
    return out


class _Transfer:
    """Rows on their way, in one direction after the other."""

    def __init__(self, send: list[int], receive: list[int], group: dist.ProcessGroup) -> None:
        self.sizes = (send, receive)
        self.group = group

    def start(self, x: torch.Tensor, send: list[int], receive: list[int]) -> None:
        self.out = x.new_empty(sum(receive), *x.shape[1:])
        self.work = dist.all_to_all_single(self.out, x.contiguous(), receive, send, group=self.group, async_op=True)

    def wait(self) -> torch.Tensor:
        self.work.wait()
        out = self.out
        del self.out, self.work
        return out


class _Start(torch.autograd.Function):
    """Start a transfer. Backward: wait for that of the gradients, which autograd reaches after what ran meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, transfer: _Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        send, receive = transfer.sizes
        transfer.start(x, send, receive)
        return transfer.out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.transfer.wait(), None


class _Finish(torch.autograd.Function):
    """Wait for a transfer. Backward: start that of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, transfer: _Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        transfer.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        send, receive = ctx.transfer.sizes
        ctx.transfer.start(gradients[0], receive, send)
        # For the shape alone: `_Start` returns what arrives.
        return gradients[0], None
