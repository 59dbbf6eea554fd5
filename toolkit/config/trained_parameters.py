"""Which parameters train: what model.lora, model.freeze and model.train_only must agree on, and the layouts of DoRA."""

from collections.abc import Iterator

from toolkit.config.recipe import Recipe
from toolkit.errors import Refusal


def trained_parameter_conflicts(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse what does not go together. Which names there are is known with the model."""
    section, lora = recipe.model, recipe.model.lora
    if section.freeze and section.train_only:
        reason = "each of them says what trains"
        yield recipe.conflict("model.freeze", "model.train_only", reason=reason, remedy=("leave one out",))
    if lora is None:
        return
    for field in ("model.freeze", "model.train_only"):
        if recipe.value_of(field):
            given, reason = (
                ((field, recipe.value_of(field)), "model.lora"),
                "with LoRA all adapters train, and nothing else",
            )
            yield Refusal(field=field, given=given, reason=reason, remedy=("leave one out",))
    if "all-linear" in lora.targets and len(lora.targets) > 1:
        field, remedy = "model.lora.targets", (("model.lora.targets", "[all-linear]"),)
        yield recipe.conflict(field, reason="all-linear already means every linear layer", remedy=remedy)
    if not lora.dora:
        return
    reason, stage = "DoRA's norms need whole weights on every rank", recipe.parallel.zero_stage
    if recipe.parallel.tp > 1:
        yield recipe.conflict("model.lora.dora", "parallel.tp", reason=reason, remedy=(("parallel.tp", 1),))
    if recipe.train.engine == "deepspeed" and stage == 3:
        field = "parallel.zero_stage"
        yield recipe.conflict("model.lora.dora", field, reason=reason, remedy=((field, "0, 1 or 2"),))
    if recipe.train.engine == "fsdp":
        field = "train.engine"
        yield recipe.conflict("model.lora.dora", field, reason=reason, remedy=((field, "deepspeed or ddp"),))
