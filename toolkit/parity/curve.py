"""LossCurve: what one run reported, step by step."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from toolkit.errors import DataError


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """Loss (nats per token) and gradient norm of steps 1, 2, … of one strategy."""

    label: str
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.losses) == len(self.grad_norms)

    def __len__(self) -> int:
        return len(self.losses)

    def named(self, label: str) -> Self:
        """The same under another label."""
        return replace(self, label=label)

    @classmethod
    def from_steps(cls, label: str, steps: Iterable[tuple[float, float]]) -> Self:
        """From (loss, gradient norm) pairs."""
        pairs = list(steps)
        return cls(label=label, losses=tuple(loss for loss, _ in pairs), grad_norms=tuple(norm for _, norm in pairs))

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a metrics.jsonl. Raises DataError with the line that is not a step."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise DataError(f"{path}: cannot be read ({reason}). Give a run's metrics.jsonl.") from error
        return cls.from_steps(str(path), [_step(path, number, line) for number, line in enumerate(lines, start=1)])


def _step(path: Path, number: int, line: str) -> tuple[float, float]:
    try:
        record: Any = json.loads(line)
        # What was not finite is written as null.
        loss, norm = (math.nan if record[key] is None else float(record[key]) for key in ("loss", "grad_norm"))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError):
        raise DataError(f"{path}:{number}: not a step. A line of metrics.jsonl has loss and grad_norm.") from None
    return loss, norm
