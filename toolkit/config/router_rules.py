"""Rule for the balancing of experts: the model must have experts."""

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.config.recipe import Recipe
from toolkit.errors import Refusal

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that configs give the number of experts."""


def expert_count(config: Mapping[str, Any]) -> int:
    """The number of experts of a model; 0 where it has none."""
    text = config.get("text_config") or config
    return next((int(text[name]) for name in EXPERT_COUNTS if text.get(name)), 0)


def router_conflicts(recipe: Recipe, config: Mapping[str, Any] | None) -> Iterator[Refusal]:
    """Refuse to balance the experts of a dense model, and to drop tokens of a part of a sequence."""
    if recipe.model.expert_capacity_factor and recipe.parallel.ulysses > 1:
        reason = "a rank sees its part of a sequence, and tokens are dropped by those of the whole micro-batch"
        remedy = (("parallel.ulysses", 1), ("model.expert_capacity_factor", None))
        yield recipe.conflict("model.expert_capacity_factor", "parallel.ulysses", reason=reason, remedy=remedy)
    if config is None or expert_count(config):
        return
    for name in ("router_aux_loss", "router_z_loss", "router_bias_update", "expert_capacity_factor"):
        field = f"model.{name}"
        if recipe.value_of(field):
            settings = (field, ("model.name_or_path", recipe.model.name_or_path))
            yield Refusal(field=field, settings=settings, reason="the model has no experts", remedy=("remove it",))
