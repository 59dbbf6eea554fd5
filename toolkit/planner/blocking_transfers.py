"""1F1B as DeepSpeed's engine executes it: sends and receives are instructions too, for which both ranks wait."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from toolkit.config.pipeline_schedules import Pass, Schedule
from toolkit.config.simulate_schedule import ScheduleCosts, Timeline

Instruction = tuple[Pass | Literal["send activation", "receive activation", "send gradient", "receive gradient"], int]
"""A pass or a transfer of this rank, and the micro-batch."""


def instructions(schedule: Schedule, rank: int) -> Iterator[Instruction]:
    """Yield the instructions of a rank of a 1F1B pipeline, in the order of DeepSpeed's TrainSchedule.

    What a pass made is sent after it, before what the next one needs is received. The steady state of 1F1B is the
    exception: a rank runs the forward pass of micro-batch m + pp - 1 - rank and then the backward pass of m. There it
    receives the gradient of m first and then sends the activation, because the next rank sends before it receives.
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
        if kind == "D" and follows_at_once:
            yield from received
            yield from unsent
        else:
            yield from unsent
            yield from received
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
    backward = [inputs + weights for inputs, weights in zip(costs.backward, costs.weight, strict=True)]
    transfer = costs.transfer or [0.0] * (schedule.pp - 1)
    starts: tuple[list[float], ...] = tuple([] for _ in programs)
    ends: tuple[list[float], ...] = tuple([] for _ in programs)
    now = [0.0] * schedule.pp
    place = [0] * schedule.pp
    waiting: dict[_BlockingTransfer, int] = {}
    runnable = list(range(schedule.pp))
    while runnable:
        rank = runnable.pop()
        program = programs[rank]
        clock = now[rank]
        for n in range(place[rank], len(program)):
            step = program[n]
            if isinstance(step, _Computation):
                starts[rank].append(clock)
                clock += costs.forward[rank] if step.kind == "F" else backward[rank]
                ends[rank].append(clock)
                continue
            if step not in waiting:
                waiting[step] = rank
                now[rank] = clock
                place[rank] = n + 1
                break
            other = waiting.pop(step)
            clock = max(clock, now[other]) + transfer[step.boundary]
            now[other] = clock
            runnable.append(other)
    assert not waiting, "the ranks wait for each other"
    return Timeline(schedule=schedule, costs=costs, starts=starts, ends=ends)


@dataclass(frozen=True)
class _Computation:
    """A pass of a rank."""

    kind: Pass


@dataclass(frozen=True)
class _BlockingTransfer:
    """A transfer between neighbors: equal for the rank that sends and the rank that receives."""

    boundary: int
    """The lower of the two ranks."""
    carries: Literal["activation", "gradient"]
    micro_batch: int


@lru_cache(maxsize=64)
def _programs(schedule: Schedule) -> tuple[list[_Computation | _BlockingTransfer], ...]:
    """Return the passes and transfers of each rank, in order."""
    return tuple(
        [_step(rank, kind, micro_batch) for kind, micro_batch in instructions(schedule, rank)]
        for rank in range(schedule.pp)
    )


def _step(rank: int, kind: str, micro_batch: int) -> _Computation | _BlockingTransfer:
    """Return an instruction of a rank as a pass, or as a transfer to or from its neighbor."""
    match kind:
        case "send activation":
            return _BlockingTransfer(rank, "activation", micro_batch)
        case "receive activation":
            return _BlockingTransfer(rank - 1, "activation", micro_batch)
        case "send gradient":
            return _BlockingTransfer(rank - 1, "gradient", micro_batch)
        case "receive gradient":
            return _BlockingTransfer(rank, "gradient", micro_batch)
        case "F":
            return _Computation("F")
        case _:
            return _Computation("D")
