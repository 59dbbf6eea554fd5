"""Processes of this machine as a watchdog sees them: a peer that ends, and this one's stacks, errors and exit.

Imports no torch.
"""

import contextlib
import linecache
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from toolkit.errors import ToolkitError
from toolkit.files import printable

_FLUSH_SECONDS = 0.25
exit_calls: list[Callable[[], None]] = []
"""Called by `exit_now`, where they take no longer than that."""
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")


def machine_id() -> str:
    """An id that two processes share if they can address each other by process id; '' if unknown."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class PeerProcess:
    """The process of another rank, watched through a pidfd. Thread-safe."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self._handle = os.pidfd_open(pid)
        self._is_open = True
        self._lock = threading.Lock()

    def has_ended(self) -> bool:
        """Whether the process has ended, even if its parent has not reaped it yet."""
        with self._lock:
            if not self._is_open:
                return False
            poll = select.poll()  # one poll object cannot be used by two threads at once
            poll.register(self._handle, select.POLLIN)
            return bool(poll.poll(0))

    def close(self) -> None:
        with self._lock:
            if self._is_open:
                os.close(self._handle)
            self._is_open = False


def thread_stacks(title: str) -> str:
    """Format the stack of each Python thread except the watchdog's, the main thread last."""
    frames = sys._current_frames()
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("watchdog")]
    threads.sort(key=lambda thread: thread is threading.main_thread())
    return "\n".join(
        f"{title}, thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    )


def is_in_collective() -> bool:
    """Whether the main thread is seen waiting for other ranks: in a call of torch.distributed, or for its handle."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return False
    if any(part in frame.f_code.co_filename for part in _COLLECTIVES):
        return True
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)  # None between two lines
    return "handle" in line and ".wait(" in line


def exit_now(code: int) -> NoReturn:
    """Exit without unwinding, after flushing the output streams where that is possible."""
    flush = threading.Thread(target=_flush, daemon=True)  # the main thread may hold the lock of a stream
    flush.start()
    flush.join(timeout=_FLUSH_SECONDS)
    os._exit(code)


def summarize(error: BaseException) -> str:
    """Describe an error in one line, for other ranks."""
    first = printable(str(error).strip().partition("\n")[0][:500])
    return first if isinstance(error, ToolkitError) else f"{type(error).__name__}: {first}"


def print_error(text: str) -> None:
    """Write lines to stderr, bypassing sys.stderr: the main thread may hold its lock."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text.rstrip()}\n".encode(errors="replace"))


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    for call in exit_calls:
        with contextlib.suppress(Exception):
            call()
