"""SequenceFacts: what a run knew of each completion in one step of preference tuning. No torch.

Dims: n completions that a run has seen in the step, in the order of their pairs and sides, those of each rank in turn.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class SequenceFacts:
    """The completions of one global batch; all arrays are empty where there is no objective of completions."""

    pieces: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The number of each completion's pair in its text, [n]."""
    sides: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """0 for a chosen or labeled completion, 1 for a rejected or mismatched one, [n]."""
    ranks: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The rank that has seen it, [n]."""
    targets: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Tokens of it whose loss is not zero, [n]."""
    policy: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """The policy's log-probability in nats, as the objective's formula gets it, [n]."""
    reference: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """The reference model's log-probability in nats, as the formula gets it, [n]."""
    coefficients: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """The weight of tokens of it in the loss, [n]."""

    def __len__(self) -> int:
        return len(self.pieces)

    def at(self, other: "SequenceFacts") -> "SequenceFacts | None":
        """Return these facts for the completions of `other`, in its order; None where one of them is missing here."""
        places = {key: place for place, key in enumerate(zip(self.pieces.tolist(), self.sides.tolist(), strict=True))}
        keys = list(zip(other.pieces.tolist(), other.sides.tolist(), strict=True))
        if not all(key in places for key in keys):
            return None
        order = np.array([places[key] for key in keys], dtype=np.int64)
        return SequenceFacts(**{name: values[order] for name, values in vars(self).items()})
