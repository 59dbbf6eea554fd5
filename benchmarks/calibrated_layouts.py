"""Layouts of a small GPT on CPU ranks: predicted from `dstk calibrate`'s constants, and measured.

    python benchmarks/calibrated_layouts.py             # calibrates, then four rounds: about ten minutes
    python benchmarks/calibrated_layouts.py --quick     # does it run? The figures mean nothing.
    python benchmarks/calibrated_layouts.py --save      # also writes benchmarks/results/calibrated_layouts.md

What somebody with this machine would compare: one, two and four ranks with the same global batch, in data, pipeline and
tensor parallelism, with small and large micro-batches, with recomputation and with ZeRO-3. Predicted is what
`dstk plan --gpus Nxcpu` predicts; nothing is fitted to the runs. They train as recipes/train.py does, on forked ranks,
in an order that is shuffled in every round. Of each step it is known how many cores other programs kept busy meanwhile:
of each layout the quietest fifth of its steps count, their median is the measured step, and how quiet they were is
printed. Beside it stands what other programs hardly change: the core time of the busiest rank, or of all ranks over the
cores where that is more. A step on idle cores takes at least so long, and longer by what ranks wait for each other.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from measure.our_run import Stamps, make_recipe, our_run
from measure.rounds import silently
from measure.table import publish, target_met
from typing_extensions import override

from toolkit.calibrate.measure import calibrate
from toolkit.calibrate.other_load import busy_seconds
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.launch.local_ranks import preload, run_ranks
from toolkit.launch.output import quiet
from toolkit.planner.calibration.file import Calibration
from toolkit.planner.request import predict
from toolkit.planner.step_time import StepTime

LAYOUTS = (
    "dp1-z1-m4",
    "dp2-z1-m1",
    "dp2-z1-m8",
    "dp2-z1-recompute-m4",
    "dp2-z3-m2",
    "pp2-z1-m1",
    "pp2-z1-m4",
    "tp2-z1-m4",
    "dp4-z1-m4",
    "dp2-pp2-z1-m2",
    "pp4-z1-m4",
    "dp2-tp2-z1-m4",
)
SHAPE = {"n_layer": 4, "n_embd": 256, "n_head": 4}
SEQ_LEN, GLOBAL_BATCH = 128, 16
STEPS, WARMUP = 12, 2
TARGET = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="runs of each layout")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/calibrated_layouts.md")
    options = parser.parse_args()
    quiet(debug=False)
    found = calibrate(say=lambda what: print(f"measuring: {what} …", file=sys.stderr))
    preload("gpt2")
    with tempfile.TemporaryDirectory() as name:
        recipe = make_recipe(
            Path(name),
            model={"name_or_path": "gpt2-tiny", "overrides": SHAPE},
            seq_len=SEQ_LEN,
            batch={"global_batch_size": GLOBAL_BATCH, "micro_batch_size": 1},
            train={"steps": STEPS},
        )
        steps = {text: predicted(recipe, text, found) for text in LAYOUTS}
        runs = measure_all(recipe, 1 if options.quick else options.rounds)
    report({text: step.seconds for text, step in steps.items()}, runs, found, save=options.save)


@dataclass
class LoadStamps(Stamps):
    """Also what all cores and this rank have computed when a step ends."""

    busy: list[tuple[float, float]] = field(default_factory=list)

    @override
    def add(self, loss: float) -> None:
        super().add(loss)
        self.busy.append((busy_seconds(), time.process_time()))


Step = tuple[float, float, float]
"""Cores that other programs kept busy, seconds, and the core time: see above."""


def measure_all(recipe: Recipe, rounds: int) -> dict[str, list[Step]]:
    steps: dict[str, list[Step]] = {text: [] for text in LAYOUTS}
    for number in range(rounds):
        for text in random.Random(number).sample(LAYOUTS, len(LAYOUTS)):
            found = measure(recipe, text)
            steps[text] += found
            others, seconds, _ = (statistics.median(values) for values in zip(*found, strict=True))
            print(f"round {number + 1}: {text}, {seconds * 1e3:.0f} ms, {others:.2f} cores beside", file=sys.stderr)
    return steps


def measure(recipe: Recipe, text: str) -> list[Step]:
    """The counted steps of a run."""
    changed, ranks = in_layout(recipe, text)
    each: list[LoadStamps] = run_ranks(silently, ranks, partial(load_run, changed), timeout_seconds=1800)
    steps = []
    for before in range(WARMUP - 1, STEPS - 1):
        seconds = each[0].times[before + 1] - each[0].times[before]
        all_cores = each[0].busy[before + 1][0] - each[0].busy[before][0]
        own = [one.busy[before + 1][1] - one.busy[before][1] for one in each]
        least = max(max(own), sum(own) / len(os.sched_getaffinity(0)))
        steps.append((max(0.0, all_cores - sum(own)) / seconds, seconds, least))
    return steps


def load_run(recipe: Recipe) -> Stamps:
    return our_run(recipe, LoadStamps())


def quietest(steps: list[Step]) -> list[Step]:
    return sorted(steps)[: -(-len(steps) // 5)]


def ranks_of(values: Sequence[float]) -> list[int]:
    """The place of each value in their order."""
    order = sorted(values)
    return [order.index(value) for value in values]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The correlation of the places."""
    return statistics.correlation(ranks_of(first), ranks_of(second))


