"""What the guards of a run cost a step when nothing goes wrong: the watchdog, and comparisons of ranks.

    python benchmarks/guard_cost.py            # five rounds: about eight minutes
    python benchmarks/guard_cost.py --quick    # does it run? The figures mean nothing.
    python benchmarks/guard_cost.py --save     # also writes benchmarks/results/guard_cost.md

Two ranks train a GPT-2 with ZeRO-1 in fp32, each on a core of its own, in turns without a watchdog (no heartbeats, no
reports of phases), with it, with `train.replica_check` at every step, and with `train.repeat_check` at every step.
Seconds of CPU are those of a rank's process with all its threads. A comparison is made every N steps, so that N divides
what it costs.

Steps on two shared cores vary by more than the watchdog costs. Its threads do the same whether a rank computes or not,
so their CPU time is measured where there is nothing else: in ranks that wait. Likewise the clock of phases and waits,
from which slow ranks are named: it is called as often as in a step, and nothing else is done.
"""

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import deepspeed  # noqa: F401  # before the ranks are forked
import torch
import torch.distributed as dist
from measure.our_run import CPU, Stamps, make_recipe
from measure.rounds import silently
from measure.table import publish, target_met

from toolkit import Job, TrainOptions, train
from toolkit.config.layout import Layout
from toolkit.config.recipe import Recipe
from toolkit.launch.health.watchdog import Watchdog
from toolkit.launch.local_ranks import run_ranks
from toolkit.launch.output import quiet
from toolkit.launch.process_group import process_group
from toolkit.launch.rank_environment import RankEnvironment
from toolkit.phases import ignore_phase
from toolkit.training.slow_ranks import SlowRanks

RANKS = 2
STEPS, WARMUP = 60, 10
TARGET = 1.01
ACCUMULATION = 2
WAIT_SECONDS = 20
CLOCKED_STEPS = 2000
CHECK_EVERY = 100
"""Steps between comparisons of replicas, for the row that compares with the target."""


@dataclass
class CpuStamps(Stamps):
    """When each step ended, and the CPU seconds of the process until then; and how often the rank waited for others."""

    cpu: list[float] = field(default_factory=list)
    waits: int = 0

    def add(self, loss: float) -> None:
        super().add(loss)
        self.cpu.append(time.process_time())

    @property
    def cpu_seconds_a_step(self) -> float:
        """The mean of all steps but the first ones."""
        return (self.cpu[-1] - self.cpu[WARMUP]) / (len(self.cpu) - 1 - WARMUP)


def trained(recipe: Recipe, *, has_watchdog: bool = True) -> CpuStamps:
    """Train on this rank, as recipes/train.py does."""
    torch.set_num_threads(1)
    if not has_watchdog:
        for name in ("start", "stop", "report_phase"):
            setattr(Watchdog, name, lambda *arguments: None)
    stamps = CpuStamps()
    wait = dist.Work.wait

    def counted(work: dist.Work, *arguments: Any) -> Any:
        stamps.waits += 1
        return wait(work, *arguments)

    dist.Work.wait = counted  # type: ignore[assignment,method-assign]
    train(Job.of(recipe, RANKS), [stamps], TrainOptions(overwrite=True))
    return stamps


def watchdog_share() -> float:
    """CPU seconds a second of a rank that does nothing but wait under a watchdog."""
    with process_group(RankEnvironment.detect(), CPU, hang_timeout_seconds=600):
        began = time.process_time()
        time.sleep(WAIT_SECONDS)
        return (time.process_time() - began) / WAIT_SECONDS


def clock_seconds(waits: int) -> float:
    """Seconds a step of a clock of phases that sees so many waits, with the comparison of times every ten steps."""
    with process_group(RankEnvironment.detect(), CPU, hang_timeout_seconds=0):
        layout = Layout(dp=RANKS)
        ranks = SlowRanks(ignore_phase, CPU, layout=layout, rank=dist.get_rank(), hosts=("host",) * RANKS, share=0.1)
        seconds = 0.0
        with mock.patch.object(dist.Work, "wait", return_value=True), ranks.watching():
            work = dist.Work()
            for step in range(CLOCKED_STEPS):
                began = time.perf_counter()
                ranks.begin_step(step)
                for _ in range(ACCUMULATION):
                    for phase in ("data", "forward", "backward"):
                        ranks.report_phase(phase, step)
                ranks.report_phase("update")
                for _ in range(waits):
                    work.wait()
                count, own_numbers = ranks.local_numbers()
                row = [own_numbers.get(place, 1.0) for place in range(count)]
                ranks.read(row)
                seconds += time.perf_counter() - began
        return seconds / CLOCKED_STEPS


