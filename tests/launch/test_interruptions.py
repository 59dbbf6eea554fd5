"""A launcher that is killed takes its ranks with it; Ctrl-C saves, or says that nothing was saved.

tests/cluster/interruptions.py draws many more moments.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from interruptions import (
    KILLED,
    TRAIN,
    first_step,
    interrupt,
    kill_launcher,
    started,
    wait_for_step,
    write_recipe,
)

LIMIT_SECONDS = 30.0
"""For a busy machine; tests/cluster/interruptions.py allows 5."""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.whole)])
@pytest.mark.parametrize("launcher", list(KILLED))
def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path, launcher: str, seed: int) -> None:
    write_recipe(tmp_path, copies=60)
    moment = random.Random(f"{launcher} {seed}").uniform(0, 10)
    found = kill_launcher(tmp_path, KILLED[launcher], moment, LIMIT_SECONDS, with_ranks=True)
    assert found.processes > 0
    assert found.seconds < LIMIT_SECONDS


def test_ctrl_c_at_any_moment_saves_or_says_that_nothing_was_saved(tmp_path: Path) -> None:
    """The last one comes in training for certain."""
    write_recipe(tmp_path)
    longest = first_step(tmp_path) + 3
    rng = random.Random(0)
    moments = [*(rng.uniform(0, longest) for _ in range(2)), 2 * longest]
    found = [interrupt(tmp_path, moment) for moment in moments]
    assert [one for one in found if one.problem] == []
    assert found[-1].saved


def test_a_second_ctrl_c_ends_ranks_that_would_not_stop(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    with started(tmp_path, *TRAIN) as process:
        wait_for_step(process, tmp_path)
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(ranks[1]), signal.SIGSTOP)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(2)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    first, second = errors.splitlines()
    assert first.startswith("error: ended at once by a second signal, SIGINT; ")
    assert second == "error: rank 1 did not stop in time and is killed."
