"""The load of other programs: what all cores did, less what this program did."""

from pathlib import Path

import pytest

from toolkit.calibrate import other_load
from toolkit.calibrate.other_load import OtherLoad, busy_seconds


def seconds(clock: float, all_programs: float, this_program: float) -> other_load._Seconds:
    return other_load._Seconds(clock=clock, all_programs=all_programs, this_program=this_program)


def cores(monkeypatch: pytest.MonkeyPatch, start: other_load._Seconds, end: other_load._Seconds) -> float:
    readings = iter([start, end])
    monkeypatch.setattr(other_load, "_now", lambda: next(readings))
    return OtherLoad().cores


def test_it_is_the_busy_time_that_is_not_this_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores(monkeypatch, seconds(100.0, 70.0, 5.0), seconds(110.0, 95.0, 10.0)) == 2.0


def test_ticks_that_are_counted_late_make_no_negative_load(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores(monkeypatch, seconds(100.0, 70.0, 5.0), seconds(110.0, 74.0, 10.0)) == 0.0


def test_no_time_at_all_divides_nothing_by_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores(monkeypatch, seconds(100.0, 70.0, 5.0), seconds(100.0, 70.0, 5.0)) == 0.0


def test_a_child_that_has_been_waited_for_is_this_program(monkeypatch: pytest.MonkeyPatch) -> None:
    usages = {other_load.resource.RUSAGE_SELF: (1.0, 2.0), other_load.resource.RUSAGE_CHILDREN: (4.0, 8.0)}

    class Usage:
        def __init__(self, who: int) -> None:
            self.ru_utime, self.ru_stime = usages[who]

    monkeypatch.setattr(other_load.resource, "getrusage", Usage)
    assert other_load._now().this_program == 15.0


@pytest.fixture
def proc_stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is read in the place of /proc/stat, with 100 ticks a second."""
    file = tmp_path / "stat"
    monkeypatch.setattr(other_load, "Path", lambda path: file)
    monkeypatch.setattr(other_load.os, "sysconf", lambda name: 100)
    return file


def test_busy_is_all_but_idle_and_waiting_and_guests_count_once(proc_stat: Path) -> None:
    # user nice system idle iowait irq softirq steal guest guest_nice: guests are in user and nice already (man 5 proc).
    proc_stat.write_text("cpu  100 200 400 8000 16000 800 1600 3200 50 60\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert busy_seconds() == (100 + 200 + 400 + 800 + 1600 + 3200) / 100


def test_a_system_without_the_file_has_no_load(proc_stat: Path) -> None:
    assert not proc_stat.exists()
    assert busy_seconds() == 0.0
