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
from toolkit.hardware import Gpu
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
    in_order = dict.fromkeys([_worst(stages).stage, len(stages) - 1, *range(len(stages))])
    shown = [stages[stage] for stage in sorted(list(in_order)[:room])]
    console.print(_table(query, stages, shown))
    if len(shown) < len(stages):
        omitted = ", ".join(_omitted(shown, len(stages)))
        console.print(f"not shown (--json and --plot have all): stages {omitted}", soft_wrap=True)
    for line in _summary(query, stages, largest):
        console.print(line, soft_wrap=True)


def _worst(stages: Sequence[MemoryBreakdown]) -> MemoryBreakdown:
    """Return the stage that needs most memory."""
    return max(stages, key=lambda stage: stage.total)


def _omitted(shown: Sequence[MemoryBreakdown], stages: int) -> list[str]:
    """Return the numbers of the stages that are not shown, neighbors as "3 to 7"."""
    texts = []
    for before, after in pairwise([-1, *(stage.stage for stage in shown), stages]):
        first = before + 1
        last = after - 1
        if first == last:
            texts.append(str(first))
        elif first < last:
            texts.append(f"{first} to {last}")
    return texts


def _table(query: MemoryQuery, stages: Sequence[MemoryBreakdown], shown: Sequence[MemoryBreakdown]) -> Table:
    """Return the table of the stages that are shown, in the unit that suits the largest of all."""
    unit, unit_name = _unit(max(stage.total for stage in stages))
    headers = ["each rank"] if len(stages) == 1 else [f"{_word(query)} {stage.stage}" for stage in shown]
    rows = _StageRows(shown, unit=unit, title=f"{unit_name} of each GPU", headers=headers)
    rows.add_texts("layers", [str(stage.layers) for stage in shown])
    rows.add_texts(_parameter_label(query), [format_count(stage.parameter_count) for stage in shown])
    if any(stage.trained_count < stage.parameter_count for stage in shown):
        rows.add_texts("trainable parameters", [format_count(stage.trained_count) for stage in shown])
    rows.table.add_section()
    rows.add_fields(_ROWS["states"])
    for kind in dict.fromkeys(kind for stage in shown for kind in stage.activations):
        label = f"activations: {_ROWS['activations'].get(kind, kind)}"
        rows.add_sizes(label, [stage.activations.get(kind, 0) for stage in shown])
    rows.add_fields(_ROWS["behind"])
    rows.table.add_section()
    rows.add_sizes("allocated at the peak", [stage.allocated for stage in shown], style="bold", always=True)
    rows.add_sizes("between two steps", [stage.static for stage in shown], style="dim", always=True)
    if query.gpu is not None:
        rows.add_fields(_ROWS["beside"])
        rows.add_sizes("total", [stage.total for stage in shown], style="bold", always=True)
        rows.add_sizes("reserved by PyTorch's allocator", [stage.reserved for stage in shown], style="dim")
        rows.add_left(query.gpu)
    rows.add_sizes("on the host", [stage.host.total for stage in shown])
    rows.add_sizes("on NVMe", [stage.nvme.total for stage in shown])
    rows.add_sizes("on the host while loading", [stage.host_loading for stage in shown], style="dim")
    return rows.table


class _StageRows:
    """The rows of a table with a column for each of these stages, with sizes in units of `unit` bytes."""

    def __init__(self, stages: Sequence[MemoryBreakdown], *, unit: int, title: str, headers: Sequence[str]) -> None:
        self.table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        self._stages = stages
        self._unit = unit
        self.table.add_column(title, no_wrap=True)
        for header in headers:
            self.table.add_column(header, justify="right", no_wrap=True)

    def add_texts(self, label: str, cells: Sequence[str], *, style: str = "") -> None:
        """Add a row with a text for each stage."""
        self.table.add_row(Text(label, style=style), *(Text(cell, style=style) for cell in cells))

    def add_sizes(self, label: str, sizes: Sequence[int], *, style: str = "", always: bool = False) -> None:
        """Add a row with bytes for each stage, if any stage has some, or always."""
        if always or any(sizes):
            self.add_texts(label, [_number(size, self._unit) for size in sizes], style=style)

    def add_fields(self, rows: Iterable[tuple[str, str]]) -> None:
        """Add rows, given as label and field of a MemoryBreakdown."""
        for label, field in rows:
            self.add_sizes(label, [getattr(stage, field) for stage in self._stages])

    def add_left(self, gpu: Gpu) -> None:
        """Add what is left of the GPU's memory, in the color of the verdict."""
        cells = [Text(_number(stage.left, self._unit), style=_STYLES[stage.verdict]) for stage in self._stages]
        self.table.add_row(Text(f"left of {_number(gpu.memory_bytes, self._unit)}"), *cells)


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
    """Return the unit that suits sizes up to so many bytes: its bytes and its name."""
    return (_GIB, "GiB") if largest >= _GIB else (_MIB, "MiB")


