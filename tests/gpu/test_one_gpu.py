"""One GPU: ZeRO 0-3, low precision, compile, offload, memory and MFU. `make test-gpu`; skipped without CUDA."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.config import dump_recipe
from toolkit.config.recipe import Recipe
from toolkit.parity import LossCurve, Tolerance, compare_curves
from toolkit.parity.finished_runs import read_runs

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parents[2] / "recipes" / "train.py"
Run = Callable[..., Path]
WIDE = {"overrides__n_embd": 512, "overrides__n_layer": 8, "train__steps": 3, "schedule": {}}


@pytest.fixture
def run(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Run:
    """Train on the GPU in a process of its own; the run directory."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def train(*overrides: str, **changes: Any) -> Path:
        folder = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        recipe = tmp_path / "small.yaml"
        recipe.write_text(dump_recipe(make_recipe(**changes)))
        environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
        command = [
            sys.executable,
            str(SCRIPT),
            "--config",
            str(tmp_path / "small.yaml"),
            f"run_dir={folder}",
            *overrides,
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        (folder / "stdout").write_text(done.stdout)
        return folder

    return train


def curve(folder: Path) -> LossCurve:
    return read_runs([folder])[0].run.curve


def last(folder: Path) -> dict[str, Any]:
    step: dict[str, Any] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return step


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_trains_what_plain_pytorch_trains(run: Run, stage: int) -> None:
    reference = curve(run("train.engine=reference"))
    report = compare_curves(curve(run(f"parallel.zero_stage={stage}")), reference, Tolerance.fp32())
    assert report.passed, str(report)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("precision", "mantissa"), [("bf16", 8), ("fp16", 11)])
def test_low_precision_learns_what_fp32_learns(run: Run, stage: int, precision: str, mantissa: int) -> None:
    exact = last(run("train.engine=reference"))["loss"]
    low = last(run(f"parallel.zero_stage={stage}", f"precision={precision}"))["loss"]
    assert low == pytest.approx(exact, rel=2 ** (1 - mantissa))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_compiled_model_trains_the_same(run: Run, stage: int) -> None:
    eager = curve(run(f"parallel.zero_stage={stage}"))
    compiled = curve(run(f"parallel.zero_stage={stage}", "train.compile=true"))
    report = compare_curves(
        compiled, eager, Tolerance(loss=(1e-5,), grad_norm=(1e-5,), source="fused kernels reorder sums")
    )
    assert report.passed, str(report)


def test_the_banner_names_the_gpu_and_the_progress_line_its_mfu(run: Run) -> None:
    import torch

    from toolkit.hardware import find_gpu

    name = torch.cuda.get_device_name()
    text = (run("precision=bf16") / "stdout").read_text()
    assert name in text
    assert ("MFU" in text) == (find_gpu(name) is not None)


def test_memory_is_what_the_allocator_counted(run: Run) -> None:
    step = last(run())
    # Weights, gradients and two Adam moments in fp32 are the least; a few GiB would be a leak of a model this small.
    parameters = 320 * 48 + 64 * 48 + 2 * (12 * 48**2 + 13 * 48) + 2 * 48
    assert 16 * parameters < step["memory_bytes"] < 4 * 2**30


def test_recomputation_saves_memory(run: Run) -> None:
    wide = {
        "overrides__n_embd": 512,
        "overrides__n_layer": 8,
        "batch__micro_batch_size": 16,
        "train__steps": 3,
        "schedule": {},
    }
    plain = last(run(**wide))["memory_bytes"]
    recomputed = last(run("parallel.recompute=full", **wide))["memory_bytes"]
    assert recomputed < plain


def test_offload_moves_the_optimizer_off_the_gpu(run: Run) -> None:
    kept = last(run("parallel.zero_stage=2", **WIDE))["memory_bytes"]
    moved = last(run("parallel.zero_stage=2", "parallel.offload_optimizer=cpu", **WIDE))["memory_bytes"]
    assert moved < kept
