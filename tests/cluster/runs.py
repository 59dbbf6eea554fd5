"""Runs between hosts: a small copy of the demo in tp2-pp2 over two hosts, and the same run in one process."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from small_text import write_corpus

from cluster.hosts import ROOT, Command, command_environment

TRAIN = ROOT / "recipes" / "train.py"
TOLERANCE = 1e-6
"""Largest relative difference of a loss or a gradient norm from those of one process."""


def write_demo(folder: Path, **changes: object) -> Path:
    """Write the demo recipe made small, with a text and a cache in `folder`; return its path."""
    recipe = yaml.safe_load((ROOT / "recipes" / "demo.yaml").read_text())
    recipe["model"]["overrides"] = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
    recipe["data"] |= {"source": str(write_corpus(folder)), "tokenizer": "bpe-300", "seq_len": 32, "workers": 1}
    recipe["data"] |= {"cache_dir": str(folder / "cache")}
    recipe["batch"]["micro_batch_size"] = 4
    recipe["schedule"]["warmup_steps"] = 2
    recipe["train"] |= {"steps": 4, "eval_every": 0}
    recipe["log"]["every"] = 1
    for key, value in changes.items():
        section, _, name = key.partition("__")
        recipe.setdefault(section, {})[name] = value
    path = folder / "demo.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def train_in_one_process(folder: Path, recipe: Path, *overrides: str) -> list[dict[str, float]]:
    """Train with the reference engine on this machine; return its metrics."""
    return _train([sys.executable], folder, recipe, "--layout", "reference", *overrides)


def train_undisturbed(folder: Path, recipe: Path, ranks: int, *words: str) -> list[dict[str, float]]:
    """Train with `--layout` and overrides among `words` on this machine alone; return its metrics."""
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", str(ranks)]
    return _train(torchrun, folder, recipe, *words)


def _train(launcher: Sequence[str], folder: Path, recipe: Path, *words: str) -> list[dict[str, float]]:
    run_dir = folder / "reference"
    command = [*launcher, TRAIN, "--config", recipe, *words, f"run_dir={run_dir}"]
    environment = command_environment()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics(run_dir)


def metrics(run: Path) -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_training(run: Path, reference: Sequence[dict[str, float]]) -> None:
    """Compare losses and gradient norms of every step with those of one process."""
    trained = metrics(run)
    assert [line["step"] for line in trained] == [line["step"] for line in reference]
    assert reference
    for name in ("loss", "grad_norm"):
        expected = [line[name] for line in reference]
        assert [line[name] for line in trained] == pytest.approx(expected, rel=TOLERANCE, abs=0), name


def end_all(commands: Sequence[Command], timeout: float = 300) -> list[int]:
    """Wait for the end of all commands; return their exit codes."""
    return [command.wait(timeout) for command in commands]


def assert_all_succeed(commands: Sequence[Command], timeout: float = 300) -> None:
    codes = end_all(commands, timeout)
    outputs = "\n".join(f"--- {command.log.name}\n{command.output[-5000:]}" for command in commands)
    assert codes == [0] * len(commands), outputs
