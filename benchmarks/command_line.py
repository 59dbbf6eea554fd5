"""How long the command line takes to answer: wall time of whole processes.

    python benchmarks/command_line.py                   # ten rounds: about two minutes
    python benchmarks/command_line.py --quick           # one round
    python benchmarks/command_line.py --save            # also writes benchmarks/results/command_line.md

`dstk --help`, `dstk validate` and `dstk config` (which reads the recipe and the model's shape, and builds the DeepSpeed
JSON), beside an interpreter that does nothing and beside `accelerate --help`. All take turns in each round; a first
round that fills the caches is not counted. Prints medians, the smallest times, and the ratio to the bare interpreter.
The targets are seconds, so they say something about this machine only; the ratios travel.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from measure.table import publish, target_met

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
DEMO = "recipes/demo.yaml"
INTERPRETER = "python -c pass"
COMMANDS: dict[str, list[str]] = {
    INTERPRETER: [sys.executable, "-c", "pass"],
    "dstk --help": [str(BIN / "dstk"), "--help"],
    f"dstk validate {DEMO}": [str(BIN / "dstk"), "validate", DEMO],
    f"dstk config {DEMO}": [str(BIN / "dstk"), "config", DEMO],
    "accelerate --help": [str(BIN / "accelerate"), "--help"],
}
TARGET_SECONDS = {"dstk --help": 0.15, f"dstk validate {DEMO}": 0.4, f"dstk config {DEMO}": 0.4}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="runs of each command")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/command_line.md")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):
        for name, command in COMMANDS.items():
            taken = timed(command)
            if number:
                seconds[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    publish(
        "command_line",
        title=f"Whole processes, medians of {rounds} runs",
        headings=("command", "seconds", "smallest", "ratio", "target"),
        rows=[
            [
                name,
                f"{median:.3f}",
                f"{min(seconds[name]):.3f}",
                f"{median / medians[INTERPRETER]:.1f}x",
                target_met(median, TARGET_SECONDS[name], at_most=True) if name in TARGET_SECONDS else "",
            ]
            for name, median in medians.items()
        ],
        save=options.save,
    )


def timed(command: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
