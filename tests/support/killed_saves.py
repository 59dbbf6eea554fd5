"""kill -9 of a rank at a random moment of a save, while every rank is slowed down at random."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tiny_checkpoint import SIZES, contents_of, save_tiny

from toolkit.checkpoint import names, rank_writer
from toolkit.checkpoint.commit import Retention
from toolkit.checkpoint.names import parse_temporary_name
from toolkit.checkpoint.save import AsyncSaver
from toolkit.checkpoint.select import select_checkpoint

LONGEST_DELAY_SECONDS = 0.5
RANKS = 3


def _save_until_killed(run_dir: Path, seed: int) -> None:
    """Save steps 10, 20, 20, 30, 30, …, and append what was committed to a file beside the run."""
    rank = int(os.environ["RANK"])
    chance = random.Random(seed)
    victim, seconds = chance.randrange(RANKS), chance.uniform(0.0, 2.0)
    is_async = chance.random() < 0.3
    delays = [chance.uniform(0.0, LONGEST_DELAY_SECONDS) / 10 for _ in range(RANKS)]
    retention = chance.choice((None, Retention(newest=1), Retention(newest=2, every=30)))
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
        if is_async:
            saver.begin(run_dir, step, contents_of(step, trainer_state={"step": step}, retention=retention))
            while saver.poll() is None:
                time.sleep(0.01)
        else:
            save_tiny(run_dir, step, trainer_state={"step": step}, retention=retention)
        if rank == 0:
            with committed.open("a") as file:
                file.write(f"{step}\n")


def _slow_down(seconds: float) -> None:
    """Delay every write of this rank."""
    write = names.write_all

    def slowly(descriptor: int, content: memoryview) -> None:
        time.sleep(seconds)
        write(descriptor, content)

    names.write_all = rank_writer.write_all = slowly


def kill_in_a_save(run_ranks: Callable[..., Any], folder: Path, seed: int) -> tuple[str, bool]:
    """One draw: what is wrong with the newest checkpoint, or ""; and whether a save was interrupted."""
    from toolkit.launch.local_ranks import RankFailedError

    run_dir = folder / f"run-{seed}"
    try:
        run_ranks(partial(_save_until_killed, run_dir, seed), RANKS)
    except RankFailedError as error:
        # The victim's error, or that of the first rank which noticed.
        if "died without an error message" not in str(error) and "by peer" not in str(error):
            return f"seed {seed}: {error}", False
    committed = max(map(int, run_dir.with_suffix(".committed").read_text().split()))
    chosen = select_checkpoint(run_dir)
    step = int(chosen.path.name.removeprefix(".").split(".")[0].removeprefix("step-"))
    was_interrupted = any(parse_temporary_name(path.name) is not None for path in run_dir.iterdir())
    if chosen.notices or step < committed:
        return f"seed {seed}: {chosen}, {committed} was committed", was_interrupted
    save_tiny(run_dir, 7)  # the next save works, and leaves no garbage
    left = [path.name for path in run_dir.iterdir() if path.name.startswith(".")]
    return f"seed {seed}: {left} were left" if left else "", was_interrupted
