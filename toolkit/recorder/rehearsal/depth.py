"""A model with fewer decoder layers: the same collectives in seconds instead of minutes, as layers repeat."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.model_init.build_model import load_config
from toolkit.models.shape import find_name


def fewer_layers(bounds: Sequence[int], pattern: Sequence[int], per_stage: int) -> tuple[int, ...]:
    """Return stage bounds with at most `per_stage` layers on each stage, or as many more as all kinds of layer take.

    `bounds`, `pattern`: of the whole model, whose first layers remain: the first layer of each stage and the end, and
    the kind of each layer.
    """
    needed = 1 + max(pattern.index(kind) for kind in set(pattern))
    sizes = [end - first for first, end in pairwise(bounds)]
    while sum(min(size, per_stage) for size in sizes) < needed:
        per_stage += 1
    return tuple(accumulate((min(size, per_stage) for size in sizes), initial=0))


def with_layers(job: Job, layers: int, all_layers: int) -> Job:
    """Return the job with the first `layers` decoder layers of its model, which has `all_layers`."""
    if layers == all_layers:
        return job
    config = load_config(with_random_weights(job.recipe).model).get_text_config(decoder=True)
    fields: dict[str, Any] = {"num_hidden_layers": layers}
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == all_layers:  # an entry for each layer
            fields[name] = value[:layers]
    overrides = job.recipe.model.overrides | fields
    return replace(job, recipe=job.recipe.changed({"model": {"overrides": overrides}}))


def with_random_weights(recipe: Recipe) -> Recipe:
    """Return the recipe with random weights, for which the catalogue's config of its model is enough."""
    name = find_name(recipe.model.name_or_path, tuned=True) or recipe.model.name_or_path
    return recipe.changed({"model": {"name_or_path": name, "init": "random"}})
