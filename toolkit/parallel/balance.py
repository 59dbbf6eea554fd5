"""Where a pipeline is cut: what each part of a model costs, and the cut whose slowest stage is as fast as can be.

A pipeline runs at the speed of its slowest stage. Equal numbers of layers or parameters do not make equal times: the
token embedding has many parameters and takes almost no time, and the LM head with the loss over a large vocabulary
takes as long as several layers.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from toolkit.errors import LayoutError
from toolkit.families.anatomy import Anatomy
from toolkit.families.tracing import traceable
from toolkit.layout import Recompute

_WITH_WEIGHTS = (torch.ops.aten.mm, torch.ops.aten.addmm)
"""The kernels of linear layers; attention's products are batched or fused."""

CPU_FLOPS_PER_BYTE = 3.0
"""FLOP/s that a decoder layer reaches, norms and activations included, by bytes/s of memory: measured in fp32 on one
core of an AMD EPYC server (78 GFLOP/s, 27 GB/s). An H100 at 40 % of its bf16 peak would have 120; that is computed."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Forward and backward pass of one token, part by part: in FLOPs, or in any other unit that is the same for all."""

    before: float
    """The embeddings."""
    layers: tuple[float, ...]
    after: float
    """Final norm, LM head and loss."""


def count_costs(
    model: PreTrainedModel,
    anatomy: Anatomy,
    *,
    seq_len: int,
    micro_batch_size: int,
    recompute: Recompute = "none",
    flops_per_byte: float = CPU_FLOPS_PER_BYTE,
) -> Costs:
    """Count what each part of `model` costs, by one forward pass: on the meta device this takes no memory.

    Derivation. Matrix products are counted as they run, and three times: the backward pass has two for each, for the
    gradients of the input and of the weight. `recompute` runs the layers' forward, but not the head's, once more; or of
    it only attention between its projections, which is every product but those of activations with weights. Two things
    are bound by memory instead, and count as the FLOPs that a layer does in that time. A parameter's gradient is
    written once a micro-batch and added to the sum of those before: two reads, two writes. The loss passes over the
    fp32 logits six times: log-softmax reads and writes them, the gradient at the targets is a tensor of their size, and
    the gradient of log-softmax reads two and writes one. A cast from and to 16 bits is two passes more.

    Known error, of the head by a layer, in fp32 on one core for GPT-2 of hidden 256 to 768: within 5 %
    (vocabulary 50,257, samples of 128 to 512), 9 % too high (vocabulary 8,192) and 7 % too low (samples of 1,024, where
    a causal kernel does half of the products of attention that are counted). Embeddings come out a third too low, which
    is a tenth of a layer. The optimizer's step is left out.
    """
    counter = FlopCounterMode(display=False)
    marks: list[tuple[int, int]] = []
    layers = anatomy.layer_list(model)

    def mark(*_: Any) -> None:
        marks.append(counted())

    def counted() -> tuple[int, int]:
        """All so far, and those of products with weights."""
        by_kernel = counter.get_flop_counts().get("Global", {})
        return counter.get_total_flops(), sum(by_kernel.get(kernel, 0) for kernel in _WITH_WEIGHTS)

    handles = [layer.register_forward_pre_hook(mark) for layer in layers]
    handles.append(layers[-1].register_forward_hook(mark))
    try:
        ids = torch.zeros(1, seq_len, dtype=torch.long, device=next(model.parameters()).device)
        with torch.no_grad(), traceable(model), counter:
            logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    spans = list(pairwise([(0, 0), *marks, counted()]))
    forward, weighted = ([(stop[i] - start[i]) / seq_len for start, stop in spans] for i in range(2))

    def gradients(modules: Iterable[nn.Module], *, recurse: bool) -> float:
        parameters = (parameter for module in modules for parameter in module.parameters(recurse=recurse))
        bytes_moved = sum(4 * parameter.numel() * parameter.element_size() for parameter in parameters)
        return flops_per_byte * bytes_moved / (micro_batch_size * seq_len)

    return Costs(
        before=3 * forward[0] + gradients(map(model.get_submodule, anatomy.before), recurse=False),
        layers=tuple(
            3 * flops + _again(recompute, flops, with_weights) + gradients([layer], recurse=True)
            for flops, with_weights, layer in zip(forward[1:-1], weighted[1:-1], layers, strict=True)
        ),
        after=3 * forward[-1]
        + gradients(map(model.get_submodule, anatomy.after), recurse=False)
        + flops_per_byte * _loss_bytes(logits),
    )


