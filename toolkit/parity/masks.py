"""Dropout masks: which ranks, layers and micro-batches must draw the same ones, and which must not. No torch.

The rule needs no layout: the same activations lose the same elements, and other activations lose others. Between the
blocks tensor-parallel ranks hold the same activations, so their masks must agree there; with sequence parallelism they
hold other positions, so their masks must differ. Inside of a block every rank has heads and columns of its own;
data-parallel ranks have other samples, Ulysses ranks other positions, and a recomputed layer has its activations again.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from toolkit.units import some

PROJECTIONS = 8
"""Numbers that stand for an activation: projections on random directions, which are alike only for alike ones."""
_SAME_ACTIVATION = 1e-4
"""Relative distance of the projections of activations that differ by rounding at most."""


@dataclass(frozen=True, kw_only=True)
class Mask:
    """One call of dropout in training."""

    rank: int
    layer: str
    call: int
    """Number among the layer's calls in one forward pass, from 0; not known for a recomputed layer."""
    step: int
    micro_batch: int
    """Number among the micro-batches of the rank in the first steps, from 1; when recomputed, the last one before."""
    drawn: bytes
    """Hash of what is dropped, and of the shape."""
    activation: tuple[float, ...]
    """Projections of what it was applied to."""
    is_recomputed: bool = False

    def has_activation_of(self, mask: "Mask") -> bool:
        """Whether both were applied to the same activation, up to rounding."""
        activation = np.array(self.activation)
        other_activation = np.array(mask.activation)
        distance = np.linalg.norm(activation - other_activation)
        return bool(distance <= _SAME_ACTIVATION * np.linalg.norm(activation))


def mask_faults(masks: Iterable[Mask]) -> tuple[str, ...]:
    """Say what is wrong, one clause for each pair of ranks and kind of fault; empty if nothing is."""
    by_drawn: dict[bytes, list[Mask]] = defaultdict(list)
    by_place: dict[tuple[str, int, int], list[Mask]] = defaultdict(list)
    recomputed: list[Mask] = []
    for mask in masks:
        by_drawn[mask.drawn].append(mask)
        if mask.is_recomputed:
            recomputed.append(mask)
        else:
            by_place[mask.layer, mask.call, mask.step].append(mask)
    faults: dict[str, list[str]] = defaultdict(list)
    for equal in by_drawn.values():
        for first, second in combinations(equal, 2):
            if not first.has_activation_of(second):
                clause, place = _same(first, second)
                faults[clause].append(place)
    for there in by_place.values():
        for first, second in combinations(there, 2):
            if first.drawn != second.drawn and first.has_activation_of(second):
                ranks = f"ranks {first.rank} and {second.rank}"
                clause = f"{ranks} draw different masks where they must agree, for the same activations in"
                faults[clause].append(first.layer)
    for again in recomputed:
        if not any(again.has_activation_of(first) for first in by_drawn[again.drawn] if not first.is_recomputed):
            faults[f"rank {again.rank} draws other masks when it recomputes"].append(again.layer)
    return tuple(f"{clause} {_places(places)}" for clause, places in faults.items())


def _same(first: Mask, second: Mask) -> tuple[str, str]:
    if first.rank != second.rank:
        return f"ranks {first.rank} and {second.rank} draw the same masks for different activations in", first.layer
    if first.layer != second.layer:
        clause = f"rank {first.rank} draws the same masks in several layers:"
        return clause, f"{first.layer} and {second.layer}"
    if first.step != second.step:
        clause = f"rank {first.rank} draws the same masks in steps {first.step} and {second.step} in"
    elif first.micro_batch != second.micro_batch:
        numbers = f"{first.micro_batch} and {second.micro_batch}"
        clause = f"rank {first.rank} draws the same masks for micro-batches {numbers} in"
    else:
        clause = f"rank {first.rank} draws the same masks twice in"
    return clause, first.layer


def _places(places: Sequence[str]) -> str:
    return some(list(dict.fromkeys(places)))
