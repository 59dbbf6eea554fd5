"""Suites of cells that are too many for every day: what whole_matrix.py runs."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from cell_runs import CellRun, TrainedCell
from context_cells import context_cells
from matrix import LONG_STEPS, legal_cells, steps_of
from schedules import schedule_cells

MATRIX = "matrix"
"""The suite whose page is docs/parity.md."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Cells with a table of their results."""

    title: str
    runs: Callable[[], list[CellRun]]
    row: Callable[[str], str]
    """The row of the table that a strategy is in."""


def _matrix_runs() -> list[CellRun]:
    return [CellRun(cell=cell, steps=steps_of(cell)) for cell in legal_cells()]


def _long_runs(cells: Callable[[], list[TrainedCell]]) -> Callable[[], list[CellRun]]:
    return lambda: [CellRun(cell=cell, steps=LONG_STEPS) for cell in cells()]


def _without_zero_stage(strategy: str) -> str:
    """`pp2-zbv-z1-recompute` -> `pp2-zbv`."""
    return re.sub(r"-z\d.*", "", strategy)


SUITES = {
    MATRIX: Suite(title="Strategies", runs=_matrix_runs, row=str),
    "schedules": Suite(
        title="Pipeline schedules", runs=_long_runs(lambda: list(schedule_cells())), row=_without_zero_stage
    ),
    "context": Suite(title="Shared sequences", runs=_long_runs(lambda: list(context_cells())), row=str),
}
