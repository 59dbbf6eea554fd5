"""Decoder layers where the pipeline stages of a framework begin, by the rule of its source."""

from functools import lru_cache
from typing import Literal

from toolkit.models.shape import ModelShape
from toolkit.models.weights import layer_matmul_parameters

Rule = Literal["layers", "modules", "costs"]
"""Units that a framework shares out: decoder layers; modules (embedding, layers, norm, head), each of which counts as
one; or the sum of costs, where a layer costs its weights and the head its own."""


@lru_cache(maxsize=4096)
def stage_bounds(shape: ModelShape, stages: int, rule: Rule) -> tuple[int, ...]:
    """Decoder layers where stages begin, and at the end their number. The head runs on the last stage."""
    count = shape.layers
    if rule == "layers" or stages == 1:
        return tuple(round(index * count / stages) for index in range(stages + 1))
    if rule == "modules":
        # The first stages take one module more where the modules cannot be shared out evenly.
        modules, rest = divmod(count + 3, stages)
        starts = [modules * index + min(index, rest) for index in range(1, stages)]
        return (0, *(min(count, start - 1) for start in starts), count)
    layer = layer_matmul_parameters(shape)
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
