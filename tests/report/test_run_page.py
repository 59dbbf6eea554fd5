"""`dstk report`: what is read from a run directory, and what is refused."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit import hardware
from toolkit.cli.main import main
from toolkit.errors import ReportError
from toolkit.report.load_map import load_map
from toolkit.report.margin_histogram import margin_histogram
from toolkit.report.recorded_run import RecordedRun, read_metrics, read_runs
from toolkit.report.run_charts import run_charts, running_mean
from toolkit.report.runs_page import figures, run_events, runs_page, write_runs

ROOT = Path(__file__).parents[2]
MakeRun = Callable[..., Path]


def line(step: int, **changes: Any) -> dict[str, Any]:
    loss = 8 - step / 100
    return {"step": step, "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "tokens": 2048, "seconds": 0.5,
            "memory_bytes": 2**30} | changes  # fmt: skip


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A run directory with these lines and the demo's recipe, with overrides."""

    def make(lines: list[dict[str, Any]], *, name: str = "run", recipe: str | None = "", tail: str = "") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines) + tail)
        if recipe is not None:
            text = (ROOT / "recipes" / "demo.yaml").read_text()
            (folder / "recipe.yaml").write_text(text + recipe)
        return folder

    return make


def one(folder: Path, **options: Any) -> RecordedRun:
    (found,) = read_runs([str(folder)], **options)
    return found


def events_of(folder: Path) -> dict[str, str]:
    return {event.description: event.steps for event in run_events(one(folder))}


def page(folder: Path, **options: Any) -> str:
    return runs_page([one(folder, **options)], command="dstk report run")


def test_curves_that_hide_each_other_alternate_and_the_caption_says_how_near_they_are(make_run: MakeRun) -> None:
    def lines(shift: float) -> list[dict[str, Any]]:
        return [line(step, loss=8 - step / 100 + shift) for step in range(1, 21)]

    shifts = {"a": 0.0, "b": 1e-6, "far": 0.1, "c": 0.0}
    runs = [one(make_run(lines(shift), name=name)) for name, shift in shifts.items()]
    loss = run_charts(runs)[0]
    looks = {each.label: each for each in loss.lines}
    # Three of them share a course: each has its third of it, one after the other.
    assert looks["a"].dash == looks["b"].dash == looks["c"].dash
    drawn, gap = looks["a"].dash
    assert gap == 2 * drawn
    assert [looks[name].offset for name in ("a", "b", "c")] == [0, -drawn, -2 * drawn]
    assert looks["far"].dash == ()
    assert "a, b and c are equal within 1.0e-06, so their colors alternate." in loss.caption
    rates = next(chart for chart in run_charts(runs) if chart.name == "learning-rate")
    assert "a, b, far and c are equal, so their colors alternate." in rates.caption
    # A curve of other steps hides nothing for long.
    longer = one(make_run([*lines(0.0), line(21)], name="longer"))
    assert all(each.dash == () for each in run_charts([runs[0], longer])[0].lines)


def test_rewards_and_margins_of_an_objective_have_charts(make_run: MakeRun) -> None:
    names = {"logps/chosen": -9.0, "rewards/chosen": 0.1, "rewards/rejected": -0.2, "rewards/margins": 0.3}
    lines = [line(step, objective={name: slope * step for name, slope in names.items()}) for step in range(1, 6)]
    charts = {chart.name: chart for chart in run_charts([one(make_run(lines))])}
    rewards = {curve.label: curve.points[-1] for curve in charts["rewards"].lines}
    assert rewards == {"chosen": (5, pytest.approx(0.5)), "rejected": (5, pytest.approx(-1.0))}
    assert charts["margins"].lines[0].points[0] == (1, pytest.approx(0.3))
    assert charts["loss"].unit == "of a pair or completion"
    assert "accuracies" not in charts
    assert "token-loss" not in charts


