"""SlowRanks: name the ranks for which the others wait, from what each rank takes for the phases of a step.

Every WINDOW steps each rank's times travel to all others with the numbers that the host reads in a step anyway. Ranks
of one pipeline stage have the same work, and are compared.
"""

import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from toolkit.config.layout import Layout
from toolkit.phases import PhaseReporter
from toolkit.training.phase_clock import PHASES, PhaseClock

WINDOW = 10
"""Steps whose times are compared together."""
_WINDOWS = 2
"""Windows in a row in which a rank has to be slow: one slow step names nobody."""

Place = tuple[int, str]
"""A rank, and a phase of a step."""


class SlowRanks:
    """The slow ranks of a run. `share`: how much of a step the others have to wait for one that is named.

    `hosts`: the name of each rank's host.
    """

    def __init__(
        self,
        report_phase: PhaseReporter,
        device: torch.device,
        *,
        layout: Layout,
        rank: int,
        hosts: Sequence[str],
        share: float,
    ) -> None:
        self.named: dict[Place, float] = {}
        """How many times as long as the others each slow rank takes for a phase, as of the last window."""
        self._clock = PhaseClock(report_phase, device)
        self._times_every_step = device.type == "cpu"
        self._layout = layout
        self._rank = rank
        self._hosts = hosts
        self._share = share
        self._windows = 0
        self._row: list[float] = []
        self._counts: dict[Place, int] = {}

    @property
    def report_phase(self) -> PhaseReporter:
        """The reporter to which this rank reports its phases."""
        return self._clock.report_phase

    def watching(self) -> AbstractContextManager[None]:
        """Return a context in which waits for other ranks are seen."""
        return self._clock.watching_waits()

    def begin_step(self, step: int) -> None:
        """Begin the step after `step` steps: at the end of a window its times are to be exchanged.

        On GPUs, where timing a wait takes two events, the last step of a window stands for it.
        """
        self._row = []
        if step % WINDOW == 0:
            row = self._clock.take()
            self._windows += 1
            if self._windows > 2:  # the first may be a part of one, and the second has what is done once
                self._row = row
        self._clock.is_on = self._times_every_step or step % WINDOW == WINDOW - 1

    def local_numbers(self) -> tuple[int, dict[int, float]]:
        """Return how many numbers all ranks exchange in this step, and those of this rank by their places."""
        if not self._row:
            return 0, {}
        first = self._rank * len(PHASES)
        return self._layout.world_size * len(PHASES), {first + place: value for place, value in enumerate(self._row)}

    def read(self, numbers: Sequence[float]) -> list[str]:
        """Take the numbers of all ranks, none where none were due. Return what is new, in sentences."""
        if not numbers:
            return []
        width = len(PHASES)
        rows = [numbers[start : start + width] for start in range(0, len(numbers), width)]
        slow = find_slow(rows, self._layout, self._share)
        self._counts = {place: self._counts.get(place, 0) + 1 for place in slow}
        before = set(self.named)
        self.named = {place: slow[place] for place, count in self._counts.items() if count >= _WINDOWS}
        begun = []
        for rank, phase in sorted(self.named.keys() - before):
            times = _times(self.named[rank, phase])
            begun.append(f"{self._name(rank)} holds the others up: its {phase} takes {times} as long as theirs")
        ended = [
            f"{self._name(rank)} no longer holds the others up in its {phase}"
            for rank, phase in sorted(before - self.named.keys())
        ]
        return begun + ended

    def metrics(self) -> dict[str, float] | None:
        """Return the slow ranks as StepMetrics has them; None where there is none."""
        named = {f"{self._name(rank)} {phase}": round(ratio, 3) for (rank, phase), ratio in self.named.items()}
        return named or None

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._hosts[rank]})"


def find_slow(rows: Sequence[Sequence[float]], layout: Layout, share: float) -> Mapping[Place, float]:
    """Return the ranks that take longer for a phase than others of their stage, and how many times as long.

    `rows`: each rank's seconds for each of PHASES. `share`: the least difference, as a share of the work of a step.
    """
    slow: dict[Place, float] = {}
    for peers in layout.ranks_along("stage"):
        step = statistics.median_low(sum(rows[rank]) for rank in peers)
        for number, phase in enumerate(PHASES):
            usual = statistics.median_low(rows[rank][number] for rank in peers)
            for rank in peers:
                seconds = rows[rank][number]
                if seconds - usual > share * step:
                    slow[rank, phase] = seconds / max(usual, 0.001 * step)
    return slow


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times" if ratio < 100 else "more than 100 times"
