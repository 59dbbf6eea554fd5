"""Forked ranks: results in order of rank, and errors that name the rank."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from toolkit.errors import DataError
from toolkit.launch.local_ranks import RankFailedError, run_jobs

Ranks = Callable[..., list[Any]]


def test_results_come_in_order_of_rank(ranks: Ranks) -> None:
    assert ranks(lambda: dist.get_rank() * 10, 3) == [0, 10, 20]


def test_ranks_share_a_process_group(ranks: Ranks) -> None:
    def total() -> torch.Tensor:
        value = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(value)
        return value

    assert [value.item() for value in ranks(total, 4)] == [10.0] * 4


def test_a_toolkit_error_of_a_rank_is_raised_here(ranks: Ranks) -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise DataError("no text")
        time.sleep(60)

    with pytest.raises(DataError, match="no text"):
        ranks(fail, 2)


def test_another_error_names_the_rank_with_its_traceback(ranks: Ranks) -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("of mine")
        time.sleep(60)

    with pytest.raises(RankFailedError, match=r"(?s)rank 1 failed.*ZeroDivisionError: of mine"):
        ranks(fail, 2)


def test_a_rank_that_dies_is_named(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match="rank 1 died"):
        ranks(lambda: os._exit(9) if dist.get_rank() == 1 else time.sleep(60), 2)


@pytest.mark.daily
def test_a_rank_that_hangs_is_named(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match=r"ranks \[1\] did not finish"):
        ranks(lambda: time.sleep(60) if os.environ["RANK"] == "1" else None, 2, timeout_seconds=5, joined=False)


def test_a_rank_that_was_killed_is_named_with_its_signal(ranks: Ranks) -> None:
    def die() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RankFailedError, match=r"rank 1 died without an error message \(SIGKILL, as sent by the kernel"):
        ranks(die, 2)


def test_a_rank_that_fails_is_named_and_not_its_peer_that_lost_it(ranks: Ranks) -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("of mine")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankFailedError, match=r"(?s)rank 1 failed.*of mine"):
        ranks(fail, 2)


@pytest.mark.usefixtures("ranks")
class TestJobs:
    def ended(
        self, *jobs: tuple[Callable[[], Any], int], cores: int = 4, timeout_seconds: float = 60
    ) -> dict[int, Any]:
        """Outcomes by index of the job, in the order in which jobs ended."""
        found = run_jobs(jobs, cores=cores, timeout_seconds=timeout_seconds, joined=False)
        return {index: outcome for index, outcome, _ in found}

    def test_each_job_has_its_results(self) -> None:
        found = self.ended((lambda: "a", 2), (lambda: "b", 1), (lambda: "c", 3))
        assert found == {0: ["a"] * 2, 1: ["b"], 2: ["c"] * 3}

    def test_jobs_run_at_the_same_time(self, tmp_path: Path) -> None:
        # Each waits for the other: neither would end if they ran one after the other.
        found = self.ended((lambda: meet(tmp_path, "a", "b"), 1), (lambda: meet(tmp_path, "b", "a"), 1))
        assert found == {0: ["met"], 1: ["met"]}

    def test_jobs_are_yielded_when_they_end(self, tmp_path: Path) -> None:
        jobs = [(lambda: meet(tmp_path, "a", "b"), 1), (lambda: None, 1)]
        found = run_jobs(jobs, cores=4, timeout_seconds=60, joined=False)
        assert next(found)[0] == 1
        (tmp_path / "b").touch()
        assert next(found)[:2] == (0, ["met"])

    def test_a_failed_job_does_not_affect_the_others(self) -> None:
        def fail() -> None:
            raise ZeroDivisionError("of mine")

        found = self.ended((lambda: "a", 1), (fail, 2), (lambda: "c", 1))
        assert isinstance(found[1], RankFailedError)
        assert (found[0], found[2]) == (["a"], ["c"])

    def test_a_toolkit_error_is_an_outcome(self) -> None:
        def fail() -> None:
            raise DataError("no text")

        assert str(self.ended((fail, 1))[0]) == "no text"

    def test_a_job_that_hangs_is_killed_while_others_finish(self) -> None:
        found = self.ended((lambda: time.sleep(60), 1), (lambda: "b", 1), timeout_seconds=5)
        assert "did not finish in 5 s" in str(found[0])
        assert found[1] == ["b"]

    def test_the_timeout_of_a_job_begins_when_it_starts(self) -> None:
        found = self.ended((lambda: time.sleep(60), 1), (lambda: time.sleep(0.5), 1), cores=1, timeout_seconds=4)
        assert found[1] == [None]

    def test_a_large_job_waits_until_there_are_cores(self, tmp_path: Path) -> None:
        def alone() -> bool:
            return (tmp_path / "done").exists()

        def small() -> None:
            time.sleep(0.5)
            (tmp_path / "done").touch()

        assert self.ended((small, 1), (alone, 2), cores=2)[1] == [True, True]

    def test_a_job_larger_than_the_machine_runs_by_itself(self) -> None:
        assert self.ended((lambda: "a", 3), cores=1)[0] == ["a"] * 3

    def test_closing_the_iterator_kills_the_ranks(self) -> None:
        found = run_jobs([(os.getpid, 1), (lambda: time.sleep(60), 1)], cores=2, timeout_seconds=60, joined=False)
        next(found)
        (sleeper,) = multiprocessing.active_children()
        found.close()
        assert not sleeper.is_alive()


def meet(folder: Path, own: str, other: str) -> str:
    (folder / own).touch()
    deadline = time.monotonic() + 30
    while not (folder / other).exists():
        if time.monotonic() > deadline:
            return "timed out"
        time.sleep(0.01)
    return "met"
