"""Contradictions between the fields of a recipe."""

import json
from pathlib import Path

import pytest

from toolkit.recipe import Recipe
from toolkit.recipe_file import problems

GOOD = {
    "model": {"name_or_path": "gpt2"},
    "data": {"seq_len": 128},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"lr": 1.0},
    "train": {"steps": 10},
}


def recipe(**changes: object) -> Recipe:
    """GOOD with fields changed: `train__steps=5`."""
    values = json.loads(json.dumps(GOOD))
    for key, value in changes.items():
        section, _, field = key.partition("__")
        if field:
            values.setdefault(section, {})[field] = value
        else:
            values[section] = value
    return Recipe.model_validate_json(json.dumps(values))


CONTRADICTIONS: list[tuple[dict[str, object], str]] = [
    ({"parallel__offload_params": "cpu"}, "offload_params=cpu with zero_stage=1: only ZeRO-3 shards parameters."),
    ({"parallel__offload_optimizer": "cpu", "parallel__zero_stage": 0}, "offload_optimizer=cpu with zero_stage=0"),
    ({"batch__micro_size": 3}, "batch.global_size=8 with micro_size=3 on dp=1: 8 is not a multiple of 3 x 1 = 3."),
    ({"parallel__dp": 3}, "batch.global_size=8 with micro_size=2 on dp=3"),
    ({"train__engine": "reference", "precision": "bf16"}, "precision=bf16 with train.engine=reference"),
    ({"train__engine": "reference", "precision": "fp16"}, "precision=fp16 with train.engine=reference"),
    (
        {"train__engine": "ddp", "precision": "fp16"},
        (
            "precision=fp16 with train.engine=ddp: this engine allows fp32 or bf16. Set precision=bf16, or "
            "train.engine=deepspeed."
        ),
    ),
    ({"train__engine": "fsdp", "precision": "fp16"}, "precision=fp16 with train.engine=fsdp"),
    ({"train__engine": "reference", "parallel__dp": 2}, "parallel.dp=2 with train.engine=reference"),
    (
        {"train__engine": "ddp", "parallel__offload_optimizer": "cpu"},
        "parallel.offload_optimizer=cpu with train.engine=ddp: only the engine deepspeed offloads.",
    ),
    (
        {"train__engine": "fsdp", "parallel__offload_params": "cpu", "parallel__zero_stage": 3},
        "parallel.offload_params=cpu with train.engine=fsdp",
    ),
    (
        {"train__on_nonfinite": "rollback"},
        "train.on_nonfinite=rollback with checkpoint.every=0: there is nothing to roll back to.",
    ),
    ({"train__spike_sigmas": 6.0}, "train.spike_sigmas=6.0 with checkpoint.every=0: there is nothing to roll back to."),
    ({"train__spike_window": 100}, "train.spike_window has no effect with train.spike_sigmas=0."),
    (
        {"train__max_incidents": 5},
        "train.max_incidents has no effect with train.on_nonfinite=stop and train.spike_sigmas=0.",
    ),
    (
        {"optimizer__momentum": 0.9},
        "optimizer.momentum has no effect with adamw. Remove it, or set optimizer.name=sgd.",
    ),
    ({"optimizer__name": "adam", "optimizer__momentum": 0.9}, "optimizer.momentum has no effect with adam."),
    ({"optimizer__name": "sgd", "optimizer__betas": [0.9, 0.95]}, "optimizer.betas has no effect with sgd."),
    ({"optimizer__name": "sgd", "optimizer__eps": 1e-6}, "optimizer.eps has no effect with sgd."),
    (
        {"optimizer__name": "lion", "optimizer__eps": 1e-6},
        "optimizer.eps has no effect with lion. Remove it, or set optimizer.name=adamw or adam.",
    ),
    (
        {"schedule__name": "constant", "schedule__warmup_steps": 2},
        "schedule.warmup_steps has no effect with constant. Remove it, or set schedule.name=constant_with_warmup.",
    ),
    (
        {"schedule__min_lr_ratio": 0.1},
        "schedule.min_lr_ratio has no effect with cosine. Remove it, or set schedule.name=",
    ),
    ({"schedule__decay_steps": 2}, "schedule.decay_steps has no effect with cosine."),
    (
        {"schedule__warmup_steps": 11},
        (
            "schedule.warmup_steps=11 with train.steps=10: the schedule is longer than the run. "
            "Lower schedule.warmup_steps, or set train.steps=11 or more."
        ),
    ),
    (
        {"schedule__name": "warmup_stable_decay", "schedule__warmup_steps": 6, "schedule__decay_steps": 5},
        "schedule.warmup_steps=6 + decay_steps=5 with train.steps=10",
    ),
    (
        {"schedule__name": "warmup_stable_decay", "schedule__warmup_steps": 10},
        "schedule.warmup_steps=10 + decay_steps=1 with train.steps=10",
    ),
    (
        {"schedule__name": "warmup_stable_decay", "schedule__warmup_steps": 5, "train__steps": 5},
        "schedule.warmup_steps=5 + decay_steps=1 with train.steps=5",
    ),
    ({"data__split": "test"}, "data.split has no effect with data.source=stdlib."),
    ({"data__subset": "en"}, "data.subset has no effect with data.source=stdlib."),
    ({"data__text_field": "content"}, "data.text_field has no effect with data.source=stdlib."),
    (
        {"train__eval_samples": 8},
        "train.eval_samples has no effect with train.eval_every=0. Remove it, or set train.eval_every=1 or more.",
    ),
    (
        {"checkpoint__keep": 5},
        "checkpoint.keep has no effect with checkpoint.every=0. Remove it, or set checkpoint.every=1 or more.",
    ),
    ({"data__eval_fraction": 0.0, "train__eval_every": 5}, "train.eval_every=5 with data.eval_fraction=0"),
    (
        {"data__seq_len": 1025},
        "data.seq_len=1025 with model.name_or_path=gpt2: the model has 1024 positions. Set data.seq_len to 1024",
    ),
    ({"model__overrides": {"n_positions": 64}}, "data.seq_len=128 with model.name_or_path=gpt2: the model has 64"),
    ({"model__overrides": {"n_layer": 0}}, "n_layer=0 in the gpt2 config"),
    ({"model__name_or_path": "./gone"}, "./gone is not a directory."),
]


