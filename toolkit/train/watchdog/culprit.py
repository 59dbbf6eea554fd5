"""Who holds the others up? A function of what the ranks tell about themselves. Imports no torch."""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from toolkit.train.watchdog.entry import Entry

_MOST_STACKS = 4
_MOST_NAMES = 8

Kind = Literal["absent", "silent", "behind", "astray", "outside", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The ranks that the others wait for.

    absent: they have never come. silent: their processes run no Python any more. behind: they have not come to where
    the others wait. astray: they wait where nobody else does. outside: of those that are equally far, the ones that do
    not wait for other ranks. unknown: all are equally far, and nothing tells them apart.
    """

    kind: Kind
    ranks: tuple[int, ...]

    @property
    def stacks_of(self) -> tuple[int, ...]:
        """The ranks that shall show what their threads do: some of those that can."""
        return () if self.kind in ("absent", "silent") else self.ranks[:_MOST_STACKS]


def find_culprit(entries: Mapping[int, Entry], world_size: int, silent: Set[int]) -> Culprit | None:
    """The ranks that hold the others up; None where they may still be as slow as they are.

    `silent`: ranks whose beat does not move.
    """
    absent = tuple(rank for rank in range(world_size) if rank not in entries)
    if absent:
        return Culprit(kind="absent", ranks=absent)
    if silent:
        return Culprit(kind="silent", ranks=tuple(sorted(silent)))
    culprit = _among(list(entries.values()))
    overdue = [entry.limit_seconds and entry.still_seconds >= entry.limit_seconds for entry in entries.values()]
    return culprit if any(overdue[rank] for rank in culprit.ranks) else None


def _among(entries: Sequence[Entry]) -> Culprit:
    """Of ranks that all answer."""
    first = min(entry.position for entry in entries)
    behind = [entry for entry in entries if entry.position == first]
    ahead = [entry for entry in entries if entry.position != first]
    if ahead and all(entry.in_collective for entry in entries) and len(ahead) < len(behind):
        # Nobody is stuck by himself: collectives do not match, and the few are wrong.
        return Culprit(kind="astray", ranks=_ranks(ahead))
    # Those behind may wait for one of them (tensor-parallel ranks for each other), and the rest for them all.
    outside = [entry for entry in behind if not entry.in_collective]
    if ahead:
        return Culprit(kind="behind", ranks=_ranks(outside or behind))
    if behind[0].phase == "data" or len(entries) == 1:
        return Culprit(kind="behind", ranks=_ranks(behind))
    if len(outside) in (0, len(behind)):
        return Culprit(kind="unknown", ranks=_ranks(behind))
    return Culprit(kind="outside", ranks=_ranks(outside))


def _ranks(entries: Collection[Entry]) -> tuple[int, ...]:
    return tuple(sorted(entry.rank for entry in entries))


def describe_hang(culprit: Culprit, entries: Mapping[int, Entry], seconds: float) -> str:
    """One line for what `find_culprit` found, when a rank had waited for so long."""
    waited = f"no progress for {seconds:.0f} s"
    end = "See train.hang_timeout."
    if culprit.kind == "absent":
        return f"{waited}: {_list(culprit.ranks)} never came. {end}"
    if culprit.kind == "unknown":
        place = entries[culprit.ranks[0]].place
        shown = _list(culprit.stacks_of)
        return (
            f"{waited}: all ranks answer and are in {place}, and none is seen to hold the others up. "
            f"Stacks of {shown} follow. {end}"
        )
    rest = [entry for entry in entries.values() if entry.rank not in culprit.ranks]
    places = sorted({entry.place for entry in rest})
    others = f", and the others wait in {' and '.join(places[:3])}" if places else ""
    if culprit.kind == "silent":
        # They have told nothing lately; but nobody can be more than a step away from those who wait for him.
        step = min((entry.step for entry in rest), default=0)
        named = _named([entries[rank] for rank in culprit.ranks], step)
        return f"{named} no longer answers (stopped, frozen or cut off){others}: {waited}. {end}"
    named = _named([entries[rank] for rank in culprit.ranks])
    return f"{named} hangs{others}: {waited}. The stack follows. {end}"


def describe_death(entry: Entry, step: int = 0) -> str:
    """One line for a rank that is no more. `step`: where another one is at the same moment, which is about the same."""
    how = entry.left or "killed, or crashed in native code, without a word"
    return f"{entry.name} died in {_place(entry, 0 if entry.left else step)}: {how}"


def describe_silence(entry: Entry, step: int, seconds: float) -> str:
    """One line for a rank that does not answer one which has waited for so long, in `step`."""
    waited = f"no progress for {seconds:.0f} s"
    return f"{_named([entry], step)} no longer answers (stopped, frozen or cut off): {waited}. See train.hang_timeout."


def _place(entry: Entry, step: int) -> str:
    return f"step {step}" if step > entry.step else entry.place


def _named(entries: Sequence[Entry], step: int = 0) -> str:
    shown = ", ".join(f"{entry.name} in {_place(entry, step)}" for entry in entries[:_MOST_NAMES])
    more = len(entries) - _MOST_NAMES
    return shown + (f" and {more} more" if more > 0 else "")


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_NAMES])) + (", …" if len(ranks) > _MOST_NAMES else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
