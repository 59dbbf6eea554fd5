"""`dstk memory`: what every rank of a layout takes on its GPU, calculated from the model's config.json."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from toolkit.cli import Count, FiniteRange, option_of
from toolkit.cli.json_output import json_option, print_json
from toolkit.cli.memory.sweep import AXES, axis_names, grid
from toolkit.config.layout import Recompute
from toolkit.errors import ModelError, RecipeError, ReportError

if TYPE_CHECKING:
    from toolkit.cli.memory.options import MemoryQuery

_PROFILES = (
    "Other programs: megatron, megatron-2021, megatron-deepspeed, nanotron, torchtitan, aleph-alpha-scaling, automodel"
)
_NOT_WITH_RECIPE = (
    "model",
    "engine",
    "optimizer",
    "deepspeed",
    "trainer",
    "pure_bf16",
    "framework",
    "chunked_loss",
    "trainable",
)
"""Options that conflict with --recipe."""


@click.command()
@click.option("--model", help="A shape that the toolkit knows, a directory with a config.json, or the file itself.")
@click.option(
    "--layout",
    help="dp8-tp4-pp2-z1-sp-recompute, or a part of it; of a recipe also a name that it lists (8xH100).",
)
@click.option(
    "--recipe", type=click.Path(), help="Take model, layout, batch and GPU from a recipe, or one of the gallery."
)
@click.option("--world-size", type=Count(), help="Ranks, where neither layout nor recipe says how many.")
@click.option("--micro", type=Count(), help="Samples of one forward pass of one rank.  [default: 1]")
@click.option("--seq", type=Count(), help="Tokens of a sample.  [default: 2048, or what the model has]")
@click.option("--accumulation", type=Count(), help="Micro-batches of a step.  [default: 4 a stage]")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Precision of matrix products; without ZeRO the weights stay fp32.  [default: bf16]",
)
@click.option(
    "--recompute",
    type=click.Choice(get_args(Recompute)),
    help="What the backward pass computes again: nothing, attention alone, whole layers, or every Nth of them.",
)
@click.option(
    "--attention",
    type=click.Choice(["eager", "sdpa", "flash"]),
    help="Implementation of attention; a family without sdpa needs eager.  [default: sdpa]",
)
@click.option(
    "--imbalance",
    type=FiniteRange(min=1),
    help="Tokens routed to the busiest expert-parallel rank, over the mean.  [default: 1]",
)
@click.option("--sequence-parallel", is_flag=True, help="Split along the sequence what tp replicates.")
@click.option("--offload-optimizer", is_flag=True, help="Keep optimizer states in host memory.")
@click.option("--offload-params", is_flag=True, help="Keep ZeRO-3 shards in host memory.")
@click.option(
    "--engine", type=click.Choice(["deepspeed", "ddp", "fsdp"]), help="Data parallelism.  [default: deepspeed]"
)
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "adam", "sgd", "lion", "muon", "adafactor", "adamw8bit"]),
    help="muon, adafactor: not for --deepspeed.  [default: adamw]",
)
@click.option("--deepspeed", metavar="FILE", help="Your own DeepSpeed config, with DeepSpeed's defaults.")
@click.option("--trainer", is_flag=True, help="The Hugging Face Trainer, with its defaults and its `auto`.")
@click.option("--pure-bf16", is_flag=True, help="DDP or FSDP over bf16 weights, gradients and moments.")
@click.option(
    "--trainable",
    metavar="WHAT",
    help="all; lora:r=16,targets=all-linear (or q_proj+v_proj),dropout=0.05,4bit=yes, by peft; or patterns of names; "
    "for --trainer, --engine ddp or fsdp, --deepspeed.",
)
@click.option(
    "--chunked-loss",
    type=Count(),
    metavar="TOKENS",
    help="Logits of so many tokens at once, as Liger's fused loss; for --trainer, --engine ddp or fsdp, --deepspeed.",
)
@click.option("--framework", metavar="NAME[:OPTIONS]", help=f"{_PROFILES} (docs/memory.md, Other frameworks).")
@click.option("--gpu", "gpu_name", help="H100-80, A100-40, L40S, …: what is left on it, and which micro-batch fits.")
@json_option("Bytes of every stage as JSON.")
@click.option("--plot", type=click.Path(dir_okay=False), metavar="FILE", help="Draw stacked bars, one a stage.")
@click.option("--sweep", metavar="NAMES", help=f"Print a grid over some of {', '.join(AXES)}: --sweep zero,micro.")
def command(recipe: str | None, as_json: bool, plot: str | None, sweep: str | None, **options: Any) -> None:
    """Print what each pipeline stage of a model in a layout takes on its GPUs. No weights are loaded or fetched.

    \b
    dstk memory --model llama-3-8b --layout dp8-tp4-pp2-z1 --seq 4096 --gpu H100-80
    dstk memory --recipe gpt2-xl-pretrain --layout z3-recompute --world-size 8 --gpu A100-40
    dstk memory --model gpt2-xl --layout dp8 --gpu A100-40 --sweep zero,micro,recompute
    dstk memory --model llama-3-8b --layout dp8 --deepspeed ds_config.json --seq 4096 --gpu A100-80
    dstk memory --model llama-3-8b --layout dp8-tp4-pp2-z1 --framework megatron:virtual_stages=2
    """
    from toolkit.cli.memory.table import grid_json, print_breakdowns, print_grid, to_json

    names = [] if sweep is None else axis_names(sweep)
    query = _query(recipe, options)
    for note in query.notes:
        click.echo(f"note: {note}", err=True)
    if names:
        if plot is not None:
            conflict = (("--plot", plot), ("--sweep", sweep))
            raise ReportError.between(conflict, "a plot shows one layout, and a grid many", "leave one of them out")
        cells = grid(query, names)
        if as_json:
            print_json(grid_json(query, cells))
        else:
            print_grid(query, names, cells)
        return
    query.check()
    stages = query.answer()
    largest = query.largest_micro_batch()
    if plot is not None:
        from toolkit.report.images import plot_memory

        plot_memory(Path(plot), stages, title=query.title)
    if as_json:
        print_json(to_json(query, stages, largest))
    else:
        print_breakdowns(query, stages, largest)


def _query(recipe: str | None, options: dict[str, Any]) -> "MemoryQuery":
    from toolkit.cli.memory.options import from_model, from_recipe

    if recipe is not None:
        for name in _NOT_WITH_RECIPE:
            if options[name]:
                option = option_of(name)
                conflict = ((option, options[name]), ("--recipe", recipe))
                raise RecipeError.between(conflict, "the recipe has model, layout and engine", f"omit {option}")
        return from_recipe(recipe, options)
    if not options["model"] or not options["layout"]:
        raise ModelError("what is to be estimated? Name --model and --layout, or a --recipe.")
    return from_model(options)
