"""`dstk validate`: what a recipe would run, or every problem in it; `dstk schema`: the JSON Schema of recipes."""

import json
import os
from pathlib import Path

import click

from toolkit.cli import Count
from toolkit.cli.plan.auto_recipe import explicit
from toolkit.config import load_recipe, recipe_json_schema, recipe_layouts
from toolkit.config.gallery import find_recipe
from toolkit.config.job import Job
from toolkit.config.layout import sequence_axes
from toolkit.config.recipe import Recipe
from toolkit.errors import LayoutError, RecipeError, ToolkitError
from toolkit.units import format_count


@click.command
@click.argument("arguments", nargs=-1, required=True, metavar="RECIPE... [SECTION.KEY=VALUE]...")
@click.option("--world-size", type=Count(), metavar="N", help="Also check that it fits so many ranks.")
@click.option(
    "--layout", help="A layout that the recipes list (8xH100), or any (dp8-z3).  [default: all that they list]"
)
@click.option("--gpu", metavar="NAME", help="The kind of GPU, or cpu, that parallel: auto is planned for.")
def command(arguments: tuple[str, ...], world_size: int | None, layout: str | None, gpu: str | None) -> None:
    """Check recipes without running them.

    RECIPE is a YAML file, a name of the gallery, or a directory that is searched for *.yaml. An argument with a = is an
    override, applied to every recipe; null restores the default.

    Prints a line for each valid recipe and layout, and a line for each problem of the others, and then exits with 2.

    \b
    Examples:
      dstk validate recipes
      dstk validate recipes/demo.yaml --world-size 2
      dstk validate gpt2-pretrain --layout 8xH100
      dstk validate recipes/demo.yaml parallel.zero_stage=3 'optimizer.betas=[0.9, 0.95]' run_dir=null
    """
    overrides = [argument for argument in arguments if "=" in argument]
    problems: list[str] = []
    for path in _find([argument for argument in arguments if "=" not in argument]):
        for name, ranks in [(layout, world_size)] if layout is not None or world_size else _layouts(path):
            try:
                recipe = load_recipe(path, overrides, world_size=ranks, layout=name)
                recipe = recipe if ranks is None else explicit(recipe, ranks, gpu)
            except ToolkitError as error:
                problems += error.problems
            else:
                click.echo(f"{path}{f', {name}' if name else ''}: {_summary(recipe, ranks)}")
    if problems:
        # A wrong override is wrong for every recipe; report it once.
        raise RecipeError(dict.fromkeys(problems))


@click.command
def schema() -> None:
    """Print the JSON Schema of recipes, for completion and checks in an editor.

    A recipe names it in a comment: # yaml-language-server: $schema=../recipe.schema.json
    """
    click.echo(schema_text(), nl=False)


def schema_text() -> str:
    """The schema as recipes/recipe.schema.json holds it."""
    return json.dumps(recipe_json_schema(), indent=2, ensure_ascii=False) + "\n"


def _layouts(path: Path) -> list[tuple[str | None, int | None]]:
    """The layouts to check of a recipe, with their ranks: all that it lists, the first of an entry by its name."""
    try:
        layouts = recipe_layouts(path)
    except (RecipeError, LayoutError):
        return [(None, None)]  # which says it
    firsts = {listed.name: listed for listed in reversed(layouts)}
    if not layouts:
        return [(None, None)]
    return [(listed.name if listed is firsts[listed.name] else listed.text, listed.ranks) for listed in layouts]


def _find(arguments: list[str]) -> list[Path]:
    """The recipes among files and directories, each once. Raises RecipeError where there is none."""
    if not arguments:
        raise RecipeError("no recipe is given, only overrides. Name a YAML file or a directory.")
    if "" in arguments:  # the current directory, to Path
        raise RecipeError("a recipe's name is empty. Name a YAML file or a directory.")
    paths = {argument: Path(argument) for argument in arguments}
    files = {name: sorted(path.rglob("*.yaml")) if path.is_dir() else [_file(path)] for name, path in paths.items()}
    why = "there is no *.yaml in this directory. Name a recipe, or a directory with recipes."
    if empty := [f"{name}: {why}" for name, below in files.items() if not below]:
        raise RecipeError(empty)
    return list(dict.fromkeys(path for below in files.values() for path in below))


def _file(path: Path) -> Path:
    located = find_recipe(str(path))
    return path if located == path else Path(os.path.relpath(located))


def _summary(recipe: Recipe, world_size: int | None) -> str:
    """Model, layout, split of the batch and tokens of a step, on one line."""
    section = recipe.parallel
    engine = recipe.train.engine
    micro = recipe.batch.micro_batch_size
    ranks = None if section.auto else world_size or (1 if engine == "reference" else recipe.world_size)
    tokens = f"{format_count(recipe.batch.global_batch_size * recipe.data.seq_len)} tokens per step"
    if section.auto:
        where = "auto"
        split = "what is planned at launch"
    elif ranks is None:
        sizes = {name: size for name, size in (("ep", section.ep), ("tp", section.tp), ("pp", section.pp)) if size > 1}
        sizes |= sequence_axes(cp=section.cp, cp_ulysses=section.cp_ulysses, ulysses=section.ulysses)
        axes = [f"{name}{sizes[name]}" for name in ("ep", "cp", "tp", "pp", "u") if name in sizes]
        where = "-".join([*axes, f"z{section.zero_stage}"]) if engine == "deepspeed" else engine
        split = f"{micro} micro x accumulation x dp"
    else:
        job = Job.of(recipe, ranks)
        where = job.strategy
        split = f"{micro} micro x {job.batch.accumulation} accumulation x {job.layout.dp} dp"
    samples = f"{recipe.batch.global_batch_size} samples = {split}"
    sources = f" of {len(recipe.data.sources)} sources" if recipe.data.sources else ""
    return f"{recipe.model.name_or_path}, {where}, {recipe.precision}, {samples}, {tokens}{sources}"
