"""Cells of the regression matrix: those of a file are trained together, once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cell_runs import CORES, Baselines, Outcome, TrainedCell, run_cells, run_of
from context_cells import write_chats_of
from matrix import Text


@pytest.fixture(scope="session")
def text(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Text:
    text = Text(corpus=corpus, cache=tmp_path_factory.mktemp("cache"))
    write_chats_of(text)
    return text


@pytest.fixture(scope="session")
def baselines(text: Text, ranks: Callable[..., list[Any]]) -> Baselines:
    return Baselines(text, cores=CORES)


@pytest.fixture(scope="module")
def selected_cells(request: pytest.FixtureRequest) -> list[TrainedCell]:
    """The cells of the file's selected tests."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    cells = [cell for item in items if isinstance(cell := item.callspec.params.get("cell"), TrainedCell)]
    return list(dict.fromkeys(cells))


@pytest.fixture(scope="module")
def outcomes(selected_cells: list[TrainedCell], text: Text, baselines: Baselines) -> dict[TrainedCell, Outcome]:
    """Outcomes of the file's selected cells, trained together: faster than one by one."""
    ended = run_cells([run_of(cell) for cell in selected_cells], text, baselines, cores=CORES)
    return {run.cell: outcome for run, outcome, _ in ended}
