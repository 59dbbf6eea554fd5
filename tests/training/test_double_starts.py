"""`dstk train` started twice in one run directory: one trains, the other ends with 2 and one line, nothing is lost."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interrupted_runs import metrics
from refusals import refused

from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.errors import FinishedError, RunError, ToolkitError

Train = Callable[..., str]
SAVED, EVERY, STEPS = 4, 25, 100_000
DAILY, ALL = 1, 50


def start(folder: Path, nproc: int, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "toolkit", "train", "small.yaml", "--nproc", str(nproc), "run_dir=run"]
    command += [f"checkpoint.every={EVERY}", "checkpoint.keep=9999", f"train.steps={STEPS}"]
    command += ["schedule.warmup_steps=0", "log.every=100000"]
    return subprocess.Popen(
        [*command, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def contents(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.glob("step-*/**/*") if path.is_file()}


@pytest.mark.parametrize(
    "seed", [*range(DAILY), *(pytest.param(n, marks=pytest.mark.whole) for n in range(DAILY, ALL))]
)
def test_of_two_starts_exactly_one_trains(train: Train, tmp_path: Path, seed: int) -> None:
    """In a new directory, or in one with checkpoints from which both would resume."""
    numbers, run, first_step = random.Random(seed), tmp_path / "run", 1
    nproc, arguments = numbers.choice([(1, ["train.engine=reference"]), (2, ["parallel.zero_stage=1"])])
    resumes = seed % 2 == 1
    train("run_dir=run", "checkpoint.every=2", "schedule.warmup_steps=0", train__steps=SAVED)
    if resumes:
        arguments, first_step = [*arguments, "--resume", "auto"], SAVED + 1
    else:
        run.rename(tmp_path / "other")
    earlier = contents(run)
    both = [start(tmp_path, nproc, *arguments)]
    time.sleep(numbers.choice([0.0, numbers.uniform(0, 10)]))
    both.append(start(tmp_path, nproc, *arguments))
    try:
        wait_until(lambda: any(one.poll() is not None for one in both))
        refused, trains = sorted(both, key=lambda one: one.poll() is None)
        output, errors = refused.communicate(timeout=300)
        assert (refused.returncode, output) == (2, ""), errors
        (line,) = errors.splitlines()
        assert line.startswith("error: run_dir=run: process ")
        assert "has trained there since" in line
        wait_until(lambda: len(steps(run)) >= first_step + 2 * EVERY or trains.poll() is not None)
        trains.send_signal(signal.SIGTERM)
        _, errors = trains.communicate(timeout=300)
        assert trains.returncode == 75, errors
    finally:
        for one in both:
            one.kill()
    done = steps(run)
    assert done == list(range(1, len(done) + 1))
    saved = {int(path.name.removeprefix("step-")) for path in run.glob("step-*")}
    assert saved >= {*range(EVERY, len(done) + 1, EVERY), len(done)}
    assert contents(run).items() >= earlier.items()
    assert bool(earlier) == resumes
    assert not list(run.glob(".lock*"))


def test_a_run_that_lost_its_directory_changes_nothing_there(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine takes it over during step 3; checkpoint.keep=1 would then delete the one of step 2."""
    micro_batches = MicroBatchLoader.micro_batches
    other = {"host": "node9", "pid": 42, "start_ticks": 1, "machine_id": "that of node9", "since": "now"}

    def watched(loader: MicroBatchLoader, step: int, ahead: Any, **place: int) -> Any:
        if step == 2:
            (tmp_path / "run" / ".lock-7").write_text(f"000000000000\n{json.dumps(other)}\n")
        yield from micro_batches(loader, step, ahead, **place)

    monkeypatch.setattr(MicroBatchLoader, "micro_batches", watched)
    with pytest.raises(ToolkitError, match=r"step-00000003: .*process 42 on node9 may train there now") as error:
        train("run_dir=run", "checkpoint.every=1", "checkpoint.keep=1", "train.steps=6", world_size=2)
    assert error.value.exit_code == 2
    found = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"step-00000002", ".lock-7"} <= found
    assert not {name for name in found if name.startswith((".step", "step-00000003", ".lock-1"))}


def test_a_run_that_fails_before_its_first_step_leaves_no_directory(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.engines.deepspeed_engine import DeepSpeedEngine

    def fails(*arguments: Any, **options: Any) -> None:
        raise RunError("no engine today")

    monkeypatch.setattr(DeepSpeedEngine, "__init__", fails)
    with pytest.raises(RunError, match="no engine today"):
        train("run_dir=run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(train: Train, tmp_path: Path) -> None:
    train("run_dir=run", train__steps=6)
    for name in ("model", "loss.png"):
        path = tmp_path / "run" / name
        path.rename(tmp_path / name)
    with refused(ToolkitError, "run_dir"):
        train("run_dir=run")
    assert "no checkpoint in run: training starts at step 0" in train("run_dir=run", "--resume", "auto")
    assert [step["step"] for step in metrics(tmp_path / "run")] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "model").exists()


def test_a_finished_run_without_checkpoints_has_none_to_resume(train: Train) -> None:
    train("run_dir=run")
    with pytest.raises(ToolkitError, match="it holds a finished run, and no checkpoint to resume"):
        train("run_dir=run", "--resume", "auto", train__steps=6)


@pytest.mark.parametrize(
    ("every", "advice"),
    [(2, "set train.steps to more than 4"), (0, "start a new run with model.name_or_path=run/model")],
    ids=["with checkpoints", "without"],
)
def test_a_finished_run_says_how_to_train_longer(train: Train, tmp_path: Path, every: int, advice: str) -> None:
    train("run_dir=run", f"checkpoint.every={every}")
    with pytest.raises(FinishedError) as finished:
        train("run_dir=run", "--resume", "auto")
    facts = "run is finished: gpt2-tiny, 4 steps. Its model is run/model."
    assert str(finished.value) == f"{facts} To train longer, {advice}."
    with refused(ToolkitError, "train.seed" if every else "run_dir"):
        train("run_dir=run", "--resume", "auto", "train.seed=9")


def test_resuming_a_finished_run_ends_with_0_and_one_line_and_changes_nothing(train: Train, tmp_path: Path) -> None:
    train("run_dir=run", "checkpoint.every=2", world_size=2)
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*"))
    command = [sys.executable, "-m", "toolkit", "train", "small.yaml", "--nproc", "2", "run_dir=run"]
    command += ["--resume", "auto"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("run is finished: ")
    assert len(done.stdout.splitlines()) == 1
    after = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*"))
    assert after == before


def test_a_run_that_was_killed_before_its_last_files_gets_them(train: Train, tmp_path: Path) -> None:
    """After the checkpoint of the last step; an earlier model is there, from before the run was made longer."""
    train("run_dir=run", "checkpoint.every=2", "schedule.name=constant", "schedule.warmup_steps=0", train__steps=4)
    model = tmp_path / "run" / "model" / "model.safetensors"
    trained = model.read_bytes()
    model.write_bytes(b"earlier")
    (tmp_path / "run" / "loss.png").unlink()
    train("run_dir=run", "schedule.name=constant", "schedule.warmup_steps=0", "--resume", "auto", train__steps=4)
    assert model.read_bytes() == trained
    assert (tmp_path / "run" / "loss.png").exists()
