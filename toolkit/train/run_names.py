"""Names of run directories that nobody uses yet. Imports no torch."""

from itertools import count
from pathlib import Path


def unused_run_directory(name: str) -> Path:
    """The first of runs/NAME, runs/NAME-2, … that does not exist."""
    candidates = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(path for path in candidates if not path.exists())
