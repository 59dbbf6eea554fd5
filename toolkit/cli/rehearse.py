"""`dstk train --rehearse`: a training step of every kind of rank of a layout, without GPUs and without memory."""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli.json_output import print_json
from toolkit.config import load_recipe, recipe_layouts
from toolkit.config.gallery import find_recipe
from toolkit.config.job import Job
from toolkit.errors import RecipeError
from toolkit.hardware import Gpu, gpu
from toolkit.launch.output import quiet
from toolkit.recorder.rehearsal.refusals import check_rehearsable
from toolkit.units import format_bytes, format_count, plural

if TYPE_CHECKING:  # it imports torch
    from toolkit.recorder.rehearsal.rehearse import Rehearsal, RehearsedKind

FAILED = 1
"""Exit code of a rehearsal in which ranks do not fit together."""


def rehearse_layout(
    recipe: str,
    overrides: Sequence[str],
    layout: str | None,
    nproc: int | None,
    *,
    layers: int | None,
    as_json: bool,
) -> int:
    """Rehearse a recipe in a layout, print what was found, and return the exit code.

    `layers`: decoder layers for each pipeline stage; None for all of the model.
    """
    decoded = load_recipe(recipe, overrides, world_size=nproc, layout=layout)
    if decoded.parallel.auto:
        advice = "name a layout with --layout", "or let `dstk plan` write one"
        raise RecipeError.of("parallel.auto", True, "a rehearsal is of one layout", *advice)
    if decoded.parallel.schedule == "auto":
        reason = "a rehearsal is of one schedule, and this one is chosen at launch"
        raise RecipeError.of("parallel.schedule", "auto", reason, ("parallel.schedule", "one of its names, or null"))
    ranks = nproc or decoded.world_size or decoded.parallel.least_ranks
    job = Job.of(load_recipe(recipe, overrides, world_size=ranks, layout=layout), ranks)
    check_rehearsable(job)
    rehearsal = _rehearsed(job, layers, _gpu_of(recipe, layout))
    if as_json:
        print_json(as_dict(rehearsal))
    else:
        _print(rehearsal)
    return FAILED if rehearsal.problem else 0


def _gpu_of(recipe: str, layout: str | None) -> Gpu | None:
    """The GPU that an entry of the recipe's layouts names."""
    names = {entry.name: entry.gpu for entry in recipe_layouts(find_recipe(recipe))}
    return gpu(names[layout]) if layout in names else None


