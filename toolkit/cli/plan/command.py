"""`dstk plan`: the fastest layout that fits, predicted from the model's config.json."""

from typing import TYPE_CHECKING, Any, get_args

import click

from toolkit.cli import Count, FiniteRange
from toolkit.cli.json_output import json_option, print_json
from toolkit.config.layout import Recompute
from toolkit.errors import LayoutError
from toolkit.files import expanded

if TYPE_CHECKING:
    from toolkit.planner.costs import Cost
    from toolkit.planner.request import Plan, PlanRequest

_TOKENS = FiniteRange(min=0, max=1e18, min_open=True)
"""Thousands of times what any model was trained on."""
_RATE = FiniteRange(min=0, max=1e6)


@click.command()
@click.option("--model", help="A shape that the toolkit knows, a directory with a config.json, or the file.")
@click.option(
    "--recipe",
    type=click.Path(),
    help="Plan what a recipe trains, or one of the gallery: its model, data, batch and objective.",
)
@click.option(
    "--gpus", required=True, metavar="NxGPU", help="64xH100, 8xA100-40, 4xL40S, …; 2xcpu after dstk calibrate."
)
@click.option("--seq", type=Count(), help="Tokens of a sample.  [default: the recipe's]")
@click.option("--global-batch", type=Count(), help="Samples of a step, of all GPUs.  [default: the recipe's]")
@click.option(
    "--goal",
    type=click.Choice(["speed", "cost", "memory"]),
    default="speed",
    show_default=True,
    help="Rank by the step's time; by GPU-seconds, also on a half, a quarter, … of the GPUs; or by memory.",
)
@click.option("--top", type=Count(), default=10, show_default=True, help="How many layouts to print.")
@click.option("--layout", help="Predict this one: dp8-tp4-pp2-z1-sp-recompute, or a part of it.")
@click.option("--micro", type=Count(), help="Samples of a forward pass.  [default: the fastest that fit]")
@click.option(
    "--recompute", type=click.Choice(get_args(Recompute)), help="Recomputation of the one layout that --layout names."
)
@click.option("--why", metavar="LAYOUT", help="Say why this layout is not the first choice, or does not fit.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]),
    default="bf16",
    show_default=True,
    help="Precision of matrix products; fp8, mxfp8 and nvfp4 are only predicted, the toolkit does not train in them.",
)
@click.option(
    "--framework",
    type=click.Choice(["toolkit", "megatron", "megatron-2021", "nanotron", "aleph-alpha-scaling", "fsdp", "automodel"]),
    default="toolkit",
    show_default=True,
    help="Predict one --layout as another framework runs it.",
)
@click.option(
    "--attention",
    type=click.Choice(["fused-softmax", "unfused", "flash1", "flash2", "flash3", "cudnn", "flex"]),
    help="Attention kernels that another framework runs.  [default: flash2]",
)
@click.option(
    "--virtual-stages", type=Count(), default=1, help="Virtual pipeline stages of each rank, with another --framework."
)
@click.option("--schedules", is_flag=True, help="Also try the toolkit's own pipeline schedules: pp4x2, pp4-zbv, …")
@click.option(
    "--cluster",
    type=click.Path(),
    metavar="FILE",
    help="YAML: gpus_per_node, network_bytes_per_second, …; a file of dstk calibrate; or measured: the stored one.",
)
@click.option(
    "--trainable", metavar="WHAT", help="lora:r=16,targets=all-linear, freeze:PATTERNS, or PATTERNS of names."
)
@click.option(
    "--imbalance",
    type=FiniteRange(min=1),
    default=1.0,
    help="Tokens routed to the busiest expert-parallel rank, over the mean: in time and memory.  [default: 1]",
)
@click.option(
    "--tokens",
    type=_TOKENS,
    help="Days, money and energy of training on so many tokens: 1e12.",
)
@click.option("--price", type=_RATE, help="US dollars a GPU and hour.  [default: prices.json]")
@click.option("--carbon", type=_RATE, help="Kilograms of CO2 a kWh.  [default: the world's average]")
@click.option("--report", metavar="DIR", help="Write a page (index.html): all candidates, memory against throughput.")
@click.option("--write", metavar="DIR", help="Write the first choice: recipe, DeepSpeed JSON, launch scripts, …")
@click.option("--overwrite", is_flag=True, help="Let --write replace the files of an earlier plan.")
@json_option("Bytes and seconds as JSON.")
def command(as_json: bool, **options: Any) -> None:
    """Print the fastest layouts that fit, with what their memory and their time go to. No weights, no GPU.

    \b
    dstk plan --model llama-3-8b --gpus 64xH100 --seq 4096 --global-batch 512
    dstk plan --model gpt3-175b --gpus 1024xA100 --seq 2048 --global-batch 1536 --tokens 3e11
    dstk plan --model llama-3-8b --gpus 8xH100 --seq 4096 --global-batch 64 --layout tp2-pp2-z1 --micro 2
    dstk plan --recipe llama-3.1-8b-dpo --gpus 16xH100
    """
    from toolkit.cli.plan.options import plan_of, request_of
    from toolkit.cli.plan.table import notes, print_plans, print_why, to_json

    _check_options(as_json, options)
    request = request_of(options)
    plans = _plans(request, options)
    if options["why"] is not None:
        print_why(request, plan_of(request, options["why"], options), plans[0] if plans else None)
        return
    costs = [_cost(plan, request, options) for plan in plans]
    for note in notes(request, is_search=options["layout"] is None):
        click.echo(f"note: {note}", err=True)
    if as_json:
        rows = [to_json(plan, cost) for plan, cost in zip(plans, costs, strict=True)]
        print_json({"plans": rows})
    else:
        print_plans(request, plans, costs)
    if options["report"] is not None:
        from toolkit.cli.plan.report import write_report

        page = write_report(request, options, plans, costs[0])
        click.echo(f"report  {page}", err=as_json)
    if options["write"] is not None:
        from toolkit.cli.plan.write import write_plan  # and with it YAML

        for path in write_plan(request, plans[0], expanded(options["write"])):
            click.echo(path, err=as_json)


