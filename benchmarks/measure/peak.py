"""The memory that a side of a benchmark adds to its process."""

import resource
from collections.abc import Callable

from measure.rounds import Outcome, silently


def with_peak(side: Callable[[], Outcome]) -> tuple[Outcome, int]:
    """Run a side on this rank; return also the resident memory that it added at most, in bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = silently(side)
    return outcome, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
