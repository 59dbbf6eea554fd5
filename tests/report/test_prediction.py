"""Predicted beside measured: what a run's page says of its plan, and that it never fails where there is none."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_run_memory import GPU, RECIPE, run_of

from toolkit.errors import ModelError
from toolkit.hardware import gpu
from toolkit.planner.cluster import Cluster
from toolkit.planner.request import predict
from toolkit.planner.run_memory import estimate_for_run
from toolkit.planner.step_time import TERMS
from toolkit.report.prediction import TRACED, compare_with_plan
from toolkit.report.recorded_run import RecordedRun, read_runs
from toolkit.report.runs_page import runs_page
from toolkit.report.step_bars import TONES
from toolkit.report.trace_terms import TERMS as TRACE_TERMS


def slow_run(folder: Path, *, recipe: str = RECIPE, device: str = "NVIDIA H100 80GB HBM3 x 4", slow: float = 1.5):
    """A run whose usual step takes `slow` times the predicted one; a compiled first step and a skipped one do not."""
    run = run_of(folder, gpu=GPU, recipe=recipe)
    assert run.layout is not None
    step = predict(run.recipe, run.layout, run.recipe.resolve_batch(run.layout), GPU).seconds
    seconds = [40 * step, 30 * step, *[slow * step] * 9, 0.1 * step, 3 * step]
    lines = [
        {"step": i, "loss": 3.0, "tokens": 16384, "seconds": each, "memory_bytes": 2**30, "skipped": each < step / 2}
        for i, each in enumerate(seconds, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "environment.json").write_text(json.dumps({"device": device}))
    (found,) = read_runs([str(folder)])
    return found


def cells(run: RecordedRun) -> list[str]:
    """The row of a single run: predicted and measured step, their ratio, and the same of its memory."""
    table = runs_page([run], command="dstk report").partition('id="predicted"')[2].partition("</table>")[0]
    return re.findall(r'<td class="number">([^<]*)</td>', table)


def test_a_run_stands_beside_the_plan_of_its_recipe(tmp_path: Path) -> None:
    run = slow_run(tmp_path / "run")
    found = compare_with_plan(run)
    batch = run.recipe.resolve_batch(run.layout)
    assert found.predicted == predict(run.recipe, run.layout, batch, GPU)
    assert found.estimated_bytes == estimate_for_run(run.recipe, run.layout, batch)[0].allocated
    assert found.seconds == pytest.approx(1.5 * found.predicted.seconds)
    assert found.ratio == pytest.approx(1.5)
    assert found.memory_ratio == pytest.approx(2**30 / found.estimated_bytes)
    assert cells(run)[2] == "1.50"
    assert cells(run)[5] == f"{found.memory_ratio:.2f}"


def test_a_term_that_alone_is_off_explains_the_whole_difference(tmp_path: Path) -> None:
    found = compare_with_plan(slow_run(tmp_path / "run"))
    assert sum(term.seconds for term in found.terms) == pytest.approx(found.predicted.seconds)
    for term in found.terms:
        others = found.predicted.seconds - term.seconds
        assert others + term.factor * term.seconds == pytest.approx(found.seconds)


def test_a_term_shorter_than_what_a_run_saved_cannot_be_what_is_off(tmp_path: Path) -> None:
    found = compare_with_plan(slow_run(tmp_path / "run", slow=0.8))
    saved = found.predicted.seconds - found.seconds
    assert (
        {term.name for term in found.terms if term.factor is None}
        == {term.name for term in found.terms if term.seconds <= saved}
        != set()
    )


@pytest.mark.parametrize(("slow", "said"), [(0.8, "20 %"), (1.001, "1 %"), (1.5, "50 %"), (8.0, "8.00 times")])
def test_the_page_says_how_far_a_step_is_off(tmp_path: Path, slow: float, said: str) -> None:
    text = runs_page([slow_run(tmp_path / "run", slow=slow)], command="dstk report")
    assert said in text.partition('id="beside"')[2].partition("</p>")[0]


def test_the_bars_are_the_two_steps_on_one_scale(tmp_path: Path) -> None:
    predicted, measured = compare_with_plan(slow_run(tmp_path / "run")).bars
    assert sum(measured.widths.values()) == pytest.approx(100)
    assert sum(predicted.widths.values()) == pytest.approx(100 / 1.5)


@pytest.mark.parametrize(
    ("recipe", "device", "reason"),
    [
        (RECIPE, "Imaginary 7763, 2 cores", "Imaginary 7763, 2 cores"),
        (RECIPE.replace("steps: 3", "steps: 3, engine: fsdp").replace(", zero_stage: 2", ""), None, "fsdp"),
        (RECIPE.replace("gpt2", "someone/hub-model"), None, "someone/hub-model"),
        (RECIPE.replace("{dp: 4, zero_stage: 2}", "{zero_stage: 2}"), None, "number of its ranks"),
        ("nonsense: [", None, "recipe"),
    ],
    ids=["device", "engine", "model", "ranks", "recipe"],
)
def test_where_nothing_can_be_predicted_the_page_says_why(
    tmp_path: Path, recipe: str, device: str | None, reason: str
) -> None:
    slow_run(tmp_path / "run")
    (tmp_path / "run" / "recipe.yaml").write_text(recipe)
    if device:
        (tmp_path / "run" / "environment.json").write_text(json.dumps({"device": device}))
    (run,) = read_runs([str(tmp_path / "run")])
    assert compare_with_plan(run).predicted is None
    text = runs_page([run], command="dstk report")
    assert reason in text.partition("No step is predicted: ")[2].partition("</p>")[0]


@pytest.mark.parametrize("error", [ModelError("no such family"), ZeroDivisionError("division"), KeyError("host")])
def test_a_time_model_that_fails_does_not_fail_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run = slow_run(tmp_path / "run")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("toolkit.report.prediction.predict", fail)
    assert str(error.args[0]) in compare_with_plan(run).reason
    assert cells(run)[0] == "–"


@pytest.mark.parametrize("error", [ModelError("no such family"), AssertionError("layers"), ZeroDivisionError("zero")])
def test_an_estimate_that_fails_does_not_fail_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run = slow_run(tmp_path / "run")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("toolkit.report.prediction.estimate_for_run", fail)
    found = compare_with_plan(run)
    assert found.estimated_bytes is None
    assert found.predicted is not None
    assert cells(run)[3] == "–"


@pytest.mark.parametrize("device", ["Imaginary 7763, 2 cores", "NVIDIA H100 80GB HBM3"])
def test_measured_constants_are_those_of_the_device_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    here = SimpleNamespace(hardware=device, date="2026-11-23", of_ranks=lambda ranks: Cluster.of(gpu("L4")))
    monkeypatch.setattr("toolkit.report.prediction.stored", lambda: here)
    ran, other = slow_run(tmp_path / "ran", device=f"{device} x 4"), slow_run(tmp_path / "other", device="another")
    found = compare_with_plan(ran)
    assert "2026-11-23" in found.constants
    assert found.predicted == predict(ran.recipe, ran.layout, ran.recipe.resolve_batch(ran.layout), gpu("L4"))
    assert compare_with_plan(other).predicted is None


def test_several_runs_are_rows_of_one_table(tmp_path: Path) -> None:
    runs = [slow_run(tmp_path / "a", slow=1.2), slow_run(tmp_path / "b", device="cpu", slow=2.0)]
    table = runs_page(runs, command="dstk report").partition('id="predicted"')[2].partition("</table>")[0]
    ratios = [re.findall(r'<td class="number">([^<]*)</td>', row)[2] for row in table.split("<tr>")[2:]]
    assert ratios == ["1.20", "–"]


def test_each_term_of_the_time_model_has_a_color_and_a_row_for_traces() -> None:
    assert set(TERMS) <= set(TONES)
    assert set(TRACED) == set(TERMS)


def test_each_term_of_a_trace_has_a_color_and_is_compared_once() -> None:
    assert set(TRACE_TERMS) <= set(TONES)
    assert sorted(part for parts in TRACED.values() for part in parts) == sorted(TRACE_TERMS)
