"""Runs with a teacher: what they print and write, that its tokens are computed once, and how they resume."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interrupted_runs import timeless
from plain_fine_tuning import save_base
from small_chats import write_tokenizer
from small_preferences import words, write_rows

from toolkit.errors import ToolkitError

Train = Callable[..., str]
LARGEST_DIFFERENCE = 1e-6
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


ADAPTERS = {"r": 4, "targets": ["all-linear"]}
SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True, "zero_stage": 1}


@pytest.mark.parametrize(
    ("before", "after", "more"),
    [
        ({"tp": 2}, {"zero_stage": 2}, {}),
        *(
            pytest.param(*row, marks=pytest.mark.whole)
            for row in (
                ({"zero_stage": 3}, {"pp": 2}, {}),
                ({"ulysses": 2, "zero_stage": 1}, SEQUENCE_PARALLEL, {"train__distill": {"divergence": "reverse"}}),
                ({"pp": 2, "zero_stage": 1}, {"cp": 2, "zero_stage": 1}, {"optimizer": {"name": "muon", "lr": 3e-4}}),
                ({"tp": 2, "zero_stage": 1}, {"zero_stage": 3}, {"model": {"lora": ADAPTERS}}),
            )
        ),
    ],
    ids=str,
)
def test_a_run_resumes_in_another_layout_with_the_same_curve(
    train: Train, tmp_path: Path, before: dict[str, Any], after: dict[str, Any], more: dict[str, Any]
) -> None:
    fields = changes(tmp_path)
    for section, changed in more.items():
        fields[section] = {**fields[section], **changed}
    fields["train__steps"] = 6
    train("run_dir=run", "checkpoint.every=3", **fields, parallel=before)
    shown = train("run_dir=on", "--resume", "run/step-00000003", **fields, parallel=after)
    assert f"{ASKED}: 100%" not in shown
    resumed = timeless(tmp_path / "on")
    whole = timeless(tmp_path / "run")[3:]
    assert [step["step"] for step in resumed] == [4, 5, 6]
    assert [step["batch"] for step in resumed] == [step["batch"] for step in whole]
    for name in ("loss", "grad_norm"):
        values = [step[name] for step in whole]
        assert [step[name] for step in resumed] == pytest.approx(values, rel=LARGEST_DIFFERENCE), name
    for name in ("token_loss", "divergence"):
        values = [step["objective"][name] for step in whole]
        assert [step["objective"][name] for step in resumed] == pytest.approx(values, rel=LARGEST_DIFFERENCE), name


@pytest.mark.parametrize("damage", ["no weights", "3 heads"])
def test_a_teacher_that_cannot_be_built_is_refused_by_its_own_field(train: Train, tmp_path: Path, damage: str) -> None:
    fields = changes(tmp_path)
    teacher = tmp_path / "teacher"
    if damage == "no weights":
        (teacher / "model.safetensors").unlink()
        says = (
            f"train.distill.teacher={teacher}: no safetensors weights could be read. Give a directory with weights, or "
        )
        says += "set train.distill=null."
    else:
        config = json.loads((teacher / "config.json").read_text())
        (teacher / "config.json").write_text(json.dumps(config | {"num_attention_heads": 3, "num_key_value_heads": 3}))
        says = f"parallel.tp=2 with train.distill.teacher={teacher}: 3 attention heads cannot be shared equally by 2 "
        says += "ranks. Set parallel.tp=1, or train.distill=null."
    with pytest.raises(ToolkitError) as refused:
        train("run_dir=run", **fields, parallel={"tp": 2})
    assert refused.value.problems == [says]