def test_margins_of_the_first_and_the_last_steps_have_a_histogram(make_run: MakeRun) -> None:
    counts = [[0] * 16 for _ in range(20)]
    for step in range(20):
        counts[step][8] = 6 if step < 10 else 2
        counts[step][11] = 2 if step < 10 else 6
    run = one(make_run([line(step + 1, margins=row) for step, row in enumerate(counts)]))
    histogram = margin_histogram(run)
    assert histogram is not None
    assert histogram.spans == ("steps 1 to 2 (2 steps)", "steps 19 to 20 (2 steps)")
    empty = [("0.01 to 0.03", 0.0, 0.0), ("0.03 to 0.1", 0.0, 0.0)]
    assert histogram.rows == (("0 to 0.01", 75.0, 25.0), *empty, ("0.1 to 0.3", 25.0, 75.0))
    assert "Margins of pairs" in runs_page([run], command="dstk report")
    assert margin_histogram(one(make_run([line(1)], name="text"))) is None


def test_the_numbers_of_a_run(make_run: MakeRun) -> None:
    run = one(make_run([line(step) for step in range(1, 41)] + [line(41, eval_loss=7.5)]))
    shown = {name: value for name, (value, _) in figures(run).items()}
    assert shown["loss"] == "7.5900"
    assert shown["held-out loss"] == "7.5000"
    assert shown["tokens/s"] == "4.1k"
    assert shown["peak memory"] == "1.00 GiB"
    assert shown["training time"] == "20s"


def test_fields_that_the_lines_lack_are_not_shown(make_run: MakeRun) -> None:
    text = page(make_run([{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}], recipe=None))
    assert re.findall(r'<figure class="plot" id="([\w-]+)">', text) == ["loss"]
    assert "<dt>MFU</dt>" not in text
    assert "<dt>tokens/s</dt>" not in text


def test_the_vocabulary_is_that_of_the_model_and_not_of_its_tokenizer(make_run: MakeRun) -> None:
    from toolkit.model_init.build_model import load_config

    folder = make_run([line(1)])
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(recipe.replace("tokenizer: bpe-4096", "tokenizer: bpe-300"))
    run = one(folder)
    assert run.recipe is not None
    assert run.recipe.data.tokenizer == "bpe-300"
    assert run.shape is not None
    assert run.shape.vocab == load_config(run.recipe.model).vocab_size


def test_the_ranks_follow_from_the_deepspeed_config(make_run: MakeRun) -> None:
    folder = make_run([line(1)])
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    (folder / "ds_config.json").write_text(json.dumps(sizes))
    layout = one(folder).layout
    assert layout is not None
    assert layout.world_size == 4
    assert "4 ranks" in page(folder)


def test_the_mfu_needs_the_gpu_by_name_or_from_the_environment(make_run: MakeRun) -> None:
    folder = make_run([line(1), line(2)], recipe=None)
    text = (ROOT / "recipes" / "demo.yaml").read_text()
    (folder / "recipe.yaml").write_text(re.sub("precision: .*", "precision: bf16", text))
    (folder / "ds_config.json").write_text(
        json.dumps({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1})
    )
    assert one(folder).mfu(1e6) is None
    named = one(folder, gpu=hardware.gpu("A100-SXM-80GB")).mfu(1e6)
    (folder / "environment.json").write_text(json.dumps({"device": "NVIDIA A100-SXM4-80GB x 8"}))
    assert named is not None
    assert 0 < named < 1
    assert one(folder).mfu(1e6) == named
    assert "<dt>MFU</dt>" in page(folder)


def test_the_mfu_is_unknown_without_the_number_of_ranks(make_run: MakeRun) -> None:
    assert one(make_run([line(1)]), gpu=hardware.gpu("H200")).mfu(1e6) is None


def test_a_restart_is_an_event_and_its_steps_count_once(make_run: MakeRun) -> None:
    folder = make_run([line(step) for step in (1, 2, 3, 4)] + [line(step, loss=1.0) for step in (3, 4, 5)])
    log = one(folder).log
    assert [step.step for step in log.steps] == [1, 2, 3, 4, 5]
    assert [step.loss for step in log.steps][2:] == [1.0, 1.0, 1.0]
    assert events_of(folder)["restart: 2 steps trained again"] == "3, after 4"


