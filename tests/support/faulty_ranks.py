"""Ranks of recipes/train.py with a fault in one of them, forked from a process that has imported everything.

Apart from the imports they run like ranks of a launcher: real rendezvous, real exit codes, stderr in a file.
"""

import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "recipes" / "train.py"
FAULTS: dict[str, Callable[[], None]] = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),  # type: ignore[dict-item, return-value]
    "locked": lambda: ctypes.PyDLL(None).sleep(3600),  # a call that holds the GIL
    "exception": lambda: _raise(),
}


def _raise() -> None:
    raise ZeroDivisionError("a bug of mine")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to which rank, and when: `delay_seconds` after a phase begins."""

    kind: str
    """A key of FAULTS, `stall` of the data loader, or `sigterm`."""
    victim: int
    step: int
    phase: str
    delay_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Exit code of each rank, and when it exited, in seconds after the fault."""

    codes: Mapping[int, int]
    seconds: Mapping[int, float]
    injected: Mapping[str, Any]
    """Step and phase of the fault; empty if it was not injected."""
    stderr: str

    @property
    def error_lines(self) -> list[str]:
        """The error lines that a user sees."""
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]


@dataclass
class FaultyRanks:
    """A job of `world_size` ranks in `folder`."""

    folder: Path
    arguments: Sequence[str]
    world_size: int
    fault: Fault | None = None
    _running: dict[int, int] = field(default_factory=dict)

    def run(self, *, timeout_seconds: float = 300.0, ends_with_first: bool = False) -> RunResult:
        """Train until all ranks except a stopped one have exited; with `ends_with_first` until the first has."""
        from toolkit.launch.spawn import free_port

        port, parent = free_port(), os.getpid()
        (self.folder / "fault.json").unlink(missing_ok=True)
        (self.folder / "errors").write_bytes(b"")
        for rank in range(self.world_size):
            pid = os.fork()
            if not pid:
                self._become_rank(rank, port, parent)
            self._running[pid] = rank
        try:
            exited = self._wait(timeout_seconds, ends_with_first)
        finally:
            for pid in self._running:
                os.kill(pid, signal.SIGKILL)
            rest = {rank: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, rank in self._running.items()}
        record = self.folder / "fault.json"
        injected = json.loads(record.read_text()) if record.exists() else {}
        began = injected.get("monotonic", 0.0)
        return RunResult(
            codes={rank: code for rank, (code, _) in exited.items()} | rest,
            seconds={rank: when - began for rank, (_, when) in exited.items()},
            injected=injected,
            stderr=(self.folder / "errors").read_text(errors="replace"),
        )

    def _wait(self, timeout_seconds: float, ends_with_first: bool) -> dict[int, tuple[int, float]]:
        exited: dict[int, tuple[int, float]] = {}
        stopped = {self.fault.victim} if self.fault is not None and self.fault.kind in ("stop", "locked") else set()
        deadline = time.monotonic() + timeout_seconds
        while (
            set(self._running.values()) - stopped and time.monotonic() < deadline and not (exited and ends_with_first)
        ):
            for pid in list(self._running):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    exited[self._running.pop(pid)] = (os.waitstatus_to_exitcode(status), time.monotonic())
            time.sleep(0.01)
        return exited

    def _become_rank(self, rank: int, port: int, parent: int) -> None:
        try:
            import torch

            from toolkit.launch.output import reported_errors
            from toolkit.launch.spawn import rank_variables
            from toolkit.parent_process import end_with

            end_with(parent)
            os.environ.update(rank_variables(rank, self.world_size, port))
            torch.set_num_threads(1)
            os.chdir(self.folder)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open("errors", os.O_WRONLY | os.O_APPEND), 2)
            faulthandler.enable(file=2)  # the test runner redirected it
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            if self.fault is not None and self.fault.victim == rank:
                inject(self.fault, self.folder / "fault.json")
            with reported_errors():
                runpy.run_path(str(SCRIPT))["main"](list(self.arguments))
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(99)
        os._exit(0)


def inject(fault: Fault, record: Path) -> None:
    """Inject `fault` into this process."""
    if fault.kind == "stall":
        return _inject_into_loader(fault, record)
    from toolkit.launch.health.watchdog import Watchdog

    report_phase, done = Watchdog.report_phase, threading.Event()

    def watched(watchdog: Watchdog, phase: str, step: int | None = None) -> None:
        report_phase(watchdog, phase, step)
        now = watchdog._progress.step
        if done.is_set() or phase != fault.phase or now < fault.step:
            return
        done.set()

        def strike() -> None:
            _record(record, watchdog._progress.step, watchdog._progress.phase)
            if fault.kind == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                FAULTS[fault.kind]()

        if fault.delay_seconds:
            threading.Timer(fault.delay_seconds, strike).start()
        else:
            strike()

    Watchdog.report_phase = watched  # type: ignore[method-assign]
    return None


def _inject_into_loader(fault: Fault, record: Path) -> None:
    """The loader prefetches; the fault counts from when training asks for the missing batch."""
    from toolkit.data.samples.samples import Samples
    from toolkit.launch.health.watchdog import Watchdog

    batch, report_phase = Samples.batch, Watchdog.report_phase

    def stalling(samples: Samples, step: int, positions: Any, **seed: int) -> Any:
        if step + 1 >= fault.step:
            threading.Event().wait()
        return batch(samples, step, positions, **seed)

    def watched(watchdog: Watchdog, phase: str, step: int | None = None) -> None:
        report_phase(watchdog, phase, step)
        if phase == "data" and watchdog._progress.step >= fault.step:
            _record(record, watchdog._progress.step, phase)

    Samples.batch, Watchdog.report_phase = stalling, watched  # type: ignore[method-assign]


def _record(path: Path, step: int, phase: str) -> None:
    text = json.dumps({"monotonic": time.monotonic(), "step": step, "phase": phase})
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, text.encode())
    os.close(descriptor)
