"""Rules for `train.objective`: the data, the reference and the layout that an objective can be computed with."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolkit.config.data_section import PREFERENCE_FORMATS, CorpusSection
from toolkit.config.objective_section import (
    NEED_REFERENCE,
    OBJECTIVE_FIELDS,
    PAIRED,
    UNPAIRED,
    ObjectiveSection,
)
from toolkit.config.recipe import Recipe
from toolkit.errors import Refusal, Setting, nearest
from toolkit.remote_files import is_url

_NAME = "train.objective.name"
_REFERENCE = "train.objective.reference"
_FORMAT = "data.format"
_HUB_NAME = re.compile(r"(?!.*(?:--|\.\.|\.git$))\w(?:[\w.-]*\w)?/\w(?:[\w.-]{0,94}\w)?", re.ASCII)
"""`org/name`, as the hub allows it."""


def objective_conflicts(recipe: Recipe, config: Mapping[str, Any] | None) -> Iterator[Refusal]:
    """Refuse data that an objective cannot read, and fields that do nothing or cannot be what they say."""
    yield from _formats(recipe)
    yield from _data(recipe)
    yield from _fields_without_effect(recipe)
    yield from _reference(recipe)
    yield from _means(recipe)


def _formats(recipe: Recipe) -> Iterator[Refusal]:
    name = recipe.train.objective.name
    row_format = recipe.data.format
    if row_format == "preference" and name not in PAIRED:
        reason = "its rows are pairs without a label"
        remedy: tuple[Setting, ...] = ((_NAME, " or ".join(PAIRED)), (_FORMAT, "unpaired"))
        yield recipe.conflict(_NAME, _FORMAT, reason=reason, remedy=remedy)
    elif row_format == "unpaired" and name not in UNPAIRED:
        reason = "its rows have one completion and a label"
        remedy = ((_NAME, " or ".join(UNPAIRED)), (_FORMAT, "preference"))
        yield recipe.conflict(_NAME, _FORMAT, reason=reason, remedy=remedy)
    elif row_format not in PREFERENCE_FORMATS and name != "sft":
        needed = "unpaired" if name in UNPAIRED else "preference"
        reason = "its rows have nothing to compare"
        remedy = ((_FORMAT, needed), (_NAME, "sft"))
        yield recipe.conflict(_NAME, _FORMAT, reason=reason, remedy=remedy, field=_FORMAT)


def _data(recipe: Recipe) -> Iterator[Refusal]:
    data = recipe.data
    texts: list[tuple[str, CorpusSection]] = [
        (data.place(index), text) for index, text in enumerate(data.sources or ())
    ]
    texts += [(f"data.validation[{index}]", text) for index, text in enumerate(data.validation or ())]
    for place, text in texts:
        text_format = text.format or data.format
        if text_format != data.format and {text_format, data.format} & set(PREFERENCE_FORMATS):
            settings: tuple[Setting, ...] = ((f"{place}.format", text_format), (_FORMAT, data.format))
            reason = "all texts of a run with an objective have one format"
            yield Refusal.between(settings, reason, (f"{place}.format", data.format))
    if data.format not in PREFERENCE_FORMATS:
        return
    if data.sources is not None:
        settings = (("data.sources", "[…]"), (_FORMAT, data.format))
        yield Refusal.between(settings, "a mixture of preference data is not supported", ("data.source", "one text"))
    if data.overlong == "split":
        reason = "a pair is compared as a whole"
        yield recipe.conflict("data.overlong", _FORMAT, reason=reason, remedy=(("data.overlong", "truncate or drop"),))


def _fields_without_effect(recipe: Recipe) -> Iterator[Refusal]:
    section = recipe.train.objective
    used = OBJECTIVE_FIELDS[section.name]
    for field, info in ObjectiveSection.model_fields.items():
        if field == "name" or field in used or getattr(section, field) == info.default:
            continue
        users = [name for name, names in OBJECTIVE_FIELDS.items() if field in names]
        reason = f"{field} has no effect"
        remedy = ("remove it", (_NAME, " or ".join(users)))
        yield recipe.conflict(f"train.objective.{field}", _NAME, reason=reason, remedy=remedy)


def _reference(recipe: Recipe) -> Iterator[Refusal]:
    section = recipe.train.objective
    if section.name not in NEED_REFERENCE:
        return
    if section.reference == "none" and section.name in UNPAIRED:
        reason = "its rewards are log-ratios to a reference"
        yield recipe.conflict(_REFERENCE, _NAME, reason=reason, remedy=((_REFERENCE, "initial"),))
    elif section.reference not in ("initial", "none", "online"):
        instead: Setting = (_REFERENCE, "initial, online or none")
        yield from other_model_conflicts(_REFERENCE, section.reference, instead, words=("initial", "online", "none"))
        if recipe.model.load_in_4bit:
            reason = "packed weights cannot change places with others"
            yield recipe.conflict(_REFERENCE, "model.load_in_4bit", reason=reason, remedy=(instead,))
    nvme = "parallel.offload_params"
    if section.reference != "initial" and recipe.parallel.offload_params == "nvme":
        reason = "weights on a drive cannot change places with others"
        yield recipe.conflict(_REFERENCE, nvme, reason=reason, remedy=((_REFERENCE, "initial"), (nvme, "cpu")))
    if section.reference != "initial" and recipe.parallel.hpz > 1:
        reason = "ZeRO++ keeps second shards, which would stay those of the policy"
        remedy = ((_REFERENCE, "initial"), ("parallel.hpz", 1))
        yield recipe.conflict(_REFERENCE, "parallel.hpz", reason=reason, remedy=remedy)


def other_model_conflicts(field: str, name: str, instead: Setting, *, words: Sequence[str] = ()) -> Iterator[Refusal]:
    """Refuse a model beside the one that trains that is neither a directory of a model nor a name on the hub.

    `words`: values of the field that are no models, one of which a name without a slash may mean.
    """
    path = os.path.expanduser(name)
    if is_url(name):
        yield Refusal.of(field, name, "models are read from directories", "copy it to one", instead)
    elif os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            yield Refusal.of(field, name, "it has no config.json", "name a model or a checkpoint", instead)
    elif _HUB_NAME.fullmatch(name) is None or os.path.exists(path):
        hint = "" if "/" in name else nearest(name, words).strip()
        remedy = (hint,) if hint else ("name a model or a checkpoint", instead)
        yield Refusal.of(field, name, "there is no such directory", *remedy)


def _means(recipe: Recipe) -> Iterator[Refusal]:
    """Refuse what a mean over the global batch, in a pass of its own, does not go together with."""
    if recipe.train.objective.name not in UNPAIRED:
        return
    if recipe.train.eval_every:
        reason = "its loss depends on a mean over the global batch, which a validation does not have"
        yield recipe.conflict("train.eval_every", _NAME, reason=reason, remedy=(("train.eval_every", 0),))
