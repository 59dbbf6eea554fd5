"""Answers of the other ranks of a job while this process is the only one, where they decide what its rank does.

These are DeepSpeed's checks that ranks agree, the rows that routers send, and who holds which part of a matrix.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import utils as zero_utils

from toolkit.config.layout import Layout
from toolkit.engines.optimizers.muon import Muon
from toolkit.models.hidden_matrices import is_hidden_matrix
from toolkit.parallel.matrix_exchange import Fragment, MatrixExchange, Part, fragments_of
from toolkit.parallel.shard import Shard
from toolkit.recorder.routing import BalancedRouting, expert_shards


@contextmanager
def other_ranks_answered(layout: Layout) -> Iterator[None]:
    """Answer what the code inside asks other ranks, where the answer decides what this rank does."""
    matrices: list[Shard] = []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(zero_utils, "dist", _RankZeroSends(zero_utils.dist)))
        own_list = _own_list(zero_utils.get_lst_from_rank0)
        stack.enter_context(mock.patch.object(zero_utils, "get_lst_from_rank0", own_list))
        stack.enter_context(BalancedRouting(partial(_even_counts, layout)).assumed())
        stack.enter_context(mock.patch.object(Muon, "connect", _noting_matrices(matrices)))
        stack.enter_context(mock.patch.object(MatrixExchange, "_held_by_all", _held_by_others(matrices)))
        yield


class _RankZeroSends:
    """deepspeed.comm for DeepSpeed's checks that a list is that of rank 0, which is taken for this rank's own.

    ZeRO-3 makes them before the first steps. Ranks that differ are found where their collectives are compared.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def get_rank(self) -> int:
        return 0


def _own_list(ask: Callable[[list[int]], list[int]]) -> Callable[[list[int]], list[int]]:
    """Return DeepSpeed's broadcast of a list from rank 0 with this rank's own list as the answer.

    The lists of large models, one number a parameter, are too long for tensors with values.
    """

    def answered(values: list[int]) -> list[int]:
        ask(values)
        return values

    return answered


def _even_counts(layout: Layout, rows: int, counts: torch.Tensor) -> list[list[int]]:
    """Return the rows for each rank of routers that spread theirs evenly over all ranks."""
    ranks = counts.shape[1]
    return [[rows // (expert_shards(layout) * ranks)] * ranks for _ in range(counts.shape[0])]


def _noting_matrices(matrices: list[Shard]) -> Any:
    """Return Muon's `connect`, which notes this rank's part of each matrix, wherever ZeRO keeps it."""
    connect = Muon.connect

    def noted(optimizer: Muon, parts: Iterable[Part], group: dist.ProcessGroup | None) -> None:
        known = list(parts)
        matrices.extend(part.shard for part in known if is_hidden_matrix(part.shard.name, part.shard.shape))
        connect(optimizer, known, group)

    return noted


def _held_by_others(matrices: Sequence[Shard]) -> Any:
    """Return what stands for a gather of the fragments of all ranks: those that this rank has not are of the next one.

    Which rank works on which matrix, and in how many rounds, follows from the shapes of all, and is as in the job.
    """

    def held(exchange: MatrixExchange, fragments: Sequence[Fragment]) -> list[list[Fragment]]:
        every: list[list[Fragment]] = [[] for _ in range(exchange.size)]
        rank = 0 if exchange.group is None else dist.get_rank(exchange.group)
        every[rank] = list(fragments)
        others = every[(rank + 1) % exchange.size]
        here = {(fragment.matrix, fragment.part.pieces): fragment for fragment in fragments}
        for shard in matrices:
            for whole in fragments_of(shard, start=0, length=prod(shard.shape), tensor=0, offset=0):
                mine = here.get((whole.matrix, whole.part.pieces))
                bounds = [0, whole.length] if mine is None else [0, mine.start, mine.start + mine.length, whole.length]
                for start, end in zip(bounds[::2], bounds[1::2], strict=True):
                    if end > start:
                        others.append(replace(whole, start=start, length=end - start))
        return every

    return held
