"""Routers' decisions, which tensors without memory do not say: how many rows of a mixture's experts a rank has.

Rows are pairs of a token and an expert. With a balanced load a rank has as many as it would alone, shared out over the
tensor-parallel ranks where experts are whole. The rank that is recorded gets `imbalance` times as many.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from toolkit.estimate.recorded.recording import RankPass
from toolkit.parallel.experts import dispatch


def load(rank_pass: RankPass) -> Fraction:
    """Rows of the recorded rank over all rows of its tokens."""
    return Fraction(rank_pass.computation.imbalance).limit_denominator(100) / expert_shards(rank_pass)


def expert_shards(rank_pass: RankPass) -> int:
    """Tensor-parallel ranks with different experts."""
    return 1 if rank_pass.layout.experts == "inner" else rank_pass.layout.tp


def groups(rank_pass: RankPass) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The first rank's tensor- and expert-parallel groups."""
    tp = rank_pass.layout.tp
    ranks = range(tp * rank_pass.layout.ep)
    tensor = dist.new_group([*ranks[:tp]])
    expert = dist.new_group([*ranks[::tp]])
    return tensor, expert


@contextmanager
def balanced_routing(rank_pass: RankPass) -> Iterator[None]:
    """Let the experts' code inside use these numbers of rows where it would ask the device for them."""
    sort = dispatch.ShardedExperts._sorted
    count = dispatch.row_counts
    rows = 0

    def sort_noting_rows(self: dispatch.ShardedExperts, experts: torch.Tensor) -> Any:
        nonlocal rows
        rows = experts.numel()
        return sort(self, experts)

    def balanced_row_counts(counts: torch.Tensor) -> list[list[int]]:
        """Return all rows as those of one rank, whose buffers hold the sum; rows for other ranks are balanced."""
        first = load(rank_pass) if len(counts) == 1 else Fraction(1, expert_shards(rank_pass))
        totals = [int(rows * share) for share in (first, load(rank_pass))]
        return [[total, *[0] * (counts.shape[1] - 1)] for total in totals[: len(counts)]]

    dispatch.ShardedExperts._sorted = sort_noting_rows  # type: ignore[method-assign]
    dispatch.row_counts = balanced_row_counts
    try:
        yield
    finally:
        dispatch.ShardedExperts._sorted = sort  # type: ignore[method-assign]
        dispatch.row_counts = count
