"""A hash of a global batch: equal where the same samples stand in the same places, however ranks divide them.

The hash of a sample is a random linear form of its tokens and labels modulo 2^64 (Carter and Wegman, Universal Classes
of Hash Functions, 1979). Mixed with the sample's place in the global batch, the samples' hashes are added up, so that
each rank hashes what it reads and one sum over the ranks gives the batch's.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from toolkit.train.data.permutation import mix

_BITS = np.uint64(40)
"""Of each sample: sums over millions of them still fit 63 bits."""


def share_of_digest(input_ids: ArrayLike, labels: ArrayLike, places: ArrayLike) -> int:
    """What these samples add to the digest of their batch. input_ids and labels [b, s]; places [b] in the batch."""
    tokens = np.concatenate([np.asarray(input_ids), np.asarray(labels)], axis=1).astype(np.uint64)  # [b, 2s]
    weights = mix(np.arange(tokens.shape[1], dtype=np.uint64)) | np.uint64(1)
    samples = mix((tokens * weights).sum(axis=1, dtype=np.uint64))
    placed: NDArray[np.uint64] = mix(samples ^ mix(np.asarray(places).astype(np.uint64)))
    return int((placed >> (np.uint64(64) - _BITS)).sum())


def digest_name(total: int) -> str:
    """The sum over all ranks as it is written: sixteen hexadecimal digits."""
    return f"{total:016x}"
