"""Samples: which tokens make a sample, and which sample stands where in which step.

b = samples asked for, s = seq_len. Labels are the next token of each position, already shifted: logits[:, i] is held
against labels[:, i]. -100 marks positions that teach nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from toolkit.errors import DataError
from toolkit.train.data.permutation import permute
from toolkit.train.data.tokens import Split, TokenCorpus

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Samples that go through the model together, as [b, s] int64. position_ids are None where they simply count."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64] | None = None


class Samples:
    """The samples of one split.

    `packed`: sample i is the window of tokens [i*s, i*s + s], so that each token but the first is a target exactly once
    an epoch. What is left after the last whole window (fewer than s + 1 tokens) is not used.
    `isolated`: the same windows; positions start at 0 with each document (and with the window, where that begins inside
    of one), and the first token of a document is no target: what stands before it is another document.
    `padded`: a sample holds one document, or a piece of one that is longer than s + 1 tokens; within a document the
    same rule holds. Padding stands on the right, where causal attention of the positions before cannot see it, and its
    labels are ignored: no attention mask is needed for the same loss.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        *,
        seq_len: int,
        packing: Literal["packed", "isolated", "padded"],
        split: Split,
        seed: int,
        global_size: int,
    ) -> None:
        self.seq_len = seq_len
        self.global_size = global_size
        self._shuffled = split == "train"
        self._seed = seed
        self._pad_id = corpus.eos_id
        self._tokens = corpus.tokens(split)
        self._packed = packing != "padded"
        self._isolated = packing == "isolated"
        self._offsets = corpus.document_offsets(split)
        if self._packed:
            self._count = max(0, len(self._tokens) - 1) // seq_len
        else:
            # A document of n tokens has n - 1 targets, in pieces of at most seq_len.
            pieces = -(-np.maximum(np.diff(self._offsets) - 1, 0) // seq_len)
            self._first_piece = np.concatenate([[0], np.cumsum(pieces)])
            self._count = int(self._first_piece[-1])
        if not self._count:
            fix = "data.eval_fraction" if split == "eval" else "the corpus"
            raise DataError(
                f"data.seq_len={seq_len}: the {split} split has {len(self._tokens):,} tokens, too few for one sample "
                f"({seq_len + 1:,}). Lower data.seq_len or raise {fix}."
            )

    def __len__(self) -> int:
        return self._count

    def tokens(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """input_ids and labels of one sample, [s] each."""
        if not 0 <= index < self._count:
            raise IndexError(f"sample {index} of {self._count}")
        start, targets = (int(array[0]) for array in self._place(np.array([index])))
        window = self._tokens[start : start + targets + 1].astype(np.int64)
        input_ids = np.full(self.seq_len, self._pad_id, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORED, dtype=np.int64)
        input_ids[:targets], labels[:targets] = window[:-1], window[1:]
        if self._isolated:
            labels[self._borders(start) - 1] = IGNORED
        return input_ids, labels

    def position_ids(self, index: int) -> NDArray[np.int64]:
        """The place of each token of one sample in its document, [s]; counted from the sample's begin at the most."""
        places = np.arange(self.seq_len, dtype=np.int64)
        if not self._isolated:
            return places
        borders = self._borders(index * self.seq_len)
        borders = borders[borders < self.seq_len]
        begins = np.zeros_like(places)
        begins[borders] = borders
        return places - np.maximum.accumulate(begins)

    def sample_ids(self, step: int, positions: ArrayLike) -> NDArray[np.int64]:
        """The samples at `positions` of the global batch of `step`: the same on every rank of every layout.

        Steps go through the samples epoch by epoch, each in an order of its own; the validation split keeps its order.
        """
        flat = np.int64(step) * self.global_size + np.asarray(positions, dtype=np.int64)
        epoch, index = np.divmod(flat, self._count)
        return permute(index, epoch, size=self._count, seed=self._seed) if self._shuffled else index

    def batch(self, step: int, positions: Sequence[int] | NDArray[np.int64]) -> MicroBatch:
        """The samples at `positions` of the global batch of `step`, [b, s]."""
        indices = self.sample_ids(step, positions).tolist()
        rows = [self.tokens(index) for index in indices]
        return MicroBatch(
            input_ids=np.stack([input_ids for input_ids, _ in rows]),
            labels=np.stack([labels for _, labels in rows]),
            position_ids=np.stack([self.position_ids(index) for index in indices]) if self._isolated else None,
        )

    def target_count(self, step: int, positions: ArrayLike) -> int:
        """Labels at `positions` that are not ignored, without reading a token: any rank can count for all of them."""
        whole = np.size(positions) * self.seq_len
        if self._isolated:
            first, last = self._border_range(self.sample_ids(step, positions) * self.seq_len)
            return whole - int((last - first).sum())
        if self._packed:
            return whole
        return int(self._place(self.sample_ids(step, positions))[1].sum())

    def _borders(self, start: int) -> NDArray[np.int64]:
        """Where documents begin among the targets of the window at `start`, counted from there: 1 to s."""
        first, last = self._border_range(np.int64(start))
        return np.asarray(self._offsets[first:last]) - start

    def _border_range(self, start: NDArray[np.int64] | np.int64) -> tuple[Any, Any]:
        """Which documents begin in (start, start + s]. Offsets tell, not end-of-text tokens: a held-out block leaves a
        border without one, and a text may contain one.
        """
        first, last = (np.searchsorted(self._offsets, end, side="right") for end in (start, start + self.seq_len))
        return first, last

    def _place(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where each sample begins in the stream, and how many targets it has."""
        if self._packed:
            return index * self.seq_len, np.full(index.shape, self.seq_len, dtype=np.int64)
        document = np.searchsorted(self._first_piece, index, side="right") - 1
        start = self._offsets[document] + (index - self._first_piece[document]) * self.seq_len
        return start, np.minimum(self.seq_len, self._offsets[document + 1] - 1 - start)
