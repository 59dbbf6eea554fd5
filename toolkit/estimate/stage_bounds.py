"""Bounds of pipeline stages: the partition whose slowest stage is fastest, and the costs that it balances.

A pipeline runs at the speed of its slowest stage. Equal numbers of layers or parameters do not give equal times: the
token embedding has many parameters and takes almost no time, and the LM head with the loss over a large vocabulary
takes as long as several layers.

Training counts every part's FLOPs on the meta device (`toolkit.parallel.pipeline.balance`); here the same counts are
recorded with the parameters, so that the same bounds are known without building the model.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from toolkit.config.layout import Recompute, recomputes
from toolkit.errors import LayoutError
from toolkit.estimate.parameters import ModelParameters

GPU_FLOPS_PER_BYTE = 120.0
"""What training assumes on a GPU: an H100 at 40 % of its bf16 peak of 989 TFLOP/s, over its memory's 3.35 TB/s."""
CPU_FLOPS_PER_BYTE = 3.0
"""FLOP/s that a decoder layer reaches, norms and activations included, by bytes/s of memory: measured in fp32 on one
core of an AMD EPYC server (78 GFLOP/s, 27 GB/s). An H100 at 40 % of its bf16 peak would have 120; that is computed."""
_LOSS_BYTES = 24
"""Memory traffic of one token's loss and its gradient per vocabulary entry: six passes over fp32."""
_GRADIENT_BYTES = 16
"""Memory traffic per parameter in each micro-batch: two reads and two writes of fp32."""
_STEPS = 2**40
"""The search for the fastest partition distinguishes stages that differ by 1e-12 of the whole model's time."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The cost of one token's forward and backward pass in each part of a model, in FLOPs or any other unit."""

    before: float
    """The embeddings."""
    layers: tuple[float, ...]
    after: float
    """Final norm, LM head and loss."""


@lru_cache(maxsize=4096)
def balanced_bounds(
    model: ModelParameters,
    stages: int,
    *,
    micro_batch_size: int,
    seq_len: int,
    recompute: Recompute = "none",
    head_alone: bool = True,
    flops_per_byte: float = GPU_FLOPS_PER_BYTE,
) -> tuple[int, ...]:
    """Return training's bounds: stage k has layers [bounds[k], bounds[k + 1]). Raises LayoutError for too many."""
    if stages == 1:
        return (0, len(model.pattern))
    return balance(
        _costs(model, micro_batch_size * seq_len, seq_len, recompute, flops_per_byte), stages, head_alone=head_alone
    )


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
        """From the last stage to the first, begin each as early as both limits allow; None if layer 0 is out of reach.

        The result has the fewest layers on the earliest stages: no partition within the limits has a smaller bound.
        """
        found = [count]
        for stage in reversed(range(stages)):
            is_last, stop = stage == stages - 1, found[0]
            time = totals[stop] + (costs.after if is_last else 0.0) + (0.0 if stage else costs.before)
            start = max(stage, stop - most_kept // (stages - stage), bisect_left(totals, time - limit))
            if start > (stop if is_last and head_alone else stop - 1):
                return None
            found.insert(0, start)
        return tuple(found) if found[0] == 0 else None

    any_kept = stages * count
    step = bisect_left(range(_STEPS), True, key=lambda step: bounds(step / _STEPS * whole, any_kept) is not None)
    # Sums of the same layers in another order differ in their last digits.
    limit = (step / _STEPS + 1e-9) * whole
    most_kept = bisect_left(range(any_kept), True, key=lambda kept: bounds(limit, kept) is not None)
    fastest = bounds(limit, most_kept)
    assert fastest is not None
    return fastest


def _costs(model: ModelParameters, tokens: int, seq_len: int, recompute: Recompute, flops_per_byte: float) -> Costs:
    """FLOPs a token, as `toolkit.parallel.pipeline.balance.count_costs` counts them, from the recorded counts."""
    traffic = flops_per_byte * _GRADIENT_BYTES / tokens
    counted = [tuple(constant + slope * seq_len for constant, slope in (p.flops, p.with_weights)) for p in model.flops]
    (before, _), *kinds, (after, _) = counted

    def layer(index: int) -> float:
        (flops, weighted), numel = kinds[model.pattern[index]], model.layer_numels[model.pattern[index]]
        return 3 * flops + recompute_cost(recompute, index, flops, weighted) + traffic * numel

    loss = flops_per_byte * _LOSS_BYTES * next(one.shape[0] for one in model.outside if one.is_head)
    return Costs(
        before=3 * before + traffic * sum(one.numel for one in model.outside if one.first),
        layers=tuple(map(layer, range(len(model.pattern)))),
        after=3 * after + traffic * sum(one.numel for one in model.outside if one.last) + loss,
    )


def recompute_cost(recompute: Recompute, layer: int, flops: float, with_weights: float) -> float:
    """FLOPs that the backward pass computes again of a layer, given all of its forward pass and those with weights."""
    if recompute == "selective":
        return flops - with_weights
    return flops if recomputes(recompute, layer) else 0.0
