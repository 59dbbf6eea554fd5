"""`dstk validate`: one line a good recipe, every problem of the others."""

from pathlib import Path

import pytest

from toolkit.cli.main import main

GOOD = """\
model: {name_or_path: gpt2}
data: {seq_len: 128}
batch: {global_batch_size: 8, micro_batch_size: 2}
optimizer: {lr: 1e-4}
train: {steps: 10}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/one.yaml", "a/b/two.yaml"):
        (tmp_path / name).write_text(GOOD)
    (tmp_path / "a" / "notes.txt").write_text("no recipe")
    return tmp_path


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], list[str]]:
    with pytest.raises(SystemExit) as stopped:
        main(["validate", *arguments])
    out, err = capfd.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, out.split("\n")[:-1], err.split("\n")[:-1]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "gpt2, z1, fp32, 8 samples = 2 micro x accumulation x dp, 1.02k tokens per step"),
        (
            ["parallel.tp=2", "parallel.pp=3"],
            "gpt2, tp2-pp3-z1, fp32, 8 samples = 2 micro x accumulation x dp, 1.02k tokens per step",
        ),
        (
            ["--world-size", "4", "parallel.zero_stage=3", "precision=bf16"],
            "gpt2, dp4-tp1-pp1-z3, bf16, 8 samples = 2 micro x 1 accumulation x 4 dp, 1.02k tokens per step",
        ),
        (
            ["parallel.dp=2"],
            "gpt2, dp2-tp1-pp1-z1, fp32, 8 samples = 2 micro x 2 accumulation x 2 dp, 1.02k tokens per step",
        ),
        (
            ["train.engine=reference"],
            "gpt2, reference dp1, fp32, 8 samples = 2 micro x 4 accumulation x 1 dp, 1.02k tokens per step",
        ),
        (
            ["train.engine=ddp"],
            "gpt2, ddp, fp32, 8 samples = 2 micro x accumulation x dp, 1.02k tokens per step",
        ),
    ],
)
def test_a_good_recipe_is_one_line(capfd: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    assert run(capfd, "a/one.yaml", *arguments) == (0, [f"a/one.yaml: {line}"], [])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("arguments", [["a"], ["."], ["a/one.yaml", "a/b"], ["a", "a/one.yaml"]])
def test_directories_are_searched_and_each_recipe_counts_once(
    capfd: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, out, err = run(capfd, *arguments)
    assert (code, sorted(line.split(":")[0] for line in out), err) == (0, ["a/b/two.yaml", "a/one.yaml"], [])


def test_a_bad_recipe_does_not_hide_a_good_one(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "a/b/two.yaml").write_text(GOOD.replace("steps", "stepz"))
    code, out, err = run(capfd, "a")
    assert (code, len(out)) == (2, 1)
    assert [line.split(": ")[1] for line in err] == ["a/b/two.yaml:5:9"]


@pytest.mark.usefixtures("here")
def test_a_wrong_override_is_reported_once_for_all_recipes(capfd: pytest.CaptureFixture[str]) -> None:
    line = "error: override train.step=2: train.step is not a field. Did you mean steps?"
    assert run(capfd, "a", "train.step=2") == (2, [], [line])


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["train.steps=2"], "no recipe is given, only overrides. Name a YAML file or a directory."),
        (["gone"], "gone: neither a file nor a recipe of the gallery."),
        (
            ["--world-size", "3", "a/one.yaml"],
            "a/one.yaml:3:28: batch.global_batch_size=8 with micro_batch_size=2 and parallel.dp=3: 8 is",
        ),
    ],
)
def test_what_cannot_be_validated_is_one_line(
    capfd: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    code, out, (given,) = run(capfd, *arguments)
    assert (code, out) == (2, [])
    assert given.startswith(f"error: {line}")


def test_a_directory_without_recipes_is_an_error(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "empty").mkdir()
    line = "error: empty: there is no *.yaml in this directory. Name a recipe, or a directory with recipes."
    assert run(capfd, "a", "empty") == (2, [], [line])
