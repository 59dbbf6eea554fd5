"""How busy other programs kept the cores while something was measured."""

import os
import resource
import time
from pathlib import Path


class OtherLoad:
    """Starts counting when it is made."""

    def __init__(self) -> None:
        self._start = _now()

    @property
    def cores(self) -> float:
        """Cores that other programs kept busy, on average; 0 where the system does not say."""
        elapsed, busy, own = (now - then for now, then in zip(_now(), self._start, strict=True))
        return max(0.0, busy - own) / max(elapsed, 1e-3)


def busy_seconds() -> float:
    """Of all cores together since the machine started; 0 where the system does not say."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").partition("\n")[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _now() -> tuple[float, float, float]:
    """The clock, and seconds of all cores and of this process with the children that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return time.monotonic(), busy_seconds(), sum(usage.ru_utime + usage.ru_stime for usage in usages)
