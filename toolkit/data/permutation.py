"""A pseudo-random permutation of range(size) that is computed, not stored: O(1) memory for 10^9 samples.

A Feistel network permutes pairs (left, right) of b-bit numbers for any round function: each round
(l, r) -> (r, l xor f(r)) is invertible. With 4^b >= size it permutes a superset of range(size); an image outside is
permuted again until it falls inside ("cycle walking"): this is a permutation of range(size), because a cycle of the
large permutation remains a cycle without the elements outside. 4^b < 4 * size (or 64), so that this takes fewer than
four iterations on average.
Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
"""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 of each value: a bijection of 64 bits in which every output bit depends on every input bit."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(index: NDArray[np.int64], epoch: NDArray[np.int64], *, size: int, seed: int) -> NDArray[np.int64]:
    """Permute indices of range(size), each in its epoch. Every (seed, epoch) has its own permutation."""
    half_bits = max(3, ((size - 1).bit_length() + 1) // 2)
    key = mix(mix(np.array([seed & _MASK], dtype=np.uint64)) ^ epoch.astype(np.uint64))
    keys = mix(key + np.arange(_ROUNDS, dtype=np.uint64)[:, None] * np.uint64(_GOLDEN))  # [rounds, n]
    image = _feistel(index.astype(np.uint64), keys, half_bits)
    while (outside := image >= np.uint64(size)).any():
        image[outside] = _feistel(image[outside], keys[:, outside], half_bits)
    return image.astype(np.int64)


def _feistel(value: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: int) -> NDArray[np.uint64]:
    shift = np.uint64(half_bits)
    low = np.uint64((1 << half_bits) - 1)
    left = value >> shift
    right = value & low
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & low)
    return (left << shift) | right
