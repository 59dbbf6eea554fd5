"""How long `dstk train` takes to its first step: wall and CPU time until the step is in metrics.jsonl.

    python benchmarks/first_step.py                        # three rounds: about three minutes
    python benchmarks/first_step.py --against CHECKOUT     # beside another version of the toolkit
    python benchmarks/first_step.py --quick                # one round
    python benchmarks/first_step.py --save                 # also writes benchmarks/results/first_step.md

The demo's model on one and on four local ranks. Without --against the other side starts each rank as a process of its
own, with its own imports, as other launchers do: torchrun, which comes with torch. Sides take turns in each round; a
first round that fills the caches is not counted. CPU time is that of all processes together, which other processes
disturb less. Prints medians, and of the ratio in the same round the median.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from measure.table import publish, target_met

ROOT = Path(__file__).resolve().parents[1]
RANKS = (1, 4)
TARGETS = {1: 0.8, 4: 0.5}
"""Of this version's wall time by that of a version that starts each rank as a process of its own."""
RECIPE = ("recipes/demo.yaml", "train.steps=2", "schedule.warmup_steps=null", "batch.micro_batch_size=4")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another version's working tree")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/first_step.md")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    other = "torchrun" if options.against is None else "the other version"
    rows = []
    for ranks in RANKS:
        ours = [sys.executable, "-m", "toolkit", "train", *RECIPE, "--nproc", str(ranks)]
        theirs = ours if options.against else _torchrun(ranks)
        taken: dict[str, list[tuple[float, float]]] = {"dstk train": [], other: []}
        for number in range(rounds + 1):
            for name, command, tree in (("dstk train", ours, ROOT), (other, theirs, options.against or ROOT)):
                seconds = to_first_step(command, tree.resolve())
                if number:
                    taken[name].append(seconds)
        ratios = [
            statistics.median(a[which] / b[which] for a, b in zip(taken["dstk train"], taken[other], strict=True))
            for which in (0, 1)
        ]
        for name, found in taken.items():
            wall, cpu = (statistics.median(one[which] for one in found) for which in (0, 1))
            ours_here = name == "dstk train"
            rows.append(
                [
                    name,
                    str(ranks),
                    f"{wall:.2f}",
                    f"{cpu:.2f}",
                    f"{ratios[0]:.2f}x" if ours_here else "",
                    f"{ratios[1]:.2f}x" if ours_here else "",
                    target_met(ratios[0], TARGETS[ranks], at_most=True) if ours_here and options.against else "",
                ]
            )
    publish(
        "first_step",
        title=f"Time to the first step, medians of {rounds} runs, {len(os.sched_getaffinity(0))} cores",
        headings=("launcher", "ranks", "seconds", "CPU seconds", "ratio", "ratio of CPU", "target"),
        rows=rows,
        notes=[] if options.against is None else [f"The other version is {_commit(options.against)}."],
        save=options.save,
    )


def _commit(tree: Path) -> str:
    found = subprocess.run(["git", "-C", str(tree), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return f"commit {found.stdout.strip()}" if found.returncode == 0 else "not a checkout"


def _torchrun(ranks: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    return [*launcher, "recipes/train.py", "--config", *RECIPE]


def to_first_step(command: Sequence[str], tree: Path) -> tuple[float, float]:
    """Wall seconds until the first step is in metrics.jsonl, and CPU seconds of all processes until then."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(tree), "DS_ACCELERATOR": "cpu"}
        metrics = Path(folder) / "run" / "metrics.jsonl"
        start = time.perf_counter()
        process = psutil.Popen(
            [*command, f"run_dir={metrics.parent}"],
            cwd=tree,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None:
                raise SystemExit(f"{command} ended with {process.returncode}")
            time.sleep(0.02)
        seconds, tree_of = time.perf_counter() - start, [process, *process.children(recursive=True)]
        used = [one.cpu_times() for one in tree_of]
        process.wait()
        return seconds, sum(one.user + one.system + one.children_user + one.children_system for one in used)


if __name__ == "__main__":
    main()
