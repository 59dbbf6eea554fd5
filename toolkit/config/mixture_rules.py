"""Rules for a recipe's sources and validation sets: what they must agree on with each other and with `data`."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from toolkit.config.data_section import CorpusSection, DataSection, SourceSection, ValidationSection
from toolkit.config.recipe import Recipe
from toolkit.errors import Refusal, Setting

_SHARES = ("weight", "epochs", "tokens")
_OWN = ("subset", "split", "stream_rows", "format", "text_field", "train_on", "dropped_text")
_MOST_CHARACTERS = 60
Idle = Callable[[DataSection], Iterator[tuple[str, Setting, Setting | str]]]
"""The fields of `data` that do nothing for a text, each with why, and a remedy."""


def mixture_conflicts(recipe: Recipe) -> Iterator[Refusal]:
    """Yield refusals of what cannot be in `data.sources` and `data.validation`."""
    data = recipe.data
    if data.sources is not None:
        if data.source != DataSection.model_fields["source"].default:
            yield Refusal.of("data.source", data.source, "data.sources is given too", "remove one of them")
        yield from _names("data.sources", data.sources)
        for index, source in enumerate(data.sources):
            yield from _share(data.place(index), source)
        weights = [source.weight for source in data.sources if source.weight is not None]
        if weights and not sum(weights):
            reason = "the weights sum to 0, so no sample has a source"
            yield Refusal(field="data.sources", reason=f"data.sources: {reason}.", remedy=("raise one of them",))
    if data.validation is not None:
        yield from _names("data.validation", data.validation)
        if not recipe.train.eval_every:
            reason = "data.validation has no effect"
            yield Refusal.of("train.eval_every", 0, reason, "remove it", ("train.eval_every", "1 or more"))


def _names(field: str, texts: tuple[CorpusSection, ...]) -> Iterator[Refusal]:
    if not texts:
        advice = "give at least one, or leave the field out"
        yield Refusal(field=field, reason=f"{field} is empty.", remedy=(advice,))
    labels = [text.label for text in texts]
    for index, label in enumerate(labels):
        place = f"{field}[{index}].name"
        if label in labels[:index]:
            first = f"{field}[{labels.index(label)}]"
            yield Refusal.of(place, label, f"{first} has the same name", "give each a name of its own")
        elif len(label) > _MOST_CHARACTERS:
            yield Refusal.of(place, label, f"a name has at most {_MOST_CHARACTERS} characters", "give a shorter name")


def _share(place: str, source: SourceSection) -> Iterator[Refusal]:
    shares = [(f"{place}.{name}", value) for name in _SHARES if (value := getattr(source, name)) is not None]
    if not shares:
        reason = f"{place} has no share of the run."
        yield Refusal(field=place, reason=reason, remedy=(f"give it one of {', '.join(_SHARES)}",))
    elif len(shares) > 1:
        yield Refusal.between(tuple(shares), "these say the same thing in two ways", "keep one of them")


def of_each_text(recipe: Recipe, rule: Callable[[Recipe], Iterator[Refusal]]) -> Iterator[Refusal]:
    """Apply a rule about `data.source` to every source and validation set."""
    data = recipe.data
    if data.sources is None:
        yield from rule(recipe)
    for place, text in _texts(data):
        for refusal in rule(recipe.model_copy(update={"data": data.of(text)})):
            yield about(refusal, place, text)


def of_all_texts(recipe: Recipe, rule: Callable[[Recipe], Iterator[Refusal]]) -> Iterator[Refusal]:
    """Apply a rule about fields that all texts share: it holds where there is no text that these fields suit."""
    parts = [*recipe.data.parts, *map(recipe.data.of, recipe.data.validation or ())]
    refusals = [[*rule(recipe.model_copy(update={"data": part}))] for part in parts]
    if all(refusals):
        yield from refusals[0]


def about(refusal: Refusal, place: str, text: CorpusSection) -> Refusal:
    """Return the refusal with the fields of a source or validation set: `data.source` is `data.sources[1].path`."""
    fields = {"data.source": f"{place}.path"}
    names = [name for name in _OWN if getattr(text, name) is not None]
    if isinstance(text, ValidationSection):
        names.append("split")  # it has a default of its own
    fields |= {f"data.{name}": f"{place}.{name}" for name in names}

    def renamed(setting: Setting | str) -> Setting | str:
        if isinstance(setting, str):
            return setting
        return fields.get(setting[0], setting[0]), setting[1]

    return replace(
        refusal,
        field=fields.get(refusal.field, refusal.field),
        settings=tuple(map(renamed, refusal.settings)),
        remedy=tuple(map(renamed, refusal.remedy)),
    )


def idle_data_fields(recipe: Recipe, idle: Idle) -> Iterator[Refusal]:
    """Refuse every field of `data` that is set and does nothing: a source's own field, where it does nothing for that
    source; a shared field, where it does nothing for any.
    """
    data = recipe.data
    parts = [*data.parts, *map(data.of, data.validation or ())]
    idle_fields = [{field: (because, remedy) for field, because, remedy in idle(part)} for part in parts]
    for name in idle_fields[0]:
        value: Any = getattr(data, name)
        if value != DataSection.model_fields[name].default and all(name in fields for fields in idle_fields):
            yield _no_effect((f"data.{name}", value), *idle_fields[0][name])
    for place, text in _texts(data):
        for name, because, remedy in idle(data.of(text)):
            if getattr(text, name, None) is not None:
                refusal = _no_effect((f"data.{name}", getattr(text, name)), because, remedy)
                yield about(refusal, place, text)
    if data.validation and data.eval_fraction not in (0, DataSection.model_fields["eval_fraction"].default):
        because = ("data.validation", "[…]")
        yield _no_effect(("data.eval_fraction", data.eval_fraction), because, "remove data.validation")


def _no_effect(setting: Setting, because: Setting, remedy: Setting | str) -> Refusal:
    return Refusal.between((setting, because), f"{setting[0].partition('.')[2]} has no effect", "remove it", remedy)


def _texts(data: DataSection) -> Iterator[tuple[str, CorpusSection]]:
    for index, source in enumerate(data.sources or ()):
        yield data.place(index), source
    for index, text in enumerate(data.validation or ()):
        yield f"data.validation[{index}]", text
