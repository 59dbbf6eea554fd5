"""Cells of the regression matrix, trained once a session, whichever file asks for their outcomes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cell_runs import CORES, Baselines, Outcome, run_cells, run_of
from matrix import Cell, Text


@pytest.fixture(scope="session")
def text(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(corpus=corpus, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def baselines(text: Text, ranks: Callable[..., list[Any]]) -> Baselines:
    return Baselines(text, cores=CORES)


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, text: Text, baselines: Baselines) -> dict[Cell, Outcome]:
    """Outcomes of all selected cells, trained together: faster than one by one."""
    selected = [item.callspec.params.get("cell") for item in request.session.items if hasattr(item, "callspec")]
    cells = [cell for cell in dict.fromkeys(selected) if isinstance(cell, Cell)]
    ended = run_cells([run_of(cell) for cell in cells], text, baselines, cores=CORES)
    return {run.cell: outcome for run, outcome, _ in ended}
