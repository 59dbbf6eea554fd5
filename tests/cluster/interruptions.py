"""Kills of a launcher, and Ctrl-C, at random moments: no rank outlives the first, and the second saves or says not.

    python tests/cluster/interruptions.py kill --draws 50
    python tests/cluster/interruptions.py ctrl-c --draws 50 --seed 3
    python tests/cluster/interruptions.py others

Moments are drawn from the start of Python to some seconds of training. Kills: each launcher of `interruptions.KILLED`
that often, with and without a token cache; no process may be left after 5 s. Ctrl-C: each start resumes from what the
ones before it saved. Others: Ctrl-C, SIGTERM and kill -9 in training, under launchers that are not ours.
tests/launch/test_interruptions.py runs a few draws.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from interruptions import (
    KILLED,
    OTHERS,
    end_launcher,
    first_step,
    interrupt,
    kill_launcher,
    newest,
    write_recipe,
)

LIMIT_SECONDS = 5.0
TRAINING_SECONDS = 6.0


def kills(folder: Path, draws: int, rng: random.Random) -> list[str]:
    problems = []
    folder.mkdir()
    write_recipe(folder, copies=60)
    longest = first_step(folder) + TRAINING_SECONDS
    for launcher, arguments in KILLED.items():
        seconds, processes = [], []
        for _ in range(draws):
            if rng.random() < 0.3:
                shutil.rmtree(folder / "cache", ignore_errors=True)
            moment = rng.uniform(0, longest)
            found = kill_launcher(folder, arguments, moment)
            seconds.append(found.seconds)
            processes.append(found.processes)
            if found.seconds > LIMIT_SECONDS:
                problems.append(f"{launcher} killed after {moment:.2f} s: outlived by {found.seconds:.1f} s")
        having = sum(1 for count in processes if count)
        print(
            f"{launcher}: {draws} kills, {having} with other processes (up to {max(processes)}); "
            f"the last one outlived it by {max(seconds):.2f} s at most",
            flush=True,
        )
    return problems


def ctrl_c(folder: Path, draws: int, rng: random.Random) -> list[str]:
    problems, saved, codes = [], 0, set()
    for engine in ("ddp", "deepspeed"):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_recipe(folder, copies=60, engine=engine)
        longest = first_step(folder) + TRAINING_SECONDS
        for _ in range(draws // 2):
            if rng.random() < 0.2:
                shutil.rmtree(folder / "cache", ignore_errors=True)
            found = interrupt(folder, rng.uniform(0, longest))
            saved += found.saved
            codes.add(found.code)
            print(f"{engine} {found.moment:5.2f} s: {found.code} {found.errors.strip()}", flush=True)
            if found.problem:
                problems.append(f"{engine} after {found.moment:.2f} s: {found.problem}\n{found.errors}")
        print(f"{engine}: {draws // 2} times Ctrl-C, resumed up to step {newest(folder / 'run')}", flush=True)
    print(f"{saved} saved a checkpoint, exit codes {sorted(codes)}")
    return problems


def others(folder: Path, draws: int, rng: random.Random) -> list[str]:
    problems = []
    folder.mkdir()
    write_recipe(folder)
    for launcher in OTHERS:
        for number, group in ((signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGKILL, False)):
            problem, line = end_launcher(folder, launcher, number, group=group)
            print(f"{launcher} {number.name}: {problem or line}", flush=True)
            problems += [f"{launcher} {number.name}: {problem}"] if problem else []
    return problems


KINDS = {"kill": kills, "ctrl-c": ctrl_c, "others": others}


def main() -> None:
    parser = argparse.ArgumentParser(description="kill -9 of launchers, and Ctrl-C, at random moments")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        problems = KINDS[options.kind](Path(folder) / "work", options.draws, random.Random(options.seed))
    print("\n".join([*problems, f"{len(problems)} problems"]))
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
