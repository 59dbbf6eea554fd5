"""`dstk compare`: its options, its output and its exit codes. Nothing trains here."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import baseline, with_losses

from toolkit.cli.main import main
from toolkit.config import load_recipe
from toolkit.errors import RunError
from toolkit.parity import Bounds, Cause, Diagnosis, ParityResult
from toolkit.parity.comparison import Baseline, Comparison, StrategyResult

RECIPE = """\
model: {name_or_path: gpt2-tiny}
data: {seq_len: 128}
batch: {global_batch_size: 8, micro_batch_size: 2}
optimizer: {lr: 1e-4}
train: {steps: 10}
"""
BASELINE = baseline()
WRONG = with_losses(BASELINE, lambda step, loss: loss * (1.01 if step > 5 else 1))


def comparison(outcome: str) -> Comparison:
    run = WRONG if outcome in ("differs", "cannot tell") else BASELINE
    strategy = StrategyResult(name="z1", result=ParityResult.of(run, BASELINE).with_diagnosis())
    if outcome == "cannot tell":
        strategy = replace(strategy, closer_diagnosis=Diagnosis(Cause.CHAOS, "each step is right"))
    if outcome == "failed":
        strategy = StrategyResult(
            name="z1", error="rank 1 died without an error message", command="dstk train one.yaml"
        )
    return Comparison(title="gpt2-tiny", baselines=[Baseline(run=BASELINE, bounds=Bounds.fixed())], results=[strategy])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(RECIPE)
    for name, factor in (("first", 1.0), ("same", 1.0), ("other", 1.1)):
        (tmp_path / name).mkdir()
        lines = [
            json.dumps({"step": step + 1, "loss": factor * (5 - step), "grad_norm": 1, "lr": 1}) for step in range(3)
        ]
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
def requested(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the runner, which returns at once with the outcome `requested["outcome"]`."""
    found: dict[str, Any] = {"outcome": "same"}

    def compare(recipe: Any, jobs: Any, baselines: Any, **options: Any) -> Comparison:
        found.update(options, recipe=recipe, jobs=jobs, baselines=[job.name for job in baselines])
        if found["outcome"] == "no baseline":
            raise RunError("the baseline reference failed.")
        return comparison(found["outcome"])

    monkeypatch.setattr("toolkit.parity.run.compare_strategies.compare_strategies", compare)
    monkeypatch.setattr("toolkit.launch.local_ranks.preload", lambda family: None)
    monkeypatch.setattr("toolkit.launch.output.quiet", lambda *, debug: None)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    return found


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "nothing to compare: give --recipe and --against, or --script, or two runs."),
        (["first"], "only one run is given, first. Give the run to compare it with."),
        (["one.yaml"], "a recipe is given instead of a run. Give it with --recipe FILE."),
        (["--against", "z1"], "--against without --recipe: give the recipe to train."),
        (["--recipe", "one.yaml"], "--recipe without --against: give the strategies, for instance --against z1,"),
        (["--recipe", "one.yaml", "--against", "z1", "--rerun", "first"], "--rerun is for finished runs:"),
        (["--recipe", "one.yaml", "--against", "z1", "--tolerance", "0"], "--tolerance is for finished runs:"),
        (["first", "same", "--steps", "30"], "--steps is for training a recipe or a script:"),
        (["first", "same", "--nproc", "2"], "--nproc is for training a recipe or a script:"),
        (["first", "same", "--baseline", "z1"], "--baseline is for training a recipe:"),
        (["first", "same", "--reruns", "1"], "--reruns is for training a recipe or a script:"),
        (["first", "same", "--shrink"], "--shrink is for training a recipe:"),
        (["first", "same", "--dropout"], "--dropout is for training a recipe:"),
        (["first", "same", "--timeout", "5"], "--timeout is for training a recipe or a script:"),
        (["first", "same", "--tolerance", "1", "--rerun", "other"], "--tolerance with --rerun: each gives a bound."),
        (["first", "same", "--tolerance", "nan"], "--tolerance nan: a relative bound is 0 or more"),
        (["first", "same", "--tolerance", "inf"], "--tolerance inf: a relative bound is 0 or more"),
        (["first", "same", "--tolerance", "-1"], "--tolerance -1: a relative bound is 0 or more"),
        (["first", "same", "--tolerance", "x"], "Invalid value for '--tolerance'"),
        (["--recipe", "one.yaml", "--against", "z1", "--steps", "1"], "Invalid value for '--steps'"),
        (["--recipe", "one.yaml", "--against", "z1", "--nproc", "0"], "Invalid value for '--nproc'"),
        (["first", "gone"], "gone: cannot be read (No such file or directory)."),
        (["--runs", "first", "same", "--loss", "x"], "--loss x: no run calls its loss that."),
        (["--recipe", "one.yaml", "--against", "z1", "--loss", "x"], "--loss is for finished runs:"),
        (["--recipe", "one.yaml", "--against", "z1", "--runs"], "--runs is for finished runs:"),
        (["first", "same", "--report", "one.yaml"], "one.yaml: not a folder."),
        (["--recipe", "gone.yaml", "--against", "z1"], "gone.yaml: there is no such file."),
        (["--recipe", "one.yaml", "--against", "z9"], "strategy=z9 with zero_stage=9:"),
        (["--recipe", "one.yaml", "--against", "z1", "--baseline", "x"], "strategy=x: 'x' is unknown."),
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


