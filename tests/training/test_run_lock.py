"""RunLock: exactly one process trains in a run directory, whoever else is killed, suspended or started meanwhile."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import RunDirectoryError
from toolkit.training import run_lock
from toolkit.training.run_lock import Holder, RunLock, is_locked

FORK = multiprocessing.get_context("fork")
Holding = Callable[..., tuple[Any, Any]]
LONG, SHORT = 600.0, 0.6
"""Leases in seconds: nothing waits for the long one, and what has to wait waits for the short one."""


@pytest.fixture(autouse=True)
def lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunLock, "lease_seconds", LONG)


def on(machine: str) -> Holder:
    """This process, as if it ran on another machine."""
    return replace(Holder.here(), host=machine, machine_id=f"boot of {machine}")


def locks(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.glob(".*"))


def plant(run_dir: Path, number: int, holder: Holder, first_line: str = "000000000007") -> None:
    (run_dir / f".lock-{number}").write_text(f"{first_line}\n{json.dumps(asdict(holder))}\n")


def ended(holder: Holder) -> Holder:
    """A process of that machine that has ended, and whose pid this one got."""
    return replace(holder, start_ticks=holder.start_ticks - 1)


def hold(run_dir: Path, machine: str | None, lease_seconds: float, renews: bool, pipe: Any) -> None:
    """Take a directory in a process of its own, report it, and write there until that is refused."""
    RunLock.lease_seconds = lease_seconds
    if not renews:
        RunLock._renew = lambda self: None  # type: ignore[method-assign]
    lock = RunLock(run_dir, on(machine) if machine else None)
    lock.acquire()
    pipe.send("holds it")
    asked = ""
    while asked != "end":
        try:
            lock.check(quickly=True)
        except RunDirectoryError as error:
            pipe.send(str(error))
            return
        with (run_dir / "written").open("a") as file:
            file.write(".")
        if (asked := pipe.recv() if pipe.poll(0.01) else "") == "pause":
            pipe.send("pauses")
            pipe.recv()
    lock.release()
    pipe.send("released it")


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """Start a process that holds tmp_path; returns it, and a pipe to it."""
    started = []

    def start(machine: str | None = None, lease_seconds: float = LONG, *, renews: bool = True) -> tuple[Any, Any]:
        pipe, other = FORK.Pipe()
        process = FORK.Process(target=hold, args=(tmp_path, machine, lease_seconds, renews, other), daemon=True)
        process.start()
        started.append(process)
        assert pipe.poll(60)
        assert pipe.recv() == "holds it"
        return process, pipe

    yield start
    for process in started:
        process.kill()
        process.join()


def test_a_released_directory_is_free_and_clean(tmp_path: Path) -> None:
    for _ in range(3):
        lock = RunLock(tmp_path)
        lock.acquire()
        assert is_locked(tmp_path)
        assert locks(tmp_path) == [".lock-1"]
        lock.release()
        assert not is_locked(tmp_path)
        assert locks(tmp_path) == []


def test_a_second_process_is_refused_with_one_line_that_says_by_whom(tmp_path: Path, holder: Holding) -> None:
    process, pipe = holder()
    with pytest.raises(RunDirectoryError) as error:
        RunLock(tmp_path).acquire()
    message = str(error.value)
    since = Holder.decode((tmp_path / ".lock-1").read_bytes()).since  # type: ignore[union-attr]
    who = f"process {process.pid} on {os.uname().nodename} has trained there since {since}"
    advice = "Wait until it has ended, or end it, or set run_dir to another directory."
    assert message == f"run_dir={tmp_path}: {who}. {advice}"
    assert error.value.scope == "job"
    assert locks(tmp_path) == [".lock-1"]
    pipe.send("end")
    assert pipe.recv() == "released it"
    RunLock(tmp_path).acquire()


@pytest.mark.parametrize("is_reaped", [False, True], ids=["zombie", "reaped"])
def test_a_killed_holder_is_replaced_at_once(tmp_path: Path, holder: Holding, is_reaped: bool) -> None:
    process, _ = holder()
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if is_reaped:
        process.join()
    lock = RunLock(tmp_path)
    lock.acquire()
    assert locks(tmp_path) == [".lock-2"]
    lock.release()
    assert locks(tmp_path) == []


def test_a_pid_that_was_reused_does_not_hold_the_directory(tmp_path: Path) -> None:
    plant(tmp_path, 1, ended(Holder.here()))
    RunLock(tmp_path).acquire()
    plant(tmp_path, 3, Holder.here())
    with pytest.raises(RunDirectoryError):
        RunLock(tmp_path).acquire()


@pytest.mark.parametrize("first_line", ["released    ", "000000000007"])
def test_a_process_of_another_machine_holds_it_until_it_releases_it_or_is_silent_for_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], first_line: str
) -> None:
    """Even if a process here has its pid."""
    plant(tmp_path, 1, on("node2"), first_line)
    monkeypatch.setattr(RunLock, "lease_seconds", LONG if "released" in first_line else SHORT)
    lock = RunLock(tmp_path)
    lock.acquire()
    waited = capfd.readouterr().err
    if "released" in first_line:
        assert (locks(tmp_path), waited) == ([".lock-2"], "")
    else:
        assert locks(tmp_path) == [".lock-1", ".lock-2"]  # it may come back, and only it may remove its file
        assert len(waited.splitlines()) == 1
        assert f"process {os.getpid()} on node2 may still train there" in waited
        lock.release()
        assert not is_locked(tmp_path)  # the next one need not wait for a lease
        RunLock(tmp_path).acquire()
        assert locks(tmp_path) == [".lock-1", ".lock-3"]


def test_a_live_process_of_another_machine_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: Holding
) -> None:
    holder("node2", lease_seconds=3.0)  # a heartbeat each half second
    monkeypatch.setattr(RunLock, "lease_seconds", 60.0)
    with pytest.raises(RunDirectoryError, match=r"on node2 has trained there since"):
        RunLock(tmp_path, on("node1")).acquire()


@pytest.mark.parametrize("renews", [True, False], ids=["its thread looks first", "its main thread looks first"])
def test_a_holder_that_was_suspended_writes_nothing_after_it_lost_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: Holding, renews: bool
) -> None:
    process, pipe = holder("node2", SHORT, renews=renews)
    pipe.send("pause")
    assert pipe.recv() == "pauses"  # not between a look at the lock and the write
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(RunDirectoryError):  # it is there, as seen from its own machine
        RunLock(tmp_path, on("node2")).acquire()
    monkeypatch.setattr(RunLock, "lease_seconds", SHORT)
    lock = RunLock(tmp_path, on("node1"))
    lock.acquire()
    time.sleep(SHORT)  # for longer than half a lease, for which it need not look
    before = (tmp_path / "written").read_text()
    os.kill(process.pid, signal.SIGCONT)
    pipe.send("go on")
    assert pipe.poll(60)
    assert f"process {os.getpid()} on node1 may train there now" in pipe.recv()
    assert before
    assert (tmp_path / "written").read_text() == before
    lock.check()


def test_a_holder_that_comes_back_during_a_takeover_keeps_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunLock, "_renew", lambda self: None)
    back = RunLock(tmp_path, on("node2"))
    back.acquire()
    monkeypatch.setattr(RunLock, "lease_seconds", SHORT)

    class Taker(RunLock):
        def _create(self, number: int, content: bytes) -> bool:
            back.check()  # the last moment before the higher file exists
            return super()._create(number, content)

    with pytest.raises(RunDirectoryError, match=r"on node2 has trained there"):
        Taker(tmp_path, on("node1")).acquire()
    assert locks(tmp_path) == [".lock-1"]
    back.check()


def test_who_comes_too_late_to_a_free_directory_steps_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saw no holder; meanwhile one came and was killed, and another one has taken its place."""
    monkeypatch.setattr(RunLock, "lease_seconds", SHORT)

    class Late(RunLock):
        def _create(self, number: int, content: bytes) -> bool:
            plant(tmp_path, 2, Holder.here())
            return super()._create(number, content)

    with pytest.raises(RunDirectoryError, match="has trained there"):
        Late(tmp_path).acquire()
    assert locks(tmp_path) == [".lock-2"]


