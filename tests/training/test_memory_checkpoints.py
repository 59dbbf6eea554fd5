"""Checkpoints in the memory of hosts: a run that starts again resumes from them, in any layout, as from a disk."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from train_script import train_here

from toolkit.checkpoint.save import AsyncSaver
from toolkit.config import dump_recipe
from toolkit.errors import CheckpointError, RunError
from toolkit.launch.local_ranks import RankFailedError
from toolkit.training import memory_checkpoints

STEPS = 6
DIES_AFTER = 5
Ranks = Callable[..., list[Any]]


@pytest.fixture
def launchers() -> Iterator[list[int]]:
    """Processes that stand for the launchers of two hosts, whose ranks may die and start again."""
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    yield [process.pid for process in processes]
    for process in processes:
        process.kill()
        process.wait()


def train_on_hosts(folder: str, launchers: Sequence[int], words: Sequence[str], dies_after: int = 0) -> str:
    """Train on a rank, each rank being a host of its own with its launcher; all die after that step, if any."""
    os.environ["LOCAL_RANK"] = "0"
    launcher = launchers[int(os.environ["RANK"])]
    on_step_end = memory_checkpoints.MemoryCheckpoints.on_step_end

    def step_or_die(self: Any, run: Any, metrics: Any) -> None:
        on_step_end(self, run, metrics)
        if run.step == dies_after:
            self._checkpointer.finish()
            raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.training.train.restarting_launcher", lambda: launcher)
        patch.setattr(memory_checkpoints.MemoryCheckpoints, "on_step_end", step_or_die)
        return train_here(folder, list(words))


@pytest.fixture
def words(make_recipe: Callable[..., Any], tmp_path: Path) -> list[str]:
    recipe = make_recipe(train__steps=STEPS, checkpoint={"memory_every": 2})
    (tmp_path / "small.yaml").write_text(dump_recipe(recipe))
    return ["--config", "small.yaml"]


@pytest.fixture
def died(ranks: Ranks, words: list[str], launchers: list[int], tmp_path: Path) -> None:
    """A run in `run` on two hosts died after its fifth step; the last checkpoint in memory is of the fourth."""
    with pytest.raises(RankFailedError):
        ranks(train_on_hosts, 2, str(tmp_path), launchers, [*words, "run_dir=run"], DIES_AFTER, joined=False)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("layout", "hosts"),
    [
        pytest.param("parallel.zero_stage=2", [0, 1], id="both hosts"),
        pytest.param("parallel.tp=2", [0, 1], id="another layout"),
        pytest.param("parallel.zero_stage=1", [0], id="the second host is lost"),
        pytest.param("parallel.zero_stage=1", [1], id="the first host is lost"),
    ],
)
def test_a_run_resumes_from_the_memory_of_the_hosts_that_are_left(
    layout: str, hosts: list[int], died: None, ranks: Ranks, words: list[str], launchers: list[int], tmp_path: Path
) -> None:
    assert not list((tmp_path / "run").glob("step-*"))
    left = [launchers[host] for host in hosts]
    again = [*words, "run_dir=run", "--resume", "auto", layout]
    banner = ranks(train_on_hosts, len(left), str(tmp_path), left, again, joined=False)[0]
    assert "hostmem://run/step-00000004" in banner
    reference = [*words, "run_dir=one", "checkpoint.memory_every=0"]
    ranks(train_here, 1, str(tmp_path), reference, joined=False)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


def test_a_run_with_a_url_takes_its_metrics_from_the_memory_to_another_host(
    ranks: Ranks, words: list[str], launchers: list[int], tmp_path: Path
) -> None:
    store = [*words, f"checkpoint.url=file://{tmp_path / 'store'}", "checkpoint.every=100"]
    with pytest.raises(RankFailedError):
        ranks(train_on_hosts, 2, str(tmp_path), launchers, [*store, "run_dir=here"], DIES_AFTER, joined=False)
    again = [*store, "run_dir=there", "--resume", "auto"]
    banner = ranks(train_on_hosts, 2, str(tmp_path), launchers, again, joined=False)[0]
    assert "hostmem://run/step-00000004" in banner
    assert len(losses(tmp_path / "there")) == STEPS


def test_a_newer_checkpoint_on_disk_comes_first(
    died: None, ranks: Ranks, words: list[str], launchers: list[int], tmp_path: Path
) -> None:
    other = [*words, "run_dir=other", "checkpoint.memory_every=0", "checkpoint.every=5"]
    ranks(train_here, 1, str(tmp_path), other, joined=False)
    shutil.copytree(tmp_path / "other" / "step-00000005", tmp_path / "run" / "step-00000005")
    again = [*words, "run_dir=run", "--resume", "auto"]
    banner = ranks(train_on_hosts, 2, str(tmp_path), launchers, again, joined=False)[0]
    assert "run/step-00000005, checkpoint" in banner


def test_a_run_that_does_not_resume_begins_at_step_0_and_clears_the_memory(
    died: None, ranks: Ranks, words: list[str], launchers: list[int], tmp_path: Path
) -> None:
    fresh = [*words, "run_dir=fresh", "checkpoint.memory_every=100"]
    ranks(train_on_hosts, 2, str(tmp_path), launchers, fresh, joined=False)
    assert len(losses(tmp_path / "fresh")) == STEPS
    again = [*words, "run_dir=run", "--resume", "auto"]
    banner = ranks(train_on_hosts, 2, str(tmp_path), launchers, again, joined=False)[0]
    assert "no checkpoint in run: training starts at step 0" in banner


def train_without_room(folder: str, launchers: Sequence[int], words: Sequence[str]) -> str:
    def fail(self: AsyncSaver, *_: object) -> None:
        raise CheckpointError("the memory of this host has no room for it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncSaver, "begin", fail)
        return train_on_hosts(folder, launchers, words)


def test_a_checkpoint_in_memory_that_fails_is_said_and_the_run_goes_on(
    ranks: Ranks, words: list[str], launchers: list[int], tmp_path: Path
) -> None:
    printed = ranks(train_without_room, 2, str(tmp_path), launchers, [*words, "run_dir=run"], joined=False)[0]
    assert "step 2: no checkpoint in memory: the memory of this host has no room for it" in printed
    assert len(losses(tmp_path / "run")) == STEPS


def test_a_launcher_that_does_not_start_ranks_again_is_refused(ranks: Ranks, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="this launcher does not start ranks again"):
        ranks(train_here, 1, str(tmp_path), [*words, "run_dir=run"], joined=False)
    assert not (tmp_path / "run").exists()
