"""The record of suites that take hours: the last result of each cell, with its date and commit, and a page of it.

`whole_matrix.py page` adds the results of the present code to the CSV files of tests/parity/records, and writes
docs/parity-layouts.md from them. A cell that failed loses its line, and so does one whose recipe has changed.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from cell_runs import CellRun
from results import ROOT, Result, digest_of_recipes
from suites import MATRIX, SUITES, Suite

RECORDS = ROOT / "tests" / "parity" / "records"
PAGE = ROOT / "docs" / "parity-layouts.md"
COLUMNS = ("loss", "norm", "parameters", "gradient")


@dataclass(frozen=True, kw_only=True)
class Line:
    """The result of a cell that passed. Differences are relative to its baseline."""

    cell: str
    steps: int
    recipes: str
    """See `results.digest_of_recipes`."""
    loss: float
    norm: float
    parameters: float
    gradient: float
    date: str
    commit: str

    @classmethod
    def of(cls, result: Result) -> Self:
        """Return the line of a result."""
        outcome = result.outcome
        return cls(
            cell=result.cell,
            steps=result.steps,
            recipes=result.recipes,
            loss=outcome.loss,
            norm=outcome.norm,
            parameters=outcome.parameters,
            gradient=outcome.gradient,
            date=result.date,
            commit=result.state.commit,
        )

    @classmethod
    def parse(cls, row: Mapping[str, str]) -> Self:
        """Parse a row of a CSV file."""
        numbers = {name: float(row[name]) for name in COLUMNS}
        return cls(
            cell=row["cell"],
            steps=int(row["steps"]),
            recipes=row["recipes"],
            date=row["date"],
            commit=row["commit"],
            **numbers,
        )


def path_of(suite: str) -> Path:
    """Return the path of the record of a suite."""
    return RECORDS / f"{suite}.csv"


def read_record(path: Path) -> dict[str, Line]:
    """Read the lines of a suite, by cell."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        lines = [Line.parse(row) for row in csv.DictReader(file)]
    return {line.cell: line for line in lines}


def updated(record: Mapping[str, Line], runs: Sequence[CellRun], results: Sequence[Result]) -> dict[str, Line]:
    """Return the record with new results, in the order of `runs`, of cells that are as they were run.

    A cell that failed and has passed since, in whichever shard, has passed.
    """
    lines = dict(record)
    passed = {result.cell: Line.of(result) for result in results if not result.outcome.failure}
    for result in results:
        if result.outcome.failure:
            lines.pop(result.cell, None)
    lines |= passed
    return {
        name: lines[name]
        for run in runs
        if (name := str(run.cell)) in lines and lines[name].recipes == digest_of_recipes(run)
    }


def write_record(path: Path, record: Mapping[str, Line]) -> None:
    """Write the lines of a suite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Line)], lineterminator="\n")
        writer.writeheader()
        for line in record.values():
            numbers = {name: f"{getattr(line, name):.2e}" for name in COLUMNS}
            writer.writerow(asdict(line) | numbers)


def write_page(records: Mapping[str, Mapping[str, Line]], path: Path = PAGE) -> Path:
    """Write the page from the records, by suite."""
    sections = [_section(suite, suite.runs(), records[name]) for name, suite in SUITES.items() if name != MATRIX]
    path.write_text("\n\n".join([_HEAD, *sections]) + "\n")
    return path


def _section(suite: Suite, runs: Sequence[CellRun], record: Mapping[str, Line]) -> str:
    rows: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        rows[f"{suite.row(run.cell.strategy)} | {run.cell.precision}"].append(str(run.cell))
    names = [name for cells in rows.values() for name in cells]
    return "\n".join(
        [
            f"## {suite.title}",
            "",
            *_summary(names, record),
            "",
            "| strategy | precision | cells | loss | gradient norm | all weights | one gradient |",
            "|---|---|---|---|---|---|---|",
            *(_row(name, cells, record) for name, cells in rows.items()),
        ]
    )


def _summary(cells: Sequence[str], record: Mapping[str, Line]) -> Iterator[str]:
    lines = [record[name] for name in cells if name in record]
    if not lines:
        yield f"None of {len(cells)} cells was run."
        return
    dates = sorted({line.date for line in lines})
    commits = sorted({line.commit for line in lines})
    period = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    yield f"{len(lines)} of {len(cells)} cells were run and passed, {period}, commits {', '.join(commits)}."


def _row(name: str, cells: Sequence[str], record: Mapping[str, Line]) -> str:
    lines = [record[cell] for cell in cells if cell in record]
    values = [f"{max(getattr(line, column) for line in lines):.1e}" if lines else "" for column in COLUMNS]
    return f"| {' | '.join([name, f'{len(lines)} of {len(cells)}', *values])} |"


_HEAD = """\
# Parity of pipeline schedules and of shared sequences

Written by `make test-all` (`python tests/parity/whole_matrix.py page`) from the last result of each cell
([records](../tests/parity/records)), CPU ranks over gloo. [parity.md](parity.md) says what a cell compares, and has the
matrix of strategies, families and options.

Each cell trains a tiny model for 30 steps, each of them clipped, and is compared with one plain PyTorch process: within
1e-6, relative, in fp32, and in bf16 within what its baseline moves when its rounding changes. The columns have the
largest differences of a row's cells.

- **Pipeline schedules** ([schedules.py](../tests/parity/schedules.py)): 1F1B, GPipe, interleaved, ZB-H1 and ZB-V, in
  five layouts, with ZeRO 0 and 1, with and without recomputation: gpt2, llama, qwen3 tied and untied, and a mixture of
  experts, whose seed is the first with which no choice of a router is close.
- **Shared sequences** ([context_cells.py](../tests/parity/context_cells.py)): context parallelism by rings and by
  gathered keys and values, Ulysses and both, and whole sequences with the toolkit's attention; gpt2, llama, qwen3,
  gemma2 and gemma3 (windows, soft caps), mistral (a window), gpt_oss (sinks, experts), phi3, olmo2 and a mixture; with
  packed text, packed text whose documents are kept apart, and padded chats. The validation loss is compared as well."""
