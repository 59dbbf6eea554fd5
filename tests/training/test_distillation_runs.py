"""Runs with a teacher: what they print and write, and that its tokens are computed once."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain_fine_tuning import save_base
from small_chats import write_tokenizer
from small_preferences import words, write_rows

Train = Callable[..., str]
ASKED = "teacher's top 16 tokens"


def changes(folder: Path) -> dict[str, Any]:
    rng = random.Random(9)
    teacher = str(save_base(folder / "teacher", "llama", seed=9, hidden_size=48))
    return {
        "model": {"name_or_path": str(save_base(folder / "base", "llama")), "init": "pretrained"},
        "data": {
            "source": str(write_rows(folder / "rows.jsonl", [{"text": words(rng)} for _ in range(80)])),
            "tokenizer": str(write_tokenizer(folder / "tokenizer")),
            "seq_len": 32,
            "workers": 1,
            "cache_dir": str(folder / "cache"),
            "eval_fraction": 0.0,
        },
        "world_size": 2,
        "train__steps": 4,
        "train__distill": {"teacher": teacher, "top_k": 16},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "optimizer": {"name": "adamw", "lr": 3e-4},
        "schedule": {"name": "constant"},
    }


def test_a_second_run_reads_what_the_teacher_says_in_another_layout(train: Train, tmp_path: Path) -> None:
    fields = changes(tmp_path)
    shown = train("run_dir=first", **fields, parallel={"zero_stage": 2})
    assert f"{ASKED}: 100%" in shown
    assert "top 16 tokens: " in shown
    assert "beside the token cache" in shown
    again = train("run_dir=second", **fields, parallel={"tp": 2})
    assert f"{ASKED}: 100%" not in again
    first, second = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    )
    assert set(first[0]["objective"]) == {"token_loss", "divergence"}
    parts = first[0]["objective"]
    assert first[0]["loss"] == pytest.approx(0.5 * parts["token_loss"] + 0.5 * parts["divergence"], rel=1e-6)
    assert [step["loss"] for step in second] == pytest.approx([step["loss"] for step in first], rel=1e-6)
