"""Interleaving: which source each sample of a run is from, for any number of samples, without state.

Sources are the leaves of a Huffman tree of their weights. Of the first m samples of a node with weight T, its first
child with weight L has round(m L / T): sample m is the first child's where that number grows, and all else is the other
child's. Both count their own samples in the same way, down to the leaves. So each sample has its source and its number
there after as many divisions as the tree is deep, the samples of a source are spread evenly, and after R samples with
R = the sum of the weights each source has had exactly its weight.

How far a source may be off: a node inherits its parent's error times its part r of the parent's weight, and rounding
adds a half. The error of a leaf is at most (1 + r1 + r1 r2 + r1 r2 r3 + …) / 2. In a Huffman tree no node is heavier
than its parent's sibling, so r1 r2 <= 1/2 for any two generations, and the error is less than
(1 + 1 + 1/2 + 1/2 + 1/4 + 1/4 + …) / 2 = 2 samples, after any number of samples. (Two sources: half a sample.)
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

_INT64 = 1 << 63


class Interleaving:
    """The order of the sources, by their weights: whole numbers of any size. A source of weight 0 has no sample."""

    def __init__(self, weights: Sequence[int]) -> None:
        divisor = gcd(*weights)
        nodes: list[tuple[int, int, Any]] = [
            (weight // divisor, source, source) for source, weight in enumerate(weights) if weight
        ]
        heapify(nodes)
        count = len(weights)
        while len(nodes) > 1:
            # Equal weights in the order of the sources, then of the nodes made of them.
            second = heappop(nodes)
            first = heappop(nodes)
            count += 1
            heappush(nodes, (first[0] + second[0], count, (first, second)))
        self._root = nodes[0]

    def locate(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample of the run, and its number among the samples of that source."""
        sources = np.empty_like(numbers)
        inner = np.empty_like(numbers)
        last = int(numbers.max(initial=0)) + 1
        # Whole numbers of Python where a product does not fit 64 bits.
        exact = numbers if 2 * last * self._root[0] + self._root[0] < _INT64 else numbers.astype(object)
        pending = [(self._root, exact, np.arange(len(numbers)))]
        while pending:
            (total, _, node), numbers_here, places = pending.pop()
            if isinstance(node, int):
                sources[places] = node
                inner[places] = numbers_here.astype(np.int64)
                continue
            first, second = node
            before, after = (_rounded(n, first[0], total) for n in (numbers_here, numbers_here + 1))
            is_first = (after > before).astype(bool)
            pending.append((first, before[is_first], places[is_first]))
            pending.append((second, (numbers_here - before)[~is_first], places[~is_first]))
        return sources, inner


def _rounded(numbers: NDArray[Any], part: int, total: int) -> NDArray[Any]:
    """Round numbers * part / total, halves up."""
    quotas: NDArray[Any] = (2 * numbers * part + total) // (2 * total)
    return quotas
