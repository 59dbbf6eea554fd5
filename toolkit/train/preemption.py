"""Preemption: a scheduler's signal becomes a checkpoint at the next step boundary, and a second one ends the rank.

SIGTERM is what Slurm, Kubernetes and `timeout` send, SIGUSR1 what `sbatch --signal=USR1@120` asks for. One rank that
was told is enough: ranks compare notes at each step boundary.
"""

import os
import signal
from types import FrameType, TracebackType
from typing import Self

from toolkit.errors import PreemptedError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption:
    """Whether this rank was asked to stop."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __enter__(self) -> Self:
        """Handle the signals inside of the block, where there are steps to end at. In the main thread only."""
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(PreemptedError.exit_code)
        self.received = signal.Signals(number)
