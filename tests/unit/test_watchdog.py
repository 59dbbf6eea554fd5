"""The watchdog's judgement: who holds the others up, and for how long one may be still."""

import subprocess
import sys
import threading
from typing import Any

import pytest

from toolkit.train.watchdog.culprit import Culprit, describe_death, describe_hang, find_culprit
from toolkit.train.watchdog.entry import Entry, Verdict
from toolkit.train.watchdog.neighbour import Neighbour
from toolkit.train.watchdog.stillness import START_UP_SECONDS, Stillness, limit_seconds

PHASES = ("data", "forward", "backward", "update", "digest")


def entry(rank: int, place: str = "7 update", *, waits: bool = True, **changes: Any) -> Entry:
    """A rank that has been in a step and phase for longer than it may."""
    step, phase = place.split()
    values: dict[str, Any] = {
        "rank": rank,
        "host": f"node{rank // 2}",
        "machine": "m",
        "pid": 100 + rank,
        "step": int(step),
        "phase": phase,
        "begun": int(step),
        "turn": PHASES.index(phase),
        "beat": 50,
        "still_seconds": 601.0,
        "limit_seconds": 600.0,
        "in_collective": waits,
    }
    return Entry(**values | changes)


def judge(*entries: Entry, world_size: int | None = None, silent: set[int] | None = None) -> Culprit | None:
    return find_culprit({entry.rank: entry for entry in entries}, world_size or len(entries), silent or set())


def test_a_rank_whose_beat_stands_still_is_the_culprit_wherever_it_was() -> None:
    found = judge(entry(0, "7 backward"), entry(1, "7 forward"), entry(2, "7 update"), silent={2})
    assert found == Culprit(kind="silent", ranks=(2,))
    assert found.stacks_of == ()


def test_a_rank_that_never_came_is_the_culprit() -> None:
    assert judge(entry(0), entry(2), world_size=3) == Culprit(kind="absent", ranks=(1,))


@pytest.mark.parametrize("place", ["7 data", "7 forward", "6 digest"])
def test_the_rank_that_is_behind_is_the_culprit(place: str) -> None:
    found = judge(entry(0), entry(1), entry(2, place, waits=False), entry(3))
    assert found == Culprit(kind="behind", ranks=(2,))
    assert found.stacks_of == (2,)


def test_ranks_that_wait_for_the_culprit_behind_the_rest_are_innocent() -> None:
    """Tensor-parallel ranks 2 and 3 are both in the forward pass; 3 waits for 2 there, and 0 and 1 for both."""
    found = judge(entry(0), entry(1), entry(2, "7 forward", waits=False), entry(3, "7 forward"))
    assert found == Culprit(kind="behind", ranks=(2,))


def test_ranks_that_all_wait_for_data_are_all_named() -> None:
    found = judge(entry(0, "7 data", waits=False), entry(1, "7 data", waits=False))
    assert found == Culprit(kind="behind", ranks=(0, 1))


def test_a_rank_that_ran_ahead_into_another_collective_is_the_culprit() -> None:
    found = judge(entry(0, "7 backward"), entry(1, "7 backward"), entry(2, "8 forward"))
    assert found == Culprit(kind="astray", ranks=(2,))


def test_of_ranks_in_one_phase_the_one_that_waits_for_nobody_is_the_culprit() -> None:
    assert judge(entry(0), entry(1, waits=False), entry(2)) == Culprit(kind="outside", ranks=(1,))


@pytest.mark.parametrize("waits", [True, False])
def test_nobody_is_accused_where_nothing_tells_ranks_apart(waits: bool) -> None:
    found = judge(*(entry(rank, waits=waits) for rank in range(6)))
    assert found is not None
    assert (found.kind, found.stacks_of) == ("unknown", (0, 1, 2, 3))


def test_a_rank_that_may_still_take_its_time_is_no_culprit() -> None:
    """The others wait for the first validation, which compiles."""
    slow = entry(1, "7 data", waits=False, still_seconds=601.0, limit_seconds=1800.0)
    assert judge(entry(0), slow) is None
    goes_on = entry(1, "7 data", waits=False, still_seconds=3.0)
    assert judge(entry(0), goes_on) is None


