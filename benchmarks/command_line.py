"""How long the command line takes to answer: wall and CPU time of whole processes.

    python benchmarks/command_line.py                   # ten rounds: about two minutes
    python benchmarks/command_line.py --quick           # one round
    python benchmarks/command_line.py --save            # also writes benchmarks/results/command_line.md

`dstk --help`, `dstk validate`, `dstk config` (which reads the recipe and the model's shape, and builds the DeepSpeed
JSON) and `dstk memory` of a catalogue's model, beside an interpreter that does nothing, one that imports click and
BaseModel of pydantic, and `accelerate --help`. All take turns in each round; a first round that fills the caches is not
counted. Prints medians, the smallest times, the smallest CPU times, which other processes disturb less, and the ratio
of medians to the bare interpreter. Targets in seconds say something about this machine only; the ratios travel.
"""

import argparse
import os
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
IMPORTS = "import click; from pydantic import BaseModel"
MEMORY = "dstk memory --model llama-3-8b --layout dp8-z3"
COMMANDS: dict[str, list[str]] = {
    INTERPRETER: [sys.executable, "-c", "pass"],
    IMPORTS: [sys.executable, "-c", IMPORTS],
    "dstk --help": [str(BIN / "dstk"), "--help"],
    f"dstk validate {DEMO}": [str(BIN / "dstk"), "validate", DEMO],
    f"dstk config {DEMO}": [str(BIN / "dstk"), "config", DEMO],
    MEMORY: [str(BIN / "dstk"), *MEMORY.split()[1:]],
    "accelerate --help": [str(BIN / "accelerate"), "--help"],
}
TARGET_SECONDS = {"dstk --help": 0.15, f"dstk validate {DEMO}": 0.4, f"dstk config {DEMO}": 0.4}
TARGET_CPU_RATIO = 3
"""CPU time of `dstk memory` to that of the imports that it cannot do without."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="runs of each command")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/command_line.md")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    cpu: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):
        for name, command in COMMANDS.items():
            taken = timed(command)
            if number:
                seconds[name].append(taken[0])
                cpu[name].append(taken[1])
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}

    def target(name: str) -> str:
        if name == MEMORY:
            return f"CPU: {target_met(min(cpu[MEMORY]) / min(cpu[IMPORTS]), TARGET_CPU_RATIO, at_most=True)} of imports"
        return target_met(medians[name], TARGET_SECONDS[name], at_most=True) if name in TARGET_SECONDS else ""

    publish(
        "command_line",
        title=f"Whole processes, medians of {rounds} runs",
        headings=("command", "seconds", "smallest", "smallest CPU", "ratio", "target"),
        rows=[
            [
                name,
                f"{median:.3f}",
                f"{min(seconds[name]):.3f}",
                f"{min(cpu[name]):.3f}",
                f"{median / medians[INTERPRETER]:.1f}x",
                target(name),
            ]
            for name, median in medians.items()
        ],
        save=options.save,
    )


def timed(command: Sequence[str]) -> tuple[float, float]:
    """Wall and CPU seconds of a process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return time.perf_counter() - start, used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
