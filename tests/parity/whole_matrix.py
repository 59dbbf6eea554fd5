"""Run the whole regression matrix, at once or in shards, and write the page of its results.

    python tests/parity/whole_matrix.py run
    python tests/parity/whole_matrix.py run --shard 2/4
    python tests/parity/whole_matrix.py page

`run` writes a line for each cell to build/parity, resumes after an interruption, and exits with 1 if a cell failed.
`page` writes docs/parity.md once all cells of this state of the code have passed.
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
from cell_runs import Baselines, CellRun, run_cells
from matrix import Text, legal_cells, steps_of
from page import IncompleteError, write_page
from results import Result, State, digest_of_recipes, read_results


def all_runs() -> list[CellRun]:
    """Every cell of the matrix."""
    return [CellRun(cell=cell, steps=steps_of(cell)) for cell in legal_cells()]


def shard_of(runs: list[CellRun], number: int, shards: int) -> list[CellRun]:
    """Return the runs of one shard (from 1). Runs with the same baseline are in the same shard."""
    baselines = list(dict.fromkeys(run.baseline for run in runs))
    own = set(baselines[number - 1 :: shards])
    return [run for run in runs if run.baseline in own]


def run(number: int, shards: int, cores: int) -> int:
    """Train the missing cells of a shard; return how many failed."""
    state = State.now()
    state.folder.mkdir(parents=True, exist_ok=True)
    runs = shard_of(all_runs(), number, shards)
    done = {(result.cell, result.recipes) for result in read_results(state.folder) if not result.outcome.failure}
    missing = [run for run in runs if (str(run.cell), digest_of_recipes(run)) not in done]
    print(f"{len(runs)} cells, {len(runs) - len(missing)} done before; results in {state.folder}", flush=True)
    failed = 0
    become_rank_parent()
    with (
        tempfile.TemporaryDirectory(prefix="parity-") as folder,
        (state.folder / f"shard-{number}-of-{shards}.jsonl").open("a") as file,
    ):
        text = Text(corpus=write_corpus(Path(folder)), cache=Path(folder) / "cache")
        ended = run_cells(missing, text, Baselines(text, cores=cores), cores=cores)
        for count, (one, outcome, seconds) in enumerate(ended, 1):
            file.write(Result.of(one, outcome, seconds, state).line())
            file.flush()
            if outcome.failure:
                failed += 1
                print(f"FAILED {one.cell}\n{outcome.failure}", flush=True)
            if count % 100 == 0 or count == len(missing):
                print(f"{count} of {len(missing)}, {failed} failed", flush=True)
    return failed


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run")
    run_parser.add_argument("--shard", default="1/1", help="which part, as 2/4")
    run_parser.add_argument("--cores", type=int, default=3 * len(os.sched_getaffinity(0)), help="ranks at a time")
    commands.add_parser("page")
    arguments = parser.parse_args()
    if arguments.command == "run":
        number, shards = map(int, arguments.shard.split("/"))
        return 1 if run(number, shards, arguments.cores) else 0
    try:
        print(f"wrote {write_page(State.now(), all_runs())}")
    except IncompleteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
