"""What `make gpu` does, on CPU ranks: `make gpu-rehearsal`."""

import os
import re
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

ROOT = Path(__file__).parents[2]
SECONDS = 1500
"""It takes two minutes on two idle cores; a busy machine may take ten times as long."""


@pytest.mark.whole  # a job of ci.yml runs it on each change
@pytest.mark.timeout(SECONDS + 60)
def test_the_rehearsal_passes_and_leaves_nothing_out(tmp_path: Path) -> None:
    environment = os.environ | {"DSTK_REHEARSAL": "cpu", "DS_ACCELERATOR": "cpu"}
    page = tmp_path / "page.md"
    command = [sys.executable, "benchmarks/gpu", "--gpus", "4", "--seconds", str(SECONDS), "--output", str(page)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert page.read_text().startswith("# A rehearsal on CPU ranks")
    assert not re.search(r"no time was left|the time was up|s were left", page.read_text())


def test_toolkit_and_trainer_are_timed_on_the_same_losses(
    ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ranks`: in this process, which has imported what ranks need."""
    monkeypatch.setenv("DSTK_REHEARSAL", "cpu")
    monkeypatch.setattr(first_hour, "FOLDER", tmp_path)
    output = tmp_path / "page.md"
    monkeypatch.setattr(first_hour, "TINY", [replace(TINY[1], sides=(TOOLKIT, TRAINER))])
    options = Namespace(gpus=1, rehearse=True, output=output, only="", without=[])
    hour = first_hour.FirstHour(options=options, budget=Budget(200))
    hour.ask_machine()
    hour.prepare()
    (ready,) = hour.ready
    setup = ready.setup
    hour.train(ready, first_hour.built(ready.recipe))
    ours, theirs = (speed.outcome.value for speed in hour.speeds)
    # The Trainer divides by the last position of a sample too, which has no target.
    scaled = [loss * setup.seq_len / (setup.seq_len - 1) for loss in theirs.losses]
    assert ours.losses == pytest.approx(scaled, rel=0.01)
    assert len(ours.seconds) == len(theirs.seconds) == setup.steps - first_hour.WARMUP
    hour.publish()
    assert output.read_text().startswith("# A rehearsal on CPU ranks")
