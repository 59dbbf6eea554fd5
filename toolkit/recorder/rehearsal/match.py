"""Whether the collectives of all kinds of ranks fit together: they are run against each other, call by call.

Each rank is a list of calls. A call of a group is over when all its ranks have come to it, a message between pipeline
stages when sender and receiver have. Replicas and tensor-parallel ranks that repeat a kind are left out: they do what
the kind's rank does. Where no rank can go on, or two meet in calls that do not fit, the job would hang or fail there.

Messages of pipeline schedules wait for nobody when they are sent, or asked for. What a rank sends to another one is
compared with what that one asks for, in order; where it waits for a message, it goes on when that has been sent.

Messages in the ring of context-parallel ranks wait for nobody when they are sent; what one rank sends to the next is
compared with what that one receives.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from toolkit.config.layout import Layout
from toolkit.recorder.rehearsal.collectives import AXES, WAIT, Collective, Groups, at_stage
from toolkit.recorder.rehearsal.rank_kinds import RankKind


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """Two kinds of ranks whose calls do not fit together, and where."""

    ranks: tuple[int, int]
    kinds: tuple[str, str]
    group: str
    step: int
    """Number of the first call of this group that differs, from 1."""
    calls: tuple[str, str]

    def __str__(self) -> str:
        first, second = (f"rank {rank} ({kind})" for rank, kind in zip(self.ranks, self.kinds, strict=True))
        where = f"call {self.step} of group {self.group}"
        return f"{where}: {first} has {self.calls[0]}; {second} has {self.calls[1]}"


Calls = Mapping[tuple[RankKind, int], Sequence[Collective]]
"""The calls of each kind of rank at each of its stages."""


def find_mismatch(layout: Layout, calls: Calls) -> Mismatch | None:
    """The first mismatch of a job whose ranks make these calls; None where all of them end."""
    kinds = {kind.rank_at(stage): kind for kind, stage in calls}
    programs = {kind.rank_at(stage): program for (kind, stage), program in calls.items()}
    mismatch = _channel_mismatch(layout, kinds, programs)
    if mismatch is not None:
        return mismatch
    match = _Match(layout, programs)
    conflict = match.run()
    if conflict is None:
        return _ring_mismatch(layout, kinds, programs)
    mismatch = _described(conflict, kinds, programs)
    if mismatch.calls != ("none", "none"):
        return mismatch
    # Over this group they do the same, but one of them is still, or already, at a call of another group.
    return replace(
        mismatch,
        step=match.number(conflict.rank, conflict.group),
        calls=(match.waits_in(conflict.rank), match.waits_in(conflict.other)),
    )


@dataclass(frozen=True, kw_only=True)
class _Conflict:
    """Two ranks that do not fit together over a group."""

    rank: int
    other: int
    group: str


class _Match:
    """Ranks that go through their calls, each waiting for the others where a call needs them."""

    def __init__(self, layout: Layout, programs: Mapping[int, Sequence[Collective]]) -> None:
        self.layout = layout
        self.groups = Groups(layout)
        self.programs = programs
        self.at = dict.fromkeys(programs, 0)
        self._members: dict[tuple[str, int], tuple[int, ...]] = {}
        self._on_the_way: Counter[tuple[int, int, str]] = Counter()
        """Messages of pipeline schedules that were sent and not yet waited for: sender, receiver, and name."""

    def run(self) -> _Conflict | None:
        """Run all ranks to their ends; return two ranks that do not fit together, or None."""
        ready = deque(self.programs)
        while ready:
            rank = ready.popleft()
            call = self._next(rank)
            if call is None:
                continue
            if call.kind == WAIT:
                message = (self.other_end(call, rank), rank, call.message)
                if not self._on_the_way[message]:
                    continue
                self._on_the_way[message] -= 1
            if call.kind == "send" and call.message:
                receiver = self.other_end(call, rank)
                self._on_the_way[rank, receiver, call.message] += 1
                ready.append(receiver)
            members = self._ranks_of(call, rank)
            calls = {other: self._next(other) for other in members}
            if not all(self._meets(call, rank, theirs, other) for other, theirs in calls.items()):
                continue
            for other, theirs in calls.items():
                if theirs is not None and not _fit(call, theirs):
                    return _Conflict(rank=rank, other=other, group=call.group)
            for member in members:
                self.at[member] += 1
            ready.extend(members)
        return self._first_stuck()

    def waits_in(self, rank: int) -> str:
        """Return the call that a rank is at, with its group, in words."""
        call = self._next(rank)
        return "come to its end" if call is None else f"{call} of group {call.group} next"

    def number(self, rank: int, group: str) -> int:
        """Count the calls of a group that a rank has come to."""
        return sum(call.group == group for call in self.programs[rank][: self.at[rank] + 1])

    def _next(self, rank: int) -> Collective | None:
        program = self.programs[rank]
        return program[self.at[rank]] if self.at[rank] < len(program) else None

    def _ranks_of(self, call: Collective, rank: int) -> tuple[int, ...]:
        if call.kind in ("send", "receive", WAIT):
            if call.group != "pipeline" or call.message:
                return (rank,)
            stage = self.layout.coordinate(rank).pipe + (call.peer or 0)
            return (rank, at_stage(self.layout, rank, stage)) if 0 <= stage < self.layout.pp else (rank,)
        key = (call.group, rank)
        if key not in self._members:
            if call.group in AXES:
                members = self.groups.members(call.group, rank)
            elif rank in call.ranks:
                members = call.ranks
            else:  # the counterpart of the rehearsed rank at another pipeline stage
                members = (rank,)
            self._members[key] = tuple(member for member in members if member in self.programs)
        return self._members[key]

    def other_end(self, call: Collective, rank: int) -> int:
        """Return the rank that a message of a rank goes to, or comes from."""
        assert call.peer is not None
        return at_stage(self.layout, rank, self.layout.coordinate(rank).pipe + call.peer)

    def _meets(self, call: Collective, rank: int, theirs: Collective | None, other: int) -> bool:
        """Whether the `other` rank is at a call of the same ranks."""
        if theirs is None or theirs.group != call.group:
            return False
        return sorted(self._ranks_of(theirs, other)) == sorted(self._ranks_of(call, rank))

    def _first_stuck(self) -> _Conflict | None:
        """Return the rank that has come least far, and one that it waits for; None where all are at their ends."""
        waiting = [rank for rank in self.programs if self._next(rank) is not None]
        for rank in sorted(waiting, key=lambda rank: (self.at[rank], rank)):
            call = self._next(rank)
            assert call is not None
            if call.kind == WAIT:
                return _Conflict(rank=rank, other=self.other_end(call, rank), group=call.group)
            for other in self._ranks_of(call, rank):
                if not self._meets(call, rank, self._next(other), other):
                    return _Conflict(rank=rank, other=other, group=call.group)
        return None


def _fit(call: Collective, other: Collective) -> bool:
    """Whether two calls that meet belong together: a message with its receipt, or the same collective on two ranks."""
    if call is other:
        return True
    if {call.kind, other.kind} == {"send", "receive"}:
        return call.shapes == other.shapes and call.dtype == other.dtype and call.message == other.message
    return call.kind not in ("send", "receive") and call.fits(other)


def _channel_mismatch(
    layout: Layout, kinds: Mapping[int, RankKind], programs: Mapping[int, Sequence[Collective]]
) -> Mismatch | None:
    """Return the first message of a pipeline schedule that a rank does not ask for as another one sends it."""
    for rank, program in programs.items():
        stage = layout.coordinate(rank).pipe
        for distance in range(-stage, layout.pp - stage):
            other = at_stage(layout, rank, stage + distance)
            if other == rank or other not in programs:
                continue
            sent = _schedule_messages(program, "send", distance)
            received = _schedule_messages(programs[other], "receive", -distance)
            mismatch = _first_unlike((rank, other), kinds, "pipeline", sent, received)
            if mismatch is not None:
                return mismatch
    return None


def _schedule_messages(program: Sequence[Collective], kind: str, distance: int) -> list[Collective]:
    """Return the messages of a pipeline schedule to, or from, the pipeline rank that is `distance` further on."""
    return [call for call in program if call.message and call.kind == kind and call.peer == distance]


def _first_unlike(
    ranks: tuple[int, int],
    kinds: Mapping[int, RankKind],
    group: str,
    sent: Sequence[Collective],
    received: Sequence[Collective],
) -> Mismatch | None:
    """Return the first message from one rank to the other that is not received as it is sent."""
    both = min(len(sent), len(received))
    place = next((place for place in range(both) if not _fit(sent[place], received[place])), both)
    if place == len(sent) == len(received):
        return None
    sender, receiver = ranks
    return Mismatch(
        ranks=ranks,
        kinds=(kinds[sender].name, kinds[receiver].name),
        group=group,
        step=place + 1,
        calls=(_described_call(sent, place), _described_call(received, place)),
    )


def _described_call(calls: Sequence[Collective], place: int) -> str:
    """Return a call in words; `none` behind the last one."""
    return str(calls[place]) if place < len(calls) else "none"


def _ring_mismatch(
    layout: Layout, kinds: Mapping[int, RankKind], programs: Mapping[int, Sequence[Collective]]
) -> Mismatch | None:
    """Return the first message to a context-parallel rank that this one does not receive as it is sent."""
    groups = Groups(layout)
    for rank, program in programs.items():
        context = groups.members("context", rank)
        for distance in range(1, layout.cp):
            other = context[(context.index(rank) + distance) % layout.cp]
            if other not in programs:
                continue
            sent = _ring_messages(program, "send", distance)
            received = _ring_messages(programs[other], "receive", layout.cp - distance)
            mismatch = _first_unlike((rank, other), kinds, "context", sent, received)
            if mismatch is not None:
                return mismatch
    return None


def _ring_messages(program: Sequence[Collective], kind: str, distance: int) -> list[Collective]:
    """Return what a rank sends to, or receives from, the context-parallel rank that is `distance` further on."""
    return [call for call in program if call.group == "context" and call.kind == kind and call.peer == distance]


def _described(
    conflict: _Conflict, kinds: Mapping[int, RankKind], programs: Mapping[int, Sequence[Collective]]
) -> Mismatch:
    """Say where the calls of two ranks over their group begin to differ."""
    rank = conflict.rank
    other = conflict.other
    group = conflict.group

    def calls_of(caller: int, partner: int) -> list[Collective]:
        layout = kinds[caller].layout
        return [call for call in programs[caller] if _is_between(call, group, layout, rank=caller, other=partner)]

    calls = calls_of(rank, other)
    other_calls = calls_of(other, rank)
    place = _first_difference(calls, other_calls)
    return Mismatch(
        ranks=(rank, other),
        kinds=(kinds[rank].name, kinds[other].name),
        group=group,
        step=place + 1,
        calls=(_described_call(calls, place), _described_call(other_calls, place)),
    )


def _is_between(call: Collective, group: str, layout: Layout, *, rank: int, other: int) -> bool:
    """Whether a call of a rank is one over the group; of messages, one to or from the other rank's stage."""
    if call.group != group or call.message:
        return False
    if call.kind not in ("send", "receive"):
        return True
    if group != "pipeline":
        return False
    return layout.coordinate(rank).pipe + (call.peer or 0) == layout.coordinate(other).pipe


def _first_difference(left: Sequence[Collective], right: Sequence[Collective]) -> int:
    """Return the index of the first calls that cannot meet, or that come from different functions of the code."""
    for index, (call, other) in enumerate(zip(left, right, strict=False)):
        is_message = {call.kind, other.kind} == {"send", "receive"}
        if not _fit(call, other) or (call.where != other.where and not is_message):
            return index
    return min(len(left), len(right))
