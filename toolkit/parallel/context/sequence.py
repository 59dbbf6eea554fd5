"""Which positions of a micro-batch's sequences a context-parallel rank holds, and what its queries see.

With c ranks a sequence has 2c equal chunks, and rank r holds chunks r and 2c-1-r (zigzag, as in Llama 3, Grattafiori et
al. 2024, section 3.3.2): an early chunk sees little and a late one much, so that every rank has the same causal work.
Where documents do not see each other, work follows from where they begin, and ranks hold more and smaller pieces.
Nothing here has s x s elements: what is visible follows from positions, and a mask exists at most for a tile.

Dims: b samples, s positions of a sequence, c ranks that share it, n = s/c positions on a rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

TILE = 512
"""Queries of a tile where a sliding window cuts through it: its mask has TILE x (TILE + window) elements."""
PIECES = 16
"""Pieces of a sequence that a rank holds where documents do not see each other; fewer where they would not be equal."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Queries that see keys: slices of the samples, of a rank's queries, and of the keys at hand.

    `offset`: query i sees key j where j <= i + offset, and, with a `window`, j > i + offset - window, i and j counted
    from the start of the tile; None where each query sees each key.
    """

    rows: slice
    queries: slice
    keys: slice
    offset: int | None = None
    window: int | None = None

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, in one sample."""
        queries: int = self.queries.stop - self.queries.start
        keys: int = self.keys.stop - self.keys.start
        if self.offset is None:
            return queries * keys
        first = -self.window if self.window is not None else -keys - queries
        pairs = 0
        for query in range(queries):
            behind = query + self.offset + 1
            end = min(keys, behind)
            start = max(0, behind + first)
            pairs += max(0, end - start)
        return pairs

    def split_keys(self, most: int) -> Iterator["Tile"]:
        """Yield tiles of so many keys at most, of keys that each query sees; another tile as it is."""
        if self.offset is not None:
            yield self
            return
        for start in range(self.keys.start, self.keys.stop, most):
            yield replace(self, keys=slice(start, min(self.keys.stop, start + most)))


def zigzag(ranks: int, length: int) -> tuple[tuple[range, ...], ...]:
    """Return the positions of each rank: two chunks of the sequence, or all of it for one rank."""
    if ranks == 1:
        return ((range(length),),)
    size = length // (2 * ranks)
    chunks = [range(start, start + size) for start in range(0, length, size)]
    return tuple((chunks[rank], chunks[-1 - rank]) for rank in range(ranks))