def _number(size: int, unit: int) -> str:
    """Write bytes in a unit; a dash for none."""
    return f"{size / unit:.2f}" if size else "-"


def _summary(query: MemoryQuery, stages: Sequence[MemoryBreakdown], largest: int | None) -> list[Text]:
    """Return the lines behind the table: notes, whether it fits, and the largest micro-batch that does."""
    lines = []
    if _accumulates_in_fp32(query):
        reason = "Gradients accumulate in fp32: this toolkit's default, not DeepSpeed's."
        lines.append(Text(f"{reason} --deepspeed FILE asks about yours.", style="dim"))
    if query.gpu is None:
        advice = "--gpu NAME adds what PyTorch does not allocate, and says what is left."
        return [*lines, Text(advice, style="dim")]
    micro_batch = f"largest micro-batch that fits: {largest}" if largest else "no micro-batch fits"
    return [*lines, _verdict_line(query, query.gpu, stages), Text(micro_batch)]


def _accumulates_in_fp32(query: MemoryQuery) -> bool:
    """Whether the toolkit's own DeepSpeed config adds up gradients of 16-bit weights in fp32."""
    runs_zero = query.recipe.train.engine == "deepspeed" and query.layout.zero_stage > 0
    return query.other_setup is None and runs_zero and query.recipe.precision != "fp32"


def _verdict_line(query: MemoryQuery, gpu: Gpu, stages: Sequence[MemoryBreakdown]) -> Text:
    """Say whether the worst stage fits, how much is left there, and how much runs may need more."""
    worst = _worst(stages)
    room = f"{format_bytes(worst.left)} left" if worst.left >= 0 else f"{format_bytes(-worst.left)} too much"
    place = f" on {_word(query)} {worst.stage}" if len(stages) > 1 else ""
    line = Text(f"{worst.verdict} on {gpu.name}: {room}{place}", style=_STYLES[worst.verdict])
    if worst.verdict == "tight":
        least, most = worst.band
        line.append(f"; runs of this kind needed {100 * least:+.0f} % to {100 * most:+.0f} % of the estimate")
    return line


def print_grid(query: MemoryQuery, names: Sequence[str], cells: Sequence[SweepCell]) -> None:
    """Rows are all names but the last, columns the values of the last one."""
    console = table_console()
    console.print(Text(query.title_without(names), style="bold"), soft_wrap=True)
    unit, unit_name = _unit(max((cell.peak.total for cell in cells if cell.peak is not None), default=0))
    console.print(_grid_table(names, cells, unit))
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


def _grid_table(names: Sequence[str], cells: Sequence[SweepCell], unit: int) -> Table:
    """Return the table of a grid whose last name has a column a value, and whose others have a column each."""
    *row_names, column_name = names
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in row_names:
        table.add_column(name, no_wrap=True)
    for value in dict.fromkeys(cell.values[-1] for cell in cells):
        table.add_column(f"{column_name} {value}", justify="right", no_wrap=True)
    cells_of_row: dict[tuple[Any, ...], list[SweepCell]] = {}
    for cell in cells:
        cells_of_row.setdefault(cell.values[:-1], []).append(cell)
    for values, row in cells_of_row.items():
        table.add_row(*map(str, values), *(_grid_cell(cell, unit) for cell in row))
    return table


def _grid_cell(cell: SweepCell, unit: int) -> Text:
    """Write the peak of a layout, with a mark where it is tight or does not fit."""
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
        "verdict": None if query.gpu is None else _worst(stages).verdict,
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
        "attention": setup.attention,
        "trainable": setup.computation.trainable,
        "loss_chunk": setup.computation.loss_chunk,
        "sequence_parallel": layout.sequence_parallel,
        "offload_optimizer": layout.offload_optimizer,
        "offload_params": layout.offload_params,
        "gpu": None if query.gpu is None else query.gpu.name,
    }


def _stage_json(stage: MemoryBreakdown) -> dict[str, Any]:
    """Return the fields of a stage, and its sums, in bytes; `left` only where a GPU is named."""
    fields = {name: value for name, value in vars(stage).items() if name != "step"}
    fields |= {"activations": dict(stage.activations), "host": vars(stage.host), "nvme": vars(stage.nvme)}
    fields |= {"allocated": stage.allocated, "reserved": stage.reserved, "total": stage.total}
    if stage.device_bytes:
        fields["left"] = stage.left
    return fields
