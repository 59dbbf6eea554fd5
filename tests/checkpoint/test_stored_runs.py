"""A run of version 0.1.0, from before recipe fields were renamed: it resumes, loads and is read by every command."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train_script import train_here

from toolkit.checkpoint.trainer_state import TrainerState
from toolkit.cli.main import main
from toolkit.config import dump_recipe, load_recipe

STORED = Path(__file__).parents[1] / "fixtures" / "run-0.1.0"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, beside the text that it was trained on."""
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def dstk(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capfd.readouterr()
    assert end.value.code == 0, err
    return out


def test_its_recipe_is_read_under_the_new_names(run: Path) -> None:
    recipe = load_recipe(run / "recipe.yaml", stored=True)
    assert (recipe.batch.global_batch_size, recipe.batch.micro_batch_size) == (4, 2)
    assert (recipe.data.packing, recipe.data.document_masking) == ("packed", True)


def test_keys_of_its_trainer_state_are_read_and_never_written_again() -> None:
    data = json.loads((STORED / "run" / "step-00000002" / "trainer_state.json").read_text()) | {"left_out": 2}
    assert "micro_size" in data
    state = TrainerState.from_dict(data, path="trainer_state.json")
    assert (state.micro_batch_size, state.skipped_batches) == (2, 2)
    assert state.recipe["batch"] == {"global_batch_size": 4, "micro_batch_size": 2}
    assert not {"micro_size", "left_out"} & state.to_dict().keys()


def test_it_resumes_and_trains_what_it_trained_before(run: Path, ranks: Callable[..., list[Any]]) -> None:
    Path("recipe.yaml").write_text(dump_recipe(load_recipe(run / "recipe.yaml", stored=True)))
    arguments = ["--config", "recipe.yaml", "--resume", str(run / "step-00000002"), "run_dir=again"]
    told = ranks(train_here, 2, str(run.parent), arguments, joined=False)[0]
    assert "step 2" in told
    again = losses(Path("again"))
    assert len(again) == 2
    assert again == pytest.approx(losses(run)[2:], rel=1e-6)


@pytest.mark.parametrize("name", ["model", "step-00000002", "step-00000004"])
def test_transformers_loads_its_models(run: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(run / name).config.n_embd == 8


@pytest.mark.parametrize(
    ("command", "told"),
    [("list", "4  64.45 KiB"), ("verify", "step-00000004: "), ("inspect", "gpt2 on corpus.txt, seed 0")],
)
def test_its_checkpoints_are_read(run: Path, capfd: pytest.CaptureFixture[str], command: str, told: str) -> None:
    assert told in dstk(capfd, "checkpoint", command, str(run))


def test_a_report_shows_its_recipe(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dstk(capfd, "report", str(run), "-o", "page")
    page = (Path("page") / "index.html").read_text()
    assert "dp2-tp1-pp1-z1" in page


def test_it_is_compared_with_another_run(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dstk(capfd, "compare", str(run), str(run), "--report", "page")
    assert "micro_batch_size: 2" in (Path("page") / "index.html").read_text()
