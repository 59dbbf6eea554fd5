"""The partition of a model's layers into pipeline stages whose slowest stage is fastest.

A pipeline runs at the speed of its slowest stage. Equal numbers of layers or parameters do not give equal times: the
token embedding has many parameters and takes almost no time, and the LM head with the loss over a large vocabulary
takes as long as several layers.

Training counts the costs on the meta device (`toolkit.parallel.pipeline.balance`); the estimate reads the same counts
from a recording (`toolkit.estimate.stage_bounds`). Both partition with `balance`, and for a schedule of the toolkit's
own with `balance_schedule`.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise, permutations

from toolkit.config.layout import Recompute, recomputes
from toolkit.config.pipeline_schedules import Schedule
from toolkit.config.simulate_schedule import SIMULATED_STAGES, ScheduleCosts, simulate
from toolkit.errors import LayoutError

GPU_FLOPS_PER_BYTE = 120.0
"""FLOP/s over memory bytes/s of a GPU: an H100 at 40 % of its bf16 peak of 989 TFLOP/s, over its memory's 3.35 TB/s."""
CPU_FLOPS_PER_BYTE = 3.0
"""FLOP/s that a decoder layer reaches, norms and activations included, by bytes/s of memory: measured in fp32 on one
core of an AMD EPYC server (78 GFLOP/s, 27 GB/s). An H100 at 40 % of its bf16 peak would have 120; that is computed."""
_STEPS = 2**40
"""The search for the fastest partition distinguishes stages that differ by 1e-12 of the whole model's time."""
_LEAST_GAIN = 1e-4
"""The share of a step for which a layer moves: by less, counted and recorded costs may not agree on what is faster."""
_DIGITS = 9
"""Decimal digits of shares of the model's time: sums of the same layers in another order differ in the last ones."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The cost of one token's forward and backward pass in each part of a model, in FLOPs or any other unit."""

    before: float
    """The embeddings' cost."""
    layers: tuple[float, ...]
    after: float
    """The cost of the final norm, the LM head and the loss."""


