"""The rank that the others wait for is named, with its host and phase. Time is counted here, never measured."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from toolkit.config.layout import Layout
from toolkit.phases import ignore_phase
from toolkit.training import phase_clock
from toolkit.training.phase_clock import PHASES, PhaseClock
from toolkit.training.slow_ranks import WINDOW, SlowRanks, find_slow

Train = Callable[..., str]
CPU = torch.device("cpu")
EVEN = [0.1, 1.0, 2.0, 0.0, 0.5]


class Seconds:
    """A clock that stands still until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(phase_clock._HostClock, "mark", lambda clock: self.now)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    return Seconds(monkeypatch)


def row(**changes: float) -> list[float]:
    return [changes.get(phase, usual) for phase, usual in zip(PHASES, EVEN, strict=True)]


def test_a_phase_counts_without_its_waits(seconds: Seconds, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits_for_others(work: Any, *arguments: Any) -> None:
        seconds.now += 5

    monkeypatch.setattr(dist.Work, "wait", waits_for_others)
    reported = []
    clock = PhaseClock(lambda phase, step=None: reported.append((phase, step)), CPU)
    clock.is_on = True
    with clock.watching_waits():
        for phase in (
            "data",
            "forward",
            "backward",
            "data",
            "forward",
            "backward",
            "update",
            "fingerprint",
            "checkpoint",
        ):
            clock.report_phase(phase, 3)
            seconds.now += 1
            if phase in ("backward", "checkpoint"):
                dist.Work().wait()
    assert reported[:2] == [("data", 3), ("forward", 3)]
    assert dict(zip(PHASES, clock.take(), strict=True)) == {
        "data": 2,
        "forward": 2,
        "backward": 2,
        "pipeline": 0,
        "update": 2,
    }
    assert clock.take() == [0.0] * len(PHASES)


class Event:
    """An event of a GPU's stream, whose time is known once it was waited for."""

    now = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.is_known = False

    def record(self) -> None:
        self.time = Event.now

    def synchronize(self) -> None:
        self.is_known = True

    def elapsed_time(self, end: "Event") -> float:
        assert end.is_known
        return 1000 * (end.time - self.time)


def test_on_a_gpu_its_stream_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits_in_the_stream(work: Any, *arguments: Any) -> None:
        Event.now += 5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(dist.Work, "wait", waits_in_the_stream)
    clock = PhaseClock(ignore_phase, torch.device("cuda"))
    clock.is_on = True
    with clock.watching_waits():
        for phase in ("data", "forward", "update", "checkpoint"):
            clock.report_phase(phase)
            Event.now += 1
            dist.Work().wait()
    assert dict(zip(PHASES, clock.take(), strict=True)) == {
        "data": 1,
        "forward": 1,
        "backward": 0,
        "pipeline": 0,
        "update": 1,
    }


def test_details_of_a_pipeline_are_one_phase(seconds: Seconds) -> None:
    clock = PhaseClock(ignore_phase, CPU)
    clock.is_on = True
    for detail in ("runs F 0", "waits for micro-batch 1", "runs B 0"):
        clock.report_phase(f"pipeline: {detail}")
        seconds.now += 1
    assert clock.take() == [0.0, 0.0, 0.0, 3.0, 0.0]


def test_nothing_is_timed_before_it_is_turned_on(seconds: Seconds) -> None:
    clock = PhaseClock(ignore_phase, CPU)
    clock.report_phase("forward")
    seconds.now += 1
    assert clock.take() == [0.0] * len(PHASES)


@pytest.mark.parametrize(
    ("layout", "rows", "slow"),
    [
        ("dp2", [row(), row()], {}),
        ("dp2", [row(), row(forward=1.8)], {(1, "forward"): 1.8}),
        ("dp2", [row(), row(forward=1.3)], {}),  # less than a tenth of the step of 3.6 s
        ("dp4", [row(), row(), row(data=1.1), row(backward=3.0)], {(2, "data"): 11.0, (3, "backward"): 1.5}),
        ("tp2-pp2", [row(), row(), row(forward=3.0), row(forward=3.0)], {}),  # a stage with more layers
        ("tp2-pp2", [row(), row(), row(forward=3.0), row(forward=6.0)], {(3, "forward"): 2.0}),
        ("pp2", [row(), row(forward=9.0)], {}),  # nobody to compare with
    ],
)
def test_ranks_of_a_stage_are_compared(layout: str, rows: list[list[float]], slow: dict[Any, float]) -> None:
    assert find_slow(rows, Layout.parse(layout), share=0.1) == pytest.approx(slow)


def watch(*windows: list[list[float]]) -> list[list[str]]:
    """What is said after each window of these times of two ranks."""
    ranks = SlowRanks(ignore_phase, CPU, layout=Layout(dp=2), rank=0, hosts=("node1", "node2"), share=0.1)
    return [ranks.read([value for times in rows for value in times]) for rows in windows]


def test_a_rank_is_named_once_it_is_slow_for_two_windows_and_again_when_it_is_not() -> None:
    slow = [row(), row(update=1.5)]
    begun = ["rank 1 (node2) holds the others up: its update takes 3.0 times as long as theirs"]
    ended = ["rank 1 (node2) no longer holds the others up in its update"]
    assert watch([row(), row()], slow, slow, slow, [row(), row()]) == [[], [], begun, [], ended]
    assert watch(slow, [row(), row()], slow, [row(), row()]) == [[], [], [], []]


@pytest.mark.parametrize("layout", ["dp2-z1", "tp2-z0"])
def test_a_run_names_its_slow_rank(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    seconds = Seconds(monkeypatch)
    report = PhaseClock.report_phase

    def report_slowly(clock: PhaseClock, phase: str, step: int | None = None) -> None:
        report(clock, phase, step)
        begun[0] += phase == "data"
        is_slow = dist.get_rank() == 1 and phase == "backward" and begun[0] <= 5 * WINDOW
        seconds.now += 3.0 if is_slow else 1.0

    begun = [0]
    monkeypatch.setattr(PhaseClock, "report_phase", report_slowly)
    monkeypatch.setattr("socket.gethostname", lambda: "HOST")
    batch = {"global_batch_size": 2, "micro_batch_size": 2 if layout == "tp2-z0" else 1}
    settings = (f"train.steps={8 * WINDOW}", "checkpoint.every=0", "run_dir=run", "--layout", layout)
    output = train(*settings, world_size=2, batch=batch)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    begins = "rank 1 (HOST) holds the others up: its backward takes 3.0 times as long as theirs"
    ends = "rank 1 (HOST) no longer holds the others up in its backward"
    # The first window has what is done once, and two more are compared, one step after they end.
    assert [(event["step"], event["kind"], event["reason"]) for event in events] == [
        (3 * WINDOW + 1, "slow", begins),
        (6 * WINDOW + 1, "slow", ends),
    ]
    assert f"step {3 * WINDOW + 1}: {begins}" in output
    assert "slow: rank 1 (HOST) backward 3.0x" in output
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    named = [step["step"] for step in steps if "slow_ranks" in step]
    assert named == list(range(3 * WINDOW + 1, 6 * WINDOW + 1))
    assert steps[3 * WINDOW]["slow_ranks"] == {"rank 1 (HOST) backward": 3.0}


def test_a_recipe_can_turn_it_off(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(clock: PhaseClock, *arguments: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(PhaseClock, "report_phase", fail)
    train("run_dir=run", "log.slow_ranks=0", "--layout", "dp2-z1", world_size=2)
    assert (tmp_path / "run" / "metrics.jsonl").exists()
