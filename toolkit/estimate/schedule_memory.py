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
from toolkit.config.pipeline_schedules import Schedule


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
    rank_of = schedule.rank_of
    last = len(rank_of) - 1
    splits = {(stage, micro_batch) for kind, stage, micro_batch in schedule.orders[rank] if kind == "B"}
    between = {other: _Between(schedule, rank, other) for other in {*rank_of} - {rank}}
    kept: Counter[int] = Counter()
    waiting: Counter[int] = Counter()
    handed_on = 0
    gradients: dict[int, int] = {}
    worst: SchedulePeak | None = None
    for kind, stage, micro_batch in schedule.orders[rank]:
        of_stage = stages[stage]
        taken = taken_by(schedule, (kind, stage, micro_batch))
        if taken is not None and rank_of[taken.sender] != rank:
            between[rank_of[taken.sender]].take(taken)
        if kind == "F":
            at_work = of_stage.forward
        elif kind == "W":
            at_work = of_stage.weights
            waiting[stage] -= 1
        else:
            at_work = of_stage.backward
            kept[stage] -= 1
            # The gradient that arrived is part of what the backward pass needs.
            if stage < last and rank_of[stage + 1] == rank:
                handed_on -= hidden
        others = sum(count * stages[of].kept for of, count in kept.items())
        others += sum(count * stages[of].waiting for of, count in waiting.items())
        messages_kept = hidden * sum(pair.count for pair in between.values()) + handed_on
        made = sum(gradients.values())
        live = others + messages_kept + at_work
        if worst is None or live + made > worst.live + worst.gradients:
            worst = SchedulePeak(
                live=live,
                kept=+kept,
                waiting=+waiting,
                at_work=(kind, stage),
                messages=messages_kept,
                gradients=made,
            )
        if kind in ("W", "D"):
            gradients[stage] = of_stage.gradients
        sent = sent_by(schedule, (kind, stage, micro_batch))
        if sent is not None and rank_of[sent.stage] != rank:
            between[rank_of[sent.stage]].send(sent)
        if kind == "F":
            kept[stage] += 1
            continue
        if kind == "W":
            continue
        waiting[stage] += (stage, micro_batch) in splits
        if stage > 0 and rank_of[stage - 1] == rank:
            handed_on += hidden
    assert worst is not None, "a rank has passes"
    return worst


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
