"""Measured timelines: what the traces of a run say that its pipeline ranks did."""

import base64
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import refused

from toolkit.cli.main import main
from toolkit.config import load_recipe
from toolkit.config.pipeline_schedules import PASS_NAMES, Kind, schedule_of
from toolkit.config.simulate_schedule import ScheduleCosts, Timeline, simulate
from toolkit.errors import ReportError
from toolkit.report.measured_timeline import read_timelines
from toolkit.report.recorded_run import read_runs
from toolkit.report.runs_page import runs_page

ROOT = Path(__file__).parents[2]
PP = 2
MakeRun = Callable[..., tuple[Path, Timeline]]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """The directory of a run whose ranks did what a simulation says, in each of two traced steps."""

    def make(kind: Kind, *, swaps: bool = False) -> tuple[Path, Timeline]:
        changes = [f"parallel.pp={PP}", "parallel.dp=1", f"parallel.schedule={kind}", "parallel.zero_stage=1"]
        recipe = load_recipe(ROOT / "recipes" / "demo.yaml", overrides=changes)
        folder = tmp_path / kind
        (folder / "profile").mkdir(parents=True)
        text = json.dumps(json.loads(recipe.model_dump_json()))
        (folder / "recipe.yaml").write_text(text)
        step = {"step": 1, "loss": 1.0}
        (folder / "metrics.jsonl").write_text(json.dumps(step) + "\n")
        batch = recipe.resolve_batch(recipe.layout(PP))
        schedule = schedule_of(kind, pp=PP, micro_batches=batch.accumulation)
        stages = len(schedule.rank_of)
        costs = ScheduleCosts(forward=[0.1] * stages, backward=[0.2] * stages, weight=[0.15] * stages)
        ran = simulate(schedule, costs)
        for rank in range(PP):
            events = []
            for begin in (5.0, 5.0 + 2 * ran.makespan):
                for kind_, stage, micro_batch, start, end in ran.operations(rank):
                    shown = micro_batch ^ 1 if swaps else micro_batch
                    name = f"phase pipeline: {PASS_NAMES[kind_]} of micro-batch {shown} in stage {stage}"
                    events.append({"ph": "X", "name": name, "ts": 1e6 * (begin + start), "dur": 1e6 * (end - start)})
                events.append({"ph": "X", "name": "phase update", "ts": 1e6 * (begin + ran.makespan), "dur": 1e5})
            content = json.dumps({"traceEvents": events, "baseTimeNanoseconds": 10**15})
            (folder / "profile" / f"trace-rank{rank}.json.gz").write_bytes(gzip.compress(content.encode()))
        return folder, ran

    return make


@pytest.mark.parametrize("kind", ["1f1b", "zb-h1", "zb-v"])
def test_the_timeline_is_that_of_the_traces(make_run: MakeRun, kind: Kind) -> None:
    folder, ran = make_run(kind)
    measured, simulated = read_timelines(folder)
    for found in (measured, simulated):
        assert found.makespan == pytest.approx(ran.makespan, abs=1e-5)
        assert found.bubbles == pytest.approx(ran.bubbles, abs=1e-5)
        assert [list(each) for each in found.starts] == [pytest.approx(list(each), abs=1e-5) for each in ran.starts]


def test_another_order_than_the_schedule_s_is_refused(make_run: MakeRun) -> None:
    folder, _ = make_run("1f1b", swaps=True)
    with refused(ReportError, "--run"):
        read_timelines(folder)


def test_the_command_shows_both_below_each_other_on_one_scale(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    folder, _ = make_run("zb-h1")
    with pytest.raises(SystemExit) as end:
        main(["schedule", "--run", str(folder), "--svg", str(tmp_path / "both.svg")])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert [word for word in ("measured", "simulated") if f"{word}, " in out] == ["measured", "simulated"]
    rows = re.findall(r"stage \d+ +(.*?) +[\d.]+ %", out)
    assert rows[:PP] == rows[PP:]
    assert "measured: ZB-H1" in (tmp_path / "both.svg").read_text()


def test_the_page_of_a_run_shows_both(make_run: MakeRun) -> None:
    folder, ran = make_run("zb-v")
    page = runs_page(read_runs([str(folder)]), command="dstk report")
    assert f"bubble measured {100 * ran.bubble:.1f} %, simulated {100 * ran.bubble:.1f} %" in page
    (encoded,) = re.findall('data:image/svg\\+xml;base64,([^"]+)', page)
    picture = base64.b64decode(encoded).decode()
    assert "measured: ZB-V" in picture
    assert "simulated: ZB-V" in picture


def test_the_page_of_a_run_without_traces_has_no_timeline(make_run: MakeRun) -> None:
    folder, _ = make_run("zb-v")
    (folder / "profile" / "trace-rank1.json.gz").unlink()
    assert "data:image/svg" not in runs_page(read_runs([str(folder)]), command="dstk report")
