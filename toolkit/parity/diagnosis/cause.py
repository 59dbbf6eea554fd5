"""What a diagnosis can name, and how it is said."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from toolkit.parity.gradients import GradientRow

SAME_RATIO = 1e-3
"""Within which a factor is the same everywhere, or is the number it seems to be."""
SAME_DIRECTION = 1e-4
"""1 - cosine below which two gradients point the same way."""


class Cause(StrEnum):
    """The likely cause of a difference."""

    DATA_ORDER = "data order"
    STARTING_WEIGHTS = "starting weights"
    BATCH_SIZE = "batch size"
    NOT_FINITE = "not finite"
    TOKEN_WEIGHTING = "token weighting"
    SCALING = "loss scaling"
    FORWARD = "forward pass"
    SLICE = "wrong slice"
    ALL_REDUCE = "missing all-reduce"
    TYING = "tying"
    STAGES = "scaled stages"
    BACKWARD = "backward pass"
    CLIPPING = "clipping"
    SCHEDULE = "schedule"
    WEIGHT_DECAY = "weight decay"
    OPTIMIZER = "optimizer state"
    COPIES = "copies"
    CHAOS = "chaos"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The likely cause, why in one sentence, and the numbers behind it."""

    cause: Cause
    sentence: str
    evidence: str = ""

    def __str__(self) -> str:
        return f"{self.cause}: {self.sentence}{f' ({self.evidence})' if self.evidence else ''}"


def common_ratio(rows: Sequence[GradientRow]) -> float | None:
    """The ratio that all of these share while they point the same way as the baseline's; None where they don't."""
    largest = max((row.difference for row in rows), default=0.0)
    # What is noise beside the others has a direction of its own.
    telling = [row for row in rows if row.difference > 1e-4 * largest]
    if not telling or not np.isfinite([row.ratio for row in telling]).all():
        return None
    middle = float(np.median([row.ratio for row in telling]))
    same = all(
        1 - row.cosine < SAME_DIRECTION and abs(row.ratio - middle) < SAME_RATIO * abs(middle) for row in telling
    )
    return middle if same and middle else None


def fraction(factor: float) -> str:
    """`4`, `1/4`, or the number itself."""
    for whole in range(2, 4097):
        if abs(factor - whole) < whole * SAME_RATIO:
            return str(whole)
        if abs(factor * whole - 1) < SAME_RATIO:
            return f"1/{whole}"
    return f"{factor:.4g}"


def some(names: Sequence[str], limit: int = 3) -> str:
    """`a, b, c and 7 more`."""
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown


def largest(rows: Sequence[GradientRow], count: int, kind: str) -> str:
    """The evidence of rows that differ: how many, and the worst."""
    worst = rows[0]
    return f"{len(rows)} of {count} {kind}; {worst.name}: ratio {worst.ratio:.4g}, cosine {worst.cosine:.6f}"
