"""`dstk memory`: what every rank of a layout takes on its GPU, calculated from the model's config.json."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.errors import LayoutError, ModelError, RecipeError, ReportError

if TYPE_CHECKING:
    from toolkit.cli.memory_question import Question

_SWEEPS = ("zero", "micro", "recompute", "seq")


@click.command()
@click.option("--model", help="A shape that the toolkit knows, a directory with a config.json, or the file itself.")
@click.option("--layout", help="dp8-tp4-pp2-z1, or a part of it; what is left out is 1 (z: 0).")
@click.option("--recipe", type=click.Path(), help="Take model, layout and batch from a recipe.")
@click.option("--world-size", type=click.IntRange(min=1), help="Ranks, where neither layout nor recipe says how many.")
@click.option("--micro", type=click.IntRange(min=1), help="Samples of one forward pass of one rank.  [default: 1]")
@click.option("--seq", type=click.IntRange(min=1), help="Tokens of a sample.  [default: 2048, or what the model has]")
@click.option("--accumulation", type=click.IntRange(min=1), help="Micro-batches of a step.  [default: 4 a stage]")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Of matrix products; without ZeRO the weights stay fp32.  [default: bf16]",
)
@click.option(
    "--recompute",
    type=click.Choice(["none", "selective", "full"]),
    help="What the backward pass computes again: nothing, attention alone, or whole layers.",
)
@click.option(
    "--attention",
    type=click.Choice(["eager", "sdpa", "flash"]),
    help="Of attention; eager for a family without sdpa.  [default: sdpa]",
)
@click.option("--sequence-parallel", is_flag=True, help="Split along the sequence what tp replicates.")
@click.option("--offload-optimizer", is_flag=True, help="Keep optimizer states in host memory.")
@click.option("--offload-params", is_flag=True, help="Keep ZeRO-3 shards in host memory.")
@click.option("--gpu", "gpu_name", help="H100-80, A100-40, L40S, …: what is left on it, and which micro-batch fits.")
@click.option("--json", "as_json", is_flag=True, help="Bytes of every stage as JSON.")
@click.option("--plot", type=click.Path(dir_okay=False), metavar="FILE", help="Draw stacked bars, one a stage.")
@click.option(
    "--sweep", metavar="NAMES", help="Print a grid over some of zero, micro, recompute, seq: --sweep zero,micro."
)
def command(recipe: str | None, as_json: bool, plot: str | None, sweep: str | None, **options: Any) -> None:
    """Print what each pipeline stage of a model in a layout takes on its GPUs. Nothing is run, loaded or fetched.

    \b
    dstk memory --model llama-3-8b --layout dp8-tp4-pp2-z1 --seq 4096 --gpu H100-80
    dstk memory --recipe recipes/gpt2/z3.yaml --world-size 8 --gpu A100-40
    dstk memory --model gpt2-xl --layout dp8 --gpu A100-40 --sweep zero,micro,recompute
    """
    from toolkit.cli.memory_sweep import grid
    from toolkit.cli.memory_table import grid_json, print_breakdowns, print_grid, to_json

    names = _sweep_names(sweep)
    question = _question(recipe, options)
    for note in question.notes:
        click.echo(f"note: {note}", err=True)
    if names:
        if plot is not None:
            raise ReportError("--plot draws one layout, and --sweep prints many. Leave one of them out.")
        cells = grid(question, names)
        if as_json:
            click.echo(json.dumps(grid_json(question, cells), indent=2))
        else:
            print_grid(question, names, cells)
        return
    question.check()
    found = question.answer()
    largest = question.largest_micro_batch()
    if plot is not None:
        from toolkit.report.memory_plot import plot_memory

        plot_memory(Path(plot), found, title=question.title)
    if as_json:
        click.echo(json.dumps(to_json(question, found, largest), indent=2))
    else:
        print_breakdowns(question, found, largest)


def _sweep_names(sweep: str | None) -> list[str]:
    names = [] if sweep is None else [name.strip() for name in sweep.split(",")]
    for name in names:
        if name not in _SWEEPS or names.count(name) > 1:
            problem = "is named twice" if name in _SWEEPS else "cannot be swept"
            raise LayoutError(f"--sweep {sweep}: {name!r} {problem}. Name some of {', '.join(_SWEEPS)}, each once.")
    return names


def _question(recipe: str | None, options: dict[str, Any]) -> "Question":
    from toolkit.cli.memory_question import from_model, from_recipe

    if recipe is not None:
        if options["model"] or options["layout"]:
            raise RecipeError("--recipe has a model and a layout: leave out --model and --layout.")
        return from_recipe(recipe, options)
    if not options["model"] or not options["layout"]:
        raise ModelError("what is to be estimated? Name --model and --layout, or a --recipe.")
    return from_model(options)
