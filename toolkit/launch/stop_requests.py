"""Requests to stop a rank, by a signal or by the end of its launcher: what becomes of each, and the one line about it.

A thread reads the signals: Python runs its own handlers in the main thread, which may wait in a collective. No torch.
"""

import contextlib
import os
import re
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, Protocol

from toolkit.launch.health.local_process import exit_now, print_error
from toolkit.launch.rank_environment import RankEnvironment

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; what Slurm, Kubernetes and `timeout` send; what `sbatch --signal=USR1@120` asks for."""
PASSED_ON = {signal.SIGINT: signal.SIGRTMIN + 1, signal.SIGTERM: signal.SIGRTMIN + 2, signal.SIGUSR1: signal.SIGUSR1}
"""What `dstk train` sends to its ranks for a signal that it got. They tell by it which one that was; and however often
it comes, it never ends a rank that is about to save, as SIGINT or SIGTERM a second later would."""
RANK_SIGNALS = (*STOP_SIGNALS, PASSED_ON[signal.SIGINT], PASSED_ON[signal.SIGTERM])
"""What ranks handle."""
SAVE_SECONDS = 120
REPEAT_SECONDS = 1.0
"""Launchers pass a signal on to ranks that have got it too: what comes within this time is the same request."""
_EXIT_SECONDS = 10.0
_LAUNCHER = re.compile(
    r"(?:\S*python\S* (?:-\w )*)?(?:\S*/)?(deepspeed(?:\.launcher\.\w+)?|torchrun|torch\.distributed\.(?:run|launch)|"
    r"accelerate(?:\.commands\.\w+|-launch)?|mpirun|mpiexec|orted|prted|hydra_pmi_proxy|slurmstepd)(?=[: ]|$)"
)
"""The beginning of its command line."""


class Stoppable(Protocol):
    """A run that can stop after a step."""

    @property
    def has_stepped(self) -> bool: ...

    def request_stop(self, cause: str) -> None: ...

    def describe_saved(self) -> str: ...


class _Requests:
    """The requests to this rank, from now to `close`. For the main thread.

    The first one stops the run at a step boundary, and where none runs yet it ends this rank; SIGINT or SIGTERM a
    second later ends it at once.
    """

    def __init__(self) -> None:
        self._prints = RankEnvironment.detect().rank == 0
        self.run: Stoppable | None = None
        self.code = 0
        self.cause = ""
        self.is_over = False
        self._repeats_from = 0.0
        self._lock = threading.RLock()
        read_end, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        numbers = [number for number in RANK_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        # Python writes to the pipe only what has a handler.
        self._previous = {number: signal.signal(number, lambda number, frame: None) for number in numbers}
        signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._read, args=(read_end,), name="watchdog-signals", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, RANK_SIGNALS)  # `dstk train` starts its ranks with these blocked

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self._pipe)

    def _read(self, pipe: int) -> None:
        while received := os.read(pipe, 64):
            for number in STOP_SIGNALS:  # before what `dstk train` passes on, which Ctrl-C reaches too
                if number in received:
                    self.request(128 + number, number.name, insists=number != signal.SIGUSR1)
            for number, passed_on in PASSED_ON.items():
                if passed_on in received:
                    self.request(128 + number, number.name)
        os.close(pipe)

    def request(self, code: int, cause: str, *, insists: bool = False) -> None:
        """Stop the run; with `insists`, end this rank with exit code `code` if a stop was requested before."""
        with self._lock:
            now = time.monotonic()
            if self.is_over or self.cause:
                if insists and now > self._repeats_from:
                    self.end(code, "" if self.is_over else f"ended at once by a second signal, {cause}")
                return
            self.code = code
            self.cause = cause
            self._repeats_from = now + REPEAT_SECONDS
            if self.run is None:
                self.end(code, f"stopped by {cause} before training began")
            if self._prints and os.isatty(2):
                print_error("stopping after this step, with a checkpoint; Ctrl-C again ends the run at once")
            self.run.request_stop(cause)

    def finish(self) -> None:
        """Ignore requests for a while: the run has ended, and this process is about to."""
        with self._lock:
            self.is_over = True
            self._repeats_from = time.monotonic() + _EXIT_SECONDS

    def end(self, code: int, reason: str) -> NoReturn:
        """Exit now. Rank 0 prints the reason, and what is saved."""
        with self._lock:  # of two threads, one prints
            if self._prints and reason:
                saved = "nothing was saved yet" if self.run is None else self.run.describe_saved()
                print_error(f"error: {reason}; {saved}.")
            exit_now(code)


_requests: _Requests | None = None


def listen() -> None:
    """Handle requests to the end of this process. For a training script, before it imports torch."""
    global _requests
    if _requests is None:
        _requests = _Requests()
        _follow_launchers(_requests)


@contextmanager
def stoppable(run: Stoppable) -> Iterator[None]:
    """Let a request inside stop `run` at a step boundary. One rank's is enough. For the main thread."""
    global _requests
    is_listening = _requests is not None
    if _requests is None:
        _requests = _Requests()
    requests = _requests
    requests.run = run
    requests.is_over = False
    try:
        yield
    finally:
        requests.finish()
        if not is_listening:
            _stop_listening()


def end_if_waiting() -> None:
    """End this rank if it should stop and no step was complete yet: the others may have ended, which is no failure."""
    if (its := _requests) and its.cause and not its.is_over and not (its.run and its.run.has_stepped):
        its.end(its.code, f"stopped by {its.cause} before the first step was complete")


def is_stopping() -> bool:
    """Whether this rank was asked to stop."""
    return _requests is not None and bool(_requests.cause)


def _stop_listening() -> None:
    global _requests
    if _requests is not None:
        _requests.close()
        _requests = None


os.register_at_fork(after_in_child=_stop_listening)


def _follow_launchers(requests: _Requests) -> None:
    """Request a stop when a launcher among the ancestors of this process ends."""
    poll = select.poll()
    causes = {}
    pid = os.getpid()
    with contextlib.suppress(OSError):  # one has ended since, or the kernel is old
        while pid := int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if name := _LAUNCHER.match(line):
                handle = os.pidfd_open(pid)
                causes[handle] = f"the end of its launcher, {name[1]} (process {pid})"
                poll.register(handle, select.POLLIN)

    def follow() -> None:
        cause = causes[poll.poll()[0][0]]
        requests.request(128 + signal.SIGTERM, cause)
        time.sleep(SAVE_SECONDS)
        requests.end(128 + signal.SIGTERM, f"not stopped {SAVE_SECONDS} s after {cause}")

    if causes:
        threading.Thread(target=follow, name="watchdog-launcher", daemon=True).start()
