"""Rules for `train.distill`: the text, the objective and the engine that a teacher can be asked with."""

from collections.abc import Iterator

from toolkit.config.data_section import PREFERENCE_FORMATS
from toolkit.config.objective_rules import other_model_conflicts
from toolkit.config.recipe import Recipe
from toolkit.errors import Refusal, Setting, ToolkitError
from toolkit.models.config_fields import text_config
from toolkit.models.shape import find_config, with_overrides

_DISTILL = "train.distill"


def distill_conflicts(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse what a teacher does not go together with."""
    section = recipe.train.distill
    if section is None:
        return
    data = recipe.data
    teacher: Setting = (f"{_DISTILL}.teacher", section.teacher)
    none: Setting = (_DISTILL, None)
    if data.format in PREFERENCE_FORMATS:
        reason = "a teacher says what comes next in a text, not which of two is better"
        yield Refusal.between((teacher, ("data.format", data.format)), reason, ("data.format", "chat"), none)
    if data.sources is not None:
        reason = "a mixture has no teacher"
        yield Refusal.between((teacher, ("data.sources", "[…]")), reason, ("data.source", "one text"), none)
    yield from other_model_conflicts(f"{_DISTILL}.teacher", section.teacher, none)
    vocabulary = _vocabulary(recipe)
    if vocabulary is not None and section.top_k > vocabulary:
        field = f"{_DISTILL}.top_k"
        reason = f"the model has a vocabulary of {vocabulary}"
        yield Refusal.of(field, section.top_k, reason, (field, f"{vocabulary} or less"))


def _vocabulary(recipe: Recipe) -> int | None:
    """Return how many tokens the model that trains has; None where that is not known without a network."""
    try:
        config = find_config(recipe.model.name_or_path)
        fields = {} if config is None else text_config(with_overrides(config, recipe.model.overrides))
    except ToolkitError:  # the rules of the model say so
        return None
    vocabulary = fields.get("vocab_size")
    return vocabulary if isinstance(vocabulary, int) else None
