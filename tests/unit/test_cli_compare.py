"""`dstk compare`: its options, its output and its exit codes. Nothing trains here."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_trial import baseline, with_losses

from toolkit.cli.main import main
from toolkit.errors import RunError
from toolkit.parity import Bounds, Verdict
from toolkit.parity.comparison import Comparison, Entry

RECIPE = """\
model: {name_or_path: gpt2-tiny}
data: {seq_len: 128}
batch: {global_size: 8, micro_size: 2}
optimizer: {lr: 1e-4}
train: {steps: 10}
"""
BASELINE = baseline()
WRONG = with_losses(BASELINE, lambda step, loss: loss * (1.01 if step > 5 else 1))


def comparison(word: str) -> Comparison:
    trial = WRONG if word == "differs" else BASELINE
    entry = Entry(asked="z1", verdict=Verdict.of(trial, BASELINE).settled())
    if word == "failed":
        entry = Entry(asked="z1", error="rank 1 died without a word", command="dstk train one.yaml")
    return Comparison(title="gpt2-tiny", baseline=BASELINE, bounds=Bounds.fixed(), entries=[entry])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(RECIPE)
    for name, factor in (("first", 1.0), ("same", 1.0), ("other", 1.1)):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"loss": factor * (5 - step), "grad_norm": 1.0, "lr": 1.0}) for step in range(3)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(here: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(["compare", *arguments])
        out, err = capfd.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, out, err

    return call


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the runner was asked for; it answers at once with `asked["word"]`."""
    found: dict[str, Any] = {"word": "same"}

    def compare(recipe: Any, jobs: Any, first: Any, **options: Any) -> Comparison:
        found.update(options, recipe=recipe, jobs=jobs, baseline=first)
        if found["word"] == "no baseline":
            raise RunError("the baseline reference failed.")
        return comparison(found["word"])

    monkeypatch.setattr("toolkit.train.comparison.compare_strategies", compare)
    monkeypatch.setattr("toolkit.train.preload.preload", lambda recipe: None)
    monkeypatch.setattr("toolkit.train.launch.quiet", lambda *, debug: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    return found


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "nothing to compare: give --recipe and --against, or two runs."),
        (["first"], "only one run is given, first: name the one to hold it against as well."),
        (["one.yaml"], "a recipe is given where a run was expected: name it with --recipe FILE."),
        (["--against", "z1"], "--against without --recipe: name the recipe that is to be trained."),
        (["--recipe", "one.yaml"], "--recipe without --against: name the strategies, for instance --against z1,"),
        (["--recipe", "one.yaml", "--against", "z1", "--rerun", "first"], "--rerun is for finished runs:"),
        (["--recipe", "one.yaml", "--against", "z1", "--tolerance", "0"], "--tolerance is for finished runs:"),
        (["first", "same", "--steps", "30"], "--steps is for training a recipe:"),
        (["first", "same", "--nproc", "2"], "--nproc is for training a recipe:"),
        (["first", "same", "--baseline", "z1"], "--baseline is for training a recipe:"),
        (["first", "same", "--reruns", "1"], "--reruns is for training a recipe:"),
        (["first", "same", "--shrink"], "--shrink is for training a recipe:"),
        (["first", "same", "--dropout"], "--dropout is for training a recipe:"),
        (["first", "same", "--timeout", "5"], "--timeout is for training a recipe:"),
        (["first", "same", "--tolerance", "1", "--rerun", "other"], "--tolerance with --rerun: each gives a bound."),
        (["first", "same", "--tolerance", "nan"], "--tolerance nan: a relative bound is 0 or more"),
        (["first", "same", "--tolerance", "inf"], "--tolerance inf: a relative bound is 0 or more"),
        (["first", "same", "--tolerance", "-1"], "--tolerance -1: a relative bound is 0 or more"),
        (["first", "same", "--tolerance", "x"], "Invalid value for '--tolerance'"),
        (["--recipe", "one.yaml", "--against", "z1", "--steps", "1"], "Invalid value for '--steps'"),
        (["--recipe", "one.yaml", "--against", "z1", "--nproc", "0"], "Invalid value for '--nproc'"),
        (["first", "gone"], "gone: cannot be read (No such file or directory)."),
        (["first", "same", "--report", "one.yaml"], "one.yaml: not a folder."),
        (["--recipe", "gone.yaml", "--against", "z1"], "gone.yaml: there is no such file."),
        (["--recipe", "one.yaml", "--against", "z9"], "strategy 'z9': zero_stage=9"),
        (["--recipe", "one.yaml", "--against", "z1", "--baseline", "x"], "strategy 'x': 'x' is not a part of one."),
        (
            ["--recipe", "one.yaml", "--against", "z1", "batch.size=3"],
            "override batch.size=3: batch.size is not a field.",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_one_line_and_exit_2(run: Run, arguments: list[str], line: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {line}")


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--against", "tp3"], "strategy tp3: parallel.tp=3"),
        (["--against", "m3"], "strategy m3: batch.global_size=8 with micro_size=3 on dp=2"),
        (["--against", "z1,reference", "precision=bf16"], "strategy reference: precision=bf16"),
        (["--against", "z1", "--shrink", "model.init=pretrained", "data.tokenizer=gpt2", "model.name_or_path=a/b"],
         "--shrink with model.init=pretrained"),
    ],
    ids=["tp3", "m3", "bf16", "pretrained"],
)  # fmt: skip
def test_what_a_recipe_does_not_allow_is_one_line_and_exits_2(run: Run, arguments: list[str], line: str) -> None:
    code, out, err = run("--recipe", "one.yaml", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {line}")


@pytest.mark.parametrize(("word", "code"), [("same", 0), ("differs", 1), ("failed", 1), ("no baseline", 2)])
def test_the_exit_code_says_whether_all_train_the_same(run: Run, asked: dict[str, Any], word: str, code: int) -> None:
    asked["word"] = word
    assert run("--recipe", "one.yaml", "--against", "z1")[0] == code


@pytest.mark.parametrize(("name", "code"), [("same", 0), ("other", 1)])
def test_finished_runs_have_the_same_exit_codes(run: Run, name: str, code: int) -> None:
    assert run("first", name)[0] == code


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    "arguments", [["first", "same"], ["--recipe", "one.yaml", "--against", "z1"]], ids=["runs", "recipe"]
)
def test_json_is_all_that_stdout_gets(run: Run, arguments: list[str]) -> None:
    _, out, _ = run(*arguments, "--json")
    assert json.loads(out)["passed"] is True


