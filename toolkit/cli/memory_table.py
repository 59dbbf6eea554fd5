"""The tables of `dstk memory`: a column a pipeline stage, or a grid of layouts; and the same as JSON."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from toolkit.cli.memory_sweep import Cell
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.units import format_bytes, format_count

if TYPE_CHECKING:
    from toolkit.cli.memory_question import Question

_GIB, _MIB = 2**30, 2**20
_LABEL_WIDTH, _COLUMN_WIDTH = 38, 10
_ROWS = (
    ("parameters", "parameters"),
    ("gradients", "gradients"),
    ("fp32 masters", "masters"),
    ("optimizer states", "optimizer"),
    ("buckets", "buckets"),
    ("weights gathered or cast", "gathered"),
    ("model buffers", "model_buffers"),
)
_KINDS = {"ends": "embedding, tables, norm", "working": "one layer at work"}
_BEHIND = (("logits and loss", "logits"), ("peak of the update", "update"), ("cuBLAS workspaces", "workspace"))
_BESIDE = (
    ("CUDA context", "framework"),
    ("NCCL buffers", "nccl"),
    ("allocator's margin", "margin"),
)


def print_breakdowns(question: "Question", found: Sequence[MemoryBreakdown], largest: int | None) -> None:
    """A column a stage: where there is no room for all, the worst, the last, and as many first ones as fit."""
    console = Console(highlight=False)
    console.print(Text(question.title, style="bold"), soft_wrap=True)
    room = max(2, (console.width - _LABEL_WIDTH) // _COLUMN_WIDTH)
    first = dict.fromkeys([_worst(found).stage, len(found) - 1, *range(len(found))])
    shown = [found[stage] for stage in sorted(list(first)[:room])]
    console.print(_table(question, found, shown))
    if len(shown) < len(found):
        gaps = pairwise([-1, *(stage.stage for stage in shown), len(found)])
        left_out = [_span(before + 1, after - 1) for before, after in gaps if after - before > 1]
        console.print(f"left out here (--json and --plot have all): stages {', '.join(left_out)}", soft_wrap=True)
    for line in _verdict(question, found, largest):
        console.print(line, soft_wrap=True)


def _worst(found: Sequence[MemoryBreakdown]) -> MemoryBreakdown:
    return max(found, key=lambda stage: stage.total)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _table(question: "Question", found: Sequence[MemoryBreakdown], shown: Sequence[MemoryBreakdown]) -> Table:
    unit, name = _unit(max(stage.total for stage in found))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column(f"{name} of each GPU", no_wrap=True)
    for stage in shown:
        table.add_column("each rank" if len(found) == 1 else f"stage {stage.stage}", justify="right", no_wrap=True)

    def add(label: str, values: list[int], *, style: str = "", always: bool = False) -> None:
        if always or any(values):
            _add(table, label, [_number(value, unit) for value in values], style)

    def add_all(rows: Iterable[tuple[str, str]]) -> None:
        for label, part in rows:
            add(label, [getattr(stage, part) for stage in shown])

    _add(table, "layers", [str(stage.layers) for stage in shown])
    _add(table, _held(question), [format_count(stage.parameter_count) for stage in shown])
    table.add_section()
    add_all(_ROWS)
    for kind in dict.fromkeys(kind for stage in shown for kind in stage.activations):
        add(f"activations: {_KINDS.get(kind, kind)}", [stage.activations.get(kind, 0) for stage in shown])
    add_all(_BEHIND)
    table.add_section()
    add("allocated at the peak", [stage.allocated for stage in shown], style="bold", always=True)
    add("between two steps", [stage.static for stage in shown], style="dim", always=True)
    if question.gpu is not None:
        add_all(_BESIDE)
        add("total", [stage.total for stage in shown], style="bold", always=True)
        cells = [Text(_number(stage.left, unit), style="green" if stage.fits else "bold red") for stage in shown]
        table.add_row(Text(f"left of {_number(question.gpu.memory_bytes, unit)}"), *cells)
    add("on the host", [stage.host.total for stage in shown])
    add("on the host while loading", [stage.host_loading for stage in shown], style="dim")
    return table


def _held(question: "Question") -> str:
    """What the number of parameters counts: not a rank's shard where each one is gathered."""
    engine = question.recipe.train.engine
    if engine == "deepspeed" and question.layout.zero_stage == 3:
        return "parameters before ZeRO"
    return "parameters before sharding" if engine == "fsdp" else "parameters held"


