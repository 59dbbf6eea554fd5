"""Where a pipeline is cut, calculated: the same cut that training makes, without building the model.

Training counts every part's FLOPs on the meta device and balances them (`toolkit.parallel.balance`). Decoder layers
cost the same each, so here the counts are sums and the best cut a search over a few hundred candidates.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import floor

from toolkit.errors import LayoutError
from toolkit.estimate.parameters import Architecture, Tensor
from toolkit.layout import Recompute

GPU_FLOPS_PER_BYTE = 120.0
"""What training assumes on a GPU: an H100 at 40 % of its bf16 peak, over its memory's bytes per second."""
_LOSS_BYTES = 24
"""That the loss of one token and its gradient move, for each entry of the vocabulary: six passes over fp32."""
_GRADIENT_BYTES = 16
"""Two reads and two writes of fp32 for each parameter in each micro-batch."""
_ROUNDING = 1e-9
"""Sums of the same costs in another order differ in their last digits."""


@dataclass(frozen=True, kw_only=True)
class EqualLayers:
    """What a pipeline's parts cost: embeddings, each decoder layer, and norm, head and loss; in any unit."""

    before: float
    layer: float
    after: float
    count: int


def uniform_bounds(layers: int, stages: int) -> tuple[int, ...]:
    """Equal numbers of layers; where they do not divide, the earliest stages have one more."""
    _check(layers, stages)
    each, more = divmod(layers, stages)
    bounds = [0]
    for stage in range(stages):
        bounds.append(bounds[-1] + each + (stage < more))
    return tuple(bounds)


@lru_cache(maxsize=4096)
def balanced_bounds(
    architecture: Architecture,
    stages: int,
    *,
    micro_batch_size: int,
    seq_len: int,
    recompute: Recompute = "none",
    flops_per_byte: float = GPU_FLOPS_PER_BYTE,
) -> tuple[int, ...]:
    """Stage k gets layers [bounds[k], bounds[k + 1]), as training cuts them. Raises LayoutError for too many stages."""
    layers = architecture.shape.layers
    _check(layers, stages)
    if stages == 1:
        return (0, layers)
    return fastest_cut(_costs(architecture, micro_batch_size, seq_len, recompute, flops_per_byte), stages)


def fastest_cut(costs: EqualLayers, stages: int) -> tuple[int, ...]:
    """The cut whose slowest stage is as fast as possible; of several the one that keeps the fewest activations.

    As `toolkit.parallel.balance.balance` for equal layers: every stage but the last has a layer at least; ties go to
    the smallest largest product of layers and micro-batches in flight, then to few layers on the earliest stages.
    """
    total = costs.before + costs.count * costs.layer + costs.after
    ends = (costs.before, 0.0, costs.after)
    candidates = sorted({end + k * costs.layer for end in ends for k in range(costs.count + 1)})
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _holds(_room(costs, stages, candidates[middle] + _ROUNDING * total), costs.count):
            high = middle
        else:
            low = middle + 1
    room = _room(costs, stages, candidates[low] + _ROUNDING * total)
    least, most = 1, stages * costs.count
    while least < most:
        middle = (least + most) // 2
        if _holds(_kept_within(room, middle), costs.count):
            most = middle
        else:
            least = middle + 1
    return _from_the_left(_kept_within(room, least), costs.count)


def _room(costs: EqualLayers, stages: int, limit: float) -> list[int]:
    """Layers that each stage can take within `limit`."""

    def layers(end: float) -> int:
        return max(-1, min(costs.count, floor((limit - end) / costs.layer)))

    return [layers(costs.before), *[layers(0.0)] * (stages - 2), layers(costs.after)]


def _kept_within(room: list[int], most: int) -> list[int]:
    stages = len(room)
    return [min(layers, most // (stages - stage)) for stage, layers in enumerate(room)]


def _holds(room: list[int], count: int) -> bool:
    return all(layers >= 1 for layers in room[:-1]) and room[-1] >= 0 and sum(room) >= count


def _from_the_left(room: list[int], count: int) -> tuple[int, ...]:
    bounds = [0]
    rest = sum(room)
    for stage, layers in enumerate(room):
        rest -= layers
        fewest = 0 if stage == len(room) - 1 else 1
        bounds.append(bounds[-1] + max(fewest, count - bounds[-1] - rest))
    assert bounds[-1] == count
    return tuple(bounds)


def _costs(
    a: Architecture, micro_batch_size: int, seq_len: int, recompute: Recompute, flops_per_byte: float
) -> EqualLayers:
    """FLOPs a token, as `toolkit.parallel.balance.count_costs` counts them."""
    shape = a.shape
    traffic = flops_per_byte * _GRADIENT_BYTES / (micro_batch_size * seq_len)
    attention = 4 * shape.attention_dim * seq_len
    forward = 2 * sum(t.numel for t in a.layer if _multiplies(t)) + attention
    again = {"none": 0, "selective": attention, "full": forward}[recompute]
    outside = (*a.front, *a.back)
    head = [t for t in outside if t.is_vocabulary and t.decays][-1:]  # the embedding itself where they are tied
    first = [t for t in outside if t.place == "first"]
    last = [t for t in outside if t.place == "last" and t not in head]
    into = sum(t.numel for t in first if t.name.startswith("project"))
    out = sum(t.numel for t in last if t.name.startswith("project")) + head[0].numel
    before = 3 * (2 * into + a.rotary_flops) + traffic * sum(t.numel for t in first)
    after = 3 * 2 * out + traffic * (sum(t.numel for t in last) + head[0].numel)
    layer = 3 * forward + again + traffic * sum(t.numel for t in a.layer)
    loss = flops_per_byte * _LOSS_BYTES * shape.vocab
    return EqualLayers(before=before, layer=layer, after=after + loss, count=shape.layers)


def _multiplies(tensor: Tensor) -> bool:
    return tensor.dim is not None and tensor.decays


def _check(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise LayoutError(
            f"pp={stages} with {layers} decoder layers: a pipeline has at least one stage, and no more than layers. "
            f"Set pp to 1 … {layers}."
        )
