"""`dstk checkpoint`: list, verify and inspect the checkpoints of a run."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.cli import CommandGroup, Place
from toolkit.cli.json_output import json_option, print_json
from toolkit.units import format_bytes, format_count, format_duration, plural

if TYPE_CHECKING:
    from toolkit.checkpoint.reader import CheckpointReader
    from toolkit.checkpoint.select import CheckpointSummary

_DAMAGED = 2


@click.group(cls=CommandGroup, subcommand_metavar="COMMAND ...", options_metavar="")
def command() -> None:
    """List, verify or inspect the checkpoints of a run, in its directory or behind its checkpoint.url.

    \b
    dstk checkpoint list runs/demo
    dstk checkpoint verify runs/demo
    dstk checkpoint inspect runs/demo/step-00000500 --tensors
    """


@command.command("list")
@click.argument("path", type=Place())
@click.option("--verify", "hashes", is_flag=True, help="Read every byte, to find damage that sizes do not show.")
@json_option("Print JSON.")
def list_(path: Path, hashes: bool, as_json: bool) -> None:
    """Print the checkpoints of the run PATH, oldest first.

    A checkpoint counts as complete when its manifest, sizes and tensor headers are consistent; with --verify, when
    every file has the hash that was written.
    """
    from toolkit.checkpoint.select import first_of, summarize_checkpoints

    summaries = summarize_checkpoints(path, hashes=hashes)
    if as_json:
        _print_summaries(summaries)
        return
    _print_table(
        ["step", "size", "age", "layout", "precision", "complete"],
        [
            [
                str(summary.step),
                "" if summary.nbytes is None else format_bytes(summary.nbytes),
                "" if summary.modified is None else format_duration(max(0.0, time.time() - summary.modified)),
                _text(summary.state, "layout"),
                _text(summary.state, "precision"),
                "no: " + first_of(summary.problems) if summary.problems else "yes",
            ]
            for summary in summaries
        ],
        right=3,
    )


@command.command
@click.argument("path", type=Place())
@json_option("Print JSON.")
def verify(path: Path, as_json: bool) -> int:
    """Read every byte of the checkpoint PATH, or of all checkpoints of a run.

    Prints a line for each problem, with the file; exits with 0 if all are complete, and with 2 if one is not.
    """
    from toolkit.checkpoint.select import summarize_checkpoints

    summaries = summarize_checkpoints(path, hashes=True)
    if as_json:
        _print_summaries(summaries)
    else:
        for summary in summaries:
            if not summary.problems:
                click.echo(f"{summary.path}: complete, {format_bytes(summary.nbytes or 0)}")
            for problem in summary.problems:
                click.echo(f"{summary.path}: {problem}", err=True)
    return _DAMAGED if any(summary.problems for summary in summaries) else 0


@command.command
@click.argument("path", type=Place())
@click.option("--tensors", is_flag=True, help="Every tensor with shape, dtype and norm, read one at a time.")
@json_option("Print JSON.")
def inspect(path: Path, tensors: bool, as_json: bool) -> None:
    """Print the progress and content of the checkpoint PATH, or of a run's newest complete one. Also of a model."""
    from toolkit.checkpoint.names import reported
    from toolkit.checkpoint.ranks import Ranks
    from toolkit.checkpoint.reader import CheckpointReader
    from toolkit.checkpoint.select import is_checkpoint, select_checkpoint

    with reported(path):
        chosen = path if is_checkpoint(path) else select_checkpoint(path, ranks=Ranks.single()).path
        saved = CheckpointReader(chosen)
        state = saved.trainer_state or {}
        kinds = [_kind(saved, kind) for kind in saved.specs]
        rows = [row for kind in saved.specs for row in _tensors(saved, kind)] if tensors else []
    if as_json:
        content = {"path": str(chosen), "step": saved.step, "state": state, "kinds": kinds}
        print_json(content | ({"tensors": rows} if tensors else {}))
        return
    for name, text in [("checkpoint", str(chosen)), *_progress(state)]:
        click.echo(f"{name:>10}  {text}")
    for kind in kinds:
        size = f"{format_count(kind['values'])} values, {format_bytes(kind['nbytes'])}"
        click.echo(
            f"{kind['kind']:>10}  {kind['tensors']} tensors, {size}, {kind['dtype']}, {plural(kind['files'], 'file')}"
        )
    if tensors:
        click.echo("")
        shown = [
            [row["kind"], row["name"], " x ".join(map(str, row["shape"])) or "1", row["dtype"], f"{row['norm']:.6g}"]
            for row in rows
        ]
        _print_table(["kind", "name", "shape", "dtype", "norm"], shown)


