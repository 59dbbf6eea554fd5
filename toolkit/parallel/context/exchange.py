"""How context-parallel ranks see each other's keys and values, and get the gradients of their own back.

`gather`: keys and values of the whole sequence on every rank while a layer computes; backward gathers again, and a
reduce-scatter sums the gradients (Grattafiori et al. 2024, The Llama 3 Herd of Models, section 3.3.2). `ring`: they
travel from rank to rank, those of one rank at a time, sent while the block at hand is computed, and in the backward
pass their gradients travel with them (Liu et al. 2023, Ring Attention with Blockwise Transformers).

Dims: b samples, g key-value heads, s positions, c ranks, n = s/c positions of a rank, d size of a head.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from toolkit.config.context_exchange import ExchangeKind
from toolkit.parallel.context.sequence import SequenceSlice

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class KeyValueBlock:
    """Keys and values [b, g, k, d] at a run of positions of the sequence."""

    positions: range
    key: Tensor
    value: Tensor


Gradients = Callable[[list[KeyValueBlock]], list[tuple[Tensor, Tensor]]]
"""Returns the parts of the gradients of the keys and values of blocks, in fp32 at least."""


def local_blocks(key: Tensor, value: Tensor, runs: tuple[range, ...]) -> list[KeyValueBlock]:
    """Return the runs of positions that a rank holds, as views of its keys and values [b, g, n, d]."""
    blocks = []
    start = 0
    for positions in runs:
        part = slice(start, start + len(positions))
        blocks.append(KeyValueBlock(positions=positions, key=key[:, :, part], value=value[:, :, part]))
        start += len(positions)
    return blocks


class NoExchange:
    """No exchange: the rank holds the whole sequence."""

    def blocks(self, key: Tensor, value: Tensor, sequence: SequenceSlice) -> Iterator[list[KeyValueBlock]]:
        """Yield the blocks of the sequence."""
        yield local_blocks(key, value, sequence.runs[0])

    def gradients(
        self, key: Tensor, value: Tensor, sequence: SequenceSlice, compute: Gradients
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of keys and values."""
        ((of_key, of_value),) = compute(local_blocks(key, value, sequence.runs[0]))
        return of_key.to(key.dtype), of_value.to(value.dtype)


class GatherExchange:
    """Keys and values of the whole sequence on each rank, for as long as a layer computes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def blocks(self, key: Tensor, value: Tensor, sequence: SequenceSlice) -> Iterator[list[KeyValueBlock]]:
        """Yield the whole sequence as one block, in its order."""
        gathers = [_Gather(key, self._group), _Gather(value, self._group)]
        # Values arrive while keys are put in order; what was gathered of keys is freed before values are copied.
        whole_key = gathers.pop(0).finish(sequence)
        whole_value = gathers.pop(0).finish(sequence)
        yield [KeyValueBlock(positions=range(sequence.length), key=whole_key, value=whole_value)]

    def gradients(
        self, key: Tensor, value: Tensor, sequence: SequenceSlice, compute: Gradients
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values, summed over the queries of all ranks."""
        ((of_key, of_value),) = compute(next(self.blocks(key, value, sequence)))
        return self._scattered(of_key.to(key.dtype), sequence), self._scattered(of_value.to(value.dtype), sequence)

    def _scattered(self, whole: Tensor, sequence: SequenceSlice) -> Tensor:
        """[b, g, s, d] -> [b, g, n, d], summed over the ranks."""
        every = torch.stack(
            [torch.cat([whole[:, :, run.start : run.stop] for run in runs], dim=2) for runs in sequence.runs]
        )
        local = every.new_empty(every.shape[1:])
        dist.reduce_scatter_tensor(local, every.flatten(0, 1), group=self._group)
        return local


