"""What is known beside a config: a recipe, a model, a layout, and the arguments of the Hugging Face Trainer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.dsconfig.build import build
from toolkit.dsconfig.lint.document import NotAConfigError
from toolkit.dsconfig.lint.files import parse, read_text
from toolkit.dsconfig.lint.finding import Path as ConfigPath
from toolkit.dsconfig.merge import conflicts
from toolkit.errors import ModelError
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.recipe_file.strict_yaml import resolve
from toolkit.shape import ModelShape, find_config, with_overrides


@dataclass(frozen=True, kw_only=True)
class RecipeBeside:
    """A recipe, and the DeepSpeed config that this toolkit makes of it."""

    name: str
    recipe: Recipe
    layout: Layout
    shape: ModelShape
    built: dict[str, Any]

    def conflicts(self, config: Mapping[str, Any]) -> tuple[tuple[ConfigPath, str], ...]:
        """What the recipe decides otherwise: path and message."""
        found = conflicts(self.built, dict(config))
        return tuple((tuple(conflict.key.split(".")), conflict.message) for conflict in found)


def beside_recipe(name: str, recipe: Recipe, gpus: int | None) -> RecipeBeside:
    """Lay a recipe out on the GPUs. Raises LayoutError, BatchError or ModelError where that is not possible."""
    ranks = gpus or recipe.world_size or recipe.parallel.tp * recipe.parallel.pp * recipe.parallel.ulysses
    layout = recipe.layout(ranks)
    shape = shape_of(recipe.model.name_or_path, recipe.model.overrides)
    built = build(recipe, layout, recipe.resolve_batch(layout), hidden_size=shape.hidden)
    return RecipeBeside(name=name, recipe=recipe, layout=layout, shape=shape, built=built)


def shape_of(name: str, overrides: Mapping[str, Any] | None = None) -> ModelShape:
    """The shape of a known model or of a local directory. Raises ModelError."""
    facts = find_config(name)
    if facts is None:
        raise ModelError(f"{name}: not a known shape or local directory. Give one, for instance gpt2 or ./my-model.")
    return ModelShape.from_config(with_overrides(facts, overrides or {}))


def trainer_arguments(given: Iterable[str]) -> dict[str, Any]:
    """TrainingArguments from files (JSON or YAML, as HfArgumentParser reads them) and NAME=VALUE; the last counts."""
    arguments: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if equals and name.replace("_", "").isalnum():
            arguments[name] = resolve(value)
            continue
        document = parse(Path(one), read_text(Path(one)))
        if not isinstance(document.value, dict):
            raise NotAConfigError(f"{one}: TrainingArguments are names with values. Give a JSON or YAML object.")
        arguments |= document.value
    return arguments
