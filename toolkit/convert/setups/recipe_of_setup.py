"""The recipe of another program's set-up: what trains the same, and a line for each thing that does not."""

import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from toolkit.config import dump_recipe, load_recipe
from toolkit.config.recipe import Recipe
from toolkit.config.strict_yaml import resolve
from toolkit.convert.setups.argument_reader import ArgumentReader
from toolkit.convert.setups.arguments_file import read_arguments
from toolkit.convert.setups.axolotl_setup import axolotl_arguments, take_axolotl
from toolkit.convert.setups.llama_factory_setup import llama_factory_arguments, take_llama_factory
from toolkit.convert.setups.model_and_data import take_model, take_text
from toolkit.convert.setups.trainer_setup import Overridden, SetUp, trainer_setup
from toolkit.errors import RecipeError
from toolkit.files import printable
from toolkit.lint.linter import parse, read_config_text
from toolkit.lint.other_programs import find

_WIDTH = 118


@dataclass(frozen=True, kw_only=True)
class WrittenRecipe:
    """A recipe as text, as it decodes, and what is not the same, a line each."""

    text: str
    recipe: Recipe
    notes: tuple[str, ...]


def recipe_of_setup(
    source: Path,
    *,
    deepspeed: Path | None = None,
    model: str | None = None,
    gpus: int | None = None,
    overrides: Sequence[str] = (),
) -> WrittenRecipe:
    """Translate the arguments of a run. `overrides` are fields of the recipe, which count more.

    Raises RecipeError where something is missing, contradicts something else, or cannot be trained here.
    """
    arguments = read_arguments(source)
    program = _program(arguments)
    settings = dict(word.partition("=")[::2] for word in overrides)
    number = resolve(settings.get("train.steps", ""))
    steps = number if isinstance(number, int) and number > 0 else None
    given_by_user = Overridden(names=frozenset(settings), steps=steps, gpus=gpus)
    if program == "axolotl":
        arguments = axolotl_arguments(arguments, steps)
    elif program == "LLaMA-Factory":
        arguments = llama_factory_arguments(arguments)
    reader = ArgumentReader(source.name, arguments)
    config = _deepspeed(reader, source, deepspeed)
    setup = trainer_setup(program, reader, config, given_by_user)
    take_model(reader, setup, model)
    if program == "axolotl":
        take_axolotl(reader, setup, given_by_user.names)
    elif program == "LLaMA-Factory":
        take_llama_factory(reader, setup, given_by_user.names)
    else:
        take_text(reader, setup, given_by_user.names)
    if setup.missing:
        raise RecipeError([f"{printable(source.name)}: give also {line}." for line in setup.missing])
    setup.notes += reader.leftovers()
    return _written(source, setup, overrides)


def _program(arguments: Mapping[str, Any]) -> str:
    if "base_model" in arguments:
        return "axolotl"
    if {"finetuning_type", "stage", "cutoff_len"} & arguments.keys():
        return "LLaMA-Factory"
    return "the Trainer"


def _deepspeed(reader: ArgumentReader, source: Path, deepspeed: Path | None) -> Mapping[str, Any] | None:
    """The DeepSpeed JSON: that of the option, else the one that the arguments hold or name."""
    named = reader.take("deepspeed")
    if deepspeed is None and isinstance(named, Mapping):
        return named
    if deepspeed is None and isinstance(named, str):
        deepspeed = find(named, str(source))
        if deepspeed is None:
            raise reader.refused("deepspeed", named, "there is no such file here", "Name it with --deepspeed FILE")
    if deepspeed is None:
        return None
    value = parse(deepspeed, read_config_text(deepspeed)).value
    if not isinstance(value, dict):
        raise RecipeError(f"{printable(deepspeed)}: a DeepSpeed JSON is an object. Name another file.")
    return value


def _written(source: Path, setup: SetUp, overrides: Sequence[str]) -> WrittenRecipe:
    sections: dict[str, Any] = {}
    for name, value in setup.fields.items():
        *parents, key = name.split(".")
        section = sections
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "recipe.yaml"
        draft.write_text(yaml.safe_dump(sections, sort_keys=False, allow_unicode=True), encoding="utf-8")
        try:
            recipe = load_recipe(draft, overrides)
        except RecipeError as error:
            where = f"{printable(source.name)}, as a recipe"
            raise RecipeError([_without_place(problem, str(draft), where) for problem in error.problems]) from None
    head = [f"From {printable(source.name)} of {setup.program}, by dstk recipe. What is not the same:"]
    lines = [line for note in setup.notes for line in textwrap.wrap(f"- {note}", _WIDTH, subsequent_indent="  ")]
    comment = "".join(f"# {line}\n" for line in (*head, *lines))
    return WrittenRecipe(
        text=f"{comment}\n{dump_recipe(recipe, defaults=False)}", recipe=recipe, notes=tuple(setup.notes)
    )


def _without_place(problem: str, draft: str, where: str) -> str:
    """A problem of the draft, with the file that the user knows in the place of the draft's name, line and column."""
    if not problem.startswith(draft):
        return problem
    _, _, text = problem.removeprefix(draft).partition(": ")
    return f"{where}: {text}"
