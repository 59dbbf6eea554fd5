"""Rules for `train.distill`: the text, the objective and the engine that a teacher can be asked with."""

from collections.abc import Iterator

from toolkit.config.data_section import PREFERENCE_FORMATS
from toolkit.config.recipe import Recipe
from toolkit.errors import Refusal, Setting
from toolkit.files import expanded
from toolkit.remote_files import is_url

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
    if is_url(section.teacher):
        yield Refusal.of(*teacher, "models are read from directories", "copy it to one", none)
    elif "/" not in section.teacher and not expanded(section.teacher).is_dir():
        yield Refusal.of(*teacher, "there is no such directory", "name a model or a checkpoint", none)
