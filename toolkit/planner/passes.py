"""The forward and the backward pass: their seconds, and pairs of figures that have one for each."""

from dataclasses import dataclass
from typing import NamedTuple

FORWARD = 0
BACKWARD = 1
"""Places of the two passes in a pair of figures."""


class PassPair(NamedTuple):
    """A figure of the forward pass, and the same figure of the backward pass."""

    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Seconds of the forward and of the backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(forward=self.forward + other.forward, backward=self.backward + other.backward)

    def __rmul__(self, share: float) -> "Passes":
        return Passes(forward=share * self.forward, backward=share * self.backward)
