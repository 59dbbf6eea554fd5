"""Run suites of cells that are too many for every day, at once or in shards, and write the pages of their results.

    python tests/parity/whole_matrix.py run
    python tests/parity/whole_matrix.py run --suite schedules --shard 2/4
    python tests/parity/whole_matrix.py run --suite schedules --unrecorded
    python tests/parity/whole_matrix.py page

`run` writes a line for each cell to build/parity, resumes after an interruption, and exits with 1 if a cell failed.
With `--unrecorded` it leaves out cells that have a line in tests/parity/records, of whichever commit.
`page` writes docs/parity-layouts.md, and docs/parity.md once all cells of the matrix have passed with this state of the
code.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from rank_parent import become_rank_parent
from small_text import write_corpus

# isort: split
import page
import record
from cell_runs import Baselines, CellRun, run_cells
from context_cells import write_chats_of
from matrix import Text
from results import Result, State, digest_of_recipes, read_results
from suites import MATRIX, SUITES


def shard_of(runs: list[CellRun], number: int, shards: int) -> list[CellRun]:
    """Return the runs of one shard (from 1). Runs with the same baseline are in the same shard."""
    baselines = list(dict.fromkeys(run.baseline for run in runs))
    own = set(baselines[number - 1 :: shards])
    return [run for run in runs if run.baseline in own]


def without_recorded(suite: str, runs: list[CellRun]) -> list[CellRun]:
    """Return the runs whose cells have no line in the record, or one of other recipes."""
    lines = record.read_record(record.path_of(suite))
    recorded = {(line.cell, line.recipes) for line in lines.values()}
    return [run for run in runs if (str(run.cell), digest_of_recipes(run)) not in recorded]


def run(suite: str, number: int, shards: int, cores: int, *, unrecorded: bool) -> int:
    """Train the missing cells of a shard of a suite; return how many failed."""
    state = State.now()
    folder = state.folder(suite)
    folder.mkdir(parents=True, exist_ok=True)
    runs = shard_of(SUITES[suite].runs(), number, shards)
    if unrecorded:
        runs = without_recorded(suite, runs)
    passed = {(result.cell, result.recipes) for result in read_results(folder) if not result.outcome.failure}
    missing = [run for run in runs if (str(run.cell), digest_of_recipes(run)) not in passed]
    print(f"{suite}: {len(runs)} cells, {len(runs) - len(missing)} passed before; results in {folder}", flush=True)
    failed = 0
    with (
        tempfile.TemporaryDirectory(prefix="parity-") as temporary,
        (folder / f"shard-{number}-of-{shards}.jsonl").open("a") as file,
    ):
        text = Text(corpus=write_corpus(Path(temporary)), cache=Path(temporary) / "cache")
        write_chats_of(text)
        ended = run_cells(missing, text, Baselines(text, cores=cores), cores=cores)
        for count, (cell_run, outcome, seconds) in enumerate(ended, 1):
            file.write(Result.of(cell_run, outcome, seconds, state).line())
            file.flush()
            if outcome.failure:
                failed += 1
                print(f"FAILED {cell_run.cell}\n{outcome.failure}", flush=True)
            if count % 100 == 0 or count == len(missing):
                print(f"{count} of {len(missing)}, {failed} failed", flush=True)
    return failed


def write_pages() -> None:
    """Write the pages from the results of this state of the code. Raises page.IncompleteError, after writing others."""
    state = State.now()
    records = {}
    for name, suite in SUITES.items():
        if name != MATRIX:
            path = record.path_of(name)
            results = list(read_results(state.folder(name)))
            record.write_record(path, record.updated(record.read_record(path), suite.runs(), results))
            records[name] = record.read_record(path)  # as rounded in the file
    print(f"wrote {record.write_page(records)}")
    print(f"wrote {page.write_page(state, SUITES[MATRIX].runs())}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run")
    run_parser.add_argument("--suite", choices=SUITES, help="one of them; default: all")
    run_parser.add_argument("--shard", default="1/1", help="which part, as 2/4")
    run_parser.add_argument("--cores", type=int, default=3 * len(os.sched_getaffinity(0)), help="ranks at a time")
    run_parser.add_argument("--unrecorded", action="store_true", help="only cells that the record does not have")
    commands.add_parser("page")
    arguments = parser.parse_args()
    if arguments.command == "run":
        number, shards = map(int, arguments.shard.split("/"))
        become_rank_parent()
        suites = [arguments.suite] if arguments.suite else list(SUITES)
        failed = [run(suite, number, shards, arguments.cores, unrecorded=arguments.unrecorded) for suite in suites]
        return 1 if any(failed) else 0
    try:
        write_pages()
    except page.IncompleteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
