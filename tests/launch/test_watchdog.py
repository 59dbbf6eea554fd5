"""Hang detection: which ranks are named, and how long a rank may make no progress."""

import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.launch import stop_requests
from toolkit.launch.health import local_process
from toolkit.launch.health.heartbeat import FailureReport, Heartbeat
from toolkit.launch.health.local_process import PeerProcess
from toolkit.launch.health.progress_page import ProgressPage
from toolkit.launch.health.stalled_ranks import (
    START_UP_SECONDS,
    StallClock,
    StalledRanks,
    describe_death,
    describe_hang,
    describe_lost_store,
    find_stalled_ranks,
    limit_seconds,
)
from toolkit.launch.health.watchdog import Watchdog

PHASES = ("data", "forward", "backward", "update", "fingerprint")


def heartbeat(rank: int, location: str = "7 update", *, waits: bool = True, **changes: Any) -> Heartbeat:
    """The heartbeat of a rank that exceeded its time limit in a step and phase."""
    step, phase = location.split()
    values: dict[str, Any] = {
        "rank": rank,
        "host": f"node{rank // 2}",
        "machine_id": "m",
        "pid": 100 + rank,
        "step": int(step),
        "phase": phase,
        "steps_started": int(step),
        "phases_started": PHASES.index(phase),
        "sequence": 50,
        "stalled_seconds": 601.0,
        "limit_seconds": 600.0,
        "in_collective": waits,
    }
    return Heartbeat(**values | changes)


def find(
    *heartbeats: Heartbeat, world_size: int | None = None, unresponsive: set[int] | None = None
) -> StalledRanks | None:
    by_rank = {one.rank: one for one in heartbeats}
    return find_stalled_ranks(by_rank, world_size or len(heartbeats), unresponsive or set())


def test_a_rank_whose_heartbeat_does_not_change_is_named_in_any_phase() -> None:
    found = find(heartbeat(0, "7 backward"), heartbeat(1, "7 forward"), heartbeat(2, "7 update"), unresponsive={2})
    assert found == StalledRanks(kind="unresponsive", ranks=(2,))
    assert found.stack_ranks == ()


def test_a_rank_that_never_started_is_named() -> None:
    assert find(heartbeat(0), heartbeat(2), world_size=3) == StalledRanks(kind="missing", ranks=(1,))


@pytest.mark.parametrize("location", ["7 data", "7 forward", "6 fingerprint"])
def test_the_rank_that_is_behind_is_named(location: str) -> None:
    found = find(heartbeat(0), heartbeat(1), heartbeat(2, location, waits=False), heartbeat(3))
    assert found == StalledRanks(kind="behind", ranks=(2,))
    assert found.stack_ranks == (2,)


def test_ranks_that_wait_for_a_rank_behind_are_not_named() -> None:
    """Tensor-parallel ranks 2 and 3 are both in the forward pass; 3 waits for 2 there, and 0 and 1 for both."""
    found = find(heartbeat(0), heartbeat(1), heartbeat(2, "7 forward", waits=False), heartbeat(3, "7 forward"))
    assert found == StalledRanks(kind="behind", ranks=(2,))


def test_ranks_that_all_wait_for_data_are_all_named() -> None:
    found = find(heartbeat(0, "7 data", waits=False), heartbeat(1, "7 data", waits=False))
    assert found == StalledRanks(kind="behind", ranks=(0, 1))


def test_a_rank_that_waits_in_another_collective_than_the_majority_is_named() -> None:
    found = find(heartbeat(0, "7 backward"), heartbeat(1, "7 backward"), heartbeat(2, "8 forward"))
    assert found == StalledRanks(kind="diverged", ranks=(2,))


def test_of_ranks_in_one_phase_the_one_that_waits_for_no_other_is_named() -> None:
    assert find(heartbeat(0), heartbeat(1, waits=False), heartbeat(2)) == StalledRanks(kind="not waiting", ranks=(1,))


@pytest.mark.parametrize("waits", [True, False])
def test_the_result_is_unknown_if_nothing_distinguishes_the_ranks(waits: bool) -> None:
    found = find(*(heartbeat(rank, waits=waits) for rank in range(6)))
    assert found is not None
    assert (found.kind, found.stack_ranks) == ("unknown", (0, 1, 2, 3))


