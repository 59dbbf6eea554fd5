"""Routers' decisions, which tensors without memory do not say: how many rows of a mixture's experts a rank has.

Rows are pairs of a token and an expert. With a balanced load a rank has as many as it would alone, shared out over the
tensor-parallel ranks where experts are whole. The rank that is recorded gets `imbalance` times as many.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from toolkit.config.layout import Layout
from toolkit.estimate.recorded.recording import RankPass
from toolkit.parallel.experts import dispatch


def load(rank_pass: RankPass) -> Fraction:
    """Rows of the recorded rank over all rows of its tokens."""
    return Fraction(rank_pass.computation.imbalance).limit_denominator(100) / expert_shards(rank_pass.layout)


def expert_shards(layout: Layout) -> int:
    """Tensor-parallel ranks with different experts."""
    return 1 if layout.experts == "inner" else layout.tp


def groups(rank_pass: RankPass) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The first rank's tensor- and expert-parallel groups."""
    tp = rank_pass.layout.tp
    ranks = range(tp * rank_pass.layout.ep)
    tensor = dist.new_group([*ranks[:tp]])
    expert = dist.new_group([*ranks[::tp]])
    return tensor, expert


class BalancedRouting:
    """Gives the code of experts numbers of rows where it would ask the device for them.

    `counts_of` returns them for the rows of the router that ran last, and the tensor of counts that has no values.
    """

    def __init__(self, counts_of: Callable[[int, torch.Tensor], list[list[int]]]) -> None:
        self._counts_of = counts_of
        self._rows = 0

    @contextmanager
    def assumed(self) -> Iterator[None]:
        """Let the code inside use these numbers."""
        sort = dispatch.ShardedExperts._sorted

        def sort_noting_rows(experts_module: dispatch.ShardedExperts, experts: torch.Tensor) -> Any:
            self._rows = experts.numel()
            return sort(experts_module, experts)

        def row_counts(counts: torch.Tensor) -> list[list[int]]:
            return self._counts_of(self._rows, counts)

        with (
            mock.patch.object(dispatch.ShardedExperts, "_sorted", sort_noting_rows),
            mock.patch.object(dispatch, "row_counts", row_counts),
        ):
            yield


def balanced_routing(rank_pass: RankPass) -> BalancedRouting:
    """Return the routing of the rank that a pass is recorded on."""

    def counts_of(rows: int, counts: torch.Tensor) -> list[list[int]]:
        """Return all rows as those of one rank, whose buffers hold the sum; rows for other ranks are balanced."""
        first = load(rank_pass) if len(counts) == 1 else Fraction(1, expert_shards(rank_pass.layout))
        totals = [int(rows * share) for share in (first, load(rank_pass))]
        return [[total, *[0] * (counts.shape[1] - 1)] for total in totals[: len(counts)]]

    return BalancedRouting(counts_of)
