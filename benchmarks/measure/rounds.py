"""Rounds: each side in turn on fresh forked ranks, so that a machine that slows down slows all sides alike."""

import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from measure.our_run import Stamps
from toolkit.launch.local_ranks import run_ranks

Outcome = TypeVar("Outcome")
Side = Callable[[], Stamps]
"""Runs on every rank; what it prints goes nowhere."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of the counted steps of one side, a list a round, and the losses of its last round."""

    rounds: list[list[float]]
    losses: list[float]

    @property
    def median(self) -> float:
        """Of all counted steps."""
        return statistics.median(seconds for steps in self.rounds for seconds in steps)

    def over(self, other: "Times") -> list[float]:
        """Of each round: the median step of this side by that of the other, smallest first."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return sorted(statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs)


def alternate(sides: Mapping[str, Side], *, ranks: int, rounds: int, warmup: int) -> dict[str, Times]:
    """Run every side once a round, on `ranks` ranks. The first `warmup` steps of each run are not counted."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {}
    console = Console(stderr=True, highlight=False)
    for number in range(rounds):
        for name, side in sides.items():
            stamps: Stamps = run_ranks(silently, ranks, side, timeout_seconds=1800)[0]
            steps = stamps.step_seconds(warmup)
            seconds[name].append(steps)
            losses[name] = stamps.losses
            milliseconds = statistics.median(steps) * 1e3
            console.print(f"round {number + 1} of {rounds}: {name}, {milliseconds:.1f} ms a step", style="dim")
    return {name: Times(rounds=seconds[name], losses=losses[name]) for name in sides}


def silently(side: Callable[[], Outcome]) -> Outcome:
    """Run a side; what DeepSpeed prints goes nowhere."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    return side()