def test_an_incomplete_last_line_is_skipped_and_is_an_event(make_run: MakeRun) -> None:
    folder = make_run([line(1), line(2)], tail='{"step": 3, "lo')
    assert one(folder).log.last.step == 2
    assert events_of(folder)["the last line of metrics.jsonl is incomplete and skipped"] == "after 2"


def test_a_complete_last_line_without_a_newline_counts(make_run: MakeRun) -> None:
    log = one(make_run([line(1)], tail=json.dumps(line(2)))).log
    assert (log.last.step, log.is_truncated) == (2, False)


def test_skipped_and_non_finite_steps_are_events(make_run: MakeRun) -> None:
    lines = [line(1, skipped=True, grad_norm=None), line(2, skipped=True, grad_norm=None), line(3), line(4, loss=None)]
    events = events_of(make_run(lines))
    assert events["update skipped (fp16 overflow)"] == "1, 2"
    assert events["loss not finite"] == "4"
    assert "gradient norm not finite" not in events


def test_updates_skipped_for_a_non_finite_loss_are_not_counted_as_overflows(make_run: MakeRun) -> None:
    events = events_of(
        make_run([line(1, skipped=True, grad_norm=None), line(2, skipped=True, loss=None, grad_norm=None)])
    )
    assert events["update skipped (fp16 overflow)"] == "1"
    assert events["update skipped (not finite)"] == "2"


def test_the_recorded_reason_of_a_skipped_update_is_shown(make_run: MakeRun) -> None:
    """An infinite norm skips a step under bf16, too, where nothing overflows by design."""
    folder = make_run([line(1, skipped=True, grad_norm=None), line(2, skipped=True, grad_norm=None), line(3)])
    skip = {"step": 2, "kind": "skip", "reason": "the gradient norm is inf"}
    (folder / "events.jsonl").write_text(json.dumps(skip) + "\n")
    events = events_of(folder)
    assert events["update skipped (the gradient norm is inf)"] == "2"
    assert events["update skipped (fp16 overflow)"] == "1"


def test_rollbacks_are_events_with_their_reason(make_run: MakeRun) -> None:
    folder = make_run([line(1), line(2), line(3)])
    rollback = {"step": 3, "kind": "rollback", "reason": "the loss is nan on rank 1", "to": 2, "left_out": 1}
    skip = {"step": 1, "kind": "skip", "reason": "the loss is nan on rank 0"}
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (skip, rollback)) + '{"st')
    assert events_of(folder)["rolled back to step 2: the loss is nan on rank 1"] == "3"


def test_a_slow_rank_is_an_event(make_run: MakeRun) -> None:
    folder = make_run([line(1), line(2)])
    slow = {"step": 2, "kind": "slow", "reason": "rank 3 (node2) holds the others up"}
    (folder / "events.jsonl").write_text(json.dumps(slow) + "\n")
    assert events_of(folder)["rank 3 (node2) holds the others up"] == "2"


def test_steps_without_a_line_are_an_event(make_run: MakeRun) -> None:
    assert events_of(make_run([line(1), line(5), line(7)]))["no line in metrics.jsonl"] == "2 to 4, 6"


def test_checkpoints_are_events(make_run: MakeRun) -> None:
    folder = make_run([line(step) for step in range(1, 26)], recipe="checkpoint: {every: 10}\n")
    (folder / "step-00000020").mkdir()
    events = events_of(folder)
    assert events["checkpoint every 10 steps"] == "10, 20"
    assert events["checkpoints on disk"] == "20"


def test_a_run_says_whether_it_is_finished(make_run: MakeRun) -> None:
    steps = 600
    assert "At step 2, reported" in page(make_run([line(1), line(2)]))
    assert "Finished" in page(make_run([line(step) for step in range(1, steps + 1)], name="whole"))


