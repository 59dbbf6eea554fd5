"""What `make gpu` does, on CPU ranks: a part of it every day, and all of it as `make gpu-rehearsal` does."""

import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu import __main__ as first_hour
from gpu.budget import Budget
from gpu.setups import TINY, TOOLKIT, TRAINER
from gpu_cells import CELLS, MEMORY_CELLS, RESUME_CELLS
from gpu_runs import Runs, estimate


@pytest.fixture
def rehearsing(ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported what ranks need."""
    monkeypatch.setenv("DSTK_REHEARSAL", "cpu")


@pytest.mark.usefixtures("rehearsing")
def test_runs_of_the_tables_train_resume_and_are_measured(tmp_path: Path, corpus: Path) -> None:
    (zero,) = (cell for cell in CELLS if cell.id == "fp32-ZeRO-2")
    memory, resume = MEMORY_CELLS[3], RESUME_CELLS[0]
    runs = Runs(tmp_path, corpus, "cpu", [*zero.specs, *resume.specs, *memory.specs])
    own, reference = (runs.result(spec) for spec in zero.specs)
    assert own.losses == pytest.approx(reference.losses, rel=zero.within)
    resumed, whole = (runs.result(spec) for spec in resume.specs)
    assert len(resumed.losses) == 4
    assert resumed.losses == pytest.approx(whole.losses, rel=resume.within)
    found = runs.result(memory.specs[0])
    expected = estimate(runs.recipe(memory.specs[0]), found)
    assert expected.allocated == pytest.approx(found.allocated, rel=0.25)


@pytest.mark.usefixtures("rehearsing")
def test_toolkit_and_trainer_are_timed_on_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_hour, "FOLDER", tmp_path)
    output = tmp_path / "page.md"
    monkeypatch.setattr(first_hour, "TINY", [replace(TINY[1], sides=(TOOLKIT, TRAINER))])
    options = Namespace(gpus=1, rehearse=True, output=output, only="")
    hour = first_hour.FirstHour(options=options, budget=Budget(200))
    hour.ask_machine()
    hour.prepare()
    (ready,) = hour.ready
    setup = ready.setup
    hour.train(ready)
    ours, theirs = (speed.outcome.value for speed in hour.speeds)
    # The Trainer divides by the last position of a sample too, which has no target.
    scaled = [loss * setup.seq_len / (setup.seq_len - 1) for loss in theirs.losses]
    assert ours.losses == pytest.approx(scaled, rel=0.01)
    assert len(ours.seconds) == len(theirs.seconds) == setup.steps - first_hour.WARMUP
    hour.publish()
    assert output.read_text().startswith("# A rehearsal on CPU ranks")


@pytest.mark.whole
def test_the_whole_rehearsal_passes(tmp_path: Path) -> None:
    environment = os.environ | {"DSTK_REHEARSAL": "cpu", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "benchmarks/gpu", "--gpus", "4", "--output", str(tmp_path / "page.md")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
