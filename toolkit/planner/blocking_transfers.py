"""1F1B as DeepSpeed's engine executes it: sends and receives are instructions too, for which both ranks wait."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

from toolkit.planner.schedules import Pass, Schedule
from toolkit.planner.simulate_schedule import ScheduleCosts, Timeline

Instruction = tuple[Pass | Literal["send activation", "receive activation", "send gradient", "receive gradient"], int]
"""A pass or a transfer of this rank, and the micro-batch."""


def instructions(schedule: Schedule, rank: int) -> Iterator[Instruction]:
    """Yield the instructions of a rank of a 1F1B pipeline, in the order of DeepSpeed's TrainSchedule.

    What a pass made is sent after it, and what the next one needs received before that. Only where a backward pass
    follows a forward pass at once, its gradient is received first: the next rank sends it before it receives.
    """
    assert schedule.kind == "1f1b"
    pp = schedule.pp
    unsent: list[Instruction] = []
    last: tuple[Pass, int] | None = None
    for kind, _, micro_batch in schedule.orders[rank]:
        received: list[Instruction] = []
        if kind == "F" and rank > 0:
            received = [("receive activation", micro_batch)]
        if kind == "D" and rank < pp - 1:
            received = [("receive gradient", micro_batch)]
        follows_at_once = last == ("F", micro_batch + pp - 1 - rank)
        yield from (received + unsent) if kind == "D" and follows_at_once else (unsent + received)
        yield kind, micro_batch
        unsent = []
        last = (kind, micro_batch)
        if kind == "F" and rank < pp - 1:
            unsent = [("send activation", micro_batch)]
        if kind == "D" and rank > 0:
            unsent = [("send gradient", micro_batch)]
    yield from unsent


def simulate_blocking(schedule: Schedule, costs: ScheduleCosts) -> Timeline:
    """Run a 1F1B pipeline in which a transfer begins when both ranks have come to it, and keeps both from computing.

    That is how DeepSpeed 0.19.8 sends (`dist.send` and `dist.recv` without `async_op`, on the stream that computes).
    """
    programs = _programs(schedule)
    durations = (costs.forward, [sum(both) for both in zip(costs.backward, costs.weight, strict=True)])
    transfer = costs.transfer or [0.0] * (schedule.pp - 1)
    starts: tuple[list[float], ...] = tuple([] for _ in programs)
    ends: tuple[list[float], ...] = tuple([] for _ in programs)
    now = [0.0] * schedule.pp
    place = [0] * schedule.pp
    waiting: dict[int, int] = {}
    runnable = list(range(schedule.pp))
    while runnable:
        rank = runnable.pop()
        program = programs[rank]
        clock = now[rank]
        for n in range(place[rank], len(program)):
            number, boundary = program[n]
            if boundary < 0:
                starts[rank].append(clock)
                clock += durations[number][rank]
                ends[rank].append(clock)
                continue
            if number not in waiting:
                waiting[number] = rank
                now[rank] = clock
                place[rank] = n + 1
                break
            other = waiting.pop(number)
            clock = now[other] = max(clock, now[other]) + transfer[boundary]
            runnable.append(other)
    assert not waiting, "the ranks wait for each other"
    return Timeline(schedule=schedule, costs=costs, starts=starts, ends=ends)


@lru_cache(maxsize=64)
def _programs(schedule: Schedule) -> tuple[list[tuple[int, int]], ...]:
    """Each instruction as a pair: a pass (0 forward, 1 backward) and -1, or a transfer as a number and its boundary."""
    micro_batches = schedule.micro_batches

    def encoded(rank: int, kind: str, micro_batch: int) -> tuple[int, int]:
        if kind in ("F", "D"):
            return ("F", "D").index(kind), -1
        boundary = rank if kind in ("send activation", "receive gradient") else rank - 1
        return (2 * boundary + kind.endswith("gradient")) * micro_batches + micro_batch, boundary

    return tuple(
        [encoded(rank, *instruction) for instruction in instructions(schedule, rank)] for rank in range(schedule.pp)
    )
