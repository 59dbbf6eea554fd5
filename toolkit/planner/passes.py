"""What a rank computes of a micro-batch, and the seconds of a forward and a backward pass."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Seconds of the forward and of the backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(forward=self.forward + other.forward, backward=self.backward + other.backward)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a rank computes of a micro-batch. `tokens` are those of its sequence shard."""

    tokens: int
    seq_len: int
    tp: int
    sequence_parallel: bool
    heads_split: int = 1
    """Ranks that share the heads of one sequence besides tp: Ulysses."""
