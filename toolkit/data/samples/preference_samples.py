"""PreferenceSamples: rows of whole pairs, or of completions with a label. Nothing of a pair is ever in two samples.

A pair has two sequences, each with its own prompt and positions from 0; packed documents do not attend to each other,
and neither do these. A sequence of n tokens takes n - 1 places: its last token is a label and no input. Where both take
more than seq_len, their ends are cut off: the shorter one keeps up to half of the places, the other what is left.

With `has_mismatched` (KTO) a completion comes with a second sequence: its prompt, and the completion of the document
before it in the text. It is that of TRL, whose batches shift completions by one, but the same in every batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from typing_extensions import override

from toolkit.data.samples.document_samples import DocumentSamples
from toolkit.data.samples.micro_batch import MicroBatch, Sequences
from toolkit.data.tokens.sequence_marks import BEGINS, BEGINS_DESIRABLE, TRAINED
from toolkit.data.tokens.token_cache import TokenCorpus
from toolkit.parallel.context.sequence import SequenceShare
from toolkit.parallel.loss import IGNORE

REFERENCE_BYTES = 16
"""Bytes of a pair or completion in the cache of a reference: two log-probabilities."""
_OUTCOMES = {"truncate": "truncated", "drop": "left out"}


class PreferenceSamples(DocumentSamples):
    """The samples of one split. A piece is a pair, or a completion.

    Dims: n pieces, 2 sequences of each, of which the second has no tokens where there is none.
    """

    reads_parts = False

    def __init__(
        self,
        corpus: TokenCorpus,
        *,
        packing: Literal["packed", "padded"],
        has_mismatched: bool = False,
        **fields: Any,
    ) -> None:
        self._has_mismatched = has_mismatched
        self.reference: NDArray[np.float64] | None = None
        """Log-probabilities of the reference model, [n, 2]."""
        super().__init__(corpus, packing=packing, **fields)
        self.has_positions = True

    @property
    def piece_count(self) -> int:
        """Number of pairs or completions that are read."""
        return len(self._begins)

    @property
    def identity(self) -> tuple[object, ...]:
        """Say what decides the pieces and, in the order of the text, the rows that they are in."""
        return self.seq_len, self._overlong, self._has_mismatched, self._document_masking

    def first_pieces(self) -> NDArray[np.int64]:
        """Return the first piece of each row of samples `in_order`, and at last their number, [rows + 1]."""
        return self._epoch(0).starts

    @override
    def weights(self, index: int) -> None:
        """Return None: a pair or completion is weighed as a whole (`Sequences.weights`)."""

    @override
    def _choose_pieces(self, offsets: NDArray[np.int64]) -> None:
        """Find the parts of each sequence in the stream, what is cut off, and how many targets are left."""
        marks = np.asarray(self._trained)
        starts = np.flatnonzero(marks >= BEGINS)
        ends = np.append(starts[1:], offsets[-1])
        answers = self._first_targets(marks, starts, ends)
        is_pair = len(starts) == 2 * (len(offsets) - 1)
        self._is_pair = is_pair
        per_document = 2 if is_pair else 1
        # A sequence is a prompt from `starts` to `answers`, and an answer from there to `ends`, maybe of another row.
        prompts = np.stack([starts, answers], axis=-1).reshape(-1, per_document, 2)  # [n, 1 or 2, 2]
        completions = np.stack([answers, ends], axis=-1).reshape(-1, per_document, 2)
        if not is_pair and self._has_mismatched:
            prompts = np.repeat(prompts, 2, axis=1)
            completions = np.concatenate([completions, np.roll(completions, 1, axis=0)], axis=1)
        elif not is_pair:
            nothing = np.zeros_like(prompts)
            prompts = np.concatenate([prompts, nothing], axis=1)
            completions = np.concatenate([completions, nothing], axis=1)
        sizes = np.diff(prompts, axis=-1)[..., 0] + np.diff(completions, axis=-1)[..., 0]  # [n, 2]
        places = np.maximum(sizes - 1, 0)
        is_long = places.sum(axis=1) > self.seq_len
        self.overlong_documents = int(is_long.sum())
        if self._overlong == "drop":
            prompts = prompts[~is_long]
            completions = completions[~is_long]
            places = places[~is_long]
            desirable = (marks[starts] == BEGINS_DESIRABLE).reshape(-1, per_document)[~is_long, 0]
        else:
            desirable = (marks[starts] == BEGINS_DESIRABLE).reshape(-1, per_document)[:, 0]
            places = _fitted(places, self.seq_len)
        parts = zip(prompts.reshape(-1, 2), completions.reshape(-1, 2), places.reshape(-1).tolist(), strict=True)
        counts = [self._count_targets(prompt, completion, length) for prompt, completion, length in parts]
        tokens = np.array(counts, dtype=np.int64).reshape(-1, 2)
        has_targets = (tokens > 0).all(axis=1) if is_pair else tokens[:, 0] > 0
        self.pieces_without_targets = int((~has_targets).sum())
        self._prompts = prompts[has_targets]
        self._completions = completions[has_targets]
        self._places = places[has_targets]
        self._tokens_of = tokens[has_targets]
        self._desirable = desirable[has_targets]
        self._begins = self._prompts[:, 0, 0]
        documents = np.searchsorted(offsets, self._begins, side="right") - 1
        self._piece_weights = np.ones(len(self._begins)) if self._row_weights is None else self._row_weights[documents]
        self._lengths = self._places.sum(axis=1)
        self._targets = self._tokens_of.sum(axis=1) if is_pair else self._tokens_of[:, 0]

    @staticmethod
    def _first_targets(
        marks: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return where the first target of each sequence is, or its end where it has none."""
        targets = np.append(np.flatnonzero(marks == TRAINED), len(marks))
        firsts: NDArray[np.int64] = np.minimum(targets[np.searchsorted(targets, starts)], ends)
        return firsts

    def _count_targets(self, prompt: NDArray[np.int64], completion: NDArray[np.int64], places: int) -> int:
        """Count the targets of a sequence whose first `places` + 1 tokens are read."""
        read = max(0, places + 1 - int(prompt[1] - prompt[0]))
        first = int(completion[0])
        marks = self._trained[first : min(first + read, int(completion[1]))]
        return int(np.count_nonzero(marks == TRAINED))

    @override
    def summary(self) -> str:
        pieces = "pair" if self._is_pair else "completion"
        pieces += "s" * (self.piece_count != 1)
        outcome = _OUTCOMES.get(self._overlong, self._overlong)
        longer = f"{self.overlong_documents:,} longer than {self.seq_len:,} tokens {outcome}"
        places = self._lengths.mean() if self.piece_count else 0.0
        text = f"{len(self):,} an epoch, {self._filled:.1%} filled; {self.piece_count:,} {pieces}: {longer}"
        text += f"; {places:,.0f} places each, {self.piece_count / max(1, len(self)):.1f} a sample"
        if self.pieces_without_targets:
            text += f", {self.pieces_without_targets:,} without a target left out"
        return text

    @override
    def tokens(self, index: int, held: Sequence[range] | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        assert held is None, "pairs are read whole"
        input_ids = np.full(self.seq_len, self._pad_id, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE, dtype=np.int64)
        for place, piece, side in self._sequences(index):
            length = int(self._places[piece, side])
            parts = (self._prompts[piece, side], self._completions[piece, side])
            ids = np.concatenate([self._tokens[first:end] for first, end in parts])[: length + 1].astype(np.int64)
            marks = np.concatenate([self._trained[first:end] for first, end in parts])[: length + 1]
            input_ids[place : place + length] = ids[:-1]
            labels[place : place + length] = np.where(marks[1:] == TRAINED, ids[1:], IGNORE)
        return input_ids, labels

    @override
    def position_ids(self, index: int) -> NDArray[np.int64]:
        positions = np.arange(self.seq_len, dtype=np.int64)
        for place, _, _ in self._sequences(index):
            positions[place:] = np.arange(self.seq_len - place)
        return positions

    @override
    def batch(
        self,
        step: int,
        places: Sequence[int] | NDArray[np.int64],
        *,
        dropout_seed: int = 0,
        share: SequenceShare | None = None,
    ) -> MicroBatch:
        plain = super().batch(step, places, dropout_seed=dropout_seed, share=share)
        indices = self.sample_ids(step, places).tolist()
        pieces = [self._pieces(index) for index in indices]
        joined = np.concatenate(pieces)
        numbers = np.full((len(indices), self.seq_len), 2 * len(joined), dtype=np.int64)
        before = 0
        for row, index in enumerate(indices):
            for count, (place, piece, side) in enumerate(self._sequences(index)):
                numbers[row, place : place + int(self._places[piece, side])] = 2 * before + count
            before += len(pieces[row])
        reference = np.zeros((len(joined), 2)) if self.reference is None else self.reference[joined]
        sequences = Sequences(
            numbers=torch.from_numpy(numbers),
            tokens=torch.from_numpy(self._tokens_of[joined]),
            reference=torch.from_numpy(reference),
            is_desirable=torch.from_numpy(self._desirable[joined]),
            is_counted=torch.ones(len(joined), dtype=torch.bool),
            weights=torch.from_numpy(self._piece_weights[joined].astype(np.float64)),
            rows=torch.from_numpy(np.repeat(np.arange(len(indices)), [len(part) for part in pieces])),
            pieces=torch.from_numpy(joined),
            chosen_token_share=self.chosen_token_share(step, np.arange(self.global_batch_size)),
        )
        return replace(plain, sequences=sequences)

    @override
    def loss_terms(self, step: int, positions: ArrayLike) -> int:
        rows = np.atleast_1d(self.sample_ids(step, positions)).tolist()
        return sum(len(self._pieces(row)) for row in rows)

    def chosen_token_share(self, step: int, positions: ArrayLike) -> float:
        """Divide the pairs at `positions` by the targets of their chosen completions."""
        rows = np.atleast_1d(self.sample_ids(step, positions)).tolist()
        pieces = np.concatenate([self._pieces(row) for row in rows])
        return len(pieces) / int(self._tokens_of[pieces, 0].sum())

    def _sequences(self, index: int) -> Iterator[tuple[int, int, int]]:
        """Yield (place in the row, piece, side) of each sequence of a row; two for each piece."""
        place = 0
        for piece in self._pieces(index).tolist():
            for side in (0, 1):
                yield place, piece, side
                place += int(self._places[piece, side])


def _fitted(places: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """Return how many places each sequence keeps, so that both of a piece take at most `seq_len`, [n, 2]."""
    half = seq_len // 2
    first = np.minimum(places[:, 0], np.maximum(half, seq_len - places[:, 1]))
    second = np.minimum(places[:, 1], seq_len - first)
    return np.stack([first, second], axis=-1)
