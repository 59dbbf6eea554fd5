"""Stalled ranks: which ranks stall the job, and the messages that name them. Imports no torch."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from toolkit.launch.health.heartbeat import Heartbeat

_MOST_STACKS = 4
_MOST_NAMES = 8
START_UP_SECONDS = 1800.0
"""Least limit until the first step is done: models are read from slow disks and kernels are compiled."""
_LONG_PHASE_FACTOR = 3
_LONG_PHASES = ("evaluate", "checkpoint", "finish")

Kind = Literal["missing", "unresponsive", "behind", "diverged", "not waiting", "unknown"]


class StallClock:
    """Seconds for which a counter has not changed while this process was awake.

    A job that is suspended and resumed (by a debugger, a batch system, a laptop's lid) has not hung in between: no gap
    between two updates counts for more than `longest_gap_seconds`.
    """

    def __init__(self, longest_gap_seconds: float) -> None:
        self._longest_gap_seconds = longest_gap_seconds
        self._counter: int | None = None
        self._last = 0.0
        self.seconds = 0.0

    def update(self, counter: int, now: float) -> float:
        """Take the counter's value at a time of a monotonic clock; return the seconds without change."""
        if counter != self._counter:
            self.seconds = 0.0
        else:
            self.seconds += min(now - self._last, self._longest_gap_seconds)
        self._counter = counter
        self._last = now
        return self.seconds


def limit_seconds(timeout_seconds: float, phase: str = "start-up", steps_started: int = 0) -> float:
    """Return the seconds that a rank may make no progress, 0 for no limit; by default the longest of all limits."""
    if not timeout_seconds:
        return 0.0
    if steps_started <= 1:
        return max(START_UP_SECONDS, _LONG_PHASE_FACTOR * timeout_seconds)
    return _LONG_PHASE_FACTOR * timeout_seconds if phase in _LONG_PHASES else timeout_seconds


@dataclass(frozen=True, kw_only=True)
class StalledRanks:
    """The ranks that the others wait for.

    missing: they never published a heartbeat. unresponsive: their processes no longer run Python. behind: they have
    not reached the phase in which the others wait. diverged: they wait in another collective than the majority.
    not waiting: all ranks are in the same phase, and these do not wait for others. unknown: all are in the same phase,
    and nothing distinguishes them.
    """

    kind: Kind
    ranks: tuple[int, ...]

    @property
    def stack_ranks(self) -> tuple[int, ...]:
        """The ranks that print their stacks: some of those that can."""
        return () if self.kind in ("missing", "unresponsive") else self.ranks[:_MOST_STACKS]


def find_stalled_ranks(
    heartbeats: Mapping[int, Heartbeat], world_size: int, unresponsive: Set[int]
) -> StalledRanks | None:
    """Find the ranks that stall the others; None if they have not exceeded their own time limit yet.

    `unresponsive`: ranks whose heartbeats do not change.
    """
    missing = tuple(rank for rank in range(world_size) if rank not in heartbeats)
    if missing:
        return StalledRanks(kind="missing", ranks=missing)
    if unresponsive:
        return StalledRanks(kind="unresponsive", ranks=tuple(sorted(unresponsive)))
    stalled = _among_responsive(list(heartbeats.values()))
    stalling = [heartbeats[rank] for rank in stalled.ranks]
    overdue = any(
        heartbeat.limit_seconds and heartbeat.stalled_seconds >= heartbeat.limit_seconds for heartbeat in stalling
    )
    return stalled if overdue else None


def _among_responsive(heartbeats: Sequence[Heartbeat]) -> StalledRanks:
    first = min(heartbeat.progress for heartbeat in heartbeats)
    behind = [heartbeat for heartbeat in heartbeats if heartbeat.progress == first]
    ahead = [heartbeat for heartbeat in heartbeats if heartbeat.progress != first]
    if ahead and all(heartbeat.in_collective for heartbeat in heartbeats) and len(ahead) < len(behind):
        # Every rank waits for others: the collectives do not match, and the minority is wrong.
        return StalledRanks(kind="diverged", ranks=_ranks(ahead))
    # Some of those behind may wait for one of them (tensor-parallel ranks for each other).
    not_waiting = [heartbeat for heartbeat in behind if not heartbeat.in_collective]
    if ahead:
        return StalledRanks(kind="behind", ranks=_ranks(not_waiting or behind))
    if behind[0].phase == "data" or len(heartbeats) == 1:
        return StalledRanks(kind="behind", ranks=_ranks(behind))
    if len(not_waiting) in (0, len(behind)):
        return StalledRanks(kind="unknown", ranks=_ranks(behind))
    return StalledRanks(kind="not waiting", ranks=_ranks(not_waiting))


def _ranks(heartbeats: Collection[Heartbeat]) -> tuple[int, ...]:
    return tuple(sorted(heartbeat.rank for heartbeat in heartbeats))


def describe_hang(stalled: StalledRanks, heartbeats: Mapping[int, Heartbeat], seconds: float) -> str:
    """Describe in one line what `find_stalled_ranks` found, after a rank had made no progress for `seconds`."""
    waited = f"no progress for {seconds:.0f} s"
    hint = "See train.hang_timeout."
    if stalled.kind == "missing":
        return f"{waited}: {_list(stalled.ranks)} never started. {hint}"
    if stalled.kind == "unknown":
        return (
            f"{waited}: all ranks respond and are in {heartbeats[stalled.ranks[0]].location}, and nothing shows which "
            f"one hangs. Stacks of {_list(stalled.stack_ranks)} follow. {hint}"
        )
    waiting = [heartbeat for heartbeat in heartbeats.values() if heartbeat.rank not in stalled.ranks]
    locations = sorted({heartbeat.location for heartbeat in waiting})
    wait_of_others = f", and the others wait in {' and '.join(locations[:3])}" if locations else ""
    named = [heartbeats[rank] for rank in stalled.ranks]
    if stalled.kind == "unresponsive":
        # Their last heartbeats are old, but no rank can be more than one step behind those that wait for it.
        step = min((heartbeat.step for heartbeat in waiting), default=0)
        return _describe_unresponsive(_names(named, step), wait_of_others, waited)
    return f"{_names(named)} hangs{wait_of_others}: {waited}. The stack follows. {hint}"


def describe_death(heartbeat: Heartbeat, step: int = 0) -> str:
    """Describe a dead rank in one line. `step`: where another rank is at the same time, which is about the same."""
    reason = heartbeat.exit_reason or "killed or crashed in native code, and left no error message"
    return f"{heartbeat.name} died in {_location(heartbeat, 0 if heartbeat.exit_reason else step)}: {reason}"


def describe_no_response(heartbeat: Heartbeat, step: int, seconds: float) -> str:
    """Describe a rank that does not respond to one in `step` that has made no progress for `seconds`."""
    return _describe_unresponsive(_names([heartbeat], step), "", f"no progress for {seconds:.0f} s")


def describe_lost_store(heartbeat: Heartbeat, host: str, store_rank: int | None, seconds: float | None) -> str:
    """Describe in one line, for the rank with this heartbeat, that the process on `host` with the store is lost.

    `store_rank`: that process, None for the launcher. `seconds`: the time without progress if it does not respond;
    None if the connection to it is closed.
    """
    process = "the launcher" if store_rank is None else f"rank {store_rank}"
    where = f"{heartbeat.name} in {heartbeat.location}"
    if seconds is None:
        return f"{process} on {host}, which hosts the store, is lost: it or its machine has ended. {where} ends too."
    store = f"{process} on {host}, which hosts the store,"
    return _describe_unresponsive(store, f", and {where} waits for it", f"no progress for {seconds:.0f} s")


def _describe_unresponsive(names: str, wait_of_others: str, waited: str) -> str:
    state = "no longer responds (stopped, frozen or disconnected)"
    return f"{names} {state}{wait_of_others}: {waited}. See train.hang_timeout."


def _location(heartbeat: Heartbeat, step: int) -> str:
    return f"step {step}" if step > heartbeat.step else heartbeat.location


def _names(heartbeats: Sequence[Heartbeat], step: int = 0) -> str:
    shown = ", ".join(f"{heartbeat.name} in {_location(heartbeat, step)}" for heartbeat in heartbeats[:_MOST_NAMES])
    more = len(heartbeats) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMES]))
    if len(ranks) > _MOST_NAMES:
        shown += ", …"
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
