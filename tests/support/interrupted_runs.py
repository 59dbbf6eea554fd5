"""Finished runs made to look interrupted, and what of two runs must agree."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

STEPS = 8
# Interrupted in the middle of the warm-up; an epoch is shorter than the run.
SETTINGS = ("checkpoint.every=1", "checkpoint.keep=20", "schedule.warmup_steps=6", f"train.steps={STEPS}")


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def timeless(run: Path) -> list[dict[str, Any]]:
    """What of the metrics must repeat."""
    varying = ("seconds", "memory_bytes", "slow_ranks")
    return [{name: value for name, value in step.items() if name not in varying} for step in metrics(run)]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {
        f"{file.stem.partition('-0')[0]} {name}": value for file in files for name, value in load_file(file).items()
    }


def assert_same_bits(one: Path, other: Path) -> None:
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def interrupt(run: Path, step: int) -> None:
    """Make a run look as if it had been killed right after the checkpoint of `step`, in the middle of a line."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[: step + 1]) + '{"step": 99, "los')
    for checkpoint in run.glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            checkpoint.rename(run.with_name(f"later-{checkpoint.name}"))
    (run / "loss.png").unlink()
    (run / "latest").write_text(f"step-{step:08d}\n")
