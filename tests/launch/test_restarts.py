"""`dstk train --restarts`: killing a rank during training changes no number."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.config import dump_recipe
from toolkit.config.recipe import Recipe

STEPS, KILLED_AFTER = 24, 9


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "toolkit", "train", "small.yaml", "--nproc", "2", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def steps(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{k: v for k, v in step.items() if k not in ("seconds", "memory_bytes", "slow_ranks")} for step in whole]


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_a_rank_that_is_killed_changes_no_number(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = make_recipe(train__steps=STEPS, parallel={"zero_stage": 1}, overrides__resid_pdrop=0.1)
    (tmp_path / "small.yaml").write_text(dump_recipe(recipe))
    reference = start(tmp_path, "run_dir=reference")
    assert reference.communicate(timeout=300)[1] == ""

    # All attempts use one directory, which the first one chooses.
    process = start(tmp_path, "checkpoint.every=2", "--restarts", "2")
    run = tmp_path / "runs" / "small"
    deadline = time.monotonic() + 300
    while len(steps(run)) < KILLED_AFTER and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    (line,) = (line for line in errors.splitlines() if line.startswith("restart"))
    assert line.startswith("restart 1 of 2: resuming from step-")
    assert "error: rank 1 was ended by SIGKILL." in errors
    assert os.listdir(tmp_path / "runs") == ["small"]
    assert steps(run) == steps(tmp_path / "reference")
    assert len(steps(run)) == STEPS
