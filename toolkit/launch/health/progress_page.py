"""ProgressPage: where a rank is, in memory that outlives its process, for the rank of the same machine that watches it.

A heartbeat is up to half a second old, in which a rank runs many passes of a pipeline. A rank that is killed cannot
send another one. So it also writes its step and phase into a page of memory without a name (memfd), which the watching
rank has opened through /proc before. Writing takes two microseconds. Imports no torch.
"""

import mmap
import os
from pathlib import Path
from typing import Self

_SLOT_BYTES = 512
_SIZE = 1 + 2 * _SLOT_BYTES
"""The number of the slot that is valid, and two slots: a rank that is killed while it writes leaves the other one."""


def _name(pid: int) -> str:
    """Return what the page of a process is called: a rank also has the page open of the rank that it watches."""
    return f"dstk-progress-{pid}"


class ProgressPage:
    """The page of a rank: of this one, or of another one on this machine."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _SIZE)
        self._slot = 0

    @classmethod
    def create(cls) -> Self | None:
        """Make the page of this process; None where the system has no such memory."""
        try:
            descriptor = os.memfd_create(_name(os.getpid()))
            os.ftruncate(descriptor, _SIZE)
            return cls(descriptor)
        except (OSError, AttributeError):
            return None

    @classmethod
    def of_process(cls, pid: int) -> Self | None:
        """Open the page of another process; None where it has none, or may not be read."""
        target = f"/memfd:{_name(pid)} (deleted)"
        try:
            for link in Path(f"/proc/{pid}/fd").iterdir():
                if os.readlink(link) == target:
                    return cls(os.open(link, os.O_RDWR))
        except OSError:
            pass
        return None

    def write(self, step: int, phase: str) -> None:
        """Write the progress of this rank."""
        text = f"{step} {phase}".encode()[: _SLOT_BYTES - 1]
        slot = 1 - self._slot
        start = 1 + slot * _SLOT_BYTES
        self._memory[start : start + len(text) + 1] = text + b"\0"
        self._memory[0] = slot
        self._slot = slot

    def read(self) -> tuple[int, str] | None:
        """Return the step and the phase that were written last; None where nothing was."""
        start = 1 + self._memory[0] * _SLOT_BYTES
        text = self._memory[start : start + _SLOT_BYTES].partition(b"\0")[0].decode(errors="replace")
        step, _, phase = text.partition(" ")
        return (int(step), phase) if phase else None

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
        os.close(self._descriptor)
