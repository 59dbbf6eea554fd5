"""Tensors that ranks hold in parts: each part goes straight from who holds it to who writes it.

In rounds of one bucket; while a round is written the next one is on its way.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from toolkit.checkpoint.header import TensorSpec
from toolkit.checkpoint.holdings import Arrival, Held, Leg, Round, local_shape, plan_rounds
from toolkit.checkpoint.host_copies import HostCopies
from toolkit.checkpoint.host_memory import host_memory
from toolkit.checkpoint.plan import PlannedFile
from toolkit.checkpoint.ranks import Ranks, Work
from toolkit.checkpoint.source import Own, Snapshot, Source

PACKED_BYTES = 2**20
"""Runs smaller than this travel together."""


@dataclass(frozen=True, kw_only=True)
class HeldGroup:
    """What this rank holds of the tensors of one kind. `values`: of the i-th of `held`, flat, of the spec's dtype."""

    kind: str
    specs: Sequence[TensorSpec]
    held: Sequence[Held]
    values: Callable[[int], torch.Tensor]


@dataclass(kw_only=True)
class HeldTensors(Source):
    """Tensors that come together only where they are written. What ranks hold must stay the same over its life."""

    groups: Sequence[HeldGroup]
    _planned: tuple[Sequence[PlannedFile], list[Round]] | None = field(default=None, init=False)

    @property
    def specs(self) -> list[tuple[str, Sequence[TensorSpec]]]:
        """See Source."""
        return [(group.kind, group.specs) for group in self.groups]

    def own(self, files: Sequence[PlannedFile], ranks: Ranks) -> Iterator[Own]:
        """See Source."""
        values = {group.kind: group.values for group in self.groups}

        def read(leg: Leg) -> torch.Tensor:
            return values[leg.kind](leg.index)[leg.offset : leg.offset + leg.length]

        return _exchanged(self._rounds(files, ranks), read, ranks)

    def snapshot(self, files: Sequence[PlannedFile], ranks: Ranks, copies: HostCopies) -> Snapshot:
        """See Source. Copies no more than this rank is to give, to others or to itself."""
        rounds = self._rounds(files, ranks)
        values = {group.kind: group.values for group in self.groups}
        given = [leg for one in rounds for legs in one.gives.values() for leg in legs]
        given += [leg for one in rounds for leg in one.legs_from(ranks.rank)]
        copies.clear(sum(leg.nbytes for leg in given), len(given))
        kept = {
            id(leg): copies.copy(values[leg.kind](leg.index)[leg.offset : leg.offset + leg.length]) for leg in given
        }
        return lambda ranks: _exchanged(rounds, lambda leg: kept[id(leg)], ranks)

    def _rounds(self, files: Sequence[PlannedFile], ranks: Ranks) -> list[Round]:
        if self._planned is None or self._planned[0] != files:
            of_ranks = ranks.gather({group.kind: list(group.held) for group in self.groups})
            held = {group.kind: [of_rank[group.kind] for of_rank in of_ranks] for group in self.groups}
            self._planned = files, plan_rounds(files, dict(self.specs), held, rank=ranks.rank)
        return self._planned[1]


Read = Callable[[Leg], torch.Tensor]


@dataclass(kw_only=True)
class _Travelling:
    """A round whose bytes are on their way."""

    one: Round
    work: list[Work]
    sent: list[torch.Tensor]
    """Held until they have gone."""
    received: dict[int, torch.Tensor]
    """Bytes of a leg, by its identity."""


def _exchanged(rounds: Sequence[Round], read: Read, ranks: Ranks) -> Iterator[Own]:
    if not rounds:
        return
    # Two rounds exist at a time, each in a memory of its own that the next but one uses again.
    memories = [_memory(rounds[first::2], ranks) for first in (0, 1)]
    ahead = _start(rounds[0], read, ranks, memories[0])
    for i in range(len(rounds)):
        now = ahead
        if i + 1 < len(rounds):
            ahead = _start(rounds[i + 1], read, ranks, memories[(i + 1) % 2])
        for work in now.work:
            work.wait()
        for arrival in now.one.arrivals:
            yield arrival.kind, arrival.spec.name, _assembled(arrival, now.received, read, ranks)


def _memory(rounds: Sequence[Round], ranks: Ranks) -> torch.Tensor:
    """Room for what the largest of these rounds takes."""
    nbytes = max((sum(leg.nbytes for legs in one.takes.values() for leg in legs) for one in rounds), default=0)
    if ranks.device.type == "cpu":
        return host_memory(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device=ranks.device)


def _start(one: Round, read: Read, ranks: Ranks, memory: torch.Tensor) -> _Travelling:
    sends: list[tuple[int, torch.Tensor]] = []
    receives: list[tuple[int, torch.Tensor]] = []
    received: dict[int, torch.Tensor] = {}
    for target, legs in one.gives.items():
        for message in _messages(legs):
            parts = [_bytes(read(leg)).to(ranks.device) for leg in message]
            sends.append((target, parts[0] if len(parts) == 1 else torch.cat(parts)))
    used = 0
    for source, legs in one.takes.items():
        for message in _messages(legs):
            sizes = [leg.nbytes for leg in message]
            buffer = memory[used : used + sum(sizes)]
            used += sum(sizes)
            receives.append((source, buffer))
            received.update(zip(map(id, message), torch.split(buffer, sizes), strict=True))
    work = ranks.transfer(sends, receives)
    return _Travelling(one=one, work=work, sent=[sent for _, sent in sends], received=received)


def _messages(legs: Sequence[Leg]) -> list[list[Leg]]:
    """Large ones alone, so that they need no copy; small ones packed. Both ends find the same."""
    small = [leg for leg in legs if leg.nbytes < PACKED_BYTES]
    return [*([small] if small else []), *([leg] for leg in legs if leg.nbytes >= PACKED_BYTES)]


def _assembled(
    arrival: Arrival, received: dict[int, torch.Tensor], read: Read, ranks: Ranks
) -> torch.Tensor | list[torch.Tensor]:
    parts = [received[id(leg)] if id(leg) in received else _bytes(read(leg)) for leg in arrival.legs]
    if not arrival.legs or arrival.legs[0].shard.dim is None:
        return parts
    spec = arrival.spec
    whole = torch.empty(spec.shape, dtype=spec.dtype, device=ranks.device)
    for leg, part in zip(arrival.legs, parts, strict=True):
        if leg.start == 0:
            shape = local_shape(leg.shard)
            local = torch.empty(shape, dtype=spec.dtype, device=ranks.device)
            flat = _bytes(local)
        begin = leg.start * spec.dtype.itemsize
        flat[begin : begin + leg.nbytes].copy_(part)
        if leg.start + leg.length == local.numel():
            leg.shard.put(local, whole)
    return whole


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.detach().contiguous().reshape(-1).view(torch.uint8)
