"""`dstk checkpoint list|verify|inspect`: the checkpoints of a run, whether they are complete, and their content."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import save_tiny, tensors_of

from toolkit.checkpoint.trainer_state import TrainerState
from toolkit.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs `dstk checkpoint …`; gives exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main(["checkpoint", *map(str, arguments)])
        out, err = capfd.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, out, err

    return run


def state(step: int) -> dict[str, Any]:
    return TrainerState(
        step=step,
        samples=16 * step,
        tokens=512 * step,
        updates=step - 1,
        learning_rate=1.25e-4,
        loss_scale={"cur_scale": 1024.0},
        layout="dp2-tp1-pp1-z3",
        micro_batch_size=4,
        accumulation=2,
        precision="fp16",
        engine="deepspeed",
        seed=1,
        states=["exp_avg", "exp_avg_sq"],
        contents="",
        versions={"toolkit": "0.1.0", "torch": "2.13.0"},
        recipe={"model": {"name_or_path": "gpt2-tiny"}, "data": {"source": "stdlib"}, "train": {"steps": 300}},
    ).to_dict()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run with the checkpoints of steps 5 and 120."""
    for step in (5, 120):
        save_tiny(tmp_path, step, trainer_state=state(step))
    return tmp_path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_list_has_a_line_for_each_checkpoint_oldest_first(run: Run, saved: Path) -> None:
    code, out, _ = run("list", saved)
    headings, *rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert headings == ["step", "size", "age", "layout", "precision", "complete"]
    assert [(row[0], row[-3:]) for row in rows] == [
        ("5", ["dp2-tp1-pp1-z3", "fp16", "yes"]),
        ("120", ["dp2-tp1-pp1-z3", "fp16", "yes"]),
    ]


def test_list_takes_one_checkpoint_too(run: Run, saved: Path) -> None:
    _, out, _ = run("list", saved / "step-00000005")
    assert len(out.splitlines()) == 2


def test_list_detects_a_missing_file_and_with_verify_a_flipped_bit(run: Run, saved: Path) -> None:
    flip(saved / "step-00000005" / "optimizer" / "exp_avg-00001-of-00002.safetensors")
    next((saved / "step-00000120" / "optimizer").iterdir()).unlink()
    complete = [one["complete"] for one in json.loads(run("list", saved, "--json")[1])]
    assert complete == [True, False]
    first, _ = json.loads(run("list", saved, "--json", "--verify")[1])
    assert first["problems"] == [
        "optimizer/exp_avg-00001-of-00002.safetensors: its sha256 differs from what was written"
    ]


@pytest.mark.parametrize("name", ["manifest.json", "trainer_state.json", "model-00001-of-00002.safetensors"])
def test_list_reports_a_missing_file(run: Run, saved: Path, name: str) -> None:
    (saved / "step-00000120" / name).unlink(missing_ok=False)
    code, out, err = run("list", saved)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].split()[0] == "120"
    assert " no: " in out.splitlines()[-1]


def test_verify_of_a_complete_run_exits_with_0(run: Run, saved: Path) -> None:
    code, out, err = run("verify", saved)
    assert (code, err) == (0, "")
    assert [line.partition(": ")[2].split(",")[0] for line in out.splitlines()] == ["complete", "complete"]


def test_verify_names_every_damaged_file_and_exits_with_2(run: Run, saved: Path) -> None:
    checkpoint = saved / "step-00000005"
    for name in ("model-00001-of-00002.safetensors", "optimizer/exp_avg-00001-of-00002.safetensors"):
        flip(checkpoint / name)
    code, out, err = run("verify", saved)
    assert code == 2
    assert len(out.splitlines()) == 1
    assert err.splitlines() == [
        f"{checkpoint}: model-00001-of-00002.safetensors: its sha256 differs from what was written",
        f"{checkpoint}: optimizer/exp_avg-00001-of-00002.safetensors: its sha256 differs from what was written",
    ]


def test_verify_prints_json(run: Run, saved: Path) -> None:
    flip(saved / "step-00000120" / "model-00001-of-00002.safetensors")
    code, out, _ = run("verify", saved, "--json")
    assert code == 2
    assert [(one["step"], one["complete"]) for one in json.loads(out)] == [(5, True), (120, False)]


def test_inspect_prints_the_progress_of_the_run(run: Run, saved: Path) -> None:
    code, out, _ = run("inspect", saved / "step-00000120")
    assert code == 0
    words = {line[:10].strip(): line[12:] for line in out.splitlines()}
    assert words["recipe"] == "gpt2-tiny on stdlib, seed 1"
    assert words["step"] == "120 of 300, 1.92k samples, 61.4k tokens, 119 updates"
    assert words["rate"] == "learning rate 0.000125, loss scale 1024"
    assert words["layout"] == "dp2-tp1-pp1-z3, deepspeed, fp16, micro-batches of 4, accumulation 2"
    assert words["written by"] == "toolkit 0.1.0, torch 2.13.0"
    assert words["exp_avg"] == "5 tensors, 212 values, 848 B, float32, 2 files"


def test_inspect_of_a_run_reads_its_newest_complete_checkpoint(run: Run, saved: Path) -> None:
    flip(saved / "step-00000120" / "model-00001-of-00002.safetensors")
    _, out, _ = run("inspect", saved)
    assert out.splitlines()[0].endswith("step-00000005")


def test_inspect_reads_every_tensor_when_asked(run: Run, saved: Path) -> None:
    content = json.loads(run("inspect", saved, "--tensors", "--json")[1])
    wanted = {(kind, name): value for kind, values in tensors_of(120).items() for name, value in values.items()}
    assert content["step"] == 120
    assert {(row["kind"], row["name"]) for row in content["tensors"]} == wanted.keys()
    for row in content["tensors"]:
        value = wanted[row["kind"], row["name"]]
        assert row["shape"] == list(value.shape)
        assert f"torch.{row['dtype']}" == str(value.dtype)
        assert row["norm"] == pytest.approx(float(torch.linalg.vector_norm(value.double())), rel=1e-6)
    table = run("inspect", saved, "--tensors")[1]
    assert "exp_avg_sq  h.0.fc.weight  5 x 20" in table


def test_a_mistyped_command_is_named(run: Run) -> None:
    code, _, err = run("inspct", "x")
    assert code == 2
    assert err == "error: inspct is not a command. Did you mean inspect? See dstk checkpoint --help.\n"


@pytest.mark.parametrize("name", ["list", "verify", "inspect"])
@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_a_path_without_checkpoints_is_one_line(run: Run, tmp_path: Path, name: str, place: str) -> None:
    (tmp_path / "empty").mkdir()
    code, out, err = run(name, tmp_path / place)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(f"error: {tmp_path / place}: ")
