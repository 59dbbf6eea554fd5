"""What a router decides, which tensors without memory do not say: how many rows of a mixture's experts a rank has.

Rows are pairs of a token and an expert. With a balanced load a rank has as many as it would alone, shared out over the
tensor-parallel ranks where experts are whole. The rank that is recorded gets `imbalance` times as many.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import torch
import torch.distributed as dist

from toolkit.estimate.recorded.recording import Setup
from toolkit.parallel.experts import dispatch


def load(setup: Setup) -> Fraction:
    """Rows of the recorded rank over all rows of its tokens."""
    return Fraction(setup.imbalance).limit_denominator(100) / lanes(setup)


def lanes(setup: Setup) -> int:
    """Tensor-parallel ranks with different experts."""
    return 1 if setup.inner else setup.tp


def groups(setup: Setup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The first rank's tensor- and expert-parallel groups."""
    ranks = range(setup.tp * setup.ep)
    tensor, expert = (dist.new_group([*some]) for some in (ranks[: setup.tp], ranks[:: setup.tp]))
    return tensor, expert


@contextmanager
def routed(setup: Setup) -> Iterator[None]:
    """Inside, the experts' code is told these numbers where it would ask the device for them."""
    sort, count = dispatch.ShardedExperts._sorted, dispatch.row_counts
    rows = 0

    def noting(self: dispatch.ShardedExperts, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        nonlocal rows
        rows = experts.numel()
        return sort(self, experts)

    def counted(counts: torch.Tensor) -> list[list[int]]:
        """All from or for one rank: buffers hold the sum. What the rank sends is balanced where others compute it."""
        first = load(setup) if len(counts) == 1 else Fraction(1, lanes(setup))
        totals = [int(rows * share) for share in (first, load(setup))]
        return [[total, *[0] * (counts.shape[1] - 1)] for total in totals[: len(counts)]]

    dispatch.ShardedExperts._sorted, dispatch.row_counts = noting, counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        dispatch.ShardedExperts._sorted, dispatch.row_counts = sort, count  # type: ignore[method-assign]
