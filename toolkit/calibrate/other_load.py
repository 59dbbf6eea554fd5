"""Load of other programs: how many cores they kept busy while something was measured."""

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class _Seconds:
    """Seconds on the clock, and seconds that programs have kept cores busy: all of them, and this one."""

    clock: float
    all_programs: float
    this_program: float


class OtherLoad:
    """Counts the load of other programs, from the time of its creation."""

    def __init__(self) -> None:
        self._start = _now()

    @property
    def cores(self) -> float:
        """Cores that other programs kept busy, on average; 0 where the system does not say."""
        now = _now()
        elapsed = now.clock - self._start.clock
        all_programs = now.all_programs - self._start.all_programs
        this_program = now.this_program - self._start.this_program
        return max(0.0, all_programs - this_program) / max(elapsed, 1e-3)


def busy_seconds() -> float:
    """Return the busy seconds of all cores together since the machine started; 0 where the system does not say."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _now() -> _Seconds:
    this_process = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)  # those that it has waited for
    return _Seconds(
        clock=time.monotonic(),
        all_programs=busy_seconds(),
        this_program=this_process.ru_utime + this_process.ru_stime + children.ru_utime + children.ru_stime,
    )