def test_a_rank_within_its_own_time_limit_is_not_named() -> None:
    """The others wait for the first validation, which compiles."""
    slow = heartbeat(1, "7 data", waits=False, stalled_seconds=601.0, limit_seconds=1800.0)
    assert find(heartbeat(0), slow) is None
    progressing = heartbeat(1, "7 data", waits=False, stalled_seconds=3.0)
    assert find(heartbeat(0), progressing) is None


def test_a_single_process_names_itself() -> None:
    assert find(heartbeat(0, "7 backward", waits=False)) == StalledRanks(kind="behind", ranks=(0,))


def test_the_message_names_rank_host_step_and_phase_of_both_sides() -> None:
    heartbeats = [heartbeat(0), heartbeat(1), heartbeat(2, "7 data", waits=False)]
    stalled = find(*heartbeats)
    assert stalled is not None
    line = describe_hang(stalled, dict(enumerate(heartbeats)), 601.0)
    assert line.startswith("rank 2 (node1) in step 7 (data) hangs, and the others wait in step 7 (update)")
    assert "no progress for 601 s" in line


def test_an_unresponsive_rank_is_reported_in_the_step_in_which_the_others_wait() -> None:
    """Its last heartbeat may be several short steps old."""
    heartbeats = {0: heartbeat(0), 1: heartbeat(1, "5 forward")}
    line = describe_hang(StalledRanks(kind="unresponsive", ranks=(1,)), heartbeats, 600.0)
    assert line.startswith("rank 1 (node0) in step 7 no longer responds")


def test_the_message_of_a_death_has_the_exit_reason() -> None:
    exited = heartbeat(3, "5 forward", exit_reason="KeyError: 'x'")
    assert describe_death(exited, 7) == "rank 3 (node1) died in step 5 (forward): KeyError: 'x'"
    assert describe_death(heartbeat(3, "5 forward"), 6).startswith("rank 3 (node1) died in step 6: killed or crashed")
    assert "died in step 5 (forward): killed" in describe_death(heartbeat(3, "5 forward"), 5)


@pytest.mark.parametrize("seconds", [None, 20.0], ids=["closed", "no answer"])
def test_the_message_of_a_lost_store_names_its_host_and_where_this_rank_is(seconds: float | None) -> None:
    message = describe_lost_store(heartbeat(2, "7 update"), "node0", None, seconds)
    assert message.startswith("the launcher on node0, which hosts the store, ")
    assert "rank 2 (node1) in step 7 (update)" in message
    assert ("no progress for 20 s" in message) == bool(seconds)


def test_a_message_about_thousands_of_ranks_is_short() -> None:
    heartbeats = {rank: heartbeat(rank) for rank in range(4096)}
    assert len(describe_hang(StalledRanks(kind="unresponsive", ranks=tuple(range(2048))), heartbeats, 600.0)) < 600
    assert len(describe_hang(StalledRanks(kind="missing", ranks=tuple(range(2048))), heartbeats, 600.0)) < 600


def test_heartbeats_and_reports_survive_serialization() -> None:
    one = heartbeat(3, exit_reason="a 'quoted'\tword")
    assert Heartbeat.from_json(one.to_json()) == one
    report = FailureReport(reporter=1, message="x", stack_ranks=(1, 2), unreachable=1)
    assert FailureReport.from_json(report.to_json().encode()) == report


class TestStallClock:
    def test_seconds_add_up_until_the_count_moves(self) -> None:
        clock = StallClock(1.0)
        assert [clock.update(counter, now) for counter, now in ((5, 10.0), (5, 10.5), (5, 11.25), (6, 11.5))] == [
            0.0,
            0.5,
            1.25,
            0.0,
        ]

    def test_a_process_that_was_suspended_for_an_hour_has_not_hung(self) -> None:
        clock = StallClock(1.0)
        clock.update(5, 10.0)
        assert clock.update(5, 3610.0) == 1.0


@pytest.mark.parametrize(
    ("phase", "steps_started", "seconds"),
    [
        ("start-up", 0, START_UP_SECONDS),
        ("forward", 1, START_UP_SECONDS),
        ("forward", 2, 100.0),
        ("data", 9, 100.0),
        ("evaluate", 9, 300.0),
        ("checkpoint", 9, 300.0),
    ],
)
def test_start_up_validation_and_checkpoints_may_take_longer(phase: str, steps_started: int, seconds: float) -> None:
    assert limit_seconds(100.0, phase, steps_started) == seconds
    assert limit_seconds(0.0, phase, steps_started) == 0.0


def test_a_long_timeout_also_extends_the_start_up_limit() -> None:
    assert limit_seconds(7200.0, "start-up", 0) == 21600.0


