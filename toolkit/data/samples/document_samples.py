"""DocumentSamples: rows of whole chats, or prompts with completions, in which only the trained tokens are targets.

A document of n tokens takes n - 1 places of a row: its last token is a label and no input. Documents that are longer
than seq_len + 1 tokens are truncated, dropped or split into pieces; pieces without a target are left out.

`packed`: the pieces of an epoch, in the order of its permutation, are put into rows one after the other; a piece that
does not fit begins the next row. How many rows that makes differs from epoch to epoch, so the rows of epoch e begin
after those of all epochs before. `padded`: a row has one piece.
"""

import copy
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import override

from toolkit.data.permutation import permute
from toolkit.data.samples.samples import Samples
from toolkit.data.tokens.token_cache import Split, TokenCorpus
from toolkit.errors import DataError
from toolkit.parallel.loss import IGNORE

Overlong = Literal["truncate", "drop", "split"]
_OUTCOMES = {"truncate": "truncated", "drop": "left out", "split": "split"}
_EPOCHS_KEPT = 2
_EPOCHS_COUNTED = 64
"""Epochs whose rows are counted; more are taken to be as long as the first one."""


class Epoch(NamedTuple):
    """The rows of an epoch."""

    first_row: int
    """Rows of all epochs before it."""
    pieces: NDArray[np.int64]
    """Numbers of the pieces of documents, in the order of the epoch."""
    starts: NDArray[np.int64]
    """Index among the pieces at which each row begins, and at which the last one ends."""

    @property
    def end(self) -> int:
        return self.first_row + len(self.starts) - 1