def _again(recompute: Recompute, flops: float, with_weights: float) -> float:
    """What of a layer's forward pass is computed again."""
    match recompute:
        case "none":
            return 0.0
        case "selective":
            return flops - with_weights
        case "full":
            return flops


def _loss_bytes(logits: torch.Tensor) -> int:
    """Bytes that the loss of one token and its gradient move."""
    casts = 2 * (4 + logits.element_size()) if logits.element_size() < 4 else 0
    return (6 * 4 + casts) * logits.shape[-1]


def balance(costs: Costs, stages: int) -> tuple[int, ...]:
    """Cut the layers so that the slowest stage is as fast as possible: stage k gets layers [bounds[k], bounds[k + 1]).

    The first stage has the embeddings besides. The last one has the head, and may have nothing else; every other stage
    has at least one layer. (Embeddings alone would never be faster: they cost less than the head at the other end.)

    Often several cuts are equally fast. Under 1F1B stage k keeps the activations of `stages - k` micro-batches, the
    first stage the most. Among the fastest cuts the one is taken whose largest product of layers and micro-batches kept
    is the smallest, and among those the one with the fewest layers on the earliest stages.
    """
    count = len(costs.layers)
    if not 1 <= stages <= count:
        raise LayoutError(
            f"pp={stages} with {count} decoder layers: a pipeline has at least one stage, and no more than layers. "
            f"Set pp to 1 … {count}."
        )
    totals = list(accumulate(costs.layers, initial=0.0))

    def cost(stage: int, start: int, stop: int) -> float:
        ends = (costs.before if stage == 0 else 0.0) + (costs.after if stage == stages - 1 else 0.0)
        return totals[stop] - totals[start] + ends

    fastest = max(cost(stage, *bounds) for stage, bounds in enumerate(pairwise(_bottleneck(cost, stages, count))))
    # Sums of the same layers in another order differ in their last digits.
    limit = fastest + 1e-9 * cost(0, 0, count)

    def kept(stage: int, start: int, stop: int) -> float:
        return (stages - stage) * (stop - start) if cost(stage, start, stop) <= limit else inf

    return _bottleneck(kept, stages, count)


def _bottleneck(cost: Callable[[int, int, int], float], stages: int, count: int) -> tuple[int, ...]:
    """The bounds with the smallest largest cost(stage, start, stop); of several, those that are smallest from the left.

    Dynamic programming from the last stage to the first. `cost` must not fall as `stop` grows: no stage is looked at
    further than it may reach, which makes about count² calls.
    """

    def stops(stage: int, start: int) -> range:
        return range(count if stage == stages - 1 else start + 1, count + 1)

    # least[k][i]: the largest cost among stages k and later at best, if stage k begins at layer i.
    least = [[inf] * (count + 1) for _ in range(stages)] + [[inf] * count + [0.0]]
    for stage in reversed(range(stages)):
        for start in range(count + 1 if stage else 1):
            for stop in stops(stage, start):
                own = cost(stage, start, stop)
                if own >= least[stage][start]:
                    break
                least[stage][start] = min(least[stage][start], max(own, least[stage + 1][stop]))
    bounds = [0]
    for stage in range(stages):
        start, rest = bounds[-1], least[stage + 1]
        reach = (stop for stop in stops(stage, start) if max(cost(stage, start, stop), rest[stop]) <= least[0][0])
        bounds.append(next(reach))
    return tuple(bounds)
