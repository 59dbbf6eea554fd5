"""Which positions of a micro-batch's sequences a context-parallel rank holds, and what its queries see.

With c ranks a sequence has 2c equal chunks, and rank r holds chunks r and 2c-1-r (zigzag, as in Llama 3, Grattafiori et
al. 2024, section 3.3.2): an early chunk sees little and a late one much, so that every rank has the same causal work.
Nothing here has s x s elements: what is visible follows from positions, and a mask exists at most for a tile.

Dims: b samples, s positions of a sequence, c ranks that share it, n = s/c positions on a rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

TILE = 512
"""Queries of a tile where a sliding window cuts through it: its mask has TILE x (TILE + window) elements."""


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
        ends = (min(keys, i + self.offset + 1) for i in range(queries))
        return sum(max(0, end - max(0, i + self.offset + 1 + first)) for i, end in enumerate(ends))


def chunks_of(rank: int, ranks: int, length: int) -> list[range]:
    """Return the positions of a rank, in its order: two chunks of the sequence, or all of it for one rank."""
    if ranks == 1:
        return [range(length)]
    size = length // (2 * ranks)
    return [range(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * ranks - 1 - rank)]


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

    def positions(self) -> list[int]:
        """Return the positions in the sequence that this rank holds, in its order, n of them."""
        return [position for chunk in chunks_of(self.rank, self.ranks, self.length) for position in chunk]

    def tiles(self, keys: range, *, window: int | None = None, chunk: int | None = None) -> list[Tile]:
        """Return what this rank's queries see of the keys at these positions, a run that chunks do not cut.

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
                for held in chunks_of(self.rank, self.ranks, self.length):
                    queries = _common(held, document)
                    local = before - held.start
                    before += len(held)
                    if queries:
                        yield from _tiles_of(queries, _common(keys, document), window, rows, local, keys.start)


def _documents(starts: Sequence[int], length: int, chunk: int | None) -> Iterator[range]:
    """Yield the runs of positions outside of which nothing is seen: documents, and the chunks of chunked attention."""
    for start, stop in zip(starts, (*starts[1:], length), strict=True):
        for first in range(start, stop, chunk or length):
            yield range(first, min(stop, first + (chunk or length)))


def _common(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


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
            own = range(later.start, queries.stop)
            yield tile(own, later, offset=0)
        return
    for first in range(queries.start, queries.stop, TILE):
        # Each query of a tile sees a key, so that no row of it is empty.
        part = range(max(first, seen.start), min(first + TILE, queries.stop, seen.stop - 1 + window))
        visible = _common(seen, range(part.start - window + 1, part.stop)) if part else range(0)
        if not visible:
            continue
        is_whole = visible.stop <= part.start + 1 and visible.start > part.stop - 1 - window
        yield tile(part, visible) if is_whole else tile(part, visible, part.start - visible.start, window)
