"""Conflicts between the fields of a recipe."""

import json
from pathlib import Path

import pytest

from toolkit.config import recipe_conflicts, recipe_problems
from toolkit.config.recipe import Recipe

GOOD = {
    "model": {"name_or_path": "gpt2"},
    "data": {"seq_len": 128},
    "batch": {"global_batch_size": 8, "micro_batch_size": 2},
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


CONFLICTS: list[tuple[dict[str, object], str, str]] = [
    (
        {"model": {"name_or_path": "gemma-2-2b", "attn_implementation": "sdpa"}},
        "model.attn_implementation=sdpa with name_or_path=gemma-2-2b: transformers has eager and flash",
        "Set model.attn_implementation to eager or flash_attention_2.",
    ),
    (
        {"model": {"name_or_path": "bloom-560m", "attn_implementation": "sdpa"}},
        "model.attn_implementation=sdpa with name_or_path=bloom-560m: transformers has eager only for bloom",
        "Set model.attn_implementation=eager.",
    ),
    (
        {"parallel__offload_params": "cpu"},
        "parallel.offload_params=cpu with zero_stage=1: only ZeRO-3 shards parameters",
        "Set parallel.zero_stage=3, or offload_params=none.",
    ),
    (
        {"parallel__offload_optimizer": "cpu", "parallel__zero_stage": 0},
        "parallel.offload_optimizer=cpu with zero_stage=0:",
        "Set parallel.zero_stage to 1, 2 or 3, or offload_optimizer=none.",
    ),
    (
        {"batch__micro_batch_size": 3},
        "batch.global_batch_size=8 with micro_batch_size=3 and parallel.dp=1: 8 is not a multiple of 3 x 1 = 3",
        "Set batch.global_batch_size to 6 or 9, or micro_batch_size to one of 1, 2, 4, 8.",
    ),
    (
        {"parallel__dp": 3},
        "batch.global_batch_size=8 with micro_batch_size=2 and parallel.dp=3:",
        "Set batch.global_batch_size to 6 or 12.",
    ),
    (
        {"train__engine": "reference", "precision": "bf16"},
        "precision=bf16 with train.engine=reference:",
        "Set precision=fp32, or train.engine=deepspeed.",
    ),
    (
        {"train__engine": "reference", "precision": "fp16"},
        "precision=fp16 with train.engine=reference:",
        "Set precision=fp32, or train.engine=deepspeed.",
    ),
    (
        {"train__engine": "ddp", "precision": "fp16"},
        "precision=fp16 with train.engine=ddp: this engine allows fp32 or bf16",
        "Set precision=bf16, or train.engine=deepspeed.",
    ),
    (
        {"train__engine": "fsdp", "precision": "fp16"},
        "precision=fp16 with train.engine=fsdp:",
        "Set precision=bf16, or train.engine=deepspeed.",
    ),
    (
        {"train__engine": "reference", "parallel__dp": 2},
        "parallel.dp=2 with train.engine=reference:",
        "Set parallel.dp=1.",
    ),
    (
        {"train__engine": "ddp", "parallel__offload_optimizer": "cpu"},
        "parallel.offload_optimizer=cpu with train.engine=ddp: only the engine deepspeed offloads",
        "Set parallel.offload_optimizer=none, or train.engine=deepspeed.",
    ),
    (
        {"train__engine": "fsdp", "parallel__offload_params": "cpu", "parallel__zero_stage": 3},
        "parallel.offload_params=cpu with train.engine=fsdp:",
        "Set parallel.offload_params=none, or train.engine=deepspeed.",
    ),
    (
        {"train__on_nonfinite": "rollback"},
        "train.on_nonfinite=rollback with checkpoint.every=0: there is no checkpoint to roll back to",
        "Set checkpoint.every to 1 or more, or train.on_nonfinite to stop or skip.",
    ),
    (
        {"train__spike_sigmas": 6.0},
        "train.spike_sigmas=6.0 with checkpoint.every=0: there is no checkpoint to roll back to",
        "Set checkpoint.every to 1 or more, or train.spike_sigmas=0.",
    ),
    (
        {"train__spike_window": 100},
        "train.spike_window=100 with spike_sigmas=0.0:",
        "Remove it, or set train.spike_sigmas to 1 or more.",
    ),
    (
        {"train__max_incidents": 5},
        "train.max_incidents=5 with on_nonfinite=stop and spike_sigmas=0.0:",
        "Remove it, or set train.on_nonfinite to skip or rollback.",
    ),
    ({"optimizer__momentum": 0.9}, "optimizer.momentum=0.9 with name=adamw:", "Remove it, or set optimizer.name=sgd."),
    (
        {"optimizer__name": "adam", "optimizer__momentum": 0.9},
        "optimizer.momentum=0.9 with name=adam:",
        "Remove it, or set optimizer.name=sgd.",
    ),
    (
        {"optimizer__name": "sgd", "optimizer__betas": [0.9, 0.95]},
        "optimizer.betas=[0.9, 0.95] with name=sgd:",
        "Remove it, or set optimizer.name to adamw or adam or lion.",
    ),
    (
        {"optimizer__name": "sgd", "optimizer__eps": 1e-06},
        "optimizer.eps=1e-06 with name=sgd:",
        "Remove it, or set optimizer.name to adamw or adam.",
    ),
    (
        {"optimizer__name": "lion", "optimizer__eps": 1e-06},
        "optimizer.eps=1e-06 with name=lion:",
        "Remove it, or set optimizer.name to adamw or adam.",
    ),
    (
        {"schedule__name": "constant", "schedule__warmup_steps": 2},
        "schedule.warmup_steps=2 with name=constant:",
        "Remove it, or set schedule.name=constant_with_warmup.",
    ),
    (
        {"schedule__min_lr_ratio": 0.1},
        "schedule.min_lr_ratio=0.1 with name=cosine:",
        "Remove it, or set schedule.name to cosine_with_min_lr or polynomial or warmup_stable_decay.",
    ),
    (
        {"schedule__decay_steps": 2},
        "schedule.decay_steps=2 with name=cosine:",
        "Remove it, or set schedule.name=warmup_stable_decay.",
    ),
    (
        {"schedule__warmup_steps": 11},
        "schedule.warmup_steps=11 with train.steps=10: the schedule is longer than the run",
        "Lower schedule.warmup_steps, or set train.steps to 11 or more.",
    ),
    (
        {"schedule__name": "warmup_stable_decay", "schedule__warmup_steps": 6, "schedule__decay_steps": 5},
        "schedule.warmup_steps=6 with decay_steps=5 and train.steps=10:",
        "Lower schedule.warmup_steps, or set train.steps to 11 or more.",
    ),
    (
        {"schedule__name": "warmup_stable_decay", "schedule__warmup_steps": 10},
        "schedule.warmup_steps=10 with decay_steps=1 and train.steps=10:",
        "Lower schedule.warmup_steps, or set train.steps to 11 or more.",
    ),
    (
        {"schedule__name": "warmup_stable_decay", "schedule__warmup_steps": 5, "train__steps": 5},
        "schedule.warmup_steps=5 with decay_steps=1 and train.steps=5:",
        "Lower schedule.warmup_steps, or set train.steps to 6 or more.",
    ),
    ({"data__split": "test"}, "data.split=test with source=stdlib:", "Remove it, or name a dataset in data.source."),
    ({"data__subset": "en"}, "data.subset=en with source=stdlib:", "Remove it, or name a dataset in data.source."),
    (
        {"data__text_field": "content"},
        "data.text_field=content with source=stdlib:",
        "Remove it, or name JSONL, Parquet or a dataset in data.source.",
    ),
    (
        {"train__eval_samples": 8},
        "train.eval_samples=8 with eval_every=0:",
        "Remove it, or set train.eval_every to 1 or more.",
    ),
    ({"checkpoint__keep": 5}, "checkpoint.keep=5 with every=0:", "Remove it, or set checkpoint.every to 1 or more."),
    (
        {"data__eval_fraction": 0.0, "train__eval_every": 5},
        "train.eval_every=5 with data.eval_fraction=0.0:",
        "Set data.eval_fraction=0.01, or train.eval_every=0.",
    ),
    (
        {"data__seq_len": 1025},
        "data.seq_len=1025 with model.name_or_path=gpt2: the model has 1024 positions",
        "Set data.seq_len to 1024 or less.",
    ),
    (
        {"model__overrides": {"n_positions": 64}},
        "data.seq_len=128 with model.name_or_path=gpt2: the model has 64 positions",
        "Set data.seq_len to 64 or less.",
    ),
    ({"model__overrides": {"n_layer": 0}}, "n_layer=0 in the gpt2 config", ""),
    ({"model__name_or_path": "./gone"}, "./gone is not a directory.", ""),
]


@pytest.mark.parametrize(("changes", "given", "remedy"), CONFLICTS)
def test_a_conflict_is_one_refusal(changes: dict[str, object], given: str, remedy: str) -> None:
    (refusal,) = recipe_conflicts(recipe(**changes))
    assert str(refusal).startswith(given)
    assert remedy in str(refusal)


CONSISTENT: list[dict[str, object]] = [
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


@pytest.mark.parametrize("changes", CONSISTENT)
def test_consistent_fields_have_no_conflict(changes: dict[str, object]) -> None:
    assert recipe_problems(recipe(**changes)) == []


@pytest.mark.parametrize(
    ("world_size", "changes", "problem"),
    [
        (3, {}, "batch.global_batch_size=8 with micro_batch_size=2 and parallel.dp=3"),
        (4, {"parallel__dp": 2}, "4 ranks with parallel.dp=2, tp=1 and pp=1: this layout needs 2 ranks."),
        (2, {"train__engine": "reference"}, "2 ranks with train.engine=reference: the reference is one plain PyTorch"),
    ],
)
def test_what_does_not_fit_the_world_size_gives_one_line(
    world_size: int, changes: dict[str, object], problem: str
) -> None:
    assert recipe_problems(recipe(**changes)) == []
    (given,) = recipe_problems(recipe(**changes), world_size)
    assert given.startswith(problem)


def test_all_conflicts_are_reported_at_once() -> None:
    bad = recipe(
        parallel__dp=3, optimizer__momentum=0.5, schedule__warmup_steps=11, data__split="x", data__seq_len=5000
    )
    assert len(recipe_problems(bad)) == 5


def test_positions_without_a_table_can_be_extended(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64}))
    (given,) = recipe_problems(recipe(model__name_or_path=str(tmp_path)))
    assert given.endswith("Set data.seq_len to 64 or less, or model.overrides.max_position_embeddings=128.")


def test_a_family_that_we_cannot_read_is_not_checked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert recipe_problems(recipe(model__name_or_path=str(tmp_path))) == []