class _Gather:
    """An all-gather that has begun: [b, g, n, d] of each rank -> [b, g, s, d], in the order of the sequence."""

    def __init__(self, local: Tensor, group: dist.ProcessGroup) -> None:
        self._local = local.contiguous()
        self._every = local.new_empty((group.size(), *local.shape))
        self._work = dist.all_gather_into_tensor(self._every.flatten(0, 1), self._local, group=group, async_op=True)

    def finish(self, sequence: SequenceSlice) -> Tensor:
        """Wait, and return the whole."""
        self._work.wait()
        return _in_order(self._every, sequence)


def _in_order(every: Tensor, sequence: SequenceSlice) -> Tensor:
    """The parts of all ranks [c, b, g, n, d] in the order of the sequence, [b, g, s, d]."""
    parts: dict[int, Tensor] = {}
    for theirs, runs in zip(every, sequence.runs, strict=True):
        pieces = theirs.split([len(run) for run in runs], dim=2)
        parts |= {run.start: piece for run, piece in zip(runs, pieces, strict=True)}
    return torch.cat([parts[start] for start in sorted(parts)], dim=2)


class RingExchange:
    """Keys and values travel from each rank to the next; a rank has those of one other rank at a time."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank = group.rank()
        self._ranks = group.size()

    def blocks(self, key: Tensor, value: Tensor, sequence: SequenceSlice) -> Iterator[list[KeyValueBlock]]:
        """Yield the blocks of one rank after the other, from this rank's own on backwards."""
        held = [key.contiguous(), value.contiguous()]
        for step in range(self._ranks):
            transfer = self._send(held) if step < self._ranks - 1 else None
            yield local_blocks(held[0], held[1], sequence.runs[self._owner(step)])
            if transfer is not None:
                held = transfer.finish()

    def gradients(
        self, key: Tensor, value: Tensor, sequence: SequenceSlice, compute: Gradients
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values. Those of others travel on until they are home."""
        local: list[Tensor] = []
        traveling: _RingTransfer | None = None
        for step, blocks in enumerate(self.blocks(key, value, sequence)):
            parts = compute(blocks)
            here = [torch.cat(each, dim=2) for each in zip(*parts, strict=True)]
            if step == 0:
                local = here
                continue
            if traveling is not None:
                here = [mine.add_(theirs) for mine, theirs in zip(here, traveling.finish(), strict=True)]
            traveling = self._send([each.to(key.dtype) for each in here])
        assert traveling is not None
        of_key, of_value = (mine.add_(theirs) for mine, theirs in zip(local, traveling.finish(), strict=True))
        return of_key.to(key.dtype), of_value.to(value.dtype)

    def _owner(self, step: int) -> int:
        return (self._rank - step) % self._ranks

    def _send(self, tensors: list[Tensor]) -> "_RingTransfer":
        following = dist.get_global_rank(self._group, (self._rank + 1) % self._ranks)
        previous = dist.get_global_rank(self._group, (self._rank - 1) % self._ranks)
        received = [torch.empty_like(each) for each in tensors]
        sends = [dist.P2POp(dist.isend, each, following, self._group) for each in tensors]
        receives = [dist.P2POp(dist.irecv, each, previous, self._group) for each in received]
        return _RingTransfer(dist.batch_isend_irecv([*sends, *receives]), tensors, received)


class _RingTransfer:
    """Tensors on their way to the next rank, and those that arrive from the one before."""

    def __init__(self, works: list[dist.Work], sent: list[Tensor], received: list[Tensor]) -> None:
        self._works = works
        self._sent = sent  # they must live until they are sent
        self._received = received

    def finish(self) -> list[Tensor]:
        """Wait, and return what has arrived."""
        for work in self._works:
            work.wait()
        return self._received


Exchange = NoExchange | GatherExchange | RingExchange


def make_exchange(group: dist.ProcessGroup | None, chosen: ExchangeKind) -> Exchange:
    """Return the exchange of the ranks of a group, which share each sequence; None: there is no other rank."""
    if group is None or group.size() == 1:
        return NoExchange()
    return GatherExchange(group) if chosen == "gather" else RingExchange(group)