def test_a_recipe_that_cannot_be_decoded_is_still_shown(make_run: MakeRun) -> None:
    folder = make_run([line(1)], recipe="flux: 1\n")
    text = page(folder)
    assert "could not be decoded" in text
    assert "flux: 1" in text


def test_several_runs_share_plots_under_their_own_names(make_run: MakeRun) -> None:
    folders = [make_run([line(step) for step in range(1, 4)], name=name) for name in ("a", "b")]
    runs = read_runs([str(folder) for folder in folders])
    loss = run_charts(runs)[0]
    assert [each.label for each in loss.lines] == ["a", "b"]
    assert len({each.tone for each in loss.lines}) == 2
    assert "a and b" in runs_page(runs, command="")


def test_a_held_out_curve_follows_the_training_curve_of_its_run(make_run: MakeRun) -> None:
    lines = [line(1), line(2, eval_loss=7.5)]
    runs = read_runs([str(make_run(lines, name=name)) for name in ("a", "b")])
    assert [each.label for each in run_charts(runs)[0].lines] == ["a", "a, held out", "b", "b, held out"]


def test_runs_of_the_same_name_keep_their_paths(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    first, second = make_run([line(1)], name="r"), make_run([line(1)], name="x/r")
    assert [run.label for run in read_runs([str(first), str(second)])] == [str(first), str(second)]


def test_a_running_mean_starts_with_fewer_values() -> None:
    assert running_mean(((1, 2.0), (2, None), (3, 4.0), (4, 8.0)), 2) == ((1, 2.0), (2, None), (3, 3.0), (4, 6.0))


def test_ten_thousand_steps_stay_a_small_page(make_run: MakeRun) -> None:
    assert len(page(make_run([line(step, loss=step % 7) for step in range(1, 10_001)]))) < 500_000


def test_names_are_escaped(make_run: MakeRun) -> None:
    text = page(make_run([line(1)], name="<b>bold", recipe="# <i>\n"))
    assert "<b>" not in text
    assert "<i>\n" not in text


BAD = [
    ("nowhere", None, "nowhere: there is no such run. Give a run directory or a metrics.jsonl."),
    (
        "run",
        "",
        "run/metrics.jsonl: no finished step, it has no line yet. Wait for the first step, or give another run.",
    ),
    ("run", '{"st', "run/metrics.jsonl: no finished step, its only line is still incomplete."),
    ("run", '{"step": 1, "loss": 2}\n{"step": 2}\n', "run/metrics.jsonl:2: not a step (loss: Field required)."),
    ("run", "what\n", "run/metrics.jsonl:1: not a step (Invalid JSON: "),
    ("run", '{"step": 1, "loss": 2}\n\n', "run/metrics.jsonl:2: not a step (Invalid JSON: "),
    ("run", '{"step": 1, "loss": "2"}\n', "run/metrics.jsonl:1: not a step (loss: Input should be a valid number)."),
    ("run", '{"step": 1.5, "loss": 2}\n', "run/metrics.jsonl:1: not a step (step: Input should be a valid integer"),
    ("run", "[1]\n", "run/metrics.jsonl:1: not a step (Input should be an object)."),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    name: str, text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).mkdir()
        Path(name, "metrics.jsonl").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        main(["report", name])
    out, err = capfd.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {message}")


def test_a_directory_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"this directory has no metrics.jsonl"):
        read_runs([str(tmp_path)])


def test_the_same_run_twice_is_refused(make_run: MakeRun) -> None:
    folder = make_run([line(1)])
    with pytest.raises(ReportError, match="given twice"):
        read_runs([str(folder), str(folder / "metrics.jsonl")])


def test_several_runs_need_an_output_folder(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["report", "a", "b"])
    assert (stopped.value.code, capfd.readouterr().err) == (
        2,
        "error: 2 runs, and no folder for their page. Add -o DIR.\n",
    )