def _unit(largest: int) -> tuple[int, str]:
    return (_GIB, "GiB") if largest >= _GIB else (_MIB, "MiB")


def _number(size: int, unit: int) -> str:
    return f"{size / unit:.2f}" if size else "-"


def _verdict(question: "Question", found: Sequence[MemoryBreakdown], largest: int | None) -> list[Text]:
    worst = _worst(found)
    if question.gpu is None:
        return [Text("--gpu NAME adds what PyTorch does not allocate, and says what is left.", style="dim")]
    name = question.gpu.name
    if worst.fits:
        first = Text(f"fits on {name}: {format_bytes(worst.left)} left on stage {worst.stage}", style="bold green")
    else:
        short = format_bytes(-worst.left)
        first = Text(f"does not fit on {name}: {short} too much on stage {worst.stage}", style="bold red")
    second = f"largest micro-batch that fits: {largest}" if largest else "no micro-batch fits"
    return [first, Text(second)]


def _add(table: Table, label: str, cells: list[str], style: str = "") -> None:
    table.add_row(Text(label, style=style), *(Text(cell, style=style) for cell in cells))


def print_grid(question: "Question", names: Sequence[str], cells: Sequence[Cell]) -> None:
    """Rows are all names but the last, columns the values of the last one."""
    console = Console(highlight=False)
    console.print(Text(question.title, style="bold"), soft_wrap=True)
    *row_names, column_name = names
    columns = list(dict.fromkeys(cell.values[-1] for cell in cells))
    unit, unit_name = _unit(max((cell.peak.total for cell in cells if cell.peak is not None), default=0))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in row_names:
        table.add_column(name, no_wrap=True)
    for value in columns:
        table.add_column(f"{column_name} {value}", justify="right", no_wrap=True)
    rows: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.values[:-1], []).append(cell)
    for values, row in rows.items():
        table.add_row(*map(str, values), *(_grid_cell(cell, unit) for cell in row))
    console.print(table)
    reasons = dict.fromkeys(cell.reason for cell in cells if cell.reason)
    for reason in reasons:
        console.print(Text(f"-: {reason}", style="dim"), soft_wrap=True)
    what = f"{unit_name} allocated at the peak of the stage that takes most"
    if question.gpu is not None:
        limit = _number(question.gpu.memory_bytes, unit)
        what = f"{unit_name} in all on the stage that takes most; ! is more than the {limit} of {question.gpu.name}"
    console.print(Text(what, style="dim"), soft_wrap=True)


def _grid_cell(cell: Cell, unit: int) -> Text:
    if cell.peak is None:
        return Text("-", style="dim")
    if not cell.peak.device_bytes:
        return Text(_number(cell.peak.allocated, unit))
    mark = "" if cell.peak.fits else " !"
    return Text(_number(cell.peak.total, unit) + mark, style="green" if cell.peak.fits else "red")


def to_json(question: "Question", found: Sequence[MemoryBreakdown], largest: int | None) -> dict[str, Any]:
    """All bytes of all stages."""
    return _asked(question) | {
        "stages": [_stage_json(stage) for stage in found],
        "allocated": max(stage.allocated for stage in found),
        "total": max(stage.total for stage in found),
        "fits": None if question.gpu is None else all(stage.fits for stage in found),
        "largest_micro_batch": largest,
    }


def grid_json(question: "Question", cells: Sequence[Cell]) -> dict[str, Any]:
    """What was asked, and every cell with the values that it has in its place."""
    return _asked(question) | {"cells": [cell.as_json() for cell in cells]}


def _asked(question: "Question") -> dict[str, Any]:
    layout, work = question.layout, question.work
    return {
        "model": question.name,
        "layout": str(layout),
        "engine": question.recipe.train.engine,
        "precision": question.recipe.precision,
        "micro_batch_size": work.micro_batch_size,
        "seq_len": work.seq_len,
        "accumulation": work.accumulation,
        "recompute": work.recompute,
        "attention": work.attention,
        "sequence_parallel": layout.sequence_parallel,
        "offload_optimizer": layout.offload_optimizer,
        "offload_params": layout.offload_params,
        "gpu": None if question.gpu is None else question.gpu.name,
    }


def _stage_json(stage: MemoryBreakdown) -> dict[str, Any]:
    fields = vars(stage) | {
        "activations": dict(stage.activations),
        "host": vars(stage.host),
        "allocated": stage.allocated,
        "total": stage.total,
    }
    return fields | ({"left": stage.left} if stage.device_bytes else {})
