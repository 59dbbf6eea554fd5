"""MixtureSamples: samples of several sources, in the shares that `data.sources` gives them.

Which source sample n of the run is from depends on n and the shares alone (`Interleaving`); the j-th sample of a source
in the run is the j-th that a run on this source alone would read, in its own epochs and permutations. So nothing
depends on layouts or restarts, and nothing is stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from typing_extensions import override

from toolkit.config.data_section import DataSection, SourceSection
from toolkit.data.samples.interleaving import Interleaving
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.data.samples.samples import Samples
from toolkit.errors import DataError, Refusal, Setting
from toolkit.parallel.context.sequence import SequenceShare
from toolkit.units import format_count


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a run's samples that is from one source."""

    name: str
    samples: int
    share: float
    epochs: float
    seq_len: int

    def __str__(self) -> str:
        tokens = format_count(self.samples * self.seq_len)
        return f"{self.share:.1%}, {self.samples:,} samples of {tokens} tokens, {self.epochs:.2f} epochs"


class MixtureSamples(Samples):
    """The samples of a run, which its number in the run identifies. `weights` are the shares, as whole numbers."""

    def __init__(self, parts: Mapping[str, Samples], weights: Sequence[int], *, global_batch_size: int) -> None:
        self.names = tuple(parts)
        self.parts = tuple(parts.values())
        self.seq_len = self.parts[0].seq_len
        self.global_batch_size = global_batch_size
        self._vocab_size = self.parts[0]._vocab_size
        self._weights = tuple(weights)
        self._interleaving = Interleaving(weights)
        self.has_positions = any(part.has_positions for part in self.parts)
        self.has_padding = any(part.has_padding for part in self.parts)
        self.reads_parts = all(part.reads_parts for part in self.parts)

    @override
    def __len__(self) -> int:
        """The samples of an epoch of every source."""
        return sum(map(len, self.parts))

    @override
    def count_of(self, epochs: float) -> int:
        raise NotImplementedError("the sources of a mixture have epochs of their own")

    @override
    def summary(self) -> str:
        summaries = {name: part.summary() for name, part in zip(self.names, self.parts, strict=True)}
        return "; ".join(f"{name}: {text}" for name, text in summaries.items() if text)

    def shares(self, run_samples: int) -> tuple[Share, ...]:
        """Return the share of each source in a run of so many samples."""
        shares = []
        for name, part, weight in zip(self.names, self.parts, self._weights, strict=True):
            share = Fraction(weight, sum(self._weights))
            samples = round(run_samples * share)
            epochs = samples / len(part)
            shares.append(Share(name=name, samples=samples, share=float(share), epochs=epochs, seq_len=self.seq_len))
        return tuple(shares)

    def locate(self, numbers: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample of the run, and which sample of the source it is."""
        sources, inner = self._interleaving.locate(np.atleast_1d(np.asarray(numbers, dtype=np.int64)))
        indices = np.empty_like(inner)
        for source, part in enumerate(self.parts):
            from_source = sources == source
            if from_source.any():
                indices[from_source] = part.sample_ids(0, inner[from_source])
        return sources, indices

    @override
    def sample_ids(self, step: int, positions: ArrayLike) -> NDArray[np.int64]:
        return np.int64(step) * self.global_batch_size + np.asarray(positions, dtype=np.int64)

    @override
    def tokens(self, index: int, held: Sequence[range] | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        part, part_index = self._part_of(index)
        return part.tokens(part_index, held)

    @override
    def position_ids(self, index: int) -> NDArray[np.int64]:
        part, part_index = self._part_of(index)
        return part.position_ids(part_index)

    @override
    def length(self, index: int) -> int:
        part, part_index = self._part_of(index)
        return part.length(part_index)

    def source_of(self, number: int) -> str:
        """Return the name of the source that a sample of the run is from."""
        return self.names[int(self.locate(number)[0][0])]

    def _part_of(self, number: int) -> tuple[Samples, int]:
        sources, indices = self.locate(number)
        return self.parts[int(sources[0])], int(indices[0])

    @override
    def batch(
        self,
        step: int,
        places: Sequence[int] | NDArray[np.int64],
        *,
        dropout_seed: int = 0,
        share: SequenceShare | None = None,
    ) -> MicroBatch:
        sources, indices = self.locate(self.sample_ids(step, places))
        samples = [
            (self.parts[source], index) for source, index in zip(sources.tolist(), indices.tolist(), strict=True)
        ]
        collated = self._collate(samples, step, dropout_seed=dropout_seed, share=share)
        return replace(collated, sources=torch.from_numpy(sources))

    @override
    def target_count(self, step: int, positions: ArrayLike) -> int:
        return sum(self.target_counts(step, positions))

    def target_counts(self, step: int, positions: ArrayLike) -> tuple[int, ...]:
        """Count the targets of each source at `positions`, without reading tokens."""
        sources, inner = self._interleaving.locate(np.atleast_1d(self.sample_ids(step, positions)))
        numbers = [inner[sources == source] for source in range(len(self.parts))]
        return tuple(
            part.target_count(0, part_indices) if len(part_indices) else 0
            for part, part_indices in zip(self.parts, numbers, strict=True)
        )


def choose_weights(data: DataSection, parts: Mapping[str, Samples], *, steps: int, global_batch_size: int) -> list[int]:
    """Turn the shares of `data.sources` into whole numbers.

    A source with epochs or tokens has as many samples as these are; sources with a weight share the rest of the run.
    Raises DataError if a budget is not there, or the budgets do not make up the run.
    """
    run_samples = steps * global_batch_size
    budgets: list[int | None] = []
    for index, (source, part) in enumerate(zip(data.sources or (), parts.values(), strict=True)):
        budgets.append(_budget(source, part, f"{data.place(index)}.{source.budget}"))
    spent = sum(budget or 0 for budget in budgets)
    weights = [Fraction(str(source.weight or 0)) for source in data.sources or ()]
    if not any(weights):
        _check_length(spent, steps, global_batch_size)
    elif spent >= run_samples:
        reason = f"the run has {run_samples:,} samples, and epochs and tokens of data.sources take {spent:,}"
        longer: Setting = ("train.steps", f"more than {spent // global_batch_size}")
        raise DataError.of("train.steps", steps, f"{reason}: no sample is left for the others", longer, "lower these")
    rest = Fraction(run_samples - spent) / (sum(weights) or 1)
    shares = [
        weight * rest if budget is None else Fraction(budget) for budget, weight in zip(budgets, weights, strict=True)
    ]
    scale = lcm(*(share.denominator for share in shares))
    return [int(share * scale) for share in shares]


def _budget(source: SourceSection, part: Samples, place: str) -> int | None:
    """The samples of a source with epochs or tokens."""
    if source.epochs is not None:
        if not (count := part.count_of(source.epochs)):
            reason = f"this is less than one of its {len(part):,} samples"
            raise DataError.of(place, source.epochs, reason, "raise it", "leave the source out")
        return count
    if source.tokens is None:
        return None
    count = int(source.tokens // part.seq_len)
    if not count:
        reason = f"this is less than one sample of {part.seq_len:,} tokens"
        raise DataError.of(place, f"{source.tokens:.0f}", reason, "raise it", "leave the source out")
    if count > len(part):
        reason = f"the source has {len(part):,} samples of {part.seq_len:,} tokens, {len(part) * part.seq_len:,} in all"
        epochs: Setting = (place.replace(".tokens", ".epochs"), f"{count / len(part):.3g}")
        raise DataError.of(place, f"{source.tokens:.0f}", reason, "lower it", epochs)
    return count


def _check_length(spent: int, steps: int, global_batch_size: int) -> None:
    """Raise DataError unless the run is as many whole steps as the budgets of its sources make."""
    possible = spent // global_batch_size
    if steps != possible:
        reason = f"epochs and tokens of data.sources make {spent:,} samples, which are {possible:,} steps"
        settings: tuple[Setting, ...] = (("train.steps", steps), ("batch.global_batch_size", global_batch_size))
        raise DataError(Refusal.between(settings, reason, ("train.steps", possible), "give a source a weight instead"))
