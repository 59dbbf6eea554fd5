"""Context of a config from other files: a recipe, a model, and the arguments of the Hugging Face Trainer."""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.config.recipe import Recipe
from toolkit.config.source_text import Path as ConfigPath
from toolkit.config.strict_yaml import resolve
from toolkit.dsconfig.build import ConfigJob, shape_of
from toolkit.dsconfig.merge import conflicts, spell_json
from toolkit.errors import ModelError
from toolkit.lint.document import NotAConfigError
from toolkit.lint.linter import parse, read_config_text


@dataclass(frozen=True, kw_only=True)
class RecipeContext:
    """A recipe as a job, from which this toolkit builds its own DeepSpeed config."""

    name: str
    job: ConfigJob

    def conflicts(self, config: Mapping[str, Any]) -> tuple[tuple[ConfigPath, str], ...]:
        """Return every value that contradicts the recipe: path and message."""
        refusals = [
            replace(refusal, remedy=())
            for refusal in conflicts(self.job.config, dict(config), shares_experts=self.job.layout.ep > 1)
        ]
        return tuple((tuple(refusal.field.split(".")), refusal.render(spell_json).rstrip(".")) for refusal in refusals)


def recipe_context(name: str, recipe: Recipe, gpus: int | None) -> RecipeContext:
    """Build the config of a recipe on `gpus`. Raises LayoutError or BatchError if that is not possible."""
    ranks = gpus or recipe.world_size or recipe.parallel.least_ranks
    shape = None
    with contextlib.suppress(ModelError):  # `conflicts` needs the width alone, and raises without it
        shape = shape_of(recipe.model.name_or_path, recipe.model.overrides)
    job = ConfigJob.of(recipe, ranks, shape)
    return RecipeContext(name=name, job=job)


def trainer_arguments(words: Iterable[str]) -> dict[str, Any]:
    """Read TrainingArguments from files (JSON or YAML, as for HfArgumentParser) and NAME=VALUE; the last one wins."""
    arguments: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.replace("_", "").isalnum():
            arguments[name] = resolve(value)
            continue
        document = parse(Path(word), read_config_text(Path(word)))
        if not isinstance(document.value, dict):
            raise NotAConfigError(f"{word}: TrainingArguments are names with values. Give a JSON or YAML object.")
        arguments |= document.value
    return arguments
