"""Held-out text: which part of the corpus is for validation. A function of the lengths of the documents alone.

Where that means 20 documents or more, whole documents are held out, chosen by a hash of their index, so that appending
documents moves none of the others. A share of so few documents would be a matter of luck: there, blocks of 2,048 tokens
are held out, chosen by a hash of theirs.
"""

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import DataError
from toolkit.train.data.permutation import mix

BLOCK_TOKENS = 2048
FEWEST_HELD_OUT_DOCUMENTS = 20


def held_out(ends: NDArray[np.int64], fraction: float, *, name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Cut the stream into segments: where each ends, and whether it is held out.

    `ends` are the ends of the documents. At least one block's worth of tokens is held out, and never everything.
    Raises DataError when the corpus (`name`) has too few tokens for that.
    """
    total = int(ends[-1])
    if fraction == 0:
        return ends, np.zeros(len(ends), dtype=np.bool_)
    if total < 2 * BLOCK_TOKENS:
        raise DataError(
            f"data.source={name} has {total:,} tokens: too few to hold out data.eval_fraction={fraction}, "
            f"which takes at least {2 * BLOCK_TOKENS:,}. Use more text, or set data.eval_fraction=0."
        )
    by_document = fraction * len(ends) >= FEWEST_HELD_OUT_DOCUMENTS
    return _documents(ends, fraction) if by_document else _blocks(ends, fraction)


def _documents(ends: NDArray[np.int64], fraction: float) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    lengths = np.diff(ends, prepend=0)
    hashes = mix(np.arange(len(ends), dtype=np.uint64))
    chosen = hashes < np.uint64(int(fraction * 2**64))
    if lengths[chosen].sum() < BLOCK_TOKENS:
        # A document has at least one token, so that the first BLOCK_TOKENS of them by hash always suffice.
        count = min(BLOCK_TOKENS, len(ends))
        first = np.argpartition(hashes, count - 1)[:count]
        first = first[np.argsort(hashes[first])]
        enough = int(np.searchsorted(np.cumsum(lengths[first]), BLOCK_TOKENS)) + 1
        chosen[first[:enough]] = True
    if chosen.all():
        chosen[np.argmax(hashes)] = False
    return ends, chosen


def _blocks(ends: NDArray[np.int64], fraction: float) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    blocks = int(ends[-1]) // BLOCK_TOKENS
    hashes = mix(np.arange(blocks, dtype=np.uint64))
    chosen = hashes < np.uint64(int(fraction * 2**64))
    chosen[np.argmin(hashes)] = True
    if chosen.all():
        chosen[np.argmax(hashes)] = False
    # The last, incomplete block stays in the training text.
    chosen = np.append(chosen, False)
    cuts = (np.flatnonzero(chosen[1:] != chosen[:-1]) + 1) * BLOCK_TOKENS
    segment_ends = np.union1d(ends, cuts)
    starts = np.concatenate([[0], segment_ends[:-1]])
    return segment_ends, chosen[starts // BLOCK_TOKENS]
