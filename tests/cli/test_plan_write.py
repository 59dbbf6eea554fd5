"""`dstk plan --write`: the files of the first choice, all or none, and a recipe that trains."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from train_script import train_here

from toolkit.cli.main import main
from toolkit.config import load_recipe
from toolkit.launch.spawn import free_port

TINY = ["plan", "--model", "gpt2-tiny", "--gpus", "2xL4", "--seq", "32", "--global-batch", "4", "--precision", "fp32"]
LARGE = ["plan", "--model", "llama-3-8b", "--gpus", "16xH100", "--seq", "2048", "--global-batch", "64"]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_the_written_recipe_trains(
    tmp_path: Path, corpus: Path, ranks: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*TINY, "--layout", "tp2-z1", "--write", str(tmp_path / "made")) == 0
    written = {Path(line).name for line in capsys.readouterr().out.splitlines() if line.startswith(str(tmp_path))}
    assert written == {path.name for path in (tmp_path / "made").iterdir()}
    recipe = load_recipe(tmp_path / "made" / "recipe.yaml", world_size=2)
    config = json.loads((tmp_path / "made" / "ds_config.json").read_text())
    assert config["train_batch_size"] == recipe.batch.global_batch_size == 4
    assert config["train_micro_batch_size_per_gpu"] == recipe.batch.micro_batch_size
    data = [f"data.source={corpus}", f"data.cache_dir={tmp_path}", "data.tokenizer=bpe-300", "data.workers=1"]
    arguments = ["--config", "recipe.yaml", *data, "run_dir=run", "train.steps=2"]
    (printed, _) = ranks(train_here, 2, str(tmp_path / "made"), arguments, joined=False)
    assert "dp1-tp2-pp1-z1" in printed
    assert len((tmp_path / "made" / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def test_every_launcher_that_can_run_the_plan_has_its_files(tmp_path: Path) -> None:
    assert run(*LARGE, "--layout", "tp4-pp2-z1", "--write", str(tmp_path / "pipeline")) == 0
    assert run(*LARGE, "--layout", "tp8-z2", "--write", str(tmp_path / "replicas")) == 0
    pipeline, replicas = ({path.name for path in (tmp_path / name).iterdir()} for name in ("pipeline", "replicas"))
    assert replicas - pipeline == {"accelerate.yaml", "ds_config_accelerate.json", "launch-accelerate.sh"}
    assert {"hostfile", "job.sbatch", "launch-deepspeed.sh", "launch-torchrun.sh"} <= pipeline
    accelerate = yaml.safe_load((tmp_path / "replicas" / "accelerate.yaml").read_text())
    assert (accelerate["num_machines"], accelerate["num_processes"]) == (2, 16)
    for script in (tmp_path / "replicas").glob("*.s*"):
        subprocess.run(["bash", "-n", script], check=True)
        assert os.access(script, os.X_OK)


def test_a_recipe_of_samples_beyond_the_named_positions_says_so_and_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Llama 3 names 8,192 positions, which its rotary embedding goes beyond.
    words = ["plan", "--model", "llama-3-8b", "--gpus", "8xH100", "--seq", "16384", "--global-batch", "8"]
    assert run(*words, "--layout", "z3-recompute-m1", "--write", str(tmp_path / "long")) == 0
    needed = "model.overrides.max_position_embeddings=16384"
    assert f"note: llama-3-8b has 8192 positions; training on 16384 tokens needs {needed}" in capsys.readouterr().err
    recipe = load_recipe(tmp_path / "long" / "recipe.yaml")
    assert recipe.model.overrides == {"max_position_embeddings": 16384}


def test_files_are_replaced_only_when_asked_and_others_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--write", str(tmp_path)]
    (tmp_path / "mine.txt").write_text("mine")
    assert run(*LARGE, "--layout", "tp8-z2", *out) == 0
    before = (tmp_path / "recipe.yaml").read_text()
    assert run(*TINY, "--layout", "z1", *out) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "recipe.yaml").read_text() == before
    assert run(*TINY, "--layout", "z1", *out, "--overwrite") == 0
    assert load_recipe(tmp_path / "recipe.yaml").model.name_or_path == "gpt2-tiny"
    assert not (tmp_path / "hostfile").exists()  # of the plan before
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "given",
    [
        pytest.param([*LARGE, "--layout", "pp2-z2"], id="a layout that training refuses"),
        pytest.param([*LARGE, "--layout", "z3", "--precision", "fp8"], id="a precision that it does not have"),
        pytest.param([*LARGE, "--layout", "tp8", "--framework", "megatron"], id="another framework"),
        pytest.param([*LARGE, "--why", "tp8-z1"], id="a comparison"),
        pytest.param([*TINY, "--layout", "tp2", "--seq", "513"], id="more tokens than positions"),
    ],
)
def test_what_is_refused_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str]) -> None:
    assert run(*given, "--write", str(tmp_path / "made")) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "chmod", full)
    assert run(*TINY, "--layout", "z1", "--write", str(tmp_path / "made")) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.whole
@pytest.mark.parametrize("script", ["launch-torchrun.sh", "launch-deepspeed.sh", "launch-accelerate.sh"])
def test_a_written_script_starts_the_plan(script: str, tmp_path: Path, corpus: Path) -> None:
    assert run(*TINY, "--layout", "z1", "--write", str(tmp_path / "made")) == 0
    path = tmp_path / "made" / script
    more = f"data.source={corpus} data.tokenizer=bpe-300 run_dir={tmp_path / 'run'} train.steps=2"
    text = path.read_text().replace("29501", str(free_port())).rstrip()
    path.write_text(f"{text} {more}\n")
    config = tmp_path / "made" / "ds_config_accelerate.json"
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    if "accelerate" in script:  # the same plan on CPU ranks has another optimizer
        words = ["config", str(tmp_path / "made" / "recipe.yaml"), "--device", "cpu", "--format", "accelerate"]
        assert run(*words, "--world-size", "2", "--output", str(config.parent)) == 0
    subprocess.run([path], env=environment, check=True, timeout=300)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