def balance(costs: Costs, stages: int, *, head_alone: bool = True) -> tuple[int, ...]:
    """Partition the layers so that the slowest stage is fastest: stage k gets layers [bounds[k], bounds[k + 1]).

    The first stage also has the embeddings. The last one has the head and, with `head_alone`, may have nothing else,
    which trains nothing where only adapters do; every other stage has at least one layer. (Embeddings alone would never
    be faster: they cost less than the head at the other end.)

    Often several partitions are equally fast. Under 1F1B stage k keeps the activations of `stages - k` micro-batches,
    the first stage the most. Of the fastest partitions this returns the one with the smallest maximum of layers times
    micro-batches kept, and of those the one with the fewest layers on the earliest stages.
    """
    count = len(costs.layers)
    if not 1 <= stages <= count:
        reason = f"a pipeline of {count} decoder layers has from 1 to {count} stages"
        raise LayoutError.of("pp", stages, reason, ("pp", f"1 to {count}"))
    totals = list(accumulate(costs.layers, initial=0.0))
    whole = costs.before + totals[-1] + costs.after

    def bounds(limit: float, most_kept: int) -> tuple[int, ...] | None:
        """Begin each stage, from the last to the first, as early as both limits allow; None if layer 0 is out of reach.

        The result has the fewest layers on the earliest stages: no partition within the limits has a smaller bound.
        """
        starts = [count]
        for stage in reversed(range(stages)):
            is_last = stage == stages - 1
            stop = starts[0]
            time = totals[stop] + (costs.after if is_last else 0.0) + (0.0 if stage else costs.before)
            start = max(stage, stop - most_kept // (stages - stage), bisect_left(totals, time - limit))
            if start > (stop if is_last and head_alone else stop - 1):
                return None
            starts.insert(0, start)
        return tuple(starts) if starts[0] == 0 else None

    any_kept = stages * count
    step = bisect_left(range(_STEPS), True, key=lambda step: bounds(step / _STEPS * whole, any_kept) is not None)
    # Sums of the same layers in another order differ in their last digits.
    limit = (step / _STEPS + 1e-9) * whole
    most_kept = bisect_left(range(any_kept), True, key=lambda most: bounds(limit, most) is not None)
    fastest = bounds(limit, most_kept)
    assert fastest is not None
    return fastest


def balance_schedule(costs: Costs, schedule: Schedule, *, head_alone: bool = True) -> tuple[int, ...]:
    """Partition the layers so that a step of the schedule is fastest, as far as a simulation can tell.

    From the partition whose slowest rank is fastest, one layer at a time moves from one stage to another as long as
    that makes the simulated step shorter: a stage that ranks wait for while the pipeline fills and drains counts more
    than one that is busy alone. A third of a stage's cost is its forward pass, and as much the backward pass for the
    input and for the weights. Pipelines of more than SIMULATED_STAGES stages are not simulated. The least numbers of
    layers have the meaning that they have in `balance`.
    """
    stages = len(schedule.rank_of)
    has_chunks = schedule.virtual_stages > 1
    bounds = (
        _balance_ranks(costs, schedule.rank_of, head_alone=head_alone)
        if has_chunks
        else balance(costs, stages, head_alone=head_alone)
    )
    if stages > SIMULATED_STAGES:
        return bounds
    fastest = _step_time(costs, schedule, bounds)
    moves = list(permutations(range(stages), 2))
    tried = 0
    for source, target in cycle(moves):
        moved = _moved(bounds, source, target)
        tried += 1
        if _is_legal(moved, head_alone=head_alone):
            time = _step_time(costs, schedule, moved)
            if time < fastest * (1 - _LEAST_GAIN):
                bounds = moved
                fastest = time
                tried = 0
        if tried >= len(moves):
            break
    return bounds


def _step_time(costs: Costs, schedule: Schedule, bounds: Sequence[int]) -> float:
    """Simulate a step, in units of the whole model's time for one micro-batch."""
    whole = costs.before + sum(costs.layers) + costs.after
    times = [round(time / whole / 3, _DIGITS) for time in _stage_times(costs, bounds)]
    simulated = schedule.shortened()
    timeline = simulate(simulated, ScheduleCosts(forward=times, backward=times, weight=times))
    others = schedule.micro_batches - simulated.micro_batches
    return timeline.makespan + others * max(timeline.busy) / simulated.micro_batches


def _balance_ranks(costs: Costs, rank_of: Sequence[int], *, head_alone: bool) -> tuple[int, ...]:
    """Partition the layers of a pipeline whose ranks have several stages: `rank_of` is the rank of each.

    A rank takes the sum of its stages. From the partition whose slowest stage is fastest, one layer at a time moves
    from one stage to another as long as that makes the slowest rank faster, or as fast with the others more alike.
    (Near an optimum, and not always one: tests compare with all partitions of small models.)
    """
    bounds = balance(costs, len(rank_of), head_alone=head_alone)
    whole = sum(costs.layers)

    def rank_times(tried: Sequence[int]) -> list[float]:
        times = [0.0] * (max(rank_of) + 1)
        for rank, time in zip(rank_of, _stage_times(costs, tried), strict=True):
            times[rank] += time
        return sorted((round(time / whole, _DIGITS) for time in times), reverse=True)

    while True:
        moves = [_moved(bounds, source, target) for source, target in permutations(range(len(rank_of)), 2)]
        legal = [moved for moved in moves if _is_legal(moved, head_alone=head_alone)]
        best = min(legal, key=rank_times, default=bounds)
        if rank_times(best) >= rank_times(bounds):
            return bounds
        bounds = best


def _stage_times(costs: Costs, bounds: Sequence[int]) -> list[float]:
    times = [sum(costs.layers[start:stop]) for start, stop in pairwise(bounds)]
    times[0] += costs.before
    times[-1] += costs.after
    return times


def _moved(bounds: Sequence[int], source: int, target: int) -> tuple[int, ...]:
    """The bounds after one layer less in stage `source` and one more in `target`: those between move by one layer."""
    step = 1 if source > target else -1
    between = range(min(source, target) + 1, max(source, target) + 1)
    return tuple(bound + step if index in between else bound for index, bound in enumerate(bounds))


def _is_legal(bounds: Sequence[int], *, head_alone: bool) -> bool:
    """Whether each stage has a layer; the last one may have none with `head_alone`."""
    sizes = [stop - start for start, stop in pairwise(bounds)]
    return all(size >= 1 for size in sizes[:-1]) and sizes[-1] >= (0 if head_alone else 1)


def recompute_cost(recompute: Recompute, layer: int, flops: float, with_weights: float) -> float:
    """FLOPs that the backward pass computes again of a layer, given all of its forward pass and those with weights."""
    if recompute == "selective":
        return flops - with_weights
    return flops if recomputes(recompute, layer) else 0.0
