"""Seconds that the slowest rank of a pipeline waits for the others, under 1F1B or another schedule."""

from collections.abc import Sequence
from functools import lru_cache

from toolkit.config.pipeline_schedules import Schedule, schedule_of
from toolkit.config.simulate_schedule import SIMULATED_STAGES, ScheduleCosts, simulate

_DIGITS = 2
"""Digits of stage times, relative to the slowest, with which a 1F1B pipeline is simulated: so that many share one."""


def bubble_seconds(stages: Sequence[float], forward_share: float, micro_batches: int) -> float:
    """Seconds of a step in which the slowest stage waits, given what each stage takes for a micro-batch.

    The closed form is the sum of all other stages: they work alone while the pipeline fills and drains. It is exact for
    equal stages. Where stages differ, part of that overlaps, which the simulation of up to SIMULATED_STAGES knows. The
    bubble no longer grows from p micro-batches on, so that no more are simulated.
    """
    slowest = max(stages)
    count = len(stages)
    if count == 1:
        return 0.0
    if count > SIMULATED_STAGES or min(stages) > 0.999 * slowest:
        return sum(stages) - slowest
    shares = tuple(round(stage / slowest, _DIGITS) for stage in stages)
    return slowest * _simulated(shares, round(forward_share, _DIGITS), min(micro_batches, count))


@lru_cache(maxsize=4096)
def _simulated(stages: tuple[float, ...], forward_share: float, micro_batches: int) -> float:
    """Simulate the bubble, in units of the slowest stage's time for one micro-batch."""
    costs = ScheduleCosts(
        forward=[forward_share * stage for stage in stages],
        backward=[(1 - forward_share) * stage for stage in stages],
        weight=[0.0] * len(stages),
    )
    schedule = schedule_of("1f1b", pp=len(stages), micro_batches=micro_batches)
    return simulate(schedule, costs).makespan - micro_batches * max(stages)


def waiting_seconds(schedule: Schedule, costs: ScheduleCosts) -> float:
    """Seconds of a step in which the busiest rank waits, for other ranks and for messages."""
    busiest = max(_busy(schedule, costs))
    relative_costs = ScheduleCosts(
        forward=_relative(costs.forward, busiest),
        backward=_relative(costs.backward, busiest),
        weight=_relative(costs.weight, busiest),
        transfer=_relative(costs.transfer, busiest),
    )
    return busiest * _simulated_waiting(schedule.shortened(), relative_costs)


_SCHEDULE_DIGITS = 3
"""Digits of the times of passes, relative to the busiest rank, with which other schedules are simulated."""


def _relative(seconds: Sequence[float], busiest: float) -> tuple[float, ...]:
    """Return times in units of the busiest rank's, rounded so that many layouts share one simulation."""
    return tuple(round(time / busiest, _SCHEDULE_DIGITS) for time in seconds)


@lru_cache(maxsize=4096)
def _simulated_waiting(schedule: Schedule, costs: ScheduleCosts) -> float:
    """Simulate the wait of the busiest rank; the costs are tuples, by which results are cached."""
    return simulate(schedule, costs).makespan - schedule.micro_batches * max(_busy(schedule, costs))


def _busy(schedule: Schedule, costs: ScheduleCosts) -> list[float]:
    """Return the time of each rank for one micro-batch in all of its stages."""
    busy = [0.0] * schedule.pp
    for rank, *passes in zip(schedule.rank_of, costs.forward, costs.backward, costs.weight, strict=True):
        busy[rank] += sum(passes)
    return busy