@pytest.mark.usefixtures("requested")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--against", "tp3"], "strategy tp3: parallel.tp=3"),
        (["--against", "m3"], "strategy m3: batch.global_batch_size=8 with micro_batch_size=3 and parallel.dp=2"),
        (["--against", "z1,reference", "precision=bf16"], "strategy reference: precision=bf16"),
        (["--against", "z1", "--shrink", "model.init=pretrained", "data.tokenizer=gpt2", "model.name_or_path=a/b"],
         "--shrink with model.init=pretrained"),
    ],
    ids=["tp3", "m3", "bf16", "pretrained"],
)  # fmt: skip
def test_a_strategy_that_the_recipe_rejects_is_one_line_and_exits_2(run: Run, arguments: list[str], line: str) -> None:
    code, out, err = run("--recipe", "one.yaml", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {line}")


@pytest.mark.parametrize(
    ("outcome", "code"), [("same", 0), ("differs", 1), ("failed", 1), ("no baseline", 2), ("cannot tell", 3)]
)
def test_the_exit_code_says_whether_all_train_the_same(
    run: Run, requested: dict[str, Any], outcome: str, code: int
) -> None:
    requested["outcome"] = outcome
    assert run("--recipe", "one.yaml", "--against", "z1")[0] == code


@pytest.mark.parametrize(("name", "code"), [("same", 0), ("other", 1)])
def test_finished_runs_have_the_same_exit_codes(run: Run, name: str, code: int) -> None:
    assert run("first", name)[0] == code


@pytest.mark.usefixtures("requested")
@pytest.mark.parametrize(
    "arguments", [["first", "same"], ["--recipe", "one.yaml", "--against", "z1"]], ids=["runs", "recipe"]
)
def test_stdout_has_nothing_but_json(run: Run, arguments: list[str]) -> None:
    _, out, _ = run(*arguments, "--json")
    assert json.loads(out)["passed"] is True


def test_stdout_has_nothing_but_json_with_a_report_too(run: Run) -> None:
    _, out, _ = run("first", "same", "--json", "--report", "out")
    assert json.loads(out) == json.loads(Path("out/comparison.json").read_text())


def test_the_path_of_the_report_is_printed(run: Run) -> None:
    _, out, _ = run("first", "same", "--report", "out")
    assert "out/index.html" in out


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        ("same", "it trains the same"),
        ("differs", "optimizer state"),
        ("failed", "rank 1 died without an error message"),
        ("failed", "alone: dstk train one.yaml"),
        ("differs", "1 of 1 differ: z1"),
        ("failed", "1 of 1 failed: z1"),
        ("cannot tell", "z1 each step is right"),
        ("cannot tell", "cannot tell from rounding at this learning rate: z1 (1 of 1)"),
    ],
)
def test_the_table_says_what_happened(run: Run, requested: dict[str, Any], outcome: str, text: str) -> None:
    requested["outcome"] = outcome
    assert text in " ".join(run("--recipe", "one.yaml", "--against", "z1")[1].split())


