"""`dstk report --watch`: what is said of runs that train, have ended, or were lost, in a terminal and on a page."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from toolkit.cli.main import main
from toolkit.cli.watch import read_fleet
from toolkit.errors import ReportError
from toolkit.report.fleet import RunStatus, fleet_page, summary, write_fleet
from toolkit.training.run_lock import Holder, RunLock

ROOT = Path(__file__).parents[2]
MakeRun = Callable[..., Path]
NOON = datetime(2026, 11, 24, 12, 0)


def line(step: int, **changes: Any) -> str:
    return json.dumps({"step": step, "loss": 8 - step / 100, "tokens": 2048, "seconds": 0.5} | changes) + "\n"


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A directory of a run of 300 steps, of which some are done."""

    def make(name: str, lines: str | None) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        recipe = (ROOT / "recipes" / "demo.yaml").read_text()
        (folder / "recipe.yaml").write_text(recipe.replace("steps: 600", "steps: 300"))
        (folder / "environment.json").write_text(json.dumps({"hosts": "node1, node2"}))
        if lines is not None:
            (folder / "metrics.jsonl").write_text(lines)
        return folder

    return make


def status_of(folder: Path) -> RunStatus:
    (status,) = read_fleet([str(folder)])
    return status


def steps(first: int, last: int, **changes: Any) -> str:
    return "".join(line(step, **changes) for step in range(first, last + 1))


def write_lock(folder: Path, holder: Holder, *, seconds_ago: float = 0.0) -> None:
    path = folder / ".lock-1"
    path.write_bytes(b"%012d\n%s\n" % (3, json.dumps(asdict(holder)).encode()))
    written = path.stat().st_mtime - seconds_ago
    os.utime(path, (written, written))


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_run_that_trains_is_at_its_last_step_and_ends_at_the_speed_of_the_last_steps(make_run: MakeRun) -> None:
    folder = make_run("demo", steps(1, 100, seconds=9.0) + steps(101, 200))
    lock = RunLock(folder)
    lock.acquire()
    try:
        status = status_of(folder)
    finally:
        lock.release()
    assert (status.state, status.step, status.steps, status.loss) == ("training", 200, 300, 6.0)
    assert status.tokens_per_second == pytest.approx(4096)
    assert status.seconds_left == pytest.approx(50)
    assert status.end(NOON) == "12:00 (in 50s)"
    assert replace(status, seconds_left=86400.0 * 2).end(NOON) == "Thu 26 Nov 12:00 (in 2d00h)"
    assert status.hosts == "node1, node2"
    assert status_of(folder).state == "stopped"


def test_a_run_whose_process_has_died_or_is_silent_is_lost(make_run: MakeRun) -> None:
    here = Holder.here()
    died = make_run("died", steps(1, 3))
    write_lock(died, replace(here, pid=ended_process()))
    assert status_of(died).state == "lost"
    elsewhere = replace(here, machine_id="another", host="node7")
    silent = make_run("silent", steps(1, 3))
    write_lock(silent, elsewhere, seconds_ago=1000)
    assert status_of(silent).state == "lost"
    write_lock(silent, elsewhere, seconds_ago=20)
    assert status_of(silent).state == "training"
    waits = make_run("waits", None)
    (waits / "environment.json").unlink()
    write_lock(waits, elsewhere)
    status = status_of(waits)
    assert (status.state, status.step, status.loss, status.hosts) == ("starting", 0, None, "node7")


def test_the_end_of_a_run_and_its_last_incident_are_read(make_run: MakeRun) -> None:
    done = make_run("done", steps(1, 300))
    assert status_of(done).state == "finished"
    events = [
        {"step": 7, "kind": "skip", "reason": "the loss is not finite"},
        {"step": 120, "kind": "rollback", "reason": "the gradient norm is inf", "to": 100, "skipped_batches": 20},
    ]
    (done / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + "{")
    assert status_of(done).incident == "step 120 rolled back to 100: the gradient norm is inf"
    slow = {"step": 131, "kind": "slow", "reason": "rank 3 (node2) holds the others up"}
    (done / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (*events, slow)))
    assert status_of(done).incident == "step 131: rank 3 (node2) holds the others up"
    with (done / "events.jsonl").open("a") as file:
        file.write('3\n[]\nnull\n{"step": 132}\n{"st')
    assert status_of(done).incident == "step 131: rank 3 (node2) holds the others up"
    again = make_run("again", steps(1, 40) + steps(31, 50) + "{")
    status = status_of(again)
    assert (status.step, status.incident) == (50, "resumed at step 31, after step 40")


def test_a_look_reads_the_end_of_a_long_log_alone(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run("long", "x" * 200_000 + "\n" + steps(1, 250))
    assert status_of(folder).step == 250
    monkeypatch.setattr("toolkit.report.fleet._TAIL_BYTES", 200)
    assert status_of(folder).step == 250


def test_folders_of_runs_are_searched_and_printed_once_without_a_terminal(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("first", steps(1, 300))
    make_run("project/second", steps(1, 150))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        main(["report", "--watch", "runs"])
    assert not error.value.code
    printed = capsys.readouterr().out
    assert "2 runs: 1 finished, 1 stopped" in printed
    assert "project/second" in printed
    assert "150/300" in printed
    assert "node1, …" in printed
    assert read_fleet(["runs/first", "runs"])[0].name == "first"
    with pytest.raises(SystemExit) as error:
        main(["report", "--watch", "nowhere"])
    assert error.value.code == 2
    assert capsys.readouterr().err == (
        "error: nowhere: no such folder. Give run directories, or a folder of them such as runs.\n"
    )


def test_the_page_is_replaced_at_once_and_nothing_else_is(make_run: MakeRun, tmp_path: Path) -> None:
    statuses = [status_of(make_run("<b>bold</b>".replace("/", "-"), steps(1, 30)))]
    page = write_fleet(tmp_path / "fleet", statuses, NOON, every_seconds=7)
    assert page == tmp_path / "fleet" / "index.html"
    text = page.read_text()
    assert '<meta http-equiv="refresh" content="7">' in text
    assert "<b>" not in text
    assert write_fleet(tmp_path / "fleet", [], NOON, every_seconds=7).read_text() != text
    assert sorted(path.name for path in (tmp_path / "fleet").iterdir()) == ["index.html"]
    (tmp_path / "fleet" / "notes.txt").write_text("mine")
    with pytest.raises(ReportError, match=r"notes\.txt, which is not part of a report"):
        write_fleet(tmp_path / "fleet", statuses, NOON, every_seconds=7)
    assert summary([]) == "no runs yet"
    assert "no runs yet" in fleet_page([], NOON, every_seconds=7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--watch", "--gpu", "H100-SXM-80GB"], "--gpu with --watch, which shows no MFU."),
        (["--every", "5"], "--every without --watch: a page of plots is written once."),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["report", "runs", *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_loss_that_explodes_keeps_its_column_narrow(make_run: MakeRun) -> None:
    assert status_of(make_run("a", line(1, loss=1e308))).loss_text == "1e+308"
    assert status_of(make_run("b", line(1, loss=999999.5))).loss_text == "999999.5000"