def test_the_page_of_a_run_is_replaced_in_its_folder(make_run: MakeRun, capfd: pytest.CaptureFixture[str]) -> None:
    folder = make_run([line(1), line(2)])
    for _ in range(2):
        with pytest.raises(SystemExit) as stopped:
            main(["report", str(folder)])
        assert (stopped.value.code, capfd.readouterr().out) == (0, f"{folder}/report/index.html\n")
    assert [path.name for path in (folder / "report").iterdir()] == ["index.html"]


def test_a_page_is_not_written_over_other_files(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run([line(1)])
    with pytest.raises(ReportError, match="not part of a report"):
        write_runs(folder, [one(folder)], command="")
    assert read_metrics(folder / "metrics.jsonl").last.step == 1


def test_the_losses_of_sources_and_validation_sets_have_charts_of_their_own(make_run: MakeRun) -> None:
    lines = [line(1, source_loss={"web": 3.0, "code": 2.0}), line(2, source_loss={"web": 2.5})]
    lines[1] |= {"eval_loss": 2.2, "eval_losses": {"books": 2.4, "chats": None}}
    charts = {chart.name: chart for chart in run_charts([one(make_run(lines))])}
    shown = {name: {line.label: line.points for line in charts[name].lines} for name in ("sources", "validation-sets")}
    assert shown["sources"] == {"web": ((1, 3.0), (2, 2.5)), "code": ((1, 2.0),)}
    assert shown["validation-sets"] == {"books": ((2, 2.4),), "chats": ((2, None),)}
    assert "sources" not in {chart.name for chart in run_charts([one(make_run([line(1)], name="other"))])}


def test_the_load_of_experts_is_a_map_of_layers_over_steps(make_run: MakeRun) -> None:
    lines = [
        line(step, expert_load=2.0, layer_expert_load=[None, 1.0, 9.0 if step < 20 else 1.2]) for step in range(1, 41)
    ]
    found = load_map(one(make_run(lines)))
    assert found is not None
    wide = found.drawings[0][3]
    assert re.findall(r"var\(--(heat\d)\)", wide) == ["heat0", "heat7", "heat1"]
    assert re.findall(r">(\d+|[\d.]+)</text>", wide)[:4] == ["1", "1.00", "2", "1.20"]
    assert "highest" in found.description
    assert 'id="experts"' in page(make_run(lines, name="again"))


def test_a_dense_model_has_no_map_of_experts(make_run: MakeRun) -> None:
    assert 'id="experts"' not in page(make_run([line(step) for step in range(1, 4)]))


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\ufeff" + json.dumps(line(1)) + "\n")
    assert [step.step for step in read_metrics(path).steps] == [1]


@pytest.mark.parametrize("loss", [1e308, 1e30])
def test_losses_near_the_largest_number_have_a_page(make_run: MakeRun, loss: float) -> None:
    text = page(make_run([line(1, loss=-loss), line(2, loss=loss), line(3, loss=loss), line(4, loss=loss)]))
    assert re.search(r"\d{30}", text) is None
    assert "Infinity" not in text


@pytest.mark.parametrize("margins", [[-5] * 16, [10**400] * 16])
def test_counts_of_margins_that_no_step_has_are_named(margins: list[int], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(line(1, margins=margins)) + "\n")
    with pytest.raises(ReportError, match=r"metrics.jsonl:1: not a step \(margins"):
        read_metrics(path)


def test_margins_with_other_edges_have_no_histogram(make_run: MakeRun) -> None:
    assert margin_histogram(one(make_run([line(1, margins=[1, 2]), line(2, margins=[1, 2, 3])]))) is None


@pytest.mark.parametrize("name", ["events.jsonl", "recipe.yaml"])
def test_files_of_a_run_that_never_end_are_not_read(make_run: MakeRun, name: str) -> None:
    folder = make_run([line(1)])
    (folder / name).unlink(missing_ok=True)
    if name == "events.jsonl":
        os.mkfifo(folder / name)
    else:
        (folder / name).touch()
        os.truncate(folder / name, 1 << 40)
    run = one(folder)
    assert run.incidents == ()
    assert name == "events.jsonl" or "larger than" in run.recipe_trouble
