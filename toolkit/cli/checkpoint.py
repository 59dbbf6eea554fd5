"""`dstk checkpoint`: which checkpoints a run has, whether they are whole, and what is in them."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolkit.errors import nearest
from toolkit.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from toolkit.checkpoint.overview import Overview
    from toolkit.checkpoint.reader import CheckpointReader

_DAMAGED = 2


class _Group(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse an unknown command with the nearest name."""
        if args[0] not in self.commands and not args[0].startswith("-"):
            known = f" Commands: {', '.join(self.commands)}."
            raise click.UsageError(f"{args[0]} is not a command.{nearest(args[0], self.commands) or known}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Group, subcommand_metavar="COMMAND ...", options_metavar="")
def command() -> None:
    """List, verify or inspect the checkpoints of a run.

    \b
    dstk checkpoint list runs/demo
    dstk checkpoint verify runs/demo
    dstk checkpoint inspect runs/demo/step-00000500 --tensors
    """


_as_json: Callable[[Any], Any] = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@command.command("list")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--verify", "hashes", is_flag=True, help="Read every byte, to find what sizes do not show.")
@_as_json
def list_(path: Path, hashes: bool, as_json: bool) -> None:
    """Print the checkpoints of the run PATH, oldest first.

    A checkpoint counts as whole when its manifest, its sizes and the headers of its tensors fit; with --verify, when
    every file has the hash that was written.
    """
    from toolkit.checkpoint.overview import overview_of

    found = overview_of(path, hashes=hashes)
    if as_json:
        click.echo(json.dumps([_plain(one) for one in found], indent=2))
        return
    _print_table(
        ["step", "size", "age", "layout", "precision", "whole"],
        [
            [
                str(one.step),
                "" if one.nbytes is None else format_bytes(one.nbytes),
                "" if one.modified is None else format_duration(max(0.0, time.time() - one.modified)),
                _text(one.state, "layout"),
                _text(one.state, "precision"),
                _verdict(one),
            ]
            for one in found
        ],
        right=3,
    )


@command.command
@click.argument("path", type=click.Path(path_type=Path))
@_as_json
def verify(path: Path, as_json: bool) -> int:
    """Read every byte of the checkpoint PATH, or of all checkpoints of a run.

    Prints a line for each problem, with the file; exits with 0 if all are whole, and with 2 if one is not.
    """
    from toolkit.checkpoint.overview import overview_of

    found = overview_of(path, hashes=True)
    if as_json:
        click.echo(json.dumps([_plain(one) for one in found], indent=2))
    for one in [] if as_json else found:
        if not one.problems:
            click.echo(f"{one.path}: whole, {format_bytes(one.nbytes or 0)}")
        for problem in one.problems:
            click.echo(f"{one.path}: {problem}", err=True)
    return _DAMAGED if any(one.problems for one in found) else 0


@command.command
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--tensors", is_flag=True, help="Every tensor with shape, dtype and norm, read one at a time.")
@_as_json
def inspect(path: Path, tensors: bool, as_json: bool) -> None:
    """Print where the checkpoint PATH stands and what it holds; of a run, its newest whole one. Also of a model."""
    from toolkit.checkpoint.overview import is_checkpoint, newest_whole
    from toolkit.checkpoint.reader import CheckpointReader

    chosen = path if is_checkpoint(path) else newest_whole(path)
    saved = CheckpointReader(chosen)
    state = saved.trainer_state or {}
    kinds = [_kind(saved, kind) for kind in saved.kinds]
    rows = [row for kind in saved.kinds for row in _tensors(saved, kind)] if tensors else []
    if as_json:
        content = {"path": str(chosen), "step": saved.step, "state": state, "kinds": kinds}
        click.echo(json.dumps(content | ({"tensors": rows} if tensors else {}), indent=2))
        return
    for name, text in [("checkpoint", str(chosen)), *_words(state)]:
        click.echo(f"{name:>10}  {text}")
    for kind in kinds:
        files = f"{kind['files']} file{'' if kind['files'] == 1 else 's'}"
        values = format_count(kind["values"])
        click.echo(
            f"{kind['kind']:>10}  {kind['tensors']} tensors, {values} values, {format_bytes(kind['nbytes'])}, "
            f"{kind['dtype']}, {files}"
        )
    if tensors:
        click.echo("")
        _print_table(
            ["kind", "name", "shape", "dtype", "norm"],
            [
                [
                    row["kind"],
                    row["name"],
                    " x ".join(map(str, row["shape"])) or "1",
                    row["dtype"],
                    f"{row['norm']:.6g}",
                ]
                for row in rows
            ],
        )


def _plain(one: "Overview") -> dict[str, Any]:
    return {
        "path": str(one.path),
        "step": one.step,
        "nbytes": one.nbytes,
        "modified": one.modified,
        "layout": one.state.get("layout"),
        "precision": one.state.get("precision"),
        "whole": not one.problems,
        "problems": list(one.problems),
    }


def _verdict(one: "Overview") -> str:
    if not one.problems:
        return "yes"
    more = f" (and {len(one.problems) - 1} more)" if len(one.problems) > 1 else ""
    return f"no: {one.problems[0]}{more}"


def _text(state: dict[str, Any], key: str) -> str:
    value = state.get(key)
    return value if isinstance(value, str) and value.isprintable() else ""


def _words(state: dict[str, Any]) -> list[tuple[str, str]]:
    """The trainer's state, as one would say it."""
    if not state:
        return []
    from toolkit.checkpoint.names import shown
    from toolkit.train.trainer_state import TrainerState

    read = TrainerState.from_dict(state, path="trainer_state.json")
    steps = read.recipe.get("train", {}).get("steps")
    model, data = (read.recipe.get(section, {}) for section in ("model", "data"))
    scale = f", loss scale {read.loss_scale['cur_scale']:g}" if "cur_scale" in read.loss_scale else ""
    counts = f"{format_count(read.samples)} samples, {format_count(read.tokens)} tokens, {read.updates} updates"
    split = f"micro-batches of {read.micro_size}, accumulation {read.accumulation}"
    versions = ", ".join(f"{name} {version}" for name, version in read.versions.items())
    words = {
        "recipe": f"{model.get('name_or_path')} on {data.get('source')}, seed {read.seed}",
        "step": f"{read.step} of {steps}, {counts}",
        "rate": f"learning rate {read.learning_rate:.3g}{scale}",
        "layout": f"{read.layout}, {read.engine}, {read.precision}, {split}",
        "written by": versions,
    }
    return [(name, shown(text)) for name, text in words.items()]


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
        rows.append(
            {
                "kind": kind,
                "name": name,
                "shape": list(spec.shape),
                "dtype": str(spec.dtype).removeprefix("torch."),
                "norm": float(torch.linalg.vector_norm(wide)),
            }
        )
    return rows


def _print_table(headings: list[str], rows: list[list[str]], *, right: int = 0) -> None:
    """Columns as wide as they need to be; the first `right` of them hold numbers."""
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    for row in [headings, *rows]:
        cells = (
            cell.rjust(width) if i < right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        click.echo("  ".join(cells).rstrip())
