"""The partition of a model's layers into pipeline stages whose slowest stage is fastest.

A pipeline runs at the speed of its slowest stage. Equal numbers of layers or parameters do not give equal times: the
token embedding has many parameters and takes almost no time, and the LM head with the loss over a large vocabulary
takes as long as several layers.

Training counts the costs on the meta device (`toolkit.parallel.pipeline.balance`); the estimate reads the same counts
from a recording (`toolkit.estimate.stage_bounds`). Both partition with `balance`.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations

from toolkit.config.layout import Recompute, recomputes
from toolkit.errors import LayoutError

GPU_FLOPS_PER_BYTE = 120.0
"""FLOP/s over memory bytes/s of a GPU: an H100 at 40 % of its bf16 peak of 989 TFLOP/s, over its memory's 3.35 TB/s."""
CPU_FLOPS_PER_BYTE = 3.0
"""FLOP/s that a decoder layer reaches, norms and activations included, by bytes/s of memory: measured in fp32 on one
core of an AMD EPYC server (78 GFLOP/s, 27 GB/s). An H100 at 40 % of its bf16 peak would have 120; that is computed."""
_STEPS = 2**40
"""The search for the fastest partition distinguishes stages that differ by 1e-12 of the whole model's time."""


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


def balance_chunks(costs: Costs, rank_of: Sequence[int], *, head_alone: bool = True) -> tuple[int, ...]:
    """Partition the layers of a pipeline whose ranks have several stages: `rank_of` is the rank of each.

    A rank takes the sum of its stages. From the partition whose slowest stage is fastest, one layer at a time moves
    from one stage to another as long as that makes the slowest rank faster, or as fast with the others more alike. The
    least numbers of layers are as of `balance`. (Near an optimum, and not always one: tests compare with all partitions
    of small models.)
    """
    bounds = balance(costs, len(rank_of), head_alone=head_alone)
    totals = list(accumulate(costs.layers, initial=0.0))
    last = len(rank_of) - 1

    def rank_times(tried: Sequence[int]) -> list[float]:
        times = [0.0] * (max(rank_of) + 1)
        times[rank_of[0]] += costs.before
        times[rank_of[last]] += costs.after
        for rank, (start, stop) in zip(rank_of, pairwise(tried), strict=True):
            times[rank] += totals[stop] - totals[start]
        return sorted((round(time / totals[-1], 9) for time in times), reverse=True)

    def moved(source: int, target: int) -> tuple[int, ...]:
        step = 1 if source > target else -1
        between = range(min(source, target) + 1, max(source, target) + 1)
        return tuple(bound + step if index in between else bound for index, bound in enumerate(bounds))

    def is_legal(tried: Sequence[int]) -> bool:
        least = [1] * last + [0 if head_alone else 1]
        return all(stop - start >= few for few, (start, stop) in zip(least, pairwise(tried), strict=True))

    while True:
        moves = (moved(source, target) for source, target in permutations(range(last + 1), 2))
        best = min(filter(is_legal, moves), key=rank_times, default=bounds)
        if rank_times(best) >= rank_times(bounds):
            return bounds
        bounds = best


def recompute_cost(recompute: Recompute, layer: int, flops: float, with_weights: float) -> float:
    """FLOPs that the backward pass computes again of a layer, given all of its forward pass and those with weights."""
    if recompute == "selective":
        return flops - with_weights
    return flops if recomputes(recompute, layer) else 0.0
