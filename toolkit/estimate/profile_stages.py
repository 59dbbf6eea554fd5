"""Decoder layers where the pipeline stages of a framework begin, by the rule of its source."""

from functools import lru_cache
from typing import Literal

from toolkit.models.shape import ModelShape

Rule = Literal["layers", "modules", "costs"]
"""Units that a framework shares out: decoder layers; modules (embedding, layers, norm, head), each of which counts as
one; or the sum of costs, where a layer and the head cost their weights. nanotron counts the weights of keys and values
as if there were as many heads of them as of queries (`get_block_compute_costs` of its models).

Where the stages do not divide the number of layers, rounding spreads them, which fits published runs. Megatron-LM
refuses such a number unless its options say how many layers the ends have."""


@lru_cache(maxsize=4096)
def stage_bounds(shape: ModelShape, stages: int, rule: Rule) -> tuple[int, ...]:
    """Decoder layers where stages begin, and at the end their number. The head runs on the last stage."""
    count = shape.layers
    if stages == 1:
        return (0, count)
    if rule == "layers":
        return tuple(round(index * count / stages) for index in range(stages + 1))
    if rule == "modules":
        # The first stages take one module more where the modules cannot be shared out evenly.
        modules, rest = divmod(count + 3, stages)
        starts = [modules * index + min(index, rest) for index in range(1, stages)]
        return (0, *(min(count, start - 1) for start in starts), count)
    matrices = 3 if shape.gated else 2
    layer = 4 * shape.hidden * shape.hidden + matrices * shape.hidden * shape.ffn
    head = shape.vocab * shape.embed_dim
    total = count * layer + head
    bounds = [0]
    for index in range(1, count + 1):
        # A stage ends with the layer whose cost pushes the running total past the stage's share.
        if len(bounds) < stages and index * layer > total * len(bounds) / stages:
            bounds.append(index)
    while len(bounds) < stages + 1:
        bounds.append(count)
    return tuple(bounds)
