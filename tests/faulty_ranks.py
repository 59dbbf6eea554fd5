"""Ranks of recipes/train.py with a fault in one of them: forked from a process that has imported all that they need.

The ranks are what a launcher would start, but for the imports: real rendezvous, real exit codes, stderr in a file.
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

SCRIPT = Path(__file__).parents[1] / "recipes" / "train.py"
DEADLY: dict[str, Callable[[], None]] = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),  # type: ignore[dict-item, return-value]
    "locked": lambda: ctypes.PyDLL(None).sleep(3600),  # a call that keeps the interpreter's lock
    "exception": lambda: _raise(),
}


def _raise() -> None:
    raise ZeroDivisionError("a bug of mine")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to a rank, where. In long phases a little later by chance: `delay_seconds`."""

    kind: str
    """A key of DEADLY, `stall` of the loader, or `sigterm`."""
    victim: int
    step: int
    phase: str
    delay_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the ranks ended. Seconds count from the fault."""

    codes: Mapping[int, int]
    seconds: Mapping[int, float]
    struck: Mapping[str, Any]
    """Step and phase in which the fault came; empty where it did not."""
    errors: str

    @property
    def lines(self) -> list[str]:
        """The error lines that a user sees."""
        return [line for line in self.errors.splitlines() if line.startswith("error: ")]


@dataclass
class FaultyRanks:
    """A job of `world_size` ranks in `folder`."""

    folder: Path
    arguments: Sequence[str]
    world_size: int
    fault: Fault | None = None
    _running: dict[int, int] = field(default_factory=dict)

    def run(self, *, timeout_seconds: float = 300.0, ends_with_first: bool = False) -> Ended:
        """Train until all ranks but a stopped one are gone; with `ends_with_first` the rest is ended then."""
        from toolkit.train.spawn import free_port

        port = free_port()
        (self.folder / "strike.json").unlink(missing_ok=True)
        (self.folder / "errors").write_bytes(b"")
        for rank in range(self.world_size):
            pid = os.fork()
            if not pid:
                self._become_rank(rank, port)
            self._running[pid] = rank
        try:
            gone = self._wait(timeout_seconds, ends_with_first)
        finally:
            for pid in self._running:
                os.kill(pid, signal.SIGKILL)
            rest = {rank: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, rank in self._running.items()}
        struck = self.folder / "strike.json"
        strike = json.loads(struck.read_text()) if struck.exists() else {}
        began = strike.get("monotonic", 0.0)
        return Ended(
            codes={rank: code for rank, (code, _) in gone.items()} | rest,
            seconds={rank: when - began for rank, (_, when) in gone.items()},
            struck=strike,
            errors=(self.folder / "errors").read_text(errors="replace"),
        )

    def _wait(self, timeout_seconds: float, ends_with_first: bool) -> dict[int, tuple[int, float]]:
        gone: dict[int, tuple[int, float]] = {}
        stopped = {self.fault.victim} if self.fault is not None and self.fault.kind in ("stop", "locked") else set()
        deadline = time.monotonic() + timeout_seconds
        while set(self._running.values()) - stopped and time.monotonic() < deadline and not (gone and ends_with_first):
            for pid in list(self._running):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    gone[self._running.pop(pid)] = (os.waitstatus_to_exitcode(status), time.monotonic())
            time.sleep(0.01)
        return gone

    def _become_rank(self, rank: int, port: int) -> None:
        try:
            import torch

            from toolkit.train.launch import reported_errors
            from toolkit.train.spawn import rank_variables

            os.environ.update(rank_variables(rank, self.world_size, port))
            torch.set_num_threads(1)
            os.chdir(self.folder)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open("errors", os.O_WRONLY | os.O_APPEND), 2)
            faulthandler.enable(file=2)  # a test runner had it write elsewhere
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            if self.fault is not None and self.fault.victim == rank:
                plant(self.fault, self.folder / "strike.json")
            with reported_errors():
                runpy.run_path(str(SCRIPT))["main"](list(self.arguments))
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(99)
        os._exit(0)


def plant(fault: Fault, record: Path) -> None:
    """Let `fault` happen in this process."""
    if fault.kind == "stall":
        return _plant_in_loader(fault, record)
    from toolkit.train.watchdog.watchdog import Watchdog

    mark, done = Watchdog.mark, threading.Event()

    def marked(watchdog: Watchdog, phase: str, step: int | None = None) -> None:
        mark(watchdog, phase, step)
        now = watchdog._place.step
        if done.is_set() or phase != fault.phase or now < fault.step:
            return
        done.set()

        def strike() -> None:
            place = watchdog._place
            _record(record, place.step, place.phase)
            if fault.kind == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                DEADLY[fault.kind]()

        if fault.delay_seconds:
            threading.Timer(fault.delay_seconds, strike).start()
        else:
            strike()

    Watchdog.mark = marked  # type: ignore[method-assign]
    return None


def _plant_in_loader(fault: Fault, record: Path) -> None:
    """It works ahead; the fault counts from when training asks for the batch that never comes."""
    from toolkit.train.data.samples import Samples
    from toolkit.train.watchdog.watchdog import Watchdog

    batch, mark = Samples.batch, Watchdog.mark

    def stalling(samples: Samples, step: int, positions: Any) -> Any:
        if step + 1 >= fault.step:
            threading.Event().wait()
        return batch(samples, step, positions)

    def marked(watchdog: Watchdog, phase: str, step: int | None = None) -> None:
        mark(watchdog, phase, step)
        if phase == "data" and watchdog._place.step >= fault.step:
            _record(record, watchdog._place.step, phase)

    Samples.batch, Watchdog.mark = stalling, marked  # type: ignore[method-assign]


def _record(path: Path, step: int, phase: str) -> None:
    text = json.dumps({"monotonic": time.monotonic(), "step": step, "phase": phase})
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, text.encode())
    os.close(descriptor)