class DocumentSamples(Samples):
    """The samples of one split. Row i of the run is sample i; the rows of later epochs follow."""

    def __init__(
        self,
        corpus: TokenCorpus,
        *,
        seq_len: int,
        packing: Literal["packed", "padded"],
        overlong: Overlong,
        split: Split,
        shuffled: bool = True,
        seed: int,
        global_batch_size: int,
    ) -> None:
        self._open(corpus, seq_len, split, seed, global_batch_size, shuffled=shuffled)
        self._trained = corpus.trained(split)
        self._document_masking = self.has_positions = packing == "packed"
        self.has_padding = True
        self._overlong = overlong
        self._offsets = np.asarray(corpus.document_offsets(split))
        self._choose_pieces(self._offsets)
        if not len(self._begins):
            reason = f"no document of the {split} split has a token to train on in its first {seq_len + 1:,} tokens"
            advice = "raise data.eval_fraction" if split == "eval" else "use other rows"
            raise DataError.of("data.seq_len", seq_len, reason, "raise data.seq_len", advice)
        self._lock = Lock()  # the prefetching thread reads samples while the main one counts targets
        self._epochs: dict[int, Epoch] = {}
        self._first_rows = [0]
        first = self._epoch(0)
        self._count = first.end
        self._filled = float(self._lengths.sum() / (self._count * seq_len))

    def _choose_pieces(self, offsets: NDArray[np.int64]) -> None:
        """Find where each piece begins, how many places it takes and how many targets it has."""
        begins = offsets[:-1]
        places = np.maximum(np.diff(offsets) - 1, 0)
        is_long = places > self.seq_len
        self.overlong_documents = int(is_long.sum())
        if self._overlong == "drop":
            begins = begins[~is_long]
            places = places[~is_long]
        counts = -(-places // self.seq_len) if self._overlong == "split" else np.minimum(places, 1)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its document
        begins = np.repeat(begins, counts) + number * self.seq_len
        lengths = np.minimum(np.repeat(places, counts) - number * self.seq_len, self.seq_len)
        pairs = zip(begins.tolist(), lengths.tolist(), strict=True)
        targets = [np.count_nonzero(self._trained[begin + 1 : begin + 1 + length]) for begin, length in pairs]
        self._targets = np.array(targets, dtype=np.int64)
        has_targets = self._targets > 0
        self.pieces_without_targets = int((~has_targets).sum())
        self._begins = begins[has_targets]
        self._lengths = lengths[has_targets]
        self._targets = self._targets[has_targets]

    @override
    def summary(self) -> str:
        documents = f"{self.overlong_documents:,} longer than {self.seq_len + 1:,} tokens {_OUTCOMES[self._overlong]}"
        without = f", {self.pieces_without_targets:,} without a target left out" * (self.pieces_without_targets > 0)
        return f"{len(self):,} an epoch, {self._filled:.1%} filled; documents: {documents}{without}"

    @override
    def count_of(self, epochs: float) -> int:
        whole = min(int(epochs), _EPOCHS_COUNTED)
        with self._lock:
            for number in range(len(self._first_rows) - 1, whole):
                self._epoch(number)
            return self._first_rows[whole] + round((epochs - whole) * self._count)

    @override
    def tokens(self, index: int, held: Sequence[range] | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        input_ids, labels = self._empty(held)
        for first, begin, length in self._row(index):
            for place, positions in self._parts(held, range(first, first + length)):
                start = begin + positions.start - first
                stop = start + len(positions)
                window = self._tokens[start : stop + 1].astype(np.int64)
                input_ids[place : place + len(positions)] = window[:-1]
                is_target = self._trained[start + 1 : stop + 1] > 0
                labels[place : place + len(positions)] = np.where(is_target, window[1:], IGNORE)
        return input_ids, labels

    @override
    def document_starts(self, index: int) -> tuple[int, ...]:
        return tuple(place for place, _, _ in self._row(index)) if self._document_masking else (0,)

    @override
    def position_ids(self, index: int) -> NDArray[np.int64]:
        """Return the position of each token in its document; the padding continues the last one, [s]."""
        positions = np.arange(self.seq_len, dtype=np.int64)
        if self._document_masking:
            for place, _, _ in self._row(index):
                positions[place:] = np.arange(self.seq_len - place)
        return positions

    @override
    def in_order(self) -> Self:
        ordered = copy.copy(self)
        ordered._shuffled = False
        ordered._lock = Lock()
        ordered._epochs = {}
        ordered._first_rows = [0]
        ordered._count = ordered._epoch(0).end
        return ordered

    @override
    def target_places(self, index: int) -> NDArray[np.int64]:
        places = np.full(self.seq_len, -1, dtype=np.int64)
        for place, begin, length in self._row(index):
            places[place : place + length] = np.arange(begin + 1, begin + 1 + length)
        return places

    @override
    def length(self, index: int) -> int:
        return int(self._lengths[self._pieces(index)].sum())

    @override
    def sample_ids(self, step: int, positions: ArrayLike) -> NDArray[np.int64]:
        rows = np.int64(step) * self.global_batch_size + np.asarray(positions, dtype=np.int64)
        return rows if self._shuffled else rows % self._count

    @override
    def target_count(self, step: int, positions: ArrayLike) -> int:
        rows = np.atleast_1d(self.sample_ids(step, positions)).tolist()
        return sum(int(self._targets[self._pieces(row)].sum()) for row in rows)

    def _row(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield (place in the row, start in the stream, places that it takes) of each piece of a row."""
        pieces = self._pieces(index)
        lengths = self._lengths[pieces]
        places = np.cumsum(lengths) - lengths
        yield from zip(places.tolist(), self._begins[pieces].tolist(), lengths.tolist(), strict=True)

    def _pieces(self, index: int) -> NDArray[np.int64]:
        with self._lock:
            number = int(np.searchsorted(self._first_rows, index, side="right")) - 1
            while (epoch := self._epoch(number)).end <= index:
                number += 1
        row = index - epoch.first_row
        return epoch.pieces[epoch.starts[row] : epoch.starts[row + 1]]

    def _epoch(self, number: int) -> Epoch:
        """Pack an epoch. Those before it have been: their rows come first."""
        if number not in self._epochs:
            size = len(self._begins)
            pieces = np.arange(size, dtype=np.int64)
            if self._shuffled:
                pieces = permute(pieces, np.full(size, number, dtype=np.int64), size=size, seed=self._seed)
            starts = self._pack(self._lengths[pieces]) if self._document_masking else np.arange(size + 1)
            epoch = Epoch(self._first_rows[number], pieces, starts)
            if number + 1 == len(self._first_rows):
                self._first_rows.append(epoch.end)
            if len(self._epochs) == _EPOCHS_KEPT:
                del self._epochs[min(self._epochs)]
            self._epochs[number] = epoch
        return self._epochs[number]

    def _pack(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Fill rows one after the other; return where each begins among the pieces, and where the last one ends."""
        ends = np.cumsum(lengths)
        starts = [0]
        used = 0
        while starts[-1] < len(ends):
            starts.append(int(np.searchsorted(ends, used + self.seq_len, side="right")))
            used = int(ends[starts[-1] - 1])
        return np.array(starts, dtype=np.int64)