def test_json_stays_alone_where_a_report_is_written(run: Run) -> None:
    _, out, _ = run("first", "same", "--json", "--report", "out")
    assert json.loads(out) == json.loads(Path("out/comparison.json").read_text())


def test_a_report_is_named(run: Run) -> None:
    _, out, _ = run("first", "same", "--report", "out")
    assert "out/index.html" in out


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("same", "it trains the same"),
        ("differs", "optimizer state"),
        ("failed", "rank 1 died without a word"),
        ("failed", "alone: dstk train one.yaml"),
        ("differs", "1 of 1 differ: z1"),
        ("failed", "1 of 1 failed: z1"),
    ],
)
def test_the_table_says_what_happened(run: Run, asked: dict[str, Any], word: str, text: str) -> None:
    asked["word"] = word
    assert text in " ".join(run("--recipe", "one.yaml", "--against", "z1")[1].split())


def test_of_finished_runs_no_weights_are_shown(run: Run) -> None:
    (row,) = (line for line in run("first", "same")[1].splitlines() if line.strip().startswith("same"))
    assert row.split() == ["same", "0", "0", "every", "bit", "same"]


def test_strategies_become_jobs(run: Run, asked: dict[str, Any]) -> None:
    run("--recipe", "one.yaml", "--against", "z3,tp2-pp2,ddp", "--nproc", "2")
    assert [(job.name, job.ranks) for job in asked["jobs"]] == [("z3", 2), ("tp2-pp2", 4), ("ddp", 2)]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [([], "reference"), (["precision=bf16"], "dp1-z1"), (["--baseline", "tp2"], "tp2")],
    ids=["fp32", "bf16", "asked for"],
)
def test_the_baseline(run: Run, asked: dict[str, Any], arguments: list[str], name: str) -> None:
    run("--recipe", "one.yaml", "--against", "z1", *arguments)
    assert asked["baseline"].name == name


def test_options_reach_the_runner(run: Run, asked: dict[str, Any]) -> None:
    run("--recipe", "one.yaml", "--against", "z1", "--reruns", "2", "--timeout", "7", "--steps", "5")
    assert (asked["rounding_seeds"], asked["timeout_seconds"], asked["recipe"].train.steps) == (2, 7, 5)


def test_dropout_is_off(run: Run, asked: dict[str, Any]) -> None:
    run("--recipe", "one.yaml", "--against", "z1", "model.overrides.resid_pdrop=0.1")
    assert asked["recipe"].model.overrides["resid_pdrop"] == 0.0


def test_dropout_stays_where_it_is_asked_for(run: Run, asked: dict[str, Any]) -> None:
    run("--recipe", "one.yaml", "--against", "z1", "--dropout", "model.overrides.resid_pdrop=0.1")
    assert asked["recipe"].model.overrides["resid_pdrop"] == 0.1


def test_a_shrunk_model_is_gone_when_all_is_done(run: Run, asked: dict[str, Any]) -> None:
    run("--recipe", "one.yaml", "--against", "z1", "--shrink")
    assert not Path(asked["recipe"].model.name_or_path).exists()


def test_the_command_of_a_strategy_undoes_what_the_recipe_says(run: Run, asked: dict[str, Any]) -> None:
    run("--recipe", "one.yaml", "--against", "z3", "parallel.tp=2")
    assert asked["commands"] == [
        "dstk train one.yaml parallel.tp=2 parallel.dp=2 parallel.tp=1 parallel.zero_stage=3 --nproc 2"
    ]


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\nfrom toolkit.cli.main import main\n"
        "try:\n    main(['compare', '--help'])\nexcept SystemExit:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