def test_a_peer_process_can_be_watched_by_several_threads() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    peer = PeerProcess(1, process.pid)
    answers: list[bool | Exception] = []

    def ask() -> None:
        try:
            answers.extend(peer.has_ended() for _ in range(20_000))
        except Exception as error:
            answers.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) == {False}
    process.kill()
    process.wait()
    assert peer.has_ended()
    peer.close()
    assert not peer.has_ended()


@pytest.mark.parametrize("noticed_by", ["peer", "store"])
def test_a_rank_that_ctrl_c_ended_is_not_reported_as_dead_by_one_that_gets_it_a_moment_later(
    noticed_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    printed: list[str] = []

    def is_stopping() -> bool:
        asked.append(True)
        return len(asked) > 2

    def end_if_waiting() -> None:
        if len(asked) > 2:
            raise SystemExit(130)

    def exit_now(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(stop_requests, "is_stopping", is_stopping)
    monkeypatch.setattr(stop_requests, "end_if_waiting", end_if_waiting)
    monkeypatch.setattr(local_process, "exit_now", exit_now)
    monkeypatch.setattr(local_process, "print_error", printed.append)
    store: Any = SimpleNamespace(
        rank=1,
        world_size=2,
        read=lambda ranks: {rank: heartbeat(rank) for rank in ranks},
        report_failure=lambda report: report,
        increment=lambda name: 1,
    )
    watchdog = Watchdog(store, local_rank=1, timeout_seconds=600, store_rank=0, store_host="node0")
    peer: Any = SimpleNamespace(rank=0, close=lambda: None)
    watchdog._has_lost_connection = noticed_by == "store"
    notice = watchdog._handle_lost_store if noticed_by == "store" else partial(watchdog._report_peer, peer)
    with pytest.raises(SystemExit) as ended:
        notice()
    assert ended.value.code == 130
    assert printed == []


@pytest.mark.parametrize("notices_first", ["its end", "its closed connection"])
def test_a_rank_killed_before_its_first_heartbeat_of_a_step_is_named_with_the_step(
    monkeypatch: pytest.MonkeyPatch, notices_first: str
) -> None:
    """A fast rank may train several steps in the half second after its heartbeat of the start-up."""

    def exit_now(code: int) -> None:
        raise SystemExit(code)

    printed: list[str] = []
    monkeypatch.setattr(stop_requests, "is_stopping", lambda: True)
    monkeypatch.setattr(local_process, "exit_now", exit_now)
    monkeypatch.setattr(local_process, "print_error", printed.append)
    last_heartbeat = replace(heartbeat(1), step=0, phase="start-up", steps_started=0)
    store: Any = SimpleNamespace(
        rank=0,
        world_size=2,
        read=lambda ranks: dict.fromkeys(ranks, last_heartbeat),
        report_failure=lambda report: report,
        count=lambda name: 1,
        increment=lambda name: 1,
        publish=lambda heartbeat: None,
        poll=lambda: (None, None),
    )
    watchdog = Watchdog(store, local_rank=0, timeout_seconds=600, store_rank=0, store_host="node0")
    watchdog._heartbeat_seconds = 0.01
    watchdog.report_phase("forward", 3)
    page = ProgressPage.create()
    assert page is not None
    page.write(3, "backward")
    watchdog._peer_page = page
    watchdog._peer = SimpleNamespace(rank=1, close=lambda: None, has_ended=lambda: True)  # type: ignore[assignment]
    notice = watchdog._check_peer if notices_first == "its end" else watchdog._find_dead_ranks
    with pytest.raises(SystemExit):
        notice()
    assert printed[0].startswith("error: rank 1 (node0) died in step 3 (backward): killed")


def test_ranks_that_differ_in_a_detail_are_in_the_same_phase() -> None:
    store: Any = SimpleNamespace(rank=0, world_size=1)
    watchdog = Watchdog(store, local_rank=0, timeout_seconds=600, store_rank=None, store_host="node0")
    watchdog.report_phase("data", 3)
    watchdog.report_phase("pipeline: forward pass of micro-batch 0 in stage 1")
    begun = watchdog._progress.phases_started
    watchdog.report_phase("pipeline: waits for the gradient of micro-batch 0 at stage 1")
    assert watchdog._progress.phases_started == begun
    assert watchdog._progress.phase == "pipeline: waits for the gradient of micro-batch 0 at stage 1"
    watchdog.report_phase("update")
    assert watchdog._progress.phases_started == begun + 1
