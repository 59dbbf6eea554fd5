"""The peak of a rank that runs a pipeline schedule: its passes in order, each with what the others have left.

A rank holds, of each of its stages, micro-batches between F and B with all activations, and micro-batches between B and
W with the inputs and output gradients of linear layers. Messages are counted as the engine keeps them
(toolkit/parallel/pipeline/channels.py): one that arrives from each rank that still sends to this one, and gradients
that were sent, until a message arrives that their receiver sent after it had taken them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.config.pipeline_messages import Message, messages, sent_by, taken_before, taken_by
from toolkit.config.pipeline_schedules import Pass, Schedule


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """Bytes of one micro-batch in a stage, while a pass runs and between passes."""

    forward: int
    """The most in the forward pass."""
    kept: int
    """Bytes between F and B."""
    backward: int
    """The most in the backward pass, W not included where that is a pass of its own."""
    waiting: int = 0
    """Bytes between B and W."""
    weights: int = 0
    """The most in W."""
    gradients: int = 0
    """Sums of the gradients of weights, from the first pass on that computes them."""


@dataclass(frozen=True, kw_only=True)
class SchedulePeak:
    """The worst moment of a rank."""

    live: int
    """Bytes of activations, of what waits for W, and of messages."""
    kept: Mapping[int, int]
    """Micro-batches between F and B, by stage, without the one at work."""
    waiting: Mapping[int, int]
    """Micro-batches between B and W, by stage, without the one at work."""
    at_work: tuple[str, int]
    """The pass that runs, and its stage."""
    messages: int
    """Bytes that are received ahead, or sent and not yet let go of."""
    gradients: int
    """Bytes of the sums of gradients that are there already."""


def schedule_peak(schedule: Schedule, rank: int, stages: Mapping[int, StageBytes], *, hidden: int) -> SchedulePeak:
    """Walk through the passes of a rank. `stages`: those of the rank; `hidden`: bytes of a message.

    Known error: while the first backward pass of a stage runs, none of its gradients is counted.
    """
    held = _Held(schedule, rank, stages, hidden=hidden)
    worst: SchedulePeak | None = None
    for kind, stage, micro_batch in schedule.orders[rank]:
        held.begin(kind, stage, micro_batch)
        moment = held.moment(kind, stage)
        if worst is None or moment.live + moment.gradients > worst.live + worst.gradients:
            worst = moment
        held.end(kind, stage, micro_batch)
    assert worst is not None, "a rank has passes"
    return worst


class _Held:
    """What a rank holds as its passes go by: F, B with or without its W (then D), and W."""

    def __init__(self, schedule: Schedule, rank: int, stages: Mapping[int, StageBytes], *, hidden: int) -> None:
        self._schedule = schedule
        self._rank = rank
        self._stages = stages
        self._hidden = hidden
        others = {*schedule.rank_of} - {rank}
        self._between = {other: _Between(schedule, rank, other) for other in others}
        self._kept: Counter[int] = Counter()
        """Micro-batches between F and B, by stage."""
        self._waiting: Counter[int] = Counter()
        """Micro-batches between B and W, by stage."""
        self._handed_on = 0
        """Bytes of gradients that one stage of the rank has handed on to another one."""
        self._gradients: dict[int, int] = {}
        """Bytes of the sums of gradients, by stage."""

    def begin(self, kind: Pass, stage: int, micro_batch: int) -> None:
        """Begin a pass: it takes what it needs of the others."""
        taken = taken_by(self._schedule, (kind, stage, micro_batch))
        if taken is not None:
            sender = self._schedule.rank_of[taken.sender]
            if sender != self._rank:
                self._between[sender].take(taken)
        if kind == "W":
            self._waiting[stage] -= 1
        elif kind != "F":
            self._kept[stage] -= 1
            # The gradient that arrived is part of what the backward pass needs.
            if self._is_own(stage + 1):
                self._handed_on -= self._hidden

    def moment(self, kind: Pass, stage: int) -> SchedulePeak:
        """Return what is live while a pass runs that has begun."""
        in_stage = self._stages[stage]
        at_work = {"F": in_stage.forward, "W": in_stage.weights}.get(kind, in_stage.backward)
        kept = sum(count * self._stages[of].kept for of, count in self._kept.items())
        waiting = sum(count * self._stages[of].waiting for of, count in self._waiting.items())
        message_count = sum(pair.count for pair in self._between.values())
        message_bytes = self._hidden * message_count + self._handed_on
        return SchedulePeak(
            live=kept + waiting + message_bytes + at_work,
            kept=+self._kept,
            waiting=+self._waiting,
            at_work=(kind, stage),
            messages=message_bytes,
            gradients=sum(self._gradients.values()),
        )

    def end(self, kind: Pass, stage: int, micro_batch: int) -> None:
        """End a pass: it sends its result, and leaves what a later pass needs."""
        if kind in ("W", "D"):
            self._gradients[stage] = self._stages[stage].gradients
        sent = sent_by(self._schedule, (kind, stage, micro_batch))
        if sent is not None:
            receiver = self._schedule.rank_of[sent.stage]
            if receiver != self._rank:
                self._between[receiver].send(sent)
        if kind == "F":
            self._kept[stage] += 1
        elif kind != "W":
            if kind == "B":
                self._waiting[stage] += 1
            if self._is_own(stage - 1):
                self._handed_on += self._hidden

    def _is_own(self, stage: int) -> bool:
        """Whether there is such a stage, and this rank has it."""
        return 0 <= stage < len(self._schedule.rank_of) and self._schedule.rank_of[stage] == self._rank


class _Between:
    """Messages between a rank and another one that the rank keeps, as its passes go by.

    An activation that was sent is kept anyway, until its backward pass.
    """

    def __init__(self, schedule: Schedule, rank: int, other: int) -> None:
        self._expected = len(messages(schedule).get((other, rank), ()))
        self._taken_before = taken_before(schedule, other, rank)
        self._sent = 0
        self._gradients: list[int] = []

    def take(self, message: Message) -> None:
        """Take a message, which says what the other rank had taken when it sent it."""
        self._expected -= 1
        self._gradients = [place for place in self._gradients if place > self._taken_before[message]]

    def send(self, message: Message) -> None:
        """Send a message."""
        self._sent += 1
        if message.carries == "gradient":
            self._gradients.append(self._sent)

    @property
    def count(self) -> int:
        """Messages that are kept: one that arrives while the rank computes, and gradients that were sent."""
        return min(1, self._expected) + len(self._gradients)
