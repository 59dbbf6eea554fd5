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
from toolkit.parallel.context.kernels import exact
from toolkit.parallel.context.sequence import SequenceSlice

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class KeyValues:
    """Keys and values [b, g, k, d] at runs of positions, one run after the other, or their gradients."""

    runs: tuple[range, ...]
    key: Tensor
    value: Tensor

    def blocks(self) -> Iterator["KeyValues"]:
        """Yield views of one run each."""
        start = 0
        for run in self.runs:
            part = slice(start, start + len(run))
            yield KeyValues(runs=(run,), key=self.key[:, :, part], value=self.value[:, :, part])
            start += len(run)

    def zero_sums(self) -> "KeyValues":
        """Return zeros of the same shape, in fp32 at least, to which gradients are added."""
        key, value = (torch.zeros_like(each, dtype=exact(each)) for each in (self.key, self.value))
        return KeyValues(runs=self.runs, key=key, value=value)


Gradients = Callable[[KeyValues], KeyValues]
"""Returns the gradients of keys and values from the queries of this rank, in fp32 at least."""


class NoExchange:
    """No exchange: the rank holds the whole sequence."""

    def parts(self, key: Tensor, value: Tensor, sequence: SequenceSlice) -> Iterator[KeyValues]:
        """Yield the keys and values of the sequence."""
        yield KeyValues(runs=sequence.runs[0], key=key, value=value)

    def gradients(
        self, key: Tensor, value: Tensor, sequence: SequenceSlice, compute: Gradients
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of keys and values."""
        computed = compute(KeyValues(runs=sequence.runs[0], key=key, value=value))
        return computed.key.to(key.dtype), computed.value.to(value.dtype)


class GatherExchange:
    """Keys and values of the whole sequence on each rank, for as long as a layer computes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def parts(self, key: Tensor, value: Tensor, sequence: SequenceSlice) -> Iterator[KeyValues]:
        """Yield the keys and values of the whole sequence at once, in its order."""
        gathers = [_Gather(key, self._group), _Gather(value, self._group)]
        # Values arrive while keys are put in order; what was gathered of keys is freed before values are copied.
        whole_key = gathers.pop(0).finish(sequence)
        whole_value = gathers.pop(0).finish(sequence)
        yield KeyValues(runs=(range(sequence.length),), key=whole_key, value=whole_value)

    def gradients(
        self, key: Tensor, value: Tensor, sequence: SequenceSlice, compute: Gradients
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values, summed over the queries of all ranks."""
        computed = compute(next(self.parts(key, value, sequence)))
        of_key = self._scattered(computed.key, key, sequence)
        return of_key, self._scattered(computed.value, value, sequence)

    def _scattered(self, whole: Tensor, like: Tensor, sequence: SequenceSlice) -> Tensor:
        """[b, g, s, d] in fp32 -> [b, g, n, d], summed over the ranks in the dtype of `like`, which has this shape."""
        every = like.new_empty((len(sequence.runs), *like.shape))
        for theirs, runs in zip(every, sequence.runs, strict=True):
            pieces = theirs.split([len(run) for run in runs], dim=2)
            for piece, run in zip(pieces, runs, strict=True):
                piece.copy_(whole[:, :, run.start : run.stop])
        local = every.new_empty(like.shape)
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

    def parts(self, key: Tensor, value: Tensor, sequence: SequenceSlice) -> Iterator[KeyValues]:
        """Yield the keys and values of one rank after the other, from this rank's own on backwards."""
        held = [key.contiguous(), value.contiguous()]
        for step in range(self._ranks):
            transfer = self._send(held) if step < self._ranks - 1 else None
            yield KeyValues(runs=sequence.runs[self._owner(step)], key=held[0], value=held[1])
            if transfer is not None:
                held = transfer.finish()

    def gradients(
        self, key: Tensor, value: Tensor, sequence: SequenceSlice, compute: Gradients
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values. Those of others travel on until they are home."""
        local: KeyValues | None = None
        traveling: _RingTransfer | None = None
        for held in self.parts(key, value, sequence):
            here = compute(held)
            if local is None:
                local = here
                continue
            if traveling is not None:
                _add(here, traveling.finish())
                traveling = None  # so that what was sent is freed before more is
            traveling = self._send([here.key.to(key.dtype), here.value.to(value.dtype)])
            del here, held  # neither must live while those of the next rank arrive
        assert local is not None
        assert traveling is not None
        _add(local, traveling.finish())
        return local.key.to(key.dtype), local.value.to(value.dtype)

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
        """Wait, free what was sent, and return what has arrived."""
        for work in self._works:
            work.wait()
        self._sent = []
        return self._received


def _add(sums: KeyValues, of_others: list[Tensor]) -> None:
    """Add the gradients of keys and values that another rank has sent."""
    sums.key.add_(of_others[0])
    sums.value.add_(of_others[1])


Exchange = NoExchange | GatherExchange | RingExchange


def make_exchange(group: dist.ProcessGroup | None, chosen: ExchangeKind) -> Exchange:
    """Return the exchange of the ranks of a group, which share each sequence; None: there is no other rank."""
    if group is None or group.size() == 1:
        return NoExchange()
    return GatherExchange(group) if chosen == "gather" else RingExchange(group)
