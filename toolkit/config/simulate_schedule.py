"""Timelines: when every operation of a pipeline schedule runs, given the costs of each stage's passes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple, Self

from toolkit.config.pipeline_schedules import Pass, Schedule


@dataclass(frozen=True, kw_only=True)
class ScheduleCosts:
    """Costs of one micro-batch in each stage, in any one unit; a whole backward pass takes B and W."""

    forward: Sequence[float]
    backward: Sequence[float]
    """B, the backward pass for the input; with recomputation that is in it too."""
    weight: Sequence[float]
    """W, the backward pass for the weights."""
    transfer: Sequence[float] = ()
    """Time from each stage to the next, of activations as well as of their gradients; 0 where both are on one rank.

    A transfer delays who receives it and keeps no rank from computing.
    """

    @classmethod
    def relative(
        cls, schedule: Schedule, *, backward: float = 2.0, transfer: float = 0.0, stage_times: Sequence[float] = ()
    ) -> Self:
        """Costs in forward passes of a rank: its chunks share them equally, and half of a backward pass is W.

        `stage_times` scale the passes of each rank, or of each stage.
        """
        rank_of = schedule.rank_of
        chunks = schedule.virtual_stages
        times = stage_times or [1.0] * schedule.pp
        if len(times) != len(rank_of):
            times = [times[rank] for rank in rank_of]
        forward = [time / chunks for time in times]
        half = [backward / 2 * time for time in forward]
        return cls(forward=forward, backward=half, weight=half, transfer=[transfer] * (len(rank_of) - 1))


class TimedOperation(NamedTuple):
    """One operation with its times: a bar of the timeline."""

    kind: Pass
    stage: int
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """A schedule with the times at which each rank starts and ends its operations."""

    schedule: Schedule
    costs: ScheduleCosts
    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]

    @cached_property
    def makespan(self) -> float:
        """The time at which the last rank is done."""
        return max(map(max, self.ends))

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the makespan in which each rank waits."""
        return tuple(1 - busy / self.makespan for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of the makespan in which ranks wait, over all ranks."""
        return 1 - sum(self.busy) / (self.makespan * self.schedule.pp)

    @property
    def step(self) -> float:
        """The makespan in units of F+B: a micro-batch's whole forward and backward pass of the average rank."""
        return self.makespan * self.schedule.pp * self.schedule.micro_batches / sum(self.busy)

    def operations(self, rank: int) -> Iterator[TimedOperation]:
        """Yield the operations of a rank with their times, in order."""
        times = zip(self.schedule.orders[rank], self.starts[rank], self.ends[rank], strict=True)
        return (TimedOperation(*operation, start, end) for operation, start, end in times)


SIMULATED_STAGES = 16
"""Searches simulate no longer pipelines: a simulation takes p² operations."""
_NOTHING, _NOBODY = 0, 1
"""The cell that is always filled, and the one that nobody waits for."""


def simulate(schedule: Schedule, costs: ScheduleCosts) -> Timeline:
    """Run each rank's operations in order, each as soon as the rank is free and its input has arrived.

    A rank runs until its next input is missing, and goes on when that arrives: the work is proportional to the number
    of operations. An input is a cell: the activation or the gradient of one stage and micro-batch.
    """
    durations = _durations(costs)
    delays = _delays(schedule, costs)
    programs = _programs(schedule)
    arrived: list[float | None] = [0.0, 0.0, *[None] * (2 * len(schedule.rank_of) * schedule.micro_batches)]
    starts: tuple[list[float], ...] = tuple([] for _ in programs)
    ends: tuple[list[float], ...] = tuple([] for _ in programs)
    waiting: dict[int, int] = {}
    runnable = list(range(schedule.pp))
    while runnable:
        rank = runnable.pop()
        program = programs[rank]
        begun = starts[rank]
        done = ends[rank]
        now = done[-1] if done else 0.0
        for n in range(len(done), len(program)):
            cost, needs, gives = program[n]
            start = arrived[needs]
            if start is None:
                waiting[needs] = rank
                break
            if start < now:
                start = now
            now = start + durations[cost]
            begun.append(start)
            done.append(now)
            arrived[gives] = now + delays[cost]
            if gives in waiting:
                runnable.append(waiting.pop(gives))
    assert not waiting, f"{schedule.kind} waits for itself"
    return Timeline(schedule=schedule, costs=costs, starts=starts, ends=ends)


_PASSES: tuple[Pass, ...] = ("F", "B", "W", "D")


def _durations(costs: ScheduleCosts) -> list[float]:
    """Return the time of each operation, by `stages * index of its pass + stage`."""
    whole = [backward + weight for backward, weight in zip(costs.backward, costs.weight, strict=True)]
    return [*costs.forward, *costs.backward, *costs.weight, *whole]


def _delays(schedule: Schedule, costs: ScheduleCosts) -> list[float]:
    """Return the delay with which an operation's result arrives, by that index: 0 at the ends and within a rank."""
    rank_of = schedule.rank_of
    assert len(costs.forward) == len(rank_of), "costs are of stages, not of ranks"
    transfer = costs.transfer or [0.0] * (len(rank_of) - 1)
    hops = [0.0 if here == there else time for time, (here, there) in zip(transfer, pairwise(rank_of), strict=True)]
    down = [*hops, 0.0]
    up = [0.0, *hops]
    return [*down, *up, *[0.0] * len(rank_of), *up]


@lru_cache(maxsize=64)
def _programs(schedule: Schedule) -> tuple[list[tuple[int, int, int]], ...]:
    """Return the operations of each rank as (index of the cost, cell that it waits for, cell that it fills)."""
    stages = len(schedule.rank_of)
    micro_batches = schedule.micro_batches
    gradients = 2 + stages * micro_batches

    def step(kind: Pass, stage: int, micro_batch: int) -> tuple[int, int, int]:
        cost = _PASSES.index(kind) * stages + stage
        cell = stage * micro_batches + micro_batch
        if kind == "W":
            return cost, _NOTHING, _NOBODY
        if kind == "F":
            fills = 2 + cell + micro_batches if stage < stages - 1 else _NOBODY
            return cost, 2 + cell if stage else _NOTHING, fills
        fills = gradients + cell - micro_batches if stage else _NOBODY
        return cost, gradients + cell if stage < stages - 1 else _NOTHING, fills

    return tuple([step(*operation) for operation in order] for order in schedule.orders)
