"""Fuzz of compositions: random recipes in random layouts train what one process trains, or are refused in one line.

    make fuzz SEED=3 N=1000 JOBS=2      # compositions 0 to 999 of a seed; goes on where it was interrupted
    make fuzz SEED=3 N=1 INDEX=417      # one of them again, with its command
    python tests/fuzz/fuzz.py page      # writes the section of docs/parity.md from the results

Each result is a line of build/fuzz/results. A composition that fails is shrunk to the smallest one that fails in the
same way, and printed as the command of `dstk compare` that shows it. Exits with 1 if one failed.
"""

import argparse
import multiprocessing
import os
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from rank_parent import become_rank_parent

# isort: split
from compositions import FOLDER, ROOT, VOCABULARIES, Composition, draw
from fuzz_page import NoResultsError, write_section
from fuzz_results import Result, folder_of, known_results
from fuzz_runs import Verdict, judge
from odd_models import forget_other_versions
from plain_fine_tuning import save_base
from results import State
from shrink_composition import shrink_composition, what_failed
from small_chats import write_chats, write_tokenizer
from small_preferences import make_completions, make_pairs, words, write_rows
from small_text import write_corpus

TOGETHER = 8
"""Compositions whose runs share forked ranks."""
SHRINK_SECONDS = 300
_SCORES = (0.5, 1.0, 2.0)
"""Weights of rows, for compositions that take them."""


def write_files() -> None:
    """Write the texts and the tokenizer that compositions name, once, and make room for models."""
    folder = Path(FOLDER)
    forget_other_versions()
    if not (folder / "documents.jsonl").exists():
        write_corpus(folder)
    if not (folder / "chats.jsonl").exists():
        write_chats(folder / "chats.jsonl")
    if not (folder / "tokenizer" / "tokenizer.json").exists():
        write_tokenizer(folder / "tokenizer")
    for vocabulary in VOCABULARIES:
        teacher = folder / f"teacher-v{vocabulary}"
        if not (teacher / "config.json").exists():
            save_base(teacher, "llama", seed=9, hidden_size=48, num_hidden_layers=2, vocab_size=vocabulary)
    rows = {
        "words": [{"text": words(random.Random(number), longest=40)} for number in range(200)],
        "preference": make_pairs(longest=5),
        "unpaired": make_completions(),
    }
    for name, unweighted in rows.items():
        if not (folder / f"{name}.jsonl").exists():
            weighted = [row | {"score": _SCORES[number % len(_SCORES)]} for number, row in enumerate(unweighted)]
            write_rows(folder / f"{name}.jsonl", weighted)


def fuzz(seed: int, indices: list[int], state: State, file: Path, *, shrinks: bool) -> int:
    """Train compositions and append their results to a file; return how many failed."""
    failed = 0
    shrunken: dict[tuple[str, ...], Composition] = {}  # failures of one kind in one family are shrunk once
    for start in range(0, len(indices), TOGETHER):
        part = indices[start : start + TOGETHER]
        began = time.monotonic()
        drawn = {index: draw(seed, index) for index in part}
        known = {index: composition for index, composition in drawn.items() if composition is not None}
        verdicts = dict(zip(known, judge(list(known.values())), strict=True))
        seconds = (time.monotonic() - began) / len(part)
        for index, composition in drawn.items():
            result = Result.of(seed, index, composition, verdicts.get(index, []), seconds, state)
            for verdict in result.failures:
                failed += 1
                assert composition is not None
                smallest = None
                kind = result.family, verdict.verdict, what_failed(verdict)
                if shrinks and kind not in shrunken:
                    shrunken[kind] = shrunk(composition, verdict, seconds=SHRINK_SECONDS)
                smallest = shrunken.get(kind)
                if smallest is not None:
                    result.shrunk[verdict.layout] = smallest.command
                _print_failure(seed, index, composition, verdict, smallest)
            with file.open("a") as lines:
                lines.write(result.line())
    return failed


def shrunk(composition: Composition, failure: Verdict, *, seconds: float) -> Composition:
    """The smallest composition that fails as this one does."""

    def judge_one(candidate: Composition, *, confirms: bool) -> Verdict:
        ((verdict,),) = judge([candidate], confirms=confirms)
        return verdict

    return shrink_composition(
        composition,
        failure,
        partial(judge_one, confirms=True),
        quick=partial(judge_one, confirms=False),
        seconds=seconds,
    )


def _print_failure(
    seed: int, index: int, composition: Composition, verdict: Verdict, smallest: Composition | None
) -> None:
    print(f"FAILED seed {seed}, index {index}, {verdict.layout}: {verdict.verdict}: {verdict.reason}", flush=True)
    print(f"  as drawn: {composition.command}", flush=True)
    if smallest is not None:
        print(f"  smallest: {smallest.command}", flush=True)


def run(seed: int, first: int, count: int, jobs: int, *, shrinks: bool, again: bool) -> int:
    """Train the compositions that have no result yet in `jobs` processes; return how many failed."""
    state = State.now()
    become_rank_parent()
    write_files()
    folder = folder_of(state.code)
    folder.mkdir(parents=True, exist_ok=True)
    done = set() if again else {(result.seed, result.index) for result in known_results(folder)}
    missing = [index for index in range(first, first + count) if (seed, index) not in done]
    print(f"{count} compositions of seed {seed}, {count - len(missing)} done before; results in {folder}", flush=True)
    jobs = min(jobs, -(-len(missing) // TOGETHER)) or 1
    if jobs == 1:
        return fuzz(seed, missing, state, folder / "results-1.jsonl", shrinks=shrinks)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    workers = []
    for job, indices in enumerate(_shares(missing, jobs), start=1):
        arguments = (queue, seed, indices, state, folder / f"results-{job}.jsonl")
        workers.append(context.Process(target=_work, args=arguments, kwargs={"shrinks": shrinks}))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    failed = sum(queue.get() for worker in workers if worker.exitcode == 0)
    return failed + sum(worker.exitcode != 0 for worker in workers)


def _shares(indices: list[int], jobs: int) -> list[list[int]]:
    """The indices of each of several processes: every so many-th group that is trained together."""
    groups = [indices[start : start + TOGETHER] for start in range(0, len(indices), TOGETHER)]
    return [[index for group in groups[job::jobs] for index in group] for job in range(jobs)]


def _work(queue: Any, *arguments: Any, shrinks: bool) -> None:
    queue.put(fuzz(*arguments, shrinks=shrinks))


def main() -> int:
    """The command line."""
    os.chdir(ROOT)  # commands name files relative to it
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run")
    run_parser.add_argument("--seed", type=int, default=0)
    run_parser.add_argument("--count", type=int, default=12)
    run_parser.add_argument("--index", type=int, help="the first; trained again if there is a result")
    run_parser.add_argument("--jobs", type=int, default=1)
    run_parser.add_argument("--no-shrink", action="store_true")
    page_parser = commands.add_parser("page")
    page_parser.add_argument("--seed", type=int, default=0)
    page_parser.add_argument("--code", help="the folder of results to take; the default is that of the present code")
    arguments = parser.parse_args()
    if arguments.command == "page":
        try:
            print(f"wrote {write_section(arguments.code or State.now().code, arguments.seed)}")
        except NoResultsError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0
    again, shrinks = arguments.index is not None, not arguments.no_shrink
    failed = run(arguments.seed, arguments.index or 0, arguments.count, arguments.jobs, shrinks=shrinks, again=again)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
