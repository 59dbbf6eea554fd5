"""kill -9 of a rank at a random moment of a save, while every rank writes slower or faster by chance.

    python tests/checkpoint_kills.py --draws 200

The parent then looks for what it would go on from: the newest checkpoint must be whole, and no older than the last one
whose `save` returned. tests/distributed/test_checkpoint_commit.py runs a short draw.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoint import SIZES, groups_of, save_tiny, write_beside

from toolkit.checkpoint import output_file, plain_file
from toolkit.checkpoint.async_saver import AsyncSaver
from toolkit.checkpoint.choose import choose
from toolkit.checkpoint.names import unfinished
from toolkit.checkpoint.retention import Keep

LONGEST_DELAY_SECONDS = 0.5
RANKS = 3


def _save_until_killed(run_dir: Path, seed: int) -> None:
    """Saves steps 10, 20, 20, 30, 30, …, and writes what was committed to a file beside the run."""
    rank = int(os.environ["RANK"])
    chance = random.Random(seed)
    victim, seconds = chance.randrange(RANKS), chance.uniform(0.0, 2.0)
    is_async = chance.random() < 0.3
    delays = [chance.uniform(0.0, LONGEST_DELAY_SECONDS) / 10 for _ in range(RANKS)]
    keep = chance.choice((None, Keep(newest=1), Keep(newest=2, every=30)))
    committed = run_dir.with_suffix(".committed")
    save_tiny(run_dir, 10)
    if rank == 0:
        committed.write_text("10\n")
    if rank == victim:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    _slow_down(delays[rank])
    saver = AsyncSaver(sizes=SIZES)
    for i in range(2, 1000):
        step = i // 2 * 10 + 10
        state = {"step": step}
        if is_async:
            saver.begin(run_dir, step, groups=groups_of(step), trainer_state=state, beside=write_beside, keep=keep)
            while saver.poll() is None:
                time.sleep(0.01)
        else:
            save_tiny(run_dir, step, trainer_state=state, keep=keep)
        if rank == 0:
            with committed.open("a") as file:
                file.write(f"{step}\n")


def _slow_down(seconds: float) -> None:
    """Every file that this rank writes takes so much longer."""
    write = plain_file.write_all

    def slowly(descriptor: int, content: memoryview) -> None:
        time.sleep(seconds)
        write(descriptor, content)

    plain_file.write_all = output_file.write_all = slowly


def kill_in_a_save(run_ranks: Callable[..., Any], folder: Path, seed: int) -> tuple[str, bool]:
    """One draw: what is wrong with the newest checkpoint, "" where it is whole; and whether a save was cut short."""
    from toolkit.train.local_ranks import RankFailedError

    run_dir = folder / f"run-{seed}"
    try:
        run_ranks(partial(_save_until_killed, run_dir, seed), RANKS)
    except RankFailedError as error:
        # The victim's, or that of a rank which noticed first.
        if "died without a word" not in str(error) and "by peer" not in str(error):
            return f"seed {seed}: {error}", False
    committed = max(map(int, run_dir.with_suffix(".committed").read_text().split()))
    chosen = choose(run_dir)
    step = int(chosen.path.name.removeprefix(".").split(".")[0].removeprefix("step-"))
    was_cut_short = any(unfinished(path.name) is not None for path in run_dir.iterdir())
    if chosen.notices or step < committed:
        return f"seed {seed}: {chosen}, {committed} was committed", was_cut_short
    save_tiny(run_dir, 7)  # the next saver finds nothing in its way, and leaves no rubbish
    left = [path.name for path in run_dir.iterdir() if path.name.startswith(".")]
    return f"seed {seed}: {left} were left" if left else "", was_cut_short


def main() -> None:
    parser = argparse.ArgumentParser(description="kill -9 of a rank inside a save")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from toolkit.train.local_ranks import run_ranks

    bad, cut_short = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seed, options.seed + options.draws):
            problem, was_cut_short = kill_in_a_save(run_ranks, Path(folder), seed)
            bad += [problem] if problem else []
            cut_short += was_cut_short
    end = (
        f"{options.draws} kills, {cut_short} of them left a folder half written: {len(bad)} unusable newest checkpoints"
    )
    print("\n".join([*bad, end]))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
