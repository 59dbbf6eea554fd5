"""The record of suites that take hours: which results it keeps, and what its page says."""

from dataclasses import replace
from pathlib import Path

import pytest
import record
from cell_runs import CellRun, Outcome
from context_cells import ContextCell
from results import Result, State
from suites import MATRIX

STATE = State(commit="abc", code="def", has_changes=False, versions="torch 2")
RUNS = [CellRun(cell=ContextCell(strategy="cp2-z1", family=family), steps=30) for family in ("gpt2", "llama")]


def result(run: CellRun, **outcome: object) -> Result:
    """A result of a run; `outcome` changes one that passed."""
    passed = Outcome(loss=1e-7, norm=2e-7, parameters=3e-7, gradient=4e-7)
    return Result.of(run, replace(passed, **outcome), 1.0, STATE)


@pytest.fixture
def lines() -> dict[str, record.Line]:
    return record.updated({}, RUNS, [result(run) for run in reversed(RUNS)])


def test_lines_are_in_the_order_of_the_suite_and_are_read_back(lines: dict[str, record.Line], tmp_path: Path) -> None:
    assert list(lines) == [str(run.cell) for run in RUNS]
    record.write_record(tmp_path / "records" / "context.csv", lines)
    assert record.read_record(tmp_path / "records" / "context.csv") == lines
    assert record.read_record(tmp_path / "none.csv") == {}


def test_a_cell_that_fails_loses_its_line(lines: dict[str, record.Line]) -> None:
    first, second = RUNS
    assert list(record.updated(lines, RUNS, [result(first, failure="differs")])) == [str(second.cell)]


def test_a_cell_that_has_passed_since_keeps_its_line(lines: dict[str, record.Line]) -> None:
    first, _ = RUNS
    results = [result(first, loss=5e-7), result(first, failure="differs")]
    assert record.updated(lines, RUNS, results)[str(first.cell)].loss == 5e-7


def test_a_newer_result_replaces_its_line(lines: dict[str, record.Line]) -> None:
    first, second = RUNS
    newer = record.updated(lines, RUNS, [result(first, loss=5e-7)])
    assert newer[str(first.cell)].loss == 5e-7
    assert newer[str(second.cell)] == lines[str(second.cell)]


def test_a_line_of_another_recipe_or_of_no_cell_is_dropped(lines: dict[str, record.Line]) -> None:
    first, second = RUNS
    assert list(record.updated(lines, [replace(first, steps=31), second], [])) == [str(second.cell)]
    assert list(record.updated(lines, [first], [])) == [str(first.cell)]


def test_the_page_says_how_many_cells_of_a_strategy_were_run(
    lines: dict[str, record.Line], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = record.Suite(title="Shared sequences", runs=lambda: RUNS, row=str)
    monkeypatch.setattr(record, "SUITES", {"context": suite})
    del lines[str(RUNS[0].cell)]
    text = record.write_page({"context": lines}, tmp_path / "page.md").read_text()
    assert "1 of 2 cells were run and passed" in text
    assert "commits abc." in text
    assert "| cp2-z1 | fp32 | 1 of 2 | 1.0e-07 | 2.0e-07 | 3.0e-07 | 4.0e-07 |" in text
    text = record.write_page({"context": {}}, tmp_path / "page.md").read_text()
    assert "None of 2 cells was run." in text
    assert "| cp2-z1 | fp32 | 0 of 2 |  |  |  |  |" in text


def test_the_committed_page_is_that_of_the_committed_records(tmp_path: Path) -> None:
    records = {name: record.read_record(record.path_of(name)) for name in record.SUITES if name != MATRIX}
    assert record.write_page(records, tmp_path / "page.md").read_text() == record.PAGE.read_text()
