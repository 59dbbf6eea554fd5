"""The bounds that DeepSpeed's own methods give a pipeline of [embeddings, decoder layers …, head]."""

from collections.abc import Sequence

from deepspeed.runtime.utils import partition_balanced, partition_uniform


def uniform(layers: int, stages: int) -> tuple[int, ...]:
    """`partition_method="uniform"`: as many items on each stage."""
    return _layer_bounds(partition_uniform(layers + 2, stages), layers)


def by_parameters(before: int, layers: Sequence[int], after: int, stages: int) -> tuple[int, ...]:
    """`partition_method="parameters"`, DeepSpeed's default: as many parameters, tied ones counted at both ends."""
    return _layer_bounds(partition_balanced([before, *layers, after], stages), len(layers))


def _layer_bounds(item_bounds: Sequence[int], layers: int) -> tuple[int, ...]:
    return tuple(min(max(int(bound) - 1, 0), layers) for bound in item_bounds)
