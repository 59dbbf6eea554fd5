"""Marks: how training tells where it is. Imports no torch."""

from typing import Protocol


class Mark(Protocol):
    """Called where a phase begins, and again in long ones: each call is progress. `step` counts from 1."""

    def __call__(self, phase: str, step: int | None = None) -> None:
        """Say so. Costs a microsecond."""


def unwatched(phase: str, step: int | None = None) -> None:
    """Nobody looks."""