def measure(side: Callable[[], CpuStamps]) -> tuple[float, float, float]:
    """Seconds of a median step, and CPU seconds and waits of a mean one, of the first rank of a run."""
    stamps: CpuStamps = run_ranks(silently, RANKS, side, joined=False, timeout_seconds=600)[0]
    waits = stamps.waits / len(stamps.cpu)
    return statistics.median(stamps.step_seconds(WARMUP)), stamps.cpu_seconds_a_step, waits


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/guard_cost.md")
    options = parser.parse_args()
    quiet(debug=False)
    with tempfile.TemporaryDirectory() as name:
        recipe = make_recipe(
            Path(name),
            model={"name_or_path": "gpt2-tiny", "overrides": {"n_layer": 6, "n_embd": 256, "n_head": 4}},
            seq_len=128,
            batch={"global_batch_size": 8, "micro_batch_size": 2},
            parallel={"zero_stage": 1},
            train={"steps": WARMUP + 5 if options.quick else STEPS},
            log={"slow_ranks": 0.0},
        )
        compared = recipe.changed({"train": {"replica_check": 1}})
        repeated = recipe.changed({"train": {"repeat_check": 1}})
        sides = {
            "no watchdog": partial(trained, recipe, has_watchdog=False),
            "watchdog": partial(trained, recipe),
            "replicas compared at every step": partial(trained, compared),
            "a micro-batch repeated at every step": partial(trained, repeated),
        }
        measured: dict[str, list[tuple[float, float, float]]] = {side: [] for side in sides}
        for _ in range(1 if options.quick else options.rounds):
            for side, run in sides.items():
                measured[side].append(measure(run))
        shares = run_ranks(watchdog_share, RANKS, joined=False, timeout_seconds=600)
        waits = math.ceil(max(value[2] for value in measured["watchdog"]))
        clocks = run_ranks(clock_seconds, RANKS, waits, joined=False, timeout_seconds=600)
    plain = measured["no watchdog"]
    rows = []
    ratios: dict[str, list[float]] = {}
    for side, values in measured.items():
        wall = sorted(value[0] / other[0] for value, other in zip(values, plain, strict=True))
        ratios[side] = sorted(value[1] / other[1] for value, other in zip(values, plain, strict=True))
        medians = (statistics.median(value[index] for value in values) for index in (0, 1))
        milliseconds = [f"{1e3 * value:.1f}" for value in medians]
        spread = f"{ratios[side][0]:.3f} to {ratios[side][-1]:.3f}"
        middle = statistics.median(ratios[side])
        rows.append([side, *milliseconds, f"{statistics.median(wall):.3f}x", f"{middle:.3f}x", spread, ""])
    of_watchdog = max(shares)
    of_a_check = statistics.median(ratios["replicas compared at every step"]) - statistics.median(ratios["watchdog"])
    of_a_repeat = statistics.median(ratios["a micro-batch repeated at every step"]) - statistics.median(
        ratios["watchdog"]
    )
    of_clock = max(clocks) / statistics.median(value[0] for value in plain)
    checks = f"replicas compared and a micro-batch repeated every {CHECK_EVERY} steps"
    total = 1 + of_watchdog + of_clock + (of_a_check + of_a_repeat) / CHECK_EVERY
    side = f"computed: watchdog, slow ranks named, {checks}"
    rows.append([side, "", "", "", f"{total:.4f}x", "", target_met(total, TARGET, at_most=True)])
    publish(
        "guard_cost",
        title="What guards cost a step when nothing goes wrong",
        headings=("side", "ms a step", "CPU ms a step", "time", "CPU time", "least to most", "target"),
        rows=rows,
        notes=[
            "GPT-2 of 6 layers x 256, samples of 128 tokens, 2 in a micro-batch, accumulation 2, ZeRO-1, two ranks.",
            f"The threads of the watchdog of a rank take {1e3 * of_watchdog:.1f} ms of CPU a second.",
            f"The clock of phases takes {1e6 * max(clocks):.0f} µs a step with {waits} waits for other ranks.",
            f"The last row adds both to the costs of comparisons by the rows above, divided by {CHECK_EVERY}.",
        ],
        save=options.save,
    )


if __name__ == "__main__":
    main()
