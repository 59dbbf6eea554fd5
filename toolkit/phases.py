"""Phases of training, as the loop, the data loader and the engines report them to the watchdog."""

from typing import Protocol


class PhaseReporter(Protocol):
    """Called when a phase begins, and repeatedly in long ones: every call counts as progress. `step` counts from 1.

    What follows a colon is a detail, in which ranks of the same phase differ: `pipeline: waits for micro-batch 3`.
    """

    def __call__(self, phase: str, step: int | None = None) -> None:
        """Report the phase. A call takes about a microsecond."""


def phase_of(text: str) -> str:
    """Return a reported phase without its detail."""
    return text.partition(":")[0]


def ignore_phase(phase: str, step: int | None = None) -> None:
    """Report to nobody: the default where no watchdog runs."""
