"""The memory chart of a run: the estimate stands beside what was held, where model, layout and GPU are known."""

import json
from pathlib import Path

from toolkit import hardware
from toolkit.planner.run_memory import estimate_for_run
from toolkit.report.chart import Chart
from toolkit.report.prediction import estimated_bytes
from toolkit.report.recorded_run import RecordedRun, read_runs
from toolkit.report.run_charts import run_charts

GPU = hardware.gpu("H100-SXM-80GB")
RECIPE = (
    "model: {name_or_path: gpt2}\n"
    "data: {seq_len: 512}\n"
    "parallel: {dp: 4, zero_stage: 2}\n"
    "batch: {global_batch_size: 32, micro_batch_size: 2}\n"
    "precision: bf16\n"
    "optimizer: {lr: 1e-4}\n"
    "train: {steps: 3}\n"
)


def run_of(folder: Path, *, gpu: hardware.Gpu | None, recipe: str = RECIPE) -> RecordedRun:
    lines = [
        {"step": step, "loss": 3.0, "seconds": 0.5, "tokens": 16384, "memory_bytes": 3 * 2**30} for step in (1, 2, 3)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.yaml").write_text(recipe)
    (found,) = read_runs([str(folder)], gpu=gpu)
    return found


def memory_chart(*runs: RecordedRun) -> Chart:
    estimates = [estimated_bytes(run) for run in runs]
    (chart,) = (chart for chart in run_charts(runs, estimates) if chart.name == "memory")
    return chart


def test_the_estimate_is_a_line_beside_what_was_held(tmp_path):
    run = run_of(tmp_path / "a", gpu=GPU)
    assert run.recipe is not None
    assert run.layout is not None
    (band,) = memory_chart(run).bands
    estimated = estimate_for_run(run.recipe, run.layout, run.recipe.resolve_batch(run.layout))[0].allocated
    assert band.points == tuple((step, estimated / 2**30) for step in (1, 2, 3))


def test_without_a_gpu_there_is_no_estimate(tmp_path):
    assert memory_chart(run_of(tmp_path / "a", gpu=None)).bands == ()


def test_a_model_that_is_not_known_has_no_estimate(tmp_path):
    recipe = RECIPE.replace("name_or_path: gpt2", "name_or_path: someone/hub-model")
    assert memory_chart(run_of(tmp_path / "a", gpu=GPU, recipe=recipe)).bands == ()


def test_several_runs_show_no_estimate(tmp_path):
    first, second = run_of(tmp_path / "a", gpu=GPU), run_of(tmp_path / "b", gpu=GPU)
    assert memory_chart(first, second).bands == ()
