"""FirstBatch: what the baseline computes of each sample of the first global batch alone, for a diagnosis. No torch.

The gradient of a strategy is compared with sums of these samples' gradients, and its loss with those of other labels:
so a mistake that changes how much a sample counts, or which labels it gets, is told from every other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

ELEMENTS = 64
"""Elements of each parameter's gradient that are kept for each sample."""


@dataclass(frozen=True, kw_only=True)
class FirstBatch:
    """Samples in their order in the global batch. Sums, not means: of token losses, in nats."""

    gradients: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Gradients of each sample's sum of token losses, at some elements of each parameter: [samples, elements]."""
    crossed: NDArray[np.float64] | None = None
    """crossed[i, j]: the loss of sample i's logits with the labels of sample j, [samples, samples]."""
    relabeled: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """The losses with labels that a mistake within a sample would give, and their number: [samples, 2]. Keys finish the
    sentence: the labels are …"""


def sampled(value: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return at most ELEMENTS elements of a tensor, evenly spread."""
    flat = value.reshape(-1)
    places = np.linspace(0, flat.size - 1, min(flat.size, ELEMENTS)).astype(np.int64)
    return flat[places].astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a run splits the samples of a global batch: p is in micro-batch p // size, of rank (p // size) % replicas."""

    samples: int
    micro_batch_size: int
    replicas: int

    @property
    def micro_batches(self) -> NDArray[np.int64]:
        """The micro-batch of each sample, counted over all replicas."""
        return np.arange(self.samples) // self.micro_batch_size

    @property
    def ranks(self) -> NDArray[np.int64]:
        """The data-parallel rank of each sample."""
        return self.micro_batches % self.replicas

    @property
    def rounds(self) -> NDArray[np.int64]:
        """The accumulation step of each sample."""
        return self.micro_batches // self.replicas

    @property
    def groups(self) -> dict[str, NDArray[np.int64]]:
        """The groups whose means could be averaged by mistake, each with more than one."""
        named = {
            "micro-batches": self.micro_batches,
            "data-parallel ranks": self.ranks,
            "accumulation steps": self.rounds,
            "samples": np.arange(self.samples),
        }
        distinct: dict[bytes, str] = {}
        for name, group in named.items():
            distinct.setdefault(group.tobytes(), name)
        return {name: named[name] for name in distinct.values() if len(np.unique(named[name])) > 1}

    def reordered(self) -> dict[str, NDArray[np.int64]]:
        """Samples whose labels each sample would get by a mistake of order; keys finish: the labels are …"""
        size = self.micro_batch_size
        replicas = self.replicas
        places = np.arange(self.samples)
        first = self.micro_batches * size
        inside = places % size
        count = len(np.unique(self.rounds))
        orders = {
            "those of a micro-batch's samples in reverse order": first + size - 1 - inside,
            "those of the next sample of the micro-batch": first + (inside + 1) % size,
            "those of the previous sample of the micro-batch": first + (inside - 1) % size,
            "those of the next micro-batch": self._places((self.rounds + 1) % count, self.ranks),
            "those of the previous micro-batch": self._places((self.rounds - 1) % count, self.ranks),
            "those of a rank's micro-batches in reverse order": self._places(count - 1 - self.rounds, self.ranks),
            "those of the next data-parallel rank": self._places(self.rounds, (self.ranks + 1) % replicas),
            "those of the previous data-parallel rank": self._places(self.rounds, (self.ranks - 1) % replicas),
            "those of the batch's samples in reverse order": places[::-1],
        }
        return {name: order for name, order in orders.items() if (order != places).any()}

    def _places(self, rounds: NDArray[np.int64], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        inside = np.arange(self.samples) % self.micro_batch_size
        return (rounds * self.replicas + ranks) * self.micro_batch_size + inside


def sums_of(values: NDArray[np.floating], groups: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sum the values of each group."""
    return np.bincount(groups, weights=values).astype(np.float64)


def nearest(value: float, candidates: Mapping[str, float], right: float, *, within: float) -> tuple[str, float] | None:
    """Return the candidate that explains `value`: within a relative gap, and four times closer than `right`."""
    gaps = {name: abs(value - candidate) / max(abs(value), 1e-300) for name, candidate in candidates.items()}
    if not gaps:
        return None
    best = min(gaps, key=lambda name: gaps[name])
    distance = abs(value - right) / max(abs(value), 1e-300)
    if not gaps[best] <= within or not 4 * gaps[best] < distance:
        return None
    return best, candidates[best]


MakeLabels = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]


def wrong_labels(ignore: int) -> dict[str, MakeLabels]:
    """Mistakes within a sample: functions of its ids [s] and labels [s]; keys finish the sentence: the labels are …"""

    def unshifted(ids: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where(labels == ignore, ignore, ids)

    def shifted_twice(ids: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.append(labels[1:], ignore)

    def reversed_tokens(ids: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
        return labels[::-1]

    def exchanged(ids: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.roll(labels, len(labels) // 2)

    def rolled(ids: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.roll(labels, 1)

    def rolled_back(ids: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.roll(labels, -1)

    def shifted_in_slices(ranks: int, ids: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(ids) % (2 * ranks):
            return labels
        chunks = np.split(np.arange(len(ids)), 2 * ranks)
        wrong = np.full_like(labels, ignore)
        for rank in range(ranks):
            held = np.concatenate([chunks[rank], chunks[-1 - rank]])
            wrong[held[:-1]] = ids[held[1:]]
        return np.where(labels == ignore, ignore, wrong)

    return {
        "the tokens themselves instead of the next ones": unshifted,
        "shifted twice: each is the token after the next one": shifted_twice,
        "those of a sample's positions in reverse order": reversed_tokens,
        "those of the other half of the sequence": exchanged,
        "those of the previous position": rolled,
        "those of the next position": rolled_back,
        **{
            f"shifted in the slices of {ranks} context-parallel ranks, after a sequence is cut": partial(
                shifted_in_slices, ranks
            )
            for ranks in (2, 4, 8)
        },
    }
