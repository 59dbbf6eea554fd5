"""`dstk validate`: what a recipe would run, or everything that is wrong with it."""

from pathlib import Path

import click

from toolkit.errors import RecipeError
from toolkit.recipe import Recipe
from toolkit.recipe_file import load
from toolkit.units import format_count


@click.command
@click.argument("arguments", nargs=-1, required=True, metavar="RECIPE... [SECTION.KEY=VALUE]...")
@click.option(
    "--world-size", type=click.IntRange(min=1), metavar="N", help="Also check that the recipe fits this many ranks."
)
def command(arguments: tuple[str, ...], world_size: int | None) -> None:
    """Check recipes without running them.

    RECIPE is a YAML file, or a directory that is searched for *.yaml. An argument with a = is an override, applied to
    every recipe; null goes back to the default.

    Prints a line for each good recipe, and a line for each problem of the others; exits with 2 if there is one.

    \b
    Examples:
      dstk validate recipes
      dstk validate recipes/demo.yaml --world-size 2
      dstk validate recipes/demo.yaml parallel.zero_stage=3 'optimizer.betas=[0.9, 0.95]' run_dir=null
    """
    overrides = [argument for argument in arguments if "=" in argument]
    problems: list[str] = []
    for path in find([argument for argument in arguments if "=" not in argument]):
        try:
            recipe = load(path, overrides, world_size=world_size)
        except RecipeError as error:
            problems += error.problems
        else:
            click.echo(f"{path}: {summary(recipe, world_size)}")
    if problems:
        # An override that is wrong is wrong for each recipe; once is enough.
        raise RecipeError(dict.fromkeys(problems))


def find(arguments: list[str]) -> list[Path]:
    """The recipes among files and directories, each once. Raises RecipeError where there is none."""
    if not arguments:
        raise RecipeError("no recipe is given, only overrides. Name a YAML file or a directory.")
    found: list[Path] = []
    empty: list[str] = []
    for argument in arguments:
        path = Path(argument)
        below = sorted(path.rglob("*.yaml")) if path.is_dir() else [path]
        found += below
        if not below:
            empty.append(f"{argument}: no *.yaml lies in this directory. Name a recipe, or a directory with recipes.")
    if empty:
        raise RecipeError(empty)
    return list(dict.fromkeys(found))


def summary(recipe: Recipe, world_size: int | None) -> str:
    """Model, layout, split of the batch and tokens of a step, on one line."""
    engine = recipe.train.engine
    ranks = world_size or (1 if engine == "reference" else recipe.world_size)
    tokens = f"{format_count(recipe.batch.global_size * recipe.data.seq_len)} tokens per step"
    micro = recipe.batch.micro_size
    if ranks is None:
        where = _axes(recipe) if engine == "deepspeed" else engine
        split = f"{recipe.batch.global_size} samples = {micro} micro x accumulation x dp"
    else:
        layout = recipe.layout(ranks)
        batch = recipe.resolve_batch(layout)
        where = str(layout) if engine == "deepspeed" else f"{engine} dp{layout.dp}"
        split = f"{batch.global_size} samples = {micro} micro x {batch.accumulation} accumulation x {layout.dp} dp"
    return f"{recipe.model.name_or_path}, {where}, {recipe.precision}, {split}, {tokens}"


def _axes(recipe: Recipe) -> str:
    """The layout as far as it is known without the number of ranks: `tp3-z1`."""
    section = recipe.parallel
    sizes = {"tp": section.tp, "pp": section.pp, "u": section.ulysses}
    axes = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    return "-".join([*axes, f"z{section.zero_stage}"])