def test_curves_from_elsewhere_are_compared_and_reported(run: Run, here: Path) -> None:
    (here / "curve.csv").write_text("step,loss\n1,5\n3,3\n")
    code, out, _ = run("--runs", "first", "curve.csv", "--report", "out")
    assert (code, "What all runs log: 2 values from step 1 to 3, without gradient norms." in " ".join(out.split())) == (
        0,
        True,
    )
    assert json.loads(Path("out/comparison.json").read_text())["steps"] == [1, 3]
    assert ">not finite<" not in Path("out/index.html").read_text()
    assert sorted(path.name for path in Path("out").glob("*.svg")) == [
        "gradients.svg",
        "loss-difference.svg",
        "losses.svg",
    ]


def test_finished_runs_show_no_weights(run: Run) -> None:
    (row,) = (line for line in run("first", "same")[1].splitlines() if line.strip().startswith("same"))
    assert row.split() == ["same", "0", "0", "every", "bit", "same"]


def test_strategies_become_jobs(run: Run, requested: dict[str, Any]) -> None:
    run("--recipe", "one.yaml", "--against", "z3,tp2-pp2,ddp", "--nproc", "2")
    assert [(job.name, job.ranks) for job in requested["jobs"]] == [("z3", 2), ("tp2-pp2", 4), ("ddp", 2)]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["reference", "reference", "reference"]),
        (["precision=bf16"], ["dp1-z1", "dp1-z0", "fsdp-dp1"]),
        (["--baseline", "tp2"], ["tp2", "tp2", "tp2"]),
    ],
    ids=["fp32", "bf16", "given"],
)
def test_the_baselines(run: Run, requested: dict[str, Any], arguments: list[str], names: list[str]) -> None:
    run("--recipe", "one.yaml", "--against", "z1,ddp,fsdp", *arguments)
    assert requested["baselines"] == names


def test_options_reach_the_runner(run: Run, requested: dict[str, Any]) -> None:
    run("--recipe", "one.yaml", "--against", "z1", "--reruns", "2", "--timeout", "7", "--steps", "5")
    assert (requested["rounding_seeds"], requested["timeout_seconds"], requested["recipe"].train.steps) == (2, 7, 5)


def test_dropout_is_off(run: Run, requested: dict[str, Any]) -> None:
    run("--recipe", "one.yaml", "--against", "z1", "model.overrides.resid_pdrop=0.1")
    assert requested["recipe"].model.overrides["resid_pdrop"] == 0.0


def test_dropout_stays_on_with_its_option(run: Run, requested: dict[str, Any]) -> None:
    run("--recipe", "one.yaml", "--against", "z1", "--dropout", "model.overrides.resid_pdrop=0.1")
    assert requested["recipe"].model.overrides["resid_pdrop"] == 0.1


OPTIONS = [
    ["--against", "z3,tp2-sp,reference"],
    ["--against", "ddp,fsdp-dp1,pp2", "--shrink", "precision=bf16"],
    ["--against", "z1", "--dropout", "parallel.tp=2", "model.overrides.resid_pdrop=0.1"],
    ["--against", "z1", "--steps", "5", "schedule.name=cosine", "schedule.warmup_steps=3", "run_dir=runs/a b"],
    ["--against", "z2", "--shrink", "model.name_or_path=llama-3.2-1b", "train.eval_every=5", "train.eval_samples=8"],
]


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_the_command_of_a_strategy_trains_the_recipe_that_is_compared(
    run: Run, requested: dict[str, Any], options: list[str]
) -> None:
    run("--recipe", "one.yaml", *options)
    assert len(requested["commands"]) == len(requested["jobs"]) > 0
    for command, job in zip(requested["commands"], requested["jobs"], strict=True):
        threads, _, _, path, *overrides, _, ranks = shlex.split(command)
        recipe = load_recipe(path, overrides, world_size=int(ranks))
        unchanged = {"log": job.recipe.log, "checkpoint": job.recipe.checkpoint}
        assert (threads, int(ranks)) == ("OMP_NUM_THREADS=1", job.ranks)
        assert recipe.model_copy(update=unchanged) == job.recipe


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\nfrom toolkit.cli.main import main\n"
        "try:\n    main(['compare', '--help'])\nexcept SystemExit:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