def balanced(starts: Sequence[Sequence[int]], ranks: int, length: int) -> tuple[tuple[range, ...], ...]:
    """Return the positions of each rank, as many for each, such that documents give all of them the same work.

    Of equal pieces, the one with most pairs of a query and a key goes to the rank with least, as long as that has room
    (Graham 1969, Bounds on Multiprocessing Timing Anomalies). The same on every rank.
    """
    each = next(count for count in (PIECES, 8, 4, 2) if length % (ranks * count) == 0)
    size = length // (ranks * each)
    work = [0] * (ranks * each)
    for sample in starts:
        for document in _documents(sample, length, None):
            for piece in range(document.start // size, (document.stop - 1) // size + 1):
                held = _common(range(piece * size, (piece + 1) * size), document)
                work[piece] += len(held) * (held.start - document.start + 1 + held.stop - document.start) // 2
    loads = [0] * ranks
    taken: list[list[int]] = [[] for _ in range(ranks)]
    for piece in sorted(range(len(work)), key=lambda piece: -work[piece]):
        rank = min((rank for rank in range(ranks) if len(taken[rank]) < each), key=lambda rank: loads[rank])
        loads[rank] += work[piece]
        taken[rank].append(piece)
    return tuple(tuple(_runs(sorted(pieces), size)) for pieces in taken)


def _runs(pieces: list[int], size: int) -> Iterator[range]:
    """Yield the positions of pieces in order, those of neighbors together."""
    start = pieces[0] * size
    for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
        if following != piece + 1:
            yield range(start, (piece + 1) * size)
            start = 0 if following is None else following * size


@dataclass(frozen=True, kw_only=True)
class SequenceSlice:
    """A rank's part of the sequences of a micro-batch. `starts`: where documents begin, of each sample, the first at 0.

    Samples whose documents are at the same positions are computed together.
    """

    rank: int
    ranks: int
    length: int
    starts: tuple[tuple[int, ...], ...]
    _tiles: dict[object, list[Tile]] = field(default_factory=dict, compare=False)

    @cached_property
    def runs(self) -> tuple[tuple[range, ...], ...]:
        """The positions of each rank, in its order: zigzag, or balanced where samples have several documents."""
        if self.ranks == 1 or all(len(starts) == 1 for starts in self.starts):
            return zigzag(self.ranks, self.length)
        return balanced(self.starts, self.ranks, self.length)

    def positions(self) -> list[int]:
        """Return the positions in the sequence that this rank holds, in its order, n of them."""
        return [position for run in self.runs[self.rank] for position in run]

    def tiles(self, keys: range, *, window: int | None = None, chunk: int | None = None) -> list[Tile]:
        """Return what this rank's queries see of the keys at these positions: the whole sequence, or a run of a rank.

        `window`: a query sees as many keys, itself included. `chunk`: of chunked attention, a query sees its own chunk
        of a document alone (Llama 4).
        """
        asked = (keys, window, chunk)
        if asked not in self._tiles:
            self._tiles[asked] = list(self._find_tiles(keys, window, chunk))
        return self._tiles[asked]

    def _find_tiles(self, keys: range, window: int | None, chunk: int | None) -> Iterator[Tile]:
        alike = len(set(self.starts)) == 1
        for sample, starts in enumerate(self.starts[:1] if alike else self.starts):
            rows = slice(0, len(self.starts)) if alike else slice(sample, sample + 1)
            for document in _documents(starts, self.length, chunk):
                before = 0
                for held in self.runs[self.rank]:
                    queries = _common(held, document)
                    local = before - held.start
                    before += len(held)
                    if queries:
                        yield from _tiles_of(queries, _common(keys, document), window, rows, local, keys.start)


@dataclass(frozen=True, kw_only=True)
class SequenceShare:
    """What one of the ranks that share each sequence holds of it: `rank` of `ranks`, neighbors of which exchange heads.

    Each `heads` neighbors see the same part of a sequence in attention, and each of them holds an equal run of it.
    """

    rank: int
    ranks: int
    heads: int = 1
    length: int

    def sequence(self, starts: tuple[tuple[int, ...], ...]) -> SequenceSlice:
        """Return what attention sees on this rank, of samples with documents that begin there."""
        rank = self.rank // self.heads
        return SequenceSlice(rank=rank, ranks=self.ranks // self.heads, length=self.length, starts=starts)

    def held(self, sequence: SequenceSlice) -> tuple[range, ...]:
        """Return the positions that this rank holds, in its order."""
        size = self.length // self.ranks
        first = self.rank % self.heads * size
        held = []
        before = 0
        for run in sequence.runs[sequence.rank]:
            part = _common(range(before, before + len(run)), range(first, first + size))
            if part:
                held.append(range(run.start + part.start - before, run.start + part.stop - before))
            before += len(run)
        return tuple(held)


def _documents(starts: Sequence[int], length: int, chunk: int | None) -> Iterator[range]:
    """Yield the runs of positions outside of which nothing is seen: documents, and the chunks of chunked attention."""
    for start, stop in zip(starts, (*starts[1:], length), strict=True):
        for first in range(start, stop, chunk or length):
            yield range(first, min(stop, first + (chunk or length)))


def _common(first: range, second: range) -> range:
    start = max(first.start, second.start)
    return range(start, max(start, min(first.stop, second.stop)))


def _tiles_of(
    queries: range, keys: range, window: int | None, rows: slice, local: int, first_key: int
) -> Iterator[Tile]:
    """Yield the tiles of a run of queries over a run of keys of its document, both in positions of the sequence."""
    seen = range(keys.start, max(keys.start, min(keys.stop, queries.stop)))

    def tile(queries: range, keys: range, offset: int | None = None, window: int | None = None) -> Tile:
        return Tile(
            rows=rows,
            queries=slice(queries.start + local, queries.stop + local),
            keys=slice(keys.start - first_key, keys.stop - first_key),
            offset=offset,
            window=window,
        )

    if window is None or window >= queries.stop - seen.start:
        earlier = _common(seen, range(queries.start))
        if earlier:
            yield tile(queries, earlier)
        later = range(max(seen.start, queries.start), max(seen.stop, queries.start))
        if later and later.start < later.stop:
            # Queries before the first of these keys see none of them.
            from_later = range(later.start, queries.stop)
            yield tile(from_later, later, offset=0)
        return
    for first in range(queries.start, queries.stop, TILE):
        # Each query of a tile sees a key, so that no row of it is empty.
        part = range(max(first, seen.start), min(first + TILE, queries.stop, seen.stop - 1 + window))
        visible = _common(seen, range(part.start - window + 1, part.stop)) if part else range(0)
        if not visible:
            continue
        is_whole = visible.stop <= part.start + 1 and visible.start > part.stop - 1 - window
        yield tile(part, visible) if is_whole else tile(part, visible, part.start - visible.start, window)
