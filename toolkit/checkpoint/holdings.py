"""What the ranks hold of a checkpoint's tensors, and on which way each tensor comes together where it is written.

A rank holds runs of elements: of a parameter that ZeRO has cut, of a tensor-parallel share, or of all there is. Which
ones is known before any value is looked at, and stays as it is for a whole run. So every rank tells once, all compute
the same routes, and a save moves each byte at most once, straight to the rank that writes it. What a rank writes and
holds itself does not move at all.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from toolkit.checkpoint.header import TensorSpec
from toolkit.checkpoint.plan import PlannedFile
from toolkit.parallel.shard import Shard

BUCKET_BYTES = 8 * 2**20
"""What comes together on a rank at once, unless a tensor of which ranks hold columns is larger."""
BYTES_OF_EACH = 16 * 2**10
"""Among many ranks a bucket is larger: as much as this from each."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Elements [start, start + length) of a flattened part of a tensor, on some rank."""

    shard: Shard
    """Which part of which tensor."""
    start: int
    length: int
    rank_of_copies: int = 0
    """Of several ranks' copies of a tensor only those with the lowest count: its first pipeline stage's."""


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A run of elements that one rank gives and one takes, who may be the same."""

    kind: str
    spec: TensorSpec
    shard: Shard
    start: int
    length: int
    """As of Held."""
    source: int
    target: int
    index: int
    """Which of the source's holdings of this kind it comes from."""
    offset: int
    """Where it begins in that."""

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.length * self.spec.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A tensor that this rank writes, or a run of one: others follow in the model's order."""

    kind: str
    spec: TensorSpec
    legs: tuple[Leg, ...]


@dataclass(kw_only=True)
class Round:
    """What one rank gives, takes and then writes at once."""

    gives: dict[int, list[Leg]] = field(default_factory=dict)
    takes: dict[int, list[Leg]] = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)

    def legs_from(self, rank: int) -> Iterable[Leg]:
        """All legs of its own arrivals that begin on `rank`."""
        return (leg for arrival in self.arrivals for leg in arrival.legs if leg.source == rank)


def local_shape(shard: Shard) -> tuple[int, ...]:
    """Of the part that a shard describes."""
    if shard.dim is None:
        return shard.shape
    width = sum(length for _, length in shard.pieces) + shard.padding
    return (*shard.shape[: shard.dim], width, *shard.shape[shard.dim + 1 :])


def plan_rounds(
    files: Sequence[PlannedFile],
    specs: Mapping[str, Sequence[TensorSpec]],
    held: Mapping[str, Sequence[Sequence[Held]]],
    *,
    rank: int,
    bucket_bytes: int | None = None,
) -> list[Round]:
    """The rounds of `rank`. `held`: for each kind what every rank holds. All ranks must plan from the same.

    Raises ValueError where nobody holds some element.
    """
    writers = {(file.kind, spec.name): file.rank for file in files for spec in file.specs}
    size = max((len(ranks) for ranks in held.values()), default=1)
    bucket_bytes = bucket_bytes or max(BUCKET_BYTES, BYTES_OF_EACH * size)
    sent, arriving = [0] * size, [0] * size
    rounds = [Round()]
    for kind, of_kind in specs.items():
        offers = _offers(held[kind])
        for spec in of_kind:
            writer = writers[kind, spec.name]
            for legs in _runs(_legs(kind, spec, offers.get(spec.name, []), writer, sent), bucket_bytes):
                nbytes = sum(leg.nbytes for leg in legs)
                if arriving[writer] and arriving[writer] + nbytes > bucket_bytes:
                    rounds.append(Round())
                    arriving = [0] * size
                arriving[writer] += nbytes
                _enter(rounds[-1], Arrival(kind=kind, spec=spec, legs=tuple(legs)), writer, rank)
    return [one for one in rounds if one.arrivals or one.gives]


def _enter(one: Round, arrival: Arrival, writer: int, rank: int) -> None:
    """What there is for `rank` to do in a round so that `arrival` comes together."""
    if rank == writer:
        one.arrivals.append(arrival)
    for leg in arrival.legs:
        if rank == leg.source != writer:
            one.gives.setdefault(writer, []).append(leg)
        elif rank == writer != leg.source:
            one.takes.setdefault(leg.source, []).append(leg)


def _runs(legs: list[Leg], bucket_bytes: int) -> list[list[Leg]]:
    """Parts of a tensor that can be written one after the other. What ranks hold columns of is written at once."""
    if not legs or legs[0].shard.dim is not None:
        return [legs]
    runs = []
    for leg in legs:
        most = max(1, bucket_bytes // leg.spec.dtype.itemsize)
        for first in range(0, leg.length, most):
            length = min(most, leg.length - first)
            runs.append([replace(leg, start=leg.start + first, offset=leg.offset + first, length=length)])
    return runs


_Offer = tuple[int, int, Held]
"""(rank, which of its holdings, holding)"""


def _offers(held: Sequence[Sequence[Held]]) -> dict[str, list[_Offer]]:
    found: dict[str, list[_Offer]] = {}
    for rank, of_rank in enumerate(held):
        for index, one in enumerate(of_rank):
            found.setdefault(one.shard.name, []).append((rank, index, one))
    return found


def _legs(kind: str, spec: TensorSpec, offers: Sequence[_Offer], writer: int, sent: list[int]) -> list[Leg]:
    first = min((held.rank_of_copies for _, _, held in offers), default=0)
    parts: dict[object, list[_Offer]] = {}
    for offer in offers:
        shard = offer[2].shard
        if shard.shape != spec.shape:
            raise ValueError(f"{kind}: {spec.name} is held as {list(shard.shape)}, where {list(spec.shape)} is due")
        if offer[2].rank_of_copies == first:
            parts.setdefault((shard.dim, shard.pieces, shard.padding), []).append(offer)
    legs = [leg for part in parts.values() for leg in _cover(kind, spec, part, writer, sent)]
    wide = {tuple(leg.shard.pieces): leg.shard.dim for leg in legs if leg.shard.dim is not None}
    covered = sum(length for pieces in wide for _, length in pieces)
    if spec.nbytes and (not legs or any(covered != spec.shape[dim] for dim in wide.values())):
        raise ValueError(f"{kind}: no rank holds all of {spec.name}, or several overlap")
    return legs


def _cover(kind: str, spec: TensorSpec, offers: Sequence[_Offer], writer: int, sent: list[int]) -> list[Leg]:
    """Runs that follow each other. Of several ranks that could give one it is the writer, or who has given least."""
    shard = offers[0][2].shard
    count = math.prod(local_shape(shard))
    beginning: dict[int, list[_Offer]] = {}
    for offer in offers:
        beginning.setdefault(offer[2].start, []).append(offer)
    legs: list[Leg] = []
    position = 0
    while position < count:
        here = beginning.get(position) or [
            offer for offer in offers if offer[2].start <= position < offer[2].start + offer[2].length
        ]
        if not here:
            raise ValueError(f"{kind}: no rank holds element {position} of {spec.name}")
        rank, index, held = min(here, key=lambda offer: (offer[0] != writer, sent[offer[0]], offer[0]))
        end = min(held.start + held.length, count)
        leg = Leg(
            kind=kind,
            spec=spec,
            shard=held.shard,
            start=position,
            length=end - position,
            source=rank,
            target=writer,
            index=index,
            offset=position - held.start,
        )
        legs.append(leg)
        sent[rank] += 0 if rank == writer else leg.nbytes
        position = end
    return legs
