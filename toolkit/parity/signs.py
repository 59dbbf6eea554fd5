"""Signs: updates that take the sign of an average (Lion), where rounding decides an element that is nearly zero.

Lion adds the learning rate to a weight or subtracts it, by the sign of a direction: b1 m + (1 - b1) g, of the momentum
m and the clipped gradient g. Two right computations differ in g by rounding, so they may differ in the sign of a
direction that is as near to zero, and then by twice the learning rate in that weight. Such an element is undecided, and
says nothing about either of them. All others must agree. No torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from toolkit.parity.parity_run import ParityRun, Tensors
from toolkit.parity.tolerance import ENVELOPE_FACTOR


@dataclass(frozen=True, kw_only=True)
class Directions(Mapping[str, NDArray[np.floating]]):
    """What an update takes the signs of, by parameter, computed on access: memory holds one tensor at a time."""

    gradient: Tensors
    """The gradients before clipping."""
    momentum: Tensors = field(default_factory=dict)
    """The momentum before the update; empty where it is zero."""
    beta: float
    """The share of the momentum."""
    clipping: float = 1.0
    """What the gradient was multiplied by."""

    @classmethod
    def of_step(cls, gradient: Tensors, momentum: Tensors, *, beta: float, grad_norm: float, grad_clip: float) -> Self:
        """Return those of a step whose gradient has the norm `grad_norm`, clipped to `grad_clip` unless that is 0."""
        clipping = grad_clip / grad_norm if 0 < grad_clip < grad_norm else 1.0
        return cls(gradient=gradient, momentum=momentum, beta=beta, clipping=clipping)

    @override
    def __getitem__(self, name: str) -> NDArray[np.floating]:
        direction = (1 - self.beta) * self.clipping * self.gradient[name].astype(np.float64)
        if name in self.momentum:
            direction = direction + self.beta * self.momentum[name].astype(np.float64)
        return direction

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.gradient)

    @override
    def __len__(self) -> int:
        return len(self.gradient)


@dataclass(frozen=True, kw_only=True)
class DecidedUpdates(Mapping[str, NDArray[np.floating]]):
    """Updates with the baseline's value in each undecided element: what still differs is not a matter of signs."""

    updates: Tensors
    baseline: Tensors
    directions: Tensors
    """What the updates take the signs of; empty for optimizers that take no signs, whose updates are compared as they
    are."""
    baseline_directions: Tensors
    bound: float = np.inf
    """How far the direction of a parameter may be from the baseline's, over the norm of all directions as one vector,
    if its elements are to be undecided: a wrong direction is not rounding."""

    @override
    def __getitem__(self, name: str) -> NDArray[np.floating]:
        updates = self.updates[name]
        if not self._has_signs(name):
            return updates
        return np.where(self._undecided(name), self.baseline[name], updates)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.updates)

    @override
    def __len__(self) -> int:
        return len(self.updates)

    def flipped(self) -> int:
        """Count the undecided elements in which the update went the other way."""
        count = 0
        for name in filter(self._has_signs, self.updates):
            baseline = self.baseline[name]
            went_the_other_way = np.abs(self.updates[name] - baseline) > np.abs(baseline)
            count += int(np.count_nonzero(self._undecided(name) & went_the_other_way))
        return count

    def _has_signs(self, name: str) -> bool:
        everything = (self.updates, self.baseline, self.directions, self.baseline_directions)
        return all(name in tensors for tensors in everything) and len({t[name].shape for t in everything}) == 1

    def _undecided(self, name: str) -> NDArray[np.bool_]:
        """Return where a direction is nearer to zero than four times what directions of its parameter differ by."""
        directions = self.directions[name]
        baseline_directions = self.baseline_directions[name]
        gap = np.abs(directions - baseline_directions)
        if np.isfinite(self.bound) and not np.linalg.norm(gap) <= self.bound * self._length:
            return np.zeros(directions.shape, dtype=bool)
        is_near = np.abs(baseline_directions) <= ENVELOPE_FACTOR * np.max(gap, initial=0.0)
        undecided: NDArray[np.bool_] = is_near & ((directions != 0) | (baseline_directions != 0))
        return undecided

    @cached_property
    def _length(self) -> float:
        """The norm of all of the baseline's directions as one vector."""
        return float(np.sqrt(sum(float(np.sum(np.square(value))) for value in self.baseline_directions.values())))


def decided_updates(run: ParityRun, baseline: ParityRun, bound: float) -> DecidedUpdates:
    """Return a run's first updates, with the baseline's in each undecided element; `bound` is that of gradients."""
    return DecidedUpdates(
        updates=run.first_updates,
        baseline=baseline.first_updates,
        directions=run.first_directions,
        baseline_directions=baseline.first_directions,
        bound=bound,
    )
