"""Incidents: what becomes of a step whose loss or gradient is not finite, or whose loss leaps.

Decided from what every rank knows alike (the loss of the global batch, the recipe, the counts so far), so that all of
them do the same without asking each other.
"""

import math
from collections import deque
from enum import Enum

from toolkit.recipe import TrainSection


class Action(Enum):
    """What to do about an incident."""

    STOP = "stop"
    SKIP = "skip"
    ROLL_BACK = "rollback"


class SpikeDetector:
    """Whether a loss lies far above those before it: more than `sigmas` standard deviations above their mean.

    It looks at the last `window` losses, and says nothing before it has seen so many. A spike is not taken into them.
    """

    def __init__(self, *, sigmas: float, window: int) -> None:
        self._sigmas = sigmas
        self._recent: deque[float] = deque(maxlen=window)

    def limit(self) -> float:
        """The largest loss that is no spike; infinite where it is switched off or has not seen enough."""
        count = len(self._recent)
        if not self._sigmas or count < (self._recent.maxlen or 0):
            return math.inf
        mean = math.fsum(self._recent) / count
        variance = math.fsum((loss - mean) ** 2 for loss in self._recent) / (count - 1)
        return mean + self._sigmas * math.sqrt(variance)

    def add(self, loss: float) -> None:
        """Remember the loss of a step."""
        self._recent.append(loss)

    def forget(self) -> None:
        """Begin anew: training has gone back to where the losses before it are others."""
        self._recent.clear()


class Incidents:
    """The policy of a recipe, and how often it was needed."""

    def __init__(self, section: TrainSection) -> None:
        self.on_nonfinite = Action(section.on_nonfinite)
        self._most = section.max_incidents
        self._skips = 0
        self._target: int | None = None
        self._rollbacks = 0
        self.spikes = SpikeDetector(sigmas=section.spike_sigmas, window=section.spike_window)

    def may_skip(self) -> bool:
        """Whether one more step in a row may be left out; it counts."""
        self._skips += 1
        return self._skips <= self._most

    def may_roll_back(self, step: int) -> bool:
        """Whether training may go back to the checkpoint of `step` once more; it counts."""
        if step != self._target:
            self._target, self._rollbacks = step, 0
        self._rollbacks += 1
        self.spikes.forget()
        return self._rollbacks <= self._most

    def went_well(self, loss: float) -> None:
        """A step was taken whose loss is no spike."""
        self._skips = 0
        self.spikes.add(loss)