def _rehearsed(job: Job, layers: int | None, device: Gpu | None) -> "Rehearsal":
    os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported: kernels need no GPU, and nothing is compiled
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    quiet(debug=False)
    from toolkit.recorder.rehearsal.preload import preload

    preload(debug=job.recipe.log.level == "debug")
    from toolkit.recorder.rehearsal.rehearse import rehearse

    def progress(name: str, number: int, count: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r\033[Krehearsing {number} of {count}: {name}", err=True, nl=False)

    rehearsal = rehearse(job, layers=layers, gpu=device, progress=progress)
    if sys.stderr.isatty():
        click.echo("\r\033[K", err=True, nl=False)
    return rehearsal


def verdict(rehearsal: "Rehearsal") -> str:
    """The answer in one line."""
    if rehearsal.problem:
        return f"does not run: {rehearsal.problem}"
    ranks = rehearsal.job.layout.world_size
    calls = sum(len(rehearsed.step.calls) for rehearsed in rehearsal.kinds)
    named = plural(len(rehearsal.kinds), "kind")
    if ranks == 1:
        return f"runs: 1 rank, {format_count(calls)} collectives"
    return f"runs: {named} of {ranks:,} ranks, whose {format_count(calls)} collectives match"


def as_dict(rehearsal: "Rehearsal") -> dict[str, Any]:
    """A rehearsal as JSON has it: bytes and counts."""
    return {
        "layout": rehearsal.job.strategy,
        "ranks": rehearsal.job.layout.world_size,
        "layers": rehearsal.layers,
        "all_layers": rehearsal.all_layers,
        "micro_batches": rehearsal.micro_batches,
        "kinds": [_kind_as_dict(rehearsed) for rehearsed in rehearsal.kinds],
        "teacher": [_kind_as_dict(rehearsed) for rehearsed in rehearsal.teacher],
        "checkpoint": {
            "files": rehearsal.files,
            "bytes": rehearsal.checkpoint_bytes,
            "largest_share_bytes": rehearsal.written_bytes,
        },
        "runs": not rehearsal.problem,
        "problem": rehearsal.problem or None,
    }


def _kind_as_dict(rehearsed: "RehearsedKind") -> dict[str, Any]:
    estimate = rehearsed.estimate
    return {
        "kind": rehearsed.kind.name,
        "rank": rehearsed.kind.rank,
        "ranks": rehearsed.kind.count,
        "parameters": rehearsed.step.parameters,
        "peak_bytes": rehearsed.peak,
        "estimate_bytes": rehearsed.estimated,
        "verdict": estimate.verdict if estimate.device_bytes else None,
        "collectives": {
            group: {"calls": calls, "bytes": nbytes} for group, (calls, nbytes) in rehearsed.traffic.items()
        },
    }


def _print(rehearsal: "Rehearsal") -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from toolkit.report.terminal import table_console

    job = rehearsal.job
    console = table_console()
    title = f"{job.recipe.model.name_or_path} in {job.strategy} on {plural(job.layout.world_size, 'rank')}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("kind of rank", overflow="fold")
    for column in ("ranks", "parameters", "peak", "estimate", "GPU"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("calls and bytes by group", overflow="fold")
    for rehearsed in (*rehearsal.teacher, *rehearsal.kinds):
        table.add_row(*_row(rehearsed))
    console.print(table)
    for line in _notes(rehearsal):
        console.print(line, soft_wrap=True)
    style = "bold red" if rehearsal.problem else "bold green"
    console.print(Text(verdict(rehearsal), style=style), soft_wrap=True)


def _row(rehearsed: "RehearsedKind") -> tuple[str, ...]:
    estimate = rehearsed.estimate
    traffic = (
        f"{group} {calls} {format_bytes(nbytes)}"
        for group, (calls, nbytes) in sorted(rehearsed.traffic.items(), key=lambda entry: -entry[1][1])
    )
    return (
        f"teacher, {rehearsed.kind.name}" if rehearsed.is_teacher else rehearsed.kind.name,
        f"{rehearsed.kind.count:,}",
        format_count(rehearsed.step.parameters),
        "–" if rehearsed.peak is None else format_bytes(rehearsed.peak),
        format_bytes(rehearsed.estimated),
        estimate.verdict if estimate.device_bytes else "–",
        ", ".join(traffic),
    )


def _notes(rehearsal: "Rehearsal") -> list[str]:
    batch = rehearsal.job.batch
    notes = []
    if rehearsal.layers < rehearsal.all_layers:
        few = f"{rehearsal.layers} of the {rehearsal.all_layers} decoder layers"
        notes.append(f"parameters, calls and files are of a model with {few}, estimates of the whole one")
    if rehearsal.micro_batches < batch.accumulation:
        of_all = f"of the {batch.accumulation} of the recipe"
        notes.append(f"calls are those of a step of {rehearsal.micro_batches} micro-batches, {of_all}")
    if rehearsal.layers == rehearsal.all_layers and any(rehearsed.peak is None for rehearsed in rehearsal.kinds):
        notes.append("no peak: what is offloaded cannot be told from what stays on the GPU")
    if rehearsal.files:
        share = format_bytes(rehearsal.written_bytes)
        total = format_bytes(rehearsal.checkpoint_bytes)
        notes.append(f"a checkpoint is {plural(rehearsal.files, 'file')} of {total}; the busiest rank writes {share}")
    return notes