def test_a_holder_whose_directory_was_deleted_and_used_again_stops(tmp_path: Path) -> None:
    first, second = RunLock(tmp_path), RunLock(tmp_path, ended(Holder.here()))
    first.acquire()
    (tmp_path / ".lock-1").unlink()
    second.acquire()
    with pytest.raises(RunDirectoryError, match="may train there now"):
        first.check()
    first.release()
    assert locks(tmp_path) == [".lock-1"]


@pytest.mark.parametrize("content", ["", "\n\n", "1\nnull\n", "1\n{}\n", '1\n{"pid": -1}\n', "\x00" * 99])
def test_a_file_that_says_nothing_holds_the_directory_for_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """Its writer may be about to write it, or was killed before."""
    (tmp_path / ".lock-4").write_text(content)
    monkeypatch.setattr(RunLock, "lease_seconds", SHORT)
    RunLock(tmp_path).acquire()
    assert ".lock-5" in locks(tmp_path)


ROUNDS, CONTENDERS = 50, 3


def contend(run_dir: Path, machine: str | None, barrier: Any, results: Any, rounds: int) -> None:
    RunLock.lease_seconds = 6.0
    for _ in range(rounds):
        lock = RunLock(run_dir, on(machine) if machine else None)
        barrier.wait(60)
        barrier.wait(60)
        try:
            lock.acquire()
            results.put("")
        except RunDirectoryError as error:
            results.put(str(error))
        barrier.wait(60)  # whoever got it keeps it until all have tried
        lock.release()


