"""PhaseClock: how long this rank computes in each phase of a step, without the time in which it waits for others.

Ranks that synchronize take the same time for a step, whichever of them is slow: the others wait for it in collectives.
What tells them apart is the time that is left without these waits.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from toolkit.phases import PhaseReporter, phase_of

PHASES = ("data", "forward", "backward", "pipeline", "update")
"""Phases that are timed. A pipeline of DeepSpeed's own schedule reports its passes as `forward`."""
_TIMED = dict(zip(PHASES, PHASES, strict=True)) | {"fingerprint": "update"}

_Interval = tuple[str, Any, Any]
"""A phase, and two marks of a clock."""


class _HostClock:
    """Marks are seconds on the host, where collectives of CPU ranks block."""

    @staticmethod
    def mark() -> float:
        return time.perf_counter()

    @staticmethod
    def seconds(start: float, end: float) -> float:
        return end - start


class _StreamClock:
    """Marks are events in the GPU's stream, which waits for collectives while the host goes on."""

    @staticmethod
    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @staticmethod
    def seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


class PhaseClock:
    """A phase reporter that times phases and passes them on. It times nothing until `is_on` is set."""

    def __init__(self, report_phase: PhaseReporter, device: torch.device) -> None:
        self.is_on = False
        self._report_phase = report_phase
        self._clock: _HostClock | _StreamClock = _StreamClock() if device.type == "cuda" else _HostClock()
        self._phase: str | None = None
        self._began: Any = None
        self._phases: list[_Interval] = []
        self._waits: list[_Interval] = []

    def report_phase(self, phase: str, step: int | None = None) -> None:
        """Pass a phase on, and time it from now on."""
        self._report_phase(phase, step)
        timed = _TIMED.get(phase_of(phase)) if self.is_on else None
        if timed != self._phase:
            self._end_phase()
            self._phase = timed
            self._began = None if timed is None else self._clock.mark()

    @contextmanager
    def watching_waits(self) -> Iterator[None]:
        """Time the waits for collectives inside: each call of torch.distributed ends in one, or returns a handle."""
        with mock.patch.object(dist.Work, "wait", self._timed(dist.Work.wait)):
            yield

    def take(self) -> list[float]:
        """Return the seconds of each of PHASES since the last call, without waits."""
        self._end_phase()
        self._phase = None
        seconds = dict.fromkeys(PHASES, 0.0)
        for phase, start, end in self._phases:
            seconds[phase] += self._clock.seconds(start, end)
        for phase, start, end in self._waits:
            seconds[phase] -= self._clock.seconds(start, end)
        self._phases.clear()
        self._waits.clear()
        return [max(0.0, value) for value in seconds.values()]

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phases.append((self._phase, self._began, self._clock.mark()))

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(work: dist.Work, *arguments: Any, **options: Any) -> Any:
            phase = self._phase
            if phase is None or _is_beside_training():
                return wait(work, *arguments, **options)
            start = self._clock.mark()
            try:
                return wait(work, *arguments, **options)
            finally:
                self._waits.append((phase, start, self._clock.mark()))

        return timed


def _is_beside_training() -> bool:
    """Whether this is a thread of Python's own, such as one that saves: those of a backward pass are not."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
