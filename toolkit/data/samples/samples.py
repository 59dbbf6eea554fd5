"""Samples: which tokens make a sample, and which samples make a global batch.

b = samples asked for, s = seq_len. Labels are the next token of each position, already shifted: the loss compares
logits[:, i] with labels[:, i], and ignores positions whose label is IGNORE.
"""

import copy
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from toolkit.data.permutation import permute
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.data.samples.teacher_table import TeacherTable
from toolkit.data.tokens.token_cache import Split, TokenCorpus
from toolkit.errors import DataError
from toolkit.parallel.context.sequence import SequenceShare
from toolkit.parallel.loss import IGNORE

_ORDERED = 4096
"""Positions of the run whose samples are computed at once."""


class Samples:
    """The samples of one split.

    `packed`: sample i is the window of tokens [i*s, i*s + s], so that each token but the first is a target exactly once
    an epoch. What is left after the last whole window (fewer than s + 1 tokens) is not used.
    `packed` with `document_masking`: the same windows; positions start at 0 with each document (and with the window,
    where it begins inside a document), and the first token of a document is no target, because another document
    precedes it.
    `padded`: a sample has one document, or one window of a document that is longer than s + 1 tokens. Padding is on the
    right, where causal attention cannot see it, and its labels are ignored: no attention mask is needed.
    """

    has_positions: bool
    """Whether micro-batches have position_ids: where documents are masked, and where those of another text are."""
    has_padding: bool
    """Whether a sample may end in padding."""
    reads_parts = True
    """Whether `tokens` reads a part of a sample without reading the rest."""
    teacher: TeacherTable | None = None
    """What a teacher says in the place of each target."""

    def __init__(
        self,
        corpus: TokenCorpus,
        *,
        seq_len: int,
        packing: Literal["packed", "padded"],
        document_masking: bool = False,
        split: Split,
        shuffled: bool = True,
        seed: int,
        global_batch_size: int,
    ) -> None:
        self._open(corpus, seq_len, split, seed, global_batch_size, shuffled=shuffled)
        self._packed = packing != "padded"
        self.has_padding = packing == "padded"
        self._document_masking = self.has_positions = self._packed and document_masking
        self._offsets = corpus.document_offsets(split)
        if self._packed:
            self._count = max(0, len(self._tokens) - 1) // seq_len
        else:
            # A document of n tokens has n - 1 targets, in samples of at most seq_len.
            counts = -(-np.maximum(np.diff(self._offsets) - 1, 0) // seq_len)
            self._first_sample = np.concatenate([[0], np.cumsum(counts)])
            self._count = int(self._first_sample[-1])
        if not self._count:
            advice = "raise data.eval_fraction" if split == "eval" else "use more text"
            reason = f"the {split} split has {len(self._tokens):,} tokens, too few for one sample of {seq_len + 1:,}"
            raise DataError.of("data.seq_len", seq_len, reason, "lower data.seq_len", advice)

    def _open(
        self, corpus: TokenCorpus, seq_len: int, split: Split, seed: int, global_batch_size: int, *, shuffled: bool
    ) -> None:
        self.seq_len = seq_len
        self.global_batch_size = global_batch_size
        self._shuffled = shuffled and split == "train"
        self._seed = seed
        self._pad_id = corpus.eos_id
        self._vocab_size = corpus.tokenizer_vocab_size
        self._tokens = np.asarray(corpus.tokens(split))
        self._row_weights = corpus.weights(split)
        # Steps read positions that follow each other: their samples are computed together.
        self._ordered = lru_cache(maxsize=4)(self._order)
        self._starts_of = lru_cache(maxsize=256)(self._document_starts)  # for labels and for positions

    def summary(self) -> str:
        """Say what became of documents, for the banner; empty where every token has a place."""
        return ""

    def __len__(self) -> int:
        return self._count

    def count_of(self, epochs: float) -> int:
        """Count the samples of the first `epochs`."""
        return round(epochs * self._count)

    def tokens(self, index: int, held: Sequence[range] | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Read input_ids and labels of one sample, [s] each; of the positions `held` alone where these are given."""
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        start = index * self.seq_len
        targets = self.seq_len
        if not self._packed:
            start, targets = (int(array[0]) for array in self._locate(np.array([index])))
        input_ids, labels = self._empty(held)
        for place, positions in self._parts(held, range(targets)):
            window = self._tokens[start + positions.start : start + positions.stop + 1].astype(np.int64)
            input_ids[place : place + len(positions)] = window[:-1]
            labels[place : place + len(positions)] = window[1:]
            if self._document_masking:
                last = self._starts_of(start) - 1  # of each document but the one at the end
                last = last[(last >= positions.start) & (last < positions.stop)]
                labels[last - positions.start + place] = IGNORE
        return input_ids, labels

    def _empty(self, held: Sequence[range] | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return padding in the place of input_ids and labels."""
        size = self.seq_len if held is None else sum(map(len, held))
        return np.full(size, self._pad_id, dtype=np.int64), np.full(size, IGNORE, dtype=np.int64)

    def _parts(self, held: Sequence[range] | None, positions: range) -> Iterator[tuple[int, range]]:
        """Yield which of these positions of a sample are `held`, as runs, each with its place among all that are."""
        before = 0
        for run in [range(self.seq_len)] if held is None else held:
            part = range(max(run.start, positions.start), min(run.stop, positions.stop))
            if part:
                yield before + part.start - run.start, part
            before += len(run)

    def document_starts(self, index: int) -> tuple[int, ...]:
        """Return where documents that do not see each other begin in a sample, the first at 0, without reading it."""
        if not self._document_masking:
            return (0,)
        starts = np.unique(self._starts_of(index * self.seq_len))
        return (0, *starts[starts < self.seq_len].tolist())

    def position_ids(self, index: int) -> NDArray[np.int64]:
        """Return the position of each token in its document, or in the sample if the document began earlier, [s]."""
        positions = np.arange(self.seq_len, dtype=np.int64)
        if not self._document_masking:
            return positions
        starts = self._starts_of(index * self.seq_len)
        starts = starts[starts < self.seq_len]
        first = np.zeros_like(positions)
        first[starts] = starts
        return positions - np.maximum.accumulate(first)

    def target_places(self, index: int) -> NDArray[np.int64]:
        """Return where the label of each position is in the stream of tokens, [s]; -1 in padding."""
        start, targets = (int(array[0]) for array in self._locate(np.array([index])))
        places = np.full(self.seq_len, -1, dtype=np.int64)
        places[:targets] = np.arange(start + 1, start + 1 + targets)
        return places

    def weights(self, index: int) -> NDArray[np.float32] | None:
        """Return the weight of the label of each position, that of its document, [s]; None where rows have none."""
        if self._row_weights is None:
            return None
        places = self.target_places(index)
        documents = np.searchsorted(self._offsets, places, side="right") - 1
        return np.where(places < 0, np.float32(0), self._row_weights[documents])

    def in_order(self) -> "Samples":
        """Return the same samples in the order of the text, once."""
        ordered = copy.copy(self)
        ordered._shuffled = False
        return ordered

    def places(self, step: int, positions: Sequence[int] | NDArray[np.int64]) -> torch.Tensor:
        """Return `target_places` of the samples at `positions`, [b, s]."""
        ids = self.sample_ids(step, positions).tolist()
        return torch.from_numpy(np.stack([self.target_places(index) for index in ids]))

    def length(self, index: int) -> int:
        """Count the tokens of a sample before its padding."""
        return int(self._locate(np.array([index]))[1][0])

    def lengths(self, step: int, places: Sequence[int] | NDArray[np.int64]) -> torch.Tensor | None:
        """Count the tokens of the samples at `places`, without reading them; None where none has padding."""
        ids = self.sample_ids(step, places).tolist()
        return torch.tensor([self.length(index) for index in ids]) if self.has_padding else None

    def is_packed(self, step: int, places: Sequence[int] | NDArray[np.int64]) -> bool:
        """Return whether one of the samples at `places` has position ids that restart, without reading tokens."""
        ids = self.sample_ids(step, places).tolist()
        return self.has_positions and any((np.diff(self.position_ids(index)) != 1).any() for index in ids)

    def sample_ids(self, step: int, positions: ArrayLike) -> NDArray[np.int64]:
        """Return the samples at `positions` of the global batch of `step`: the same on every rank of every layout.

        Steps read the samples epoch by epoch, each epoch in its own order; the validation split is not shuffled.
        """
        flat = np.int64(step) * self.global_batch_size + np.asarray(positions, dtype=np.int64)
        if not self._shuffled:
            return flat % self._count
        first, last = (int(end) // _ORDERED for end in (flat.min(), flat.max()))
        order = np.concatenate([self._ordered(part) for part in range(first, last + 1)])
        return np.asarray(order[flat - first * _ORDERED])

    def _order(self, part: int) -> NDArray[np.int64]:
        """Permute so many positions of the run at once."""
        epoch, index = np.divmod(np.arange(part * _ORDERED, (part + 1) * _ORDERED), self._count)
        return permute(index, epoch, size=self._count, seed=self._seed)

    def batch(
        self,
        step: int,
        places: Sequence[int] | NDArray[np.int64],
        *,
        dropout_seed: int = 0,
        share: SequenceShare | None = None,
    ) -> MicroBatch:
        """Read the samples at `places` of the global batch of `step`, [b, s]; of each the `share` alone, [b, n]."""
        indices = self.sample_ids(step, places).tolist()
        return self._collate([(self, index) for index in indices], step, dropout_seed=dropout_seed, share=share)

    def _collate(
        self, samples: Sequence[tuple["Samples", int]], step: int, *, dropout_seed: int, share: SequenceShare | None
    ) -> MicroBatch:
        starts = None if share is None else tuple(source.document_starts(index) for source, index in samples)
        held = None if share is None or starts is None else share.held(share.sequence(starts))
        read = (source.tokens(index, held) for source, index in samples)
        input_ids, labels = map(np.stack, zip(*read, strict=True))
        if input_ids.min() < 0 or max(input_ids.max(), labels.max()) >= self._vocab_size:
            there = f"0 to {self._vocab_size - 1:,}"
            raise DataError(f"the samples of step {step + 1:,} have ids that the tokenizer does not: it has {there}.")
        part = slice(None) if held is None else np.concatenate([np.arange(run.start, run.stop) for run in held])
        positions = None
        if self.has_positions or held is not None:
            positions = [source.position_ids(index)[part] for source, index in samples]
        weights = [own[part] for source, index in samples if (own := source.weights(index)) is not None]
        teacher = None
        if self.teacher is not None:
            places = np.stack([source.target_places(index)[part] for source, index in samples])
            teacher = self.teacher.read(np.where(labels == IGNORE, -1, places))
        return MicroBatch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            teacher=teacher,
            position_ids=torch.from_numpy(np.stack(positions)) if positions else None,
            dropout_seed=dropout_seed,
            lengths=torch.tensor([source.length(index) for source, index in samples]) if self.has_padding else None,
            is_packed=None if starts is None else any(len(begins) > 1 for begins in starts),
            held=held,
            starts=starts,
            weights=torch.from_numpy(np.stack(weights)) if weights else None,
        )

    def loss_terms(self, step: int, positions: ArrayLike) -> int:
        """Count what the loss is a mean over at `positions`: targets, or the pairs or completions of an objective."""
        return self.target_count(step, positions)

    def target_count(self, step: int, positions: ArrayLike) -> int:
        """Count the labels at `positions` that are not ignored, without reading tokens: any rank can do it for all."""
        whole = np.size(positions) * self.seq_len
        if self._document_masking:
            first, last = self._document_range(self.sample_ids(step, positions) * self.seq_len)
            return whole - int((last - first).sum())
        if self._packed:
            return whole
        return int(self._locate(self.sample_ids(step, positions))[1].sum())

    def _document_starts(self, start: int) -> NDArray[np.int64]:
        """Return where documents begin among the targets of the window at `start`, relative to it: 1 to s."""
        first, last = self._document_range(np.int64(start))
        return np.asarray(self._offsets[first:last]) - start

    def _document_range(self, start: NDArray[np.int64] | np.int64) -> tuple[Any, Any]:
        """Return the documents that begin in (start, start + s], as a range of their numbers.

        End-of-text tokens cannot tell: a validation block leaves a boundary without one, and a text may contain one.
        """
        first, last = np.searchsorted(self._offsets, np.array([start, start + self.seq_len]), side="right")
        return first, last

    def _locate(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where each sample begins in the stream, and how many targets it has."""
        if self._packed:
            return index * self.seq_len, np.full(index.shape, self.seq_len, dtype=np.int64)
        document = np.searchsorted(self._first_sample, index, side="right") - 1
        start = self._offsets[document] + (index - self._first_sample[document]) * self.seq_len
        return start, np.minimum(self.seq_len, self._offsets[document + 1] - 1 - start)
