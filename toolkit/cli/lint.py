"""`dstk lint`: what is wrong with DeepSpeed configs and accelerate's, before a run finds out."""

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import click

from toolkit.cli.byte_size import ByteSize
from toolkit.dsconfig.lint import Facts, Linted, Linter, Runner, Severity, render
from toolkit.dsconfig.lint.rules import GROUPS, RULES
from toolkit.dsconfig.lint.schema import version, version_of
from toolkit.dsconfig.lint.view import GPU_BYTES
from toolkit.errors import ConfigError, nearest
from toolkit.layout import Layout

if TYPE_CHECKING:
    from toolkit.dsconfig.lint.beside import RecipeBeside


@click.command()
@click.argument("files", nargs=-1, metavar="FILE...")
@click.option("--recipe", metavar="RECIPE", help="A recipe of this toolkit that the config is used with.")
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="GPUs of all machines together.")
@click.option("--layout", metavar="LAYOUT", help="Who shares samples, such as tp2-pp2: the rest is data-parallel.")
@click.option("--model", metavar="NAME", help="A known shape (gpt2-xl) or a directory with a config.json.")
@click.option("--gpu-memory", type=ByteSize(), metavar="SIZE", help="Of one GPU, such as 80GB.  [default: 24GiB]")
@click.option(
    "--trainer-args", multiple=True, metavar="FILE|NAME=VALUE", help="TrainingArguments of Hugging Face; repeatable."
)
@click.option("--for", "runner", type=click.Choice(get_args(Runner)), help="Who reads the config; else it is guessed.")
@click.option("--deepspeed", metavar="VERSION", help=f"The version that runs it.  [default: {version()}]")
@click.option("--ignore", multiple=True, metavar="RULE[,RULE]", help="Rules to leave out; repeatable.")
@click.option("--fix", is_flag=True, help="Mend what can be mended, in the files themselves.")
@click.option("--format", "form", type=click.Choice(["text", "json", "github"]), default="text", show_default=True)
@click.option("--rules", is_flag=True, help="List the rules.")
def command(
    files: tuple[str, ...],
    recipe: str | None,
    gpus: int | None,
    layout: str | None,
    model: str | None,
    gpu_memory: int | None,
    trainer_args: tuple[str, ...],
    runner: Runner | None,
    deepspeed: str | None,
    ignore: tuple[str, ...],
    fix: bool,
    form: str,
    rules: bool,
) -> int:
    """Find mistakes in DeepSpeed configs before a run does.

    FILE is a DeepSpeed JSON, a config of accelerate (YAML), or a directory that is searched for both.

    Exits with 0 where nothing but infos is found, 1 where a file has an error or a warning, 2 where one cannot be read.

    \b
    Examples:
      dstk lint ds_config.json
      dstk lint ds_configs --gpus 8
      dstk lint ds_config.json --trainer-args per_device_train_batch_size=4 --trainer-args bf16=true
      dstk lint accelerate.yaml --fix
    """
    if rules:
        click.echo("\n".join(render.catalogue(GROUPS, click.style)))
        return 0
    if not files:
        raise click.UsageError("Name a file or a directory, or ask for --rules.")
    facts = Facts(
        gpus=gpus,
        layout=Layout.parse(layout) if layout else None,
        gpu_bytes=gpu_memory or GPU_BYTES,
        deepspeed=_version(deepspeed),
    )
    beside = None
    if recipe or model or trainer_args:
        facts, beside = _beside(facts, recipe, model, trainer_args)
    linter = Linter(facts=facts, runner=runner, recipe=beside, ignored=_ignored(ignore), mends=fix)
    linted = linter.run(files)
    _print(linted, form, deepspeed or version())
    if linted.problems:
        raise ConfigError("\n".join(linted.problems))
    return 1 if any(finding.severity is not Severity.INFO for finding in linted.findings) else 0


def _beside(
    facts: Facts, recipe: str | None, model: str | None, trainer_args: tuple[str, ...]
) -> tuple[Facts, "RecipeBeside | None"]:
    """What a recipe, a model and the Trainer's arguments say. What an option says itself comes first."""
    from toolkit import recipe_file
    from toolkit.dsconfig.lint.beside import beside_recipe, shape_of, trainer_arguments

    beside = None
    if recipe is not None:
        beside = beside_recipe(recipe, recipe_file.load(recipe, world_size=facts.gpus), facts.gpus)
        facts = replace(facts, recipe=recipe, layout=facts.layout or beside.layout, shape=beside.shape)
    if model is not None:
        facts = replace(facts, shape=shape_of(model))
    return replace(facts, trainer=trainer_arguments(trainer_args)), beside


def _version(text: str | None) -> tuple[int, ...]:
    try:
        return version_of(text or version())
    except ValueError:
        raise click.UsageError(f"--deepspeed {text} is not a version. Write one such as {version()}.") from None


def _ignored(options: tuple[str, ...]) -> frozenset[str]:
    names = [name.strip().upper() for option in options for name in option.split(",") if name.strip()]
    for name in names:
        if name not in RULES:
            raise click.UsageError(f"--ignore {name}: not a rule.{nearest(name, RULES)} See dstk lint --rules.")
    return frozenset(names)


def _print(linted: Linted, form: str, deepspeed: str) -> None:
    if form == "json":
        click.echo(render.as_json(linted.findings, linted.files, deepspeed))
        return
    for name, changes in linted.changes.items():
        for change in changes:
            click.echo(f"{name}: {click.style('mended', fg='green')} {change}", err=form == "github")
    if form == "github":
        lines = render.github(linted.findings)
        if lines:
            click.echo("\n".join(lines))
        return
    width = _width()
    blocks = render.text(linted.findings, click.style, width)
    if linted.changes and blocks:
        click.echo()
    for line in blocks:
        click.echo(line)
    if blocks:
        click.echo()
    passed = f", {linted.passed_over} other files passed over" if linted.passed_over else ""
    click.echo(render.summary(linted.findings, linted.files) + passed)


def _width() -> int | None:
    """Columns of the terminal; None where the output goes elsewhere, and lines stay whole."""
    if not sys.stdout.isatty():
        return None
    try:
        return max(os.get_terminal_size().columns, 40)
    except OSError:
        return 100