@pytest.mark.parametrize(("machines", "rounds"), [(1, ROUNDS), (CONTENDERS, 2)], ids=["one machine", "several"])
def test_of_processes_that_start_at_once_exactly_one_gets_the_directory(
    tmp_path: Path, machines: int, rounds: int
) -> None:
    """In a directory that is free, or was left by a killed process, or released by one of another machine."""
    barrier, results = FORK.Barrier(CONTENDERS + 1), FORK.Queue()
    names = [f"node{number}" if machines > 1 else None for number in range(CONTENDERS)]
    arguments = [(tmp_path, name, barrier, results, rounds) for name in names]
    processes = [FORK.Process(target=contend, args=one, daemon=True) for one in arguments]
    for process in processes:
        process.start()
    try:
        for number in range(rounds):
            barrier.wait(60)
            for left in tmp_path.iterdir():
                left.unlink()
            if number % 3 == 1:
                plant(tmp_path, 3, ended(Holder.here() if machines == 1 else on("node1")), "released")
            if number % 3 == 2 and machines == 1:
                plant(tmp_path, 5, ended(Holder.here()))
            barrier.wait(60)
            messages = sorted(results.get(timeout=60) for _ in range(CONTENDERS))
            assert [bool(message) for message in messages] == [False, True, True], f"round {number}"
            assert all("has trained there since" in message for message in messages[1:])
            barrier.wait(60)
    finally:
        for process in processes:
            with suppress(OSError):
                process.kill()
            process.join()


@pytest.mark.parametrize(
    ("earlier", "now", "patience"),
    [("job", "job", SHORT), ("job", "other", LONG), ("job", "", LONG), ("", "", LONG)],
)
def test_the_lease_is_short_between_starts_of_one_launch_alone(
    earlier: str,
    now: str,
    patience: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant(tmp_path, 1, replace(on("another machine"), launch=earlier))
    monkeypatch.setattr(RunLock, "launch_lease_seconds", SHORT)
    seconds = []

    def stop(slept: float) -> None:
        seconds.append(slept)
        raise InterruptedError

    monkeypatch.setattr(run_lock.time, "sleep", stop)
    with pytest.raises(InterruptedError):
        RunLock(tmp_path, replace(Holder.here(), launch=now)).acquire()
    assert f"for {patience:g} s, this run takes its place" in capsys.readouterr().err
    assert seconds == [patience / run_lock._POLLS]


def test_a_later_start_of_the_same_launch_takes_the_place_of_a_lost_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, 1, replace(on("a lost machine"), launch="job"))
    monkeypatch.setattr(RunLock, "launch_lease_seconds", SHORT)
    lock = RunLock(tmp_path, replace(Holder.here(), launch="job"))
    lock.acquire()
    lock.check()
    lock.release()


def test_a_holder_of_an_elastic_launch_looks_at_the_disk_within_its_short_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = RunLock(tmp_path, replace(on("here"), launch="job"))
    lock.acquire()
    lock._is_over.set()  # it renews no more
    plant(tmp_path, 2, replace(on("another machine"), launch="job"))
    lock.check(quickly=True)
    later = run_lock._now() + RunLock.launch_lease_seconds / 2
    monkeypatch.setattr(run_lock, "_now", lambda: later)
    with pytest.raises(RunDirectoryError, match="may train there now"):
        lock.check(quickly=True)
