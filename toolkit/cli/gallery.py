"""`dstk ls`, `dstk cat` and `dstk cp`: the recipes that come with the toolkit."""

from pathlib import Path

import click

from toolkit.config import load_recipe, recipe_layouts
from toolkit.config.gallery import TASKS, find_recipe, gallery, task_of
from toolkit.errors import RecipeError, nearest
from toolkit.models.shape import published_parameters
from toolkit.units import format_count, plural

_WIDE = 140
"""Columns from which data and layouts stand beside each other."""


@click.command
@click.argument("pattern", default="")
@click.option("--family", metavar="NAME", help="Only those of a folder: llama, qwen3, …")
@click.option("--task", type=click.Choice(list(TASKS)), help="Only those of a task.")
def ls(pattern: str, family: str | None, task: str | None) -> None:
    """List the recipes of the gallery whose name contains PATTERN.

    \b
    dstk ls
    dstk ls 8b --task lora
    dstk ls --family qwen3
    """
    from rich import box
    from rich.table import Table

    from toolkit.report.terminal import table_console

    families = {name.partition("/")[0] for name in gallery() if "/" in name}
    if family is not None and family not in families:
        hint = nearest(family, families) or f" Families: {', '.join(sorted(families))}."
        raise click.UsageError(f"--family {family} has no recipes.{hint}")
    names = [
        name
        for name in gallery()
        if pattern.lower() in name and family in (None, name.partition("/")[0]) and task in (None, task_of(name))
    ]
    if not names:
        hint = nearest(pattern, [name.rpartition("/")[2] for name in gallery()], most=3)
        raise RecipeError(f"no recipe fits {pattern or task}.{hint or ' `dstk ls` lists all.'}")
    rows = [_row(name) for name in names]
    console = table_console()
    is_wide = console.width >= _WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in ("name", "task", "parameters"):
        table.add_column(column, justify="right" if column == "parameters" else "left", no_wrap=True)
    for column in ("data", "layouts") if is_wide else ("data, layouts",):
        table.add_column(column, overflow="fold")
    for *row, data, layouts in rows:
        if is_wide:
            table.add_row(*row, data, layouts)
        else:
            table.add_row(*row, f"{data}\n{layouts}".rstrip())
    console.print(table)
    console.print(f"{plural(len(names), 'recipe')}; dstk train NAME --layout 8xH100 trains one, dstk cp NAME copies it")


def _row(name: str) -> tuple[str, ...]:
    path = gallery()[name]
    recipe = load_recipe(path)
    count = published_parameters(recipe.model.name_or_path)
    layouts = dict.fromkeys(layout.name for layout in recipe_layouts(path))
    size = "" if count is None else format_count(count)
    return name, task_of(name), size, recipe.data.source, ", ".join(layouts)


def _source(name: str) -> Path:
    path = find_recipe(name)
    if path not in gallery().values():
        raise RecipeError(f"{name}: not a recipe of the gallery. `dstk ls` lists them.")
    return path


@click.command
@click.argument("name")
def cat(name: str) -> None:
    """Print the recipe NAME of the gallery."""
    click.echo(_source(name).read_text(encoding="utf-8"), nl=False)


@click.command
@click.argument("name")
@click.argument("destination", type=click.Path(path_type=Path), default=".", metavar="[DEST]")
def cp(name: str, destination: Path) -> None:
    """Copy the recipe NAME of the gallery to DEST, a file or a directory; the default is here."""
    source = _source(name)
    target = destination / source.name if destination.is_dir() else destination
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise RecipeError(f"{target}: this file exists. Name another one, or remove it.") from None
    click.echo(target)