def _print_summaries(summaries: Sequence["CheckpointSummary"]) -> None:
    rows = [
        {
            "path": str(summary.path),
            "step": summary.step,
            "nbytes": summary.nbytes,
            "modified": summary.modified,
            "layout": summary.state.get("layout"),
            "precision": summary.state.get("precision"),
            "complete": not summary.problems,
            "problems": list(summary.problems),
        }
        for summary in summaries
    ]
    print_json(rows)


def _text(state: dict[str, Any], key: str) -> str:
    value = state.get(key)
    return value if isinstance(value, str) and value.isprintable() else ""


def _progress(state: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, text) for each line about the trainer state."""
    if not state:
        return []
    from toolkit.checkpoint.trainer_state import TrainerState
    from toolkit.files import printable

    read = TrainerState.from_dict(state, path="trainer_state.json")
    steps = read.recipe.get("train", {}).get("steps")
    model = read.recipe.get("model", {})
    data = read.recipe.get("data", {})
    scale = f", loss scale {read.loss_scale['cur_scale']:g}" if "cur_scale" in read.loss_scale else ""
    counts = f"{format_count(read.samples)} samples, {format_count(read.tokens)} tokens, {read.updates} updates"
    split = f"micro-batches of {read.micro_batch_size}, accumulation {read.accumulation}"
    versions = ", ".join(f"{name} {version}" for name, version in read.versions.items())
    lines = {
        "recipe": f"{model.get('name_or_path')} on {data.get('source')}, seed {read.seed}",
        "step": f"{read.step} of {steps}, {counts}",
        "rate": f"learning rate {read.learning_rate:.3g}{scale}",
        "layout": f"{read.layout}, {read.engine}, {read.precision}, {split}",
        "written by": versions,
    }
    return [(name, printable(text)) for name, text in lines.items()]


def _kind(saved: "CheckpointReader", kind: str) -> dict[str, Any]:
    specs = list(saved.specs[kind].values())
    dtypes = sorted({str(spec.dtype).removeprefix("torch.") for spec in specs})
    return {
        "kind": kind,
        "tensors": len(specs),
        "values": sum(spec.nbytes // spec.dtype.itemsize for spec in specs),
        "nbytes": sum(spec.nbytes for spec in specs),
        "dtype": " and ".join(dtypes),
        "files": len({saved.tensor(kind, spec.name).path for spec in specs}),
    }


def _tensors(saved: "CheckpointReader", kind: str) -> list[dict[str, Any]]:
    import torch

    rows = []
    for name, spec in saved.specs[kind].items():
        values = saved.tensor(kind, name).clone()
        wide = values.double() if values.dtype in (torch.float64, torch.int64) else values.float()
        norm = float(torch.linalg.vector_norm(wide))
        dtype = str(spec.dtype).removeprefix("torch.")
        rows.append({"kind": kind, "name": name, "shape": list(spec.shape), "dtype": dtype, "norm": norm})
    return rows


def _print_table(headings: list[str], rows: list[list[str]], *, right: int = 0) -> None:
    """Print columns as wide as needed; the first `right` of them are numbers."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in [headings, *rows]:
        cells = (f"{cell:{'>' if i < right else '<'}{widths[i]}}" for i, cell in enumerate(row))
        click.echo("  ".join(cells).rstrip())
