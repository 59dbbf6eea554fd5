"""Messages between the stages of a pipeline, as they follow from a schedule: what is sent to whom, in which order.

A pass takes what it needs when it begins, and sends what it has made when it ends. The engine's channels carry the
messages, and the estimate of memory counts those that are kept.
"""

from collections import defaultdict
from functools import lru_cache
from typing import Literal, NamedTuple

from toolkit.config.pipeline_schedules import Operation, Schedule

Carries = Literal["activation", "gradient"]


class Message(NamedTuple):
    """What a pass of a stage sends to the stage after it, or with a gradient to the one before it."""

    carries: Carries
    stage: int
    """The stage that receives it."""
    micro_batch: int

    @property
    def boundary(self) -> int:
        """The earlier of the two stages."""
        return self.stage - 1 if self.carries == "activation" else self.stage

    @property
    def sender(self) -> int:
        """The stage that sends it."""
        return self.stage - 1 if self.carries == "activation" else self.stage + 1


def taken_by(schedule: Schedule, operation: Operation) -> Message | None:
    """Return the message that a pass takes, also from a stage of the same rank; None where it needs none."""
    kind, stage, micro_batch = operation
    if kind == "F":
        return Message("activation", stage, micro_batch) if stage > 0 else None
    if kind == "W" or stage + 1 == len(schedule.rank_of):
        return None
    return Message("gradient", stage, micro_batch)


def sent_by(schedule: Schedule, operation: Operation) -> Message | None:
    """Return the message that a pass sends, also to a stage of the same rank; None where nobody needs one."""
    kind, stage, micro_batch = operation
    if kind == "F":
        return Message("activation", stage + 1, micro_batch) if stage + 1 < len(schedule.rank_of) else None
    return Message("gradient", stage - 1, micro_batch) if kind != "W" and stage > 0 else None


@lru_cache(maxsize=64)
def messages(schedule: Schedule) -> dict[tuple[int, int], list[Message]]:
    """Return the messages from each rank to each other one, in the order in which they are produced."""
    between: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, order in enumerate(schedule.orders):
        for operation in order:
            message = sent_by(schedule, operation)
            if message is not None and schedule.rank_of[message.stage] != rank:
                between[rank, schedule.rank_of[message.stage]].append(message)
    return dict(between)


@lru_cache(maxsize=256)
def taken_before(schedule: Schedule, rank: int, other: int) -> dict[Message, int]:
    """Return, for each message from a rank to another one, how many of the other one's the rank has taken before."""
    counts = {}
    taken = 0
    for operation in schedule.orders[rank]:
        message = taken_by(schedule, operation)
        if message is not None and schedule.rank_of[message.sender] == other:
            taken += 1
        message = sent_by(schedule, operation)
        if message is not None and schedule.rank_of[message.stage] == other:
            counts[message] = taken
    return counts