@pytest.mark.parametrize(("changes", "problem"), CONTRADICTIONS)
def test_a_contradiction_gives_one_line(changes: dict[str, object], problem: str) -> None:
    (given,) = problems(recipe(**changes))
    assert given.startswith(problem)


AGREEMENTS: list[dict[str, object]] = [
    {},
    {"train__engine": "reference"},
    {"train__engine": "reference", "parallel__zero_stage": 3},
    {"train__engine": "ddp", "precision": "bf16", "parallel__dp": 2},
    {"train__engine": "fsdp"},
    {"precision": "fp16", "parallel__zero_stage": 3, "parallel__offload_params": "cpu"},
    {"optimizer__name": "sgd", "optimizer__momentum": 0.9},
    {"optimizer__name": "lion", "optimizer__betas": [0.9, 0.99]},
    {"schedule__name": "constant_with_warmup", "schedule__warmup_steps": 10},
    {"schedule__name": "cosine_with_min_lr", "schedule__min_lr_ratio": 0.1},
    {"schedule__name": "warmup_stable_decay", "schedule__warmup_steps": 5, "schedule__decay_steps": 5},
    {"data__source": "org/data", "data__split": "test", "data__subset": "en", "data__text_field": "x"},
    {"train__eval_samples": 8, "train__eval_every": 5},
    {"checkpoint__keep": 5, "checkpoint__every": 5},
    {"data__seq_len": 1024},
    {"data__seq_len": 100_000, "model__name_or_path": "org/unknown"},
]


@pytest.mark.parametrize("changes", AGREEMENTS)
def test_what_agrees_gives_no_line(changes: dict[str, object]) -> None:
    assert problems(recipe(**changes)) == []


@pytest.mark.parametrize(
    ("world_size", "changes", "problem"),
    [
        (3, {}, "batch.global_size=8 with micro_size=2 on dp=3"),
        (4, {"parallel__dp": 2}, "4 ranks with dp=2 tp=1 pp=1: this layout needs 2 ranks."),
        (2, {"train__engine": "reference"}, "2 ranks with train.engine=reference: the reference is one plain PyTorch"),
    ],
)
def test_what_does_not_fit_the_world_size_gives_one_line(
    world_size: int, changes: dict[str, object], problem: str
) -> None:
    assert problems(recipe(**changes)) == []
    (given,) = problems(recipe(**changes), world_size)
    assert given.startswith(problem)


def test_all_contradictions_come_at_once() -> None:
    bad = recipe(
        parallel__dp=3, optimizer__momentum=0.5, schedule__warmup_steps=11, data__split="x", data__seq_len=5000
    )
    assert len(problems(bad)) == 5


def test_positions_that_are_no_table_can_be_stretched(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    (given,) = problems(recipe(model__name_or_path=str(tmp_path)))
    assert given.endswith("Set data.seq_len to 64 or less, or model.overrides.max_position_embeddings to 128.")


def test_a_family_that_we_cannot_read_is_not_checked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert problems(recipe(model__name_or_path=str(tmp_path))) == []