def _plans(request: "PlanRequest", options: dict[str, Any]) -> list["Plan"]:
    """Plan the one layout that --layout names, or search. Raises LayoutError where nothing fits, but for --why."""
    from toolkit.cli.plan.options import plan_of
    from toolkit.cli.plan.table import nothing_fits
    from toolkit.planner.search import nearest_that_fits, search

    if options["layout"] is None:
        _only_with_layout(options)
        result = search(request, goal=options["goal"], top=options["top"])
        if not result.plans and options["why"] is None:
            raise LayoutError(nothing_fits(request, result.candidates, nearest_that_fits(request)))
        return result.plans
    plan = plan_of(request, options["layout"], options)
    refusal = request.refusal(plan.layout) if options["framework"] == "toolkit" else None
    if refusal is not None and options["write"] is not None:
        raise LayoutError(refusal)
    if refusal is not None:
        click.echo(f"note: training refuses it: {refusal.render()}", err=True)
    return [plan]


def _cost(plan: "Plan", request: "PlanRequest", options: dict[str, Any]) -> "Cost | None":
    """Return what training on --tokens costs; None without that option."""
    from toolkit.planner.costs import cost_of

    tokens = options["tokens"]
    if tokens is None:
        return None
    return cost_of(plan.step, request.gpu, tokens, price=options["price"], carbon=options["carbon"])


def _check_options(as_json: bool, options: dict[str, Any]) -> None:
    """Refuse options that do not go together, and files that cannot be written, before anything is planned."""
    _check_complete(options)
    if as_json and options["why"] is not None:
        both = (("--json", None), ("--why", options["why"]))
        raise LayoutError.between(both, "the reasons are text", "leave one of them out")
    if options["report"] is not None:
        from toolkit.cli.plan.report import check_report

        check_report(options)
    if options["write"] is not None:
        from toolkit.cli.plan.write import check_write  # and with it YAML

        check_write(options)
    elif options["overwrite"]:
        raise LayoutError.of("--overwrite", None, "nothing is written", "give --write DIR")


def _check_complete(options: dict[str, Any]) -> None:
    """Raise a usage error where neither options nor a recipe say what is planned."""
    for name in ("model", "seq", "global_batch"):
        if options["recipe"] is None and options[name] is None:
            option = name.replace("_", "-")
            raise click.UsageError(f"Missing option '--{option}'. Give it, or a --recipe.")


def _only_with_layout(options: dict[str, Any]) -> None:
    """Refuse options that mean nothing in a search."""
    for name, off in (("micro", None), ("recompute", None), ("framework", "toolkit")):
        if options[name] != off and options["why"] is None:
            option = f"--{name}"
            raise LayoutError.of(option, options[name], "a search goes over all of them", "give it with --layout")
