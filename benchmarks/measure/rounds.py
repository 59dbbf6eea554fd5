"""Rounds: each side in turn, in forked ranks, so that a machine that slows down slows all sides alike."""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.our_run import Stamps
from rich.console import Console

from toolkit.train.local_ranks import run_ranks

Side = Callable[[], Stamps]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of the counted steps of one side, a list a round, and the losses of its last round."""

    rounds: list[list[float]]
    losses: list[float]

    @property
    def median(self) -> float:
        """Of all counted steps."""
        return statistics.median(seconds for steps in self.rounds for seconds in steps)


def alternate(sides: Mapping[str, Side], *, ranks: int, rounds: int, warmup: int) -> dict[str, Times]:
    """Run every side once a round, on `ranks` fresh ranks. The first `warmup` steps of each run are not counted."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {}
    console = Console(stderr=True)
    for number in range(rounds):
        for name, side in sides.items():
            stamps: Stamps = run_ranks(_silently, ranks, side, timeout_seconds=1800)[0]
            seconds[name].append(stamps.step_seconds(warmup))
            losses[name] = stamps.losses
            median = statistics.median(seconds[name][-1]) * 1e3
            console.print(f"round {number + 1}/{rounds}  {name}  {median:.1f} ms a step", style="dim", highlight=False)
    return {name: Times(rounds=seconds[name], losses=losses[name]) for name in sides}


def ratios(slower: Times, faster: Times) -> list[float]:
    """Of each round: the median step of one side by that of the other."""
    return [
        statistics.median(a) / statistics.median(b) for a, b in zip(slower.rounds, faster.rounds, strict=True)
    ]


def _silently(side: Side) -> Any:
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    return side()
