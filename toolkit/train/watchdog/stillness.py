"""For how long nothing has changed, as seen by a process that may itself be put to sleep. Imports no torch."""


class Stillness:
    """Seconds for which a count has not moved, while this process was awake.

    A job that is suspended and woken again (a debugger, a batch system, a laptop's lid) has not been still in between:
    no single gap between two looks counts for more than `longest_gap_seconds`.
    """

    def __init__(self, longest_gap_seconds: float) -> None:
        self._longest_gap_seconds = longest_gap_seconds
        self._count: int | None = None
        self._last = 0.0
        self.seconds = 0.0

    def look(self, count: int, now: float) -> float:
        """Take notice of the count at a moment of a monotonic clock."""
        if count != self._count:
            self.seconds = 0.0
        else:
            self.seconds += min(now - self._last, self._longest_gap_seconds)
        self._count, self._last = count, now
        return self.seconds


START_UP_SECONDS = 1800.0
"""Before the first step is through, models are read from slow disks and kernels compiled, however short steps are."""
_LONGER = 3
_LONG_PHASES = ("evaluate", "checkpoint", "finish")


def longest_limit_seconds(timeout_seconds: float) -> float:
    """Of all phases."""
    return limit_seconds(timeout_seconds, "start-up", 0)


def limit_seconds(timeout_seconds: float, phase: str, begun: int) -> float:
    """How long a rank may be without progress, in its step number `begun` (0: before the first); 0 means for ever."""
    if not timeout_seconds:
        return 0.0
    if begun <= 1:
        return max(START_UP_SECONDS, _LONGER * timeout_seconds)
    return _LONGER * timeout_seconds if phase in _LONG_PHASES else timeout_seconds
