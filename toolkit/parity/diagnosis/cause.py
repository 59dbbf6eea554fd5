"""The causes that a diagnosis can name, and the wording of its rules, whose texts are in diagnoses.json."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.parity.parity_run import TensorDifference

SAME_RATIO = 1e-3
"""Relative bound within which factors count as equal, or as a whole number or fraction."""
SAME_DIRECTION = 1e-4
"""1 - cosine below which two gradients point the same way."""
_TEXTS = json.loads(Path(__file__).with_name("diagnoses.json").read_text(encoding="utf-8"))


class Cause(StrEnum):
    """The likely cause of a difference."""

    DATA_ORDER = "data order"
    INITIAL_WEIGHTS = "initial weights"
    DROPOUT = "dropout"
    BATCH_SIZE = "batch size"
    NOT_FINITE = "not finite"
    LABELS = "labels"
    TOKEN_WEIGHTING = "token weighting"
    ACCUMULATION = "gradient accumulation"
    SCALING = "loss scaling"
    PAIRS = "split pair"
    REFERENCE = "reference model"
    OBJECTIVE = "objective"
    FORWARD = "forward pass"
    POSITIONS = "positions"
    CONTEXT = "context parallelism"
    PRECISION = "precision"
    BIAS = "row-parallel bias"
    SHARD = "wrong shard"
    ALL_REDUCE = "missing all-reduce"
    TYING = "weight tying"
    STALE = "stale weights"
    STAGES = "scaled stages"
    MESSAGES = "pipeline messages"
    EXPERTS = "experts"
    ROUTER = "router"
    BALANCING = "auxiliary loss"
    BACKWARD = "backward pass"
    CLIPPING = "clipping"
    SCHEDULE = "schedule"
    WEIGHT_DECAY = "weight decay"
    OPTIMIZER = "optimizer state"
    REPLICAS = "diverged replicas"
    CHAOS = "chaos"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Diagnosis:
    """The likely cause, the reason in one sentence, and the numbers behind it."""

    cause: Cause
    sentence: str
    evidence: str = ""
    is_late: bool = False
    """Whether the first step is right, so that growth of rounding may explain what differs later."""

    def __str__(self) -> str:
        return f"{self.cause}: {self.sentence}{f' ({self.evidence})' if self.evidence else ''}"


def diagnosis(name: str, /, **values: Any) -> Diagnosis:
    """Return the diagnosis of this name in diagnoses.json, filled in."""
    row = _TEXTS[name]
    sentence, evidence = (row.get(key, "").format(**values) for key in ("sentence", "evidence"))
    return Diagnosis(Cause(row["cause"]), sentence, evidence, row.get("is_late", False))


def common_ratio(rows: Sequence[TensorDifference]) -> float | None:
    """Return the ratio that all rows share while pointing the same way as the baseline's; else None."""
    largest = max((row.difference for row in rows), default=0.0)
    # A gradient that is rounding noise beside the others has a direction of its own.
    telling = [row for row in rows if row.difference > 1e-4 * largest]
    if not telling or not np.isfinite([row.ratio for row in telling]).all():
        return None
    middle = float(np.median([row.ratio for row in telling]))
    same = all(
        1 - row.cosine < SAME_DIRECTION and abs(row.ratio - middle) < SAME_RATIO * abs(middle) for row in telling
    )
    return middle if same and middle else None


def fraction(factor: float) -> str:
    """Format a factor as `4`, `1/4`, or the number itself."""
    for whole in range(2, 4097):
        if abs(factor - whole) < whole * SAME_RATIO:
            return str(whole)
        if abs(factor * whole - 1) < SAME_RATIO:
            return f"1/{whole}"
    return f"{factor:.4g}"


def worst_of(rows: Sequence[TensorDifference], count: int, kind: str) -> str:
    """Format the evidence of rows that differ: how many of `count`, and the worst."""
    worst = rows[0]
    return f"{len(rows)} of {count} {kind}; {worst.name}: ratio {worst.ratio:.4g}, cosine {worst.cosine:.6f}"