def report(expected: dict[str, float], runs: dict[str, list[Step]], found: Calibration, *, save: bool) -> None:
    measured, least, rows = {}, {}, []
    for text in LAYOUTS:
        others, seconds, _ = zip(*quietest(runs[text]), strict=True)
        measured[text] = statistics.median(seconds)
        least[text] = statistics.median(step[2] for step in runs[text])
        rows.append(
            [
                text,
                f"{expected[text] * 1e3:.0f}",
                f"{measured[text] * 1e3:.0f}",
                f"{100 * (expected[text] / measured[text] - 1):+.0f} %",
                f"{max(others):.2f}",
                f"{least[text] * 1e3:.0f}",
            ]
        )
    rows.sort(key=lambda row: int(row[2]))
    rho = spearman([expected[text] for text in LAYOUTS], [measured[text] for text in LAYOUTS])
    chosen = min(expected, key=expected.__getitem__)
    in_cores = spearman([expected[text] for text in LAYOUTS], [least[text] for text in LAYOUTS])
    load = statistics.median(step[0] for each in runs.values() for step in each)
    publish(
        "calibrated_layouts",
        title="Twelve layouts of a small GPT on CPU ranks: the step, predicted and measured",
        headings=("layout", "predicted ms", "measured ms", "error", "cores beside, at most", "core ms"),
        rows=rows,
        notes=[
            f"Spearman's rho {rho:.2f}: {target_met(rho, TARGET, at_most=False)}.",
            f"Spearman's rho with the core time, whatever else runs on the machine: {in_cores:.2f}.",
            f"The first choice, {chosen}, reaches {min(measured.values()) / measured[chosen]:.0%} of the best.",
            f"Other programs kept {load:.2f} cores busy during the median step, {found.others:.2f} during calibration.",
            f"GPT-2 of {SHAPE['n_layer']} layers x {SHAPE['n_embd']}, vocabulary 4,096, fp32, one thread a rank.",
            f"{GLOBAL_BATCH} samples of {SEQ_LEN} tokens in a step; {len(runs[LAYOUTS[0]])} steps of each layout.",
            f"Calibrated: {found.summary}.",
        ],
        save=save,
    )


def in_layout(recipe: Recipe, text: str) -> tuple[Recipe, int]:
    """The recipe in this layout, and its ranks."""
    strategy = Strategy.parse(text)
    ranks = strategy.world_size(1)
    return strategy.apply(recipe, ranks), ranks


def predicted(recipe: Recipe, text: str, found: Calibration) -> StepTime:
    """The step as `dstk plan` predicts it."""
    changed, ranks = in_layout(recipe, text)
    job = Job.of(changed, ranks)
    return predict(changed, job.layout, job.batch, found.of_ranks(ranks))


if __name__ == "__main__":
    main()
