"""Ties a process to the one that started it: it ends when that one does, however that ends. Linux only, no torch."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # prctl(2)
_libc = ctypes.CDLL(None)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread of `parent` that started it ends; now if `parent` is gone.

    It is kept by exec but not by fork, and works where no thread could: in a process that is stopped, or that native
    code blocks.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call, so no signal comes
        os.kill(os.getpid(), signal.SIGKILL)
