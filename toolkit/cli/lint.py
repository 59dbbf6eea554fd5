"""`dstk lint`: find mistakes in configs of DeepSpeed and accelerate before a run does."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import click

from toolkit.cli import ByteSize, Count
from toolkit.cli.json_output import print_json_text, stdout_is_json
from toolkit.config.layout import Layout
from toolkit.errors import ConfigError, nearest
from toolkit.lint import Linter, LintResult, Runner, Severity, render
from toolkit.lint.finding import GROUPS, RULES
from toolkit.lint.key_schema import version, version_of
from toolkit.lint.view import GPU_BYTES, LintContext
from toolkit.report.terminal import columns
from toolkit.units import plural

if TYPE_CHECKING:
    from toolkit.lint.recipe_context import RecipeContext


@click.command()
@click.argument("files", nargs=-1, metavar="FILE...")
@click.option("--recipe", metavar="RECIPE", help="A recipe of this toolkit that the config is used with.")
@click.option("--gpus", type=Count(), metavar="N", help="GPUs of all machines together.")
@click.option("--nodes", type=Count(), metavar="N", help="Machines.")
@click.option("--layout", metavar="LAYOUT", help="Ranks that share samples, such as tp2-pp2; of a recipe also 8xH100.")
@click.option("--model", metavar="NAME", help="A known shape (gpt2-xl) or a directory with a config.json.")
@click.option(
    "--gpu-memory", type=ByteSize(), metavar="SIZE", help="Memory of one GPU, such as 80GB.  [default: 24GiB]"
)
@click.option("--trainer-args", multiple=True, metavar="FILE|NAME=VALUE", help="TrainingArguments; repeatable.")
@click.option("--for", "runner", type=click.Choice(get_args(Runner)), help="Who reads the config; else it is guessed.")
@click.option("--deepspeed", metavar="VERSION", help=f"The version that runs it.  [default: {version()}]")
@click.option("--ignore", multiple=True, metavar="RULE[,RULE]", help="Rules to switch off; repeatable.")
@click.option("--fix", is_flag=True, help="Fix what can be fixed, in the files themselves.")
@click.option("--format", "form", type=click.Choice(["text", "json", "github"]), default="text", show_default=True)
@click.option("--rules", is_flag=True, help="List the rules.")
@stdout_is_json(lambda options: options["form"] == "json" and not options["rules"])
def command(files: tuple[str, ...], rules: bool, form: str, **flags: Any) -> int:
    """Find mistakes in DeepSpeed configs before a run does.

    FILE is a DeepSpeed JSON, a config of accelerate (YAML), or a directory that is searched for both.

    Exits with 0 if nothing but infos is found, 1 if a file has an error or a warning, 2 if one cannot be read.

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
    context, recipe = _context(flags)
    ignored = _ignored(flags["ignore"])
    linter = Linter(context=context, runner=flags["runner"], recipe=recipe, ignored=ignored, fixes=flags["fix"])
    result = linter.run(files)
    _print(result, form, flags["deepspeed"] or version())
    if result.problems:
        raise ConfigError("\n".join(result.problems))
    return 1 if any(finding.severity is not Severity.INFO for finding in result.findings) else 0


def _context(flags: dict[str, Any]) -> tuple[LintContext, "RecipeContext | None"]:
    """Collect what is known about the run. An option takes precedence over the recipe."""
    context = LintContext(
        gpus=flags["gpus"],
        nodes=flags["nodes"],
        layout=Layout.parse(flags["layout"]) if flags["layout"] and not flags["recipe"] else None,
        gpu_bytes=flags["gpu_memory"] or GPU_BYTES,
        deepspeed=_version(flags["deepspeed"]),
    )
    name = flags["recipe"]
    model = flags["model"]
    arguments = flags["trainer_args"]
    if not (name or model or arguments):
        return context, None  # pydantic takes longer to import than a file to lint
    from toolkit.cli.plan.auto_recipe import explicit
    from toolkit.config import load_recipe
    from toolkit.dsconfig.build import shape_of
    from toolkit.lint.recipe_context import recipe_context, trainer_arguments

    recipe = None
    if name is not None:
        loaded = load_recipe(name, world_size=context.gpus, layout=flags["layout"])
        recipe = recipe_context(name, explicit(loaded, context.gpus, None, option="--gpus"), context.gpus)
        context = replace(context, recipe=name, layout=recipe.job.layout, shape=recipe.job.shape)
    if model is not None:
        context = replace(context, shape=shape_of(model))
    return replace(context, trainer=trainer_arguments(arguments)), recipe


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


def _print(result: LintResult, form: str, deepspeed: str) -> None:
    if form == "json":
        print_json_text(render.as_json(result.findings, result.files, deepspeed))
        return
    for name, changes in result.changes.items():
        for change in changes:
            click.echo(f"{name}: {click.style('fixed', fg='green')} {change}", err=form == "github")
    if form == "github":
        click.echo("".join(f"{line}\n" for line in render.github(result.findings)), nl=False)
        return
    blocks = render.text(result.findings, click.style, _terminal_width())
    if result.changes and blocks:
        click.echo()
    for line in blocks:
        click.echo(line)
    if blocks:
        click.echo()
    if result.problems and result.files <= len(result.problems) and not result.findings:
        return  # no file was read
    skipped = f", {plural(result.skipped_files, 'other file')} skipped" if result.skipped_files else ""
    click.echo(render.summary(result.findings, result.files) + skipped)


def _terminal_width() -> int | None:
    """Return the columns of the terminal; None if the output is not a terminal, so that lines stay whole."""
    if not sys.stdout.isatty():
        return None
    return columns()
