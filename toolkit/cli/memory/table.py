"""The tables of `dstk memory`: a column a pipeline stage, or a grid of layouts; and the same as JSON."""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from toolkit.cli.memory.options import MemoryQuery
from toolkit.cli.memory.sweep import SweepCell
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.report.terminal import table_console
from toolkit.units import format_bytes, format_count

_GIB = 2**30
_MIB = 2**20
_LABEL_WIDTH = 38
_COLUMN_WIDTH = 10
_ROWS = json.loads(Path(__file__).with_name("rows.json").read_text(encoding="utf-8"))
"""Label and field of each part of a stage's memory, by where it stands."""
_STYLES = {"fits": "bold green", "tight": "bold yellow", "does not fit": "bold red"}


def print_breakdowns(query: MemoryQuery, stages: Sequence[MemoryBreakdown], largest: int | None) -> None:
    """A column a stage: where there is no room for all, the worst, the last, and as many first ones as fit."""
    console = table_console()
    console.print(Text(query.title, style="bold"), soft_wrap=True)
    room = max(2, (console.width - _LABEL_WIDTH) // _COLUMN_WIDTH)
    first = dict.fromkeys([_worst(stages).stage, len(stages) - 1, *range(len(stages))])
    shown = [stages[stage] for stage in sorted(list(first)[:room])]
    console.print(_table(query, stages, shown))
    if len(shown) < len(stages):
        gaps = pairwise([-1, *(stage.stage for stage in shown), len(stages)])
        spans = [(before + 1, after - 1) for before, after in gaps if after - before > 1]
        omitted = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
        console.print(f"not shown (--json and --plot have all): stages {', '.join(omitted)}", soft_wrap=True)
    for line in _summary(query, stages, largest):
        console.print(line, soft_wrap=True)


def _worst(stages: Sequence[MemoryBreakdown]) -> MemoryBreakdown:
    return max(stages, key=lambda stage: stage.total)


def _table(query: MemoryQuery, stages: Sequence[MemoryBreakdown], shown: Sequence[MemoryBreakdown]) -> Table:
    unit, name = _unit(max(stage.total for stage in stages))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column(f"{name} of each GPU", no_wrap=True)
    for stage in shown:
        name_of_stage = f"{_word(query)} {stage.stage}"
        table.add_column("each rank" if len(stages) == 1 else name_of_stage, justify="right", no_wrap=True)

    def add(label: str, values: list[int], *, style: str = "", always: bool = False) -> None:
        if always or any(values):
            _add(table, label, [_number(value, unit) for value in values], style)

    def add_all(rows: Iterable[tuple[str, str]]) -> None:
        for label, part in rows:
            add(label, [getattr(stage, part) for stage in shown])

    _add(table, "layers", [str(stage.layers) for stage in shown])
    _add(table, _parameter_label(query), [format_count(stage.parameter_count) for stage in shown])
    if any(stage.trained_count < stage.parameter_count for stage in shown):
        _add(table, "trainable parameters", [format_count(stage.trained_count) for stage in shown])
    table.add_section()
    add_all(_ROWS["states"])
    for kind in dict.fromkeys(kind for stage in shown for kind in stage.activations):
        add(f"activations: {_ROWS['activations'].get(kind, kind)}", [stage.activations.get(kind, 0) for stage in shown])
    add_all(_ROWS["behind"])
    table.add_section()
    add("allocated at the peak", [stage.allocated for stage in shown], style="bold", always=True)
    add("between two steps", [stage.static for stage in shown], style="dim", always=True)
    if query.gpu is not None:
        add_all(_ROWS["beside"])
        add("total", [stage.total for stage in shown], style="bold", always=True)
        add("reserved by PyTorch's allocator", [stage.reserved for stage in shown], style="dim")
        cells = [Text(_number(stage.left, unit), style=_STYLES[stage.verdict]) for stage in shown]
        table.add_row(Text(f"left of {_number(query.gpu.memory_bytes, unit)}"), *cells)
    add("on the host", [stage.host.total for stage in shown])
    add("on NVMe", [stage.nvme.total for stage in shown])
    add("on the host while loading", [stage.host_loading for stage in shown], style="dim")
    return table


def _word(query: MemoryQuery) -> str:
    """Return what a column stands for: a pipeline stage, or a pipeline rank that has several."""
    return "stage" if query.layout.chunks == 1 else "rank"


def _parameter_label(query: MemoryQuery) -> str:
    """Return the label of the number of parameters: not a rank's shard where each one is gathered."""
    engine = query.recipe.train.engine
    if engine == "deepspeed" and query.layout.zero_stage == 3:
        return "parameters before ZeRO"
    return "parameters before sharding" if engine == "fsdp" else "parameters per rank"


def _unit(largest: int) -> tuple[int, str]:
    return (_GIB, "GiB") if largest >= _GIB else (_MIB, "MiB")


def _number(size: int, unit: int) -> str:
    return f"{size / unit:.2f}" if size else "-"


def _summary(query: MemoryQuery, stages: Sequence[MemoryBreakdown], largest: int | None) -> list[Text]:
    worst = _worst(stages)
    runs_zero = query.other_setup is None and query.recipe.train.engine == "deepspeed" and query.layout.zero_stage > 0
    whose = "Gradients accumulate in fp32: this toolkit's default, not DeepSpeed's. --deepspeed FILE asks about yours."
    notes = [Text(whose, style="dim")] if runs_zero and query.recipe.precision != "fp32" else []
    if query.gpu is None:
        return [*notes, Text("--gpu NAME adds what PyTorch does not allocate, and says what is left.", style="dim")]
    name = query.gpu.name
    rest = f"{format_bytes(worst.left)} left" if worst.left >= 0 else f"{format_bytes(-worst.left)} too much"
    where = f" on {_word(query)} {worst.stage}" if len(stages) > 1 else ""
    first = Text(f"{worst.verdict} on {name}: {rest}{where}", style=_STYLES[worst.verdict])
    if worst.verdict == "tight":
        least, most = worst.band
        first.append(f"; runs of this kind needed {100 * least:+.0f} % to {100 * most:+.0f} % of the estimate")
    second = f"largest micro-batch that fits: {largest}" if largest else "no micro-batch fits"
    return [*notes, first, Text(second)]


def _add(table: Table, label: str, cells: list[str], style: str = "") -> None:
    table.add_row(Text(label, style=style), *(Text(cell, style=style) for cell in cells))


def print_grid(query: MemoryQuery, names: Sequence[str], cells: Sequence[SweepCell]) -> None:
    """Rows are all names but the last, columns the values of the last one."""
    console = table_console()
    console.print(Text(query.title_without(names), style="bold"), soft_wrap=True)
    *row_names, column_name = names
    columns = list(dict.fromkeys(cell.values[-1] for cell in cells))
    unit, unit_name = _unit(max((cell.peak.total for cell in cells if cell.peak is not None), default=0))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in row_names:
        table.add_column(name, no_wrap=True)
    for value in columns:
        table.add_column(f"{column_name} {value}", justify="right", no_wrap=True)
    rows: dict[tuple[Any, ...], list[SweepCell]] = {}
    for cell in cells:
        rows.setdefault(cell.values[:-1], []).append(cell)
    for values, row in rows.items():
        table.add_row(*map(str, values), *(_grid_cell(cell, unit) for cell in row))
    console.print(table)
    reasons = dict.fromkeys(cell.reason for cell in cells if cell.reason)
    for reason in reasons:
        console.print(Text(f"-: {reason}", style="dim"), soft_wrap=True)
    caption = f"{unit_name} allocated at the peak of the stage that takes most"
    if query.gpu is not None:
        limit = _number(query.gpu.memory_bytes, unit)
        caption = (
            f"{unit_name} in all on the stage that takes most; ? tight, ! more than the {limit} of {query.gpu.name}"
        )
    console.print(Text(caption, style="dim"), soft_wrap=True)


def _grid_cell(cell: SweepCell, unit: int) -> Text:
    if cell.peak is None:
        return Text("-", style="dim")
    if not cell.peak.device_bytes:
        return Text(_number(cell.peak.allocated, unit))
    mark = {"fits": "", "tight": " ?", "does not fit": " !"}[cell.peak.verdict]
    return Text(_number(cell.peak.total, unit) + mark, style=_STYLES[cell.peak.verdict].removeprefix("bold "))


def to_json(query: MemoryQuery, stages: Sequence[MemoryBreakdown], largest: int | None) -> dict[str, Any]:
    """Return all bytes of all stages."""
    return _asked(query) | {
        "stages": [_stage_json(stage) for stage in stages],
        "allocated": max(stage.allocated for stage in stages),
        "total": max(stage.total for stage in stages),
        "reserved": max(stage.reserved for stage in stages),
        "fits": None if query.gpu is None else all(stage.fits for stage in stages),
        "verdict": None if query.gpu is None else max(stages, key=lambda stage: stage.total).verdict,
        "largest_micro_batch": largest,
    }


def grid_json(query: MemoryQuery, cells: Sequence[SweepCell]) -> dict[str, Any]:
    """Return the query, and every cell with the values that it has in its place."""
    return _asked(query) | {"cells": [cell.as_json() for cell in cells]}


def _asked(query: MemoryQuery) -> dict[str, Any]:
    """Return what was asked, as JSON has it."""
    setup = query.setup
    layout = setup.layout
    return {
        "model": query.name,
        "layout": str(layout),
        "engine": query.engine,
        "precision": query.recipe.precision,
        "micro_batch_size": setup.micro_batch_size,
        "seq_len": setup.seq_len,
        "accumulation": setup.accumulation,
        "recompute": layout.recompute,
        "attention": setup.computation.attention,
        "trainable": setup.computation.trainable,
        "loss_chunk": setup.computation.loss_chunk,
        "sequence_parallel": layout.sequence_parallel,
        "offload_optimizer": layout.offload_optimizer,
        "offload_params": layout.offload_params,
        "gpu": None if query.gpu is None else query.gpu.name,
    }


def _stage_json(stage: MemoryBreakdown) -> dict[str, Any]:
    fields = {name: value for name, value in vars(stage).items() if name != "step"}
    fields |= {"activations": dict(stage.activations), "host": vars(stage.host), "nvme": vars(stage.nvme)}
    fields |= {"allocated": stage.allocated, "reserved": stage.reserved, "total": stage.total}
    return fields | ({"left": stage.left} if stage.device_bytes else {})
