"""Trained parameters of a recipe: what model.lora, model.freeze and model.train_only must agree on."""

from collections.abc import Iterator

from toolkit.config.recipe import Recipe
from toolkit.errors import Refusal


def trained_parameter_conflicts(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse what does not go together. Which names there are is known with the model."""
    section = recipe.model
    lora = recipe.model.lora
    if section.freeze and section.train_only:
        reason = "each of them says what trains"
        yield recipe.conflict("model.freeze", "model.train_only", reason=reason, remedy=("leave one out",))
    if section.load_in_4bit:
        yield from _four_bit_conflicts(recipe)
    if lora is None:
        return
    for field in ("model.freeze", "model.train_only"):
        if recipe.value_of(field):
            settings = ((field, recipe.value_of(field)), "model.lora")
            reason = "with LoRA all adapters train, and nothing else"
            yield Refusal(field=field, settings=settings, reason=reason, remedy=("leave one out",))
    if "all-linear" in lora.targets and len(lora.targets) > 1:
        field = "model.lora.targets"
        remedy = (("model.lora.targets", "[all-linear]"),)
        yield recipe.conflict(field, reason="all-linear already means every linear layer", remedy=remedy)


def _four_bit_conflicts(recipe: Recipe) -> Iterator[Refusal]:
    field = "model.load_in_4bit"
    lora = recipe.model.lora
    if lora is None:
        reason = "4-bit weights cannot train: adapters do"
        yield recipe.conflict(field, "model.lora", reason=reason, remedy=(("model.lora", "{r: 16}"),))
    elif lora.dora:
        reason = "DoRA's norms need weights that are not packed"
        yield recipe.conflict(field, "model.lora.dora", reason=reason, remedy=(("model.lora.dora", False),))
    if recipe.model.init != "pretrained":
        reason = "only published weights are worth keeping in 4 bits"
        yield recipe.conflict(field, "model.init", reason=reason, remedy=(("model.init", "pretrained"),))
    reason = "packed weights cannot be split"
    for axis in ("ep", "tp", "pp", "ulysses"):
        if recipe.value_of(f"parallel.{axis}") > 1:
            yield recipe.conflict(field, f"parallel.{axis}", reason=reason, remedy=((f"parallel.{axis}", 1),))
    if recipe.train.engine == "deepspeed" and recipe.parallel.zero_stage == 3:
        remedy = (("parallel.zero_stage", "0, 1 or 2"),)
        yield recipe.conflict(field, "parallel.zero_stage", reason=reason, remedy=remedy)
    if recipe.train.engine == "fsdp":
        yield recipe.conflict(field, "train.engine", reason=reason, remedy=(("train.engine", "deepspeed or ddp"),))