def test_one_process_alone_is_its_own_culprit() -> None:
    assert judge(entry(0, "7 backward", waits=False)) == Culprit(kind="behind", ranks=(0,))


def test_a_line_names_rank_host_step_and_phase_of_both_sides() -> None:
    entries = [entry(0), entry(1), entry(2, "7 data", waits=False)]
    culprit = judge(*entries)
    assert culprit is not None
    line = describe_hang(culprit, dict(enumerate(entries)), 601.0)
    assert line.startswith("rank 2 (node1) in step 7 (data) hangs, and the others wait in step 7 (update)")
    assert "no progress for 601 s" in line


def test_a_silent_rank_is_placed_where_the_others_wait() -> None:
    """Its entry may be some short steps old."""
    entries = {0: entry(0), 1: entry(1, "5 forward")}
    line = describe_hang(Culprit(kind="silent", ranks=(1,)), entries, 600.0)
    assert line.startswith("rank 1 (node0) in step 7 no longer answers")


def test_a_death_has_the_reason_that_the_rank_left() -> None:
    left = entry(3, "5 forward", left="KeyError: 'x'")
    assert describe_death(left, 7) == "rank 3 (node1) died in step 5 (forward): KeyError: 'x'"
    assert describe_death(entry(3, "5 forward"), 6).startswith("rank 3 (node1) died in step 6: killed, or crashed")
    assert "died in step 5 (forward): killed" in describe_death(entry(3, "5 forward"), 5)


def test_a_line_about_thousands_of_ranks_is_short() -> None:
    entries = {rank: entry(rank) for rank in range(4096)}
    assert len(describe_hang(Culprit(kind="silent", ranks=tuple(range(2048))), entries, 600.0)) < 600
    assert len(describe_hang(Culprit(kind="absent", ranks=tuple(range(2048))), entries, 600.0)) < 600


def test_entries_and_verdicts_travel_as_they_are() -> None:
    one = entry(3, left="a 'quoted'\tword")
    assert Entry.from_json(one.to_json()) == one
    verdict = Verdict(by=1, line="x", stacks_of=(1, 2), unheard=1)
    assert Verdict.from_json(verdict.to_json().encode()) == verdict


class TestStillness:
    """Time counts only while one is awake."""

    def test_seconds_add_up_until_the_count_moves(self) -> None:
        still = Stillness(1.0)
        assert [still.look(count, now) for count, now in ((5, 10.0), (5, 10.5), (5, 11.25), (6, 11.5))] == [
            0.0,
            0.5,
            1.25,
            0.0,
        ]

    def test_a_process_that_slept_for_an_hour_has_not_hung(self) -> None:
        still = Stillness(1.0)
        still.look(5, 10.0)
        assert still.look(5, 3610.0) == 1.0


@pytest.mark.parametrize(
    ("phase", "begun", "seconds"),
    [
        ("start-up", 0, START_UP_SECONDS),
        ("forward", 1, START_UP_SECONDS),
        ("forward", 2, 100.0),
        ("data", 9, 100.0),
        ("evaluate", 9, 300.0),
        ("checkpoint", 9, 300.0),
    ],
)
def test_the_first_step_validations_and_checkpoints_may_take_longer(phase: str, begun: int, seconds: float) -> None:
    assert limit_seconds(100.0, phase, begun) == seconds
    assert limit_seconds(0.0, phase, begun) == 0.0


def test_a_long_timeout_holds_for_the_start_as_well() -> None:
    assert limit_seconds(7200.0, "start-up", 0) == 21600.0


def test_two_threads_may_ask_after_a_neighbour_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    neighbour = Neighbour(1, process.pid)
    answers: list[bool | Exception] = []

    def ask() -> None:
        try:
            answers.extend(neighbour.has_ended() for _ in range(20_000))
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
    assert neighbour.has_ended()
    neighbour.close()
    assert not neighbour.has_ended()
