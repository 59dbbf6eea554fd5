"""Conflicts between the fields of a recipe."""

import json
from pathlib import Path

import pytest
from checked_recipes import check_conflict, recipe

from toolkit.config import recipe_problems

CONFLICTS: list[tuple[dict[str, object], list[str], list[object]]] = [
    (
        {"model": {"name_or_path": "gemma-2-2b", "attn_implementation": "sdpa"}},
        ["model.attn_implementation", "model.name_or_path"],
        [("model.attn_implementation", "eager or flash_attention_2")],
    ),
    (
        {"model": {"name_or_path": "bloom-560m", "attn_implementation": "sdpa"}},
        ["model.attn_implementation", "model.name_or_path"],
        [("model.attn_implementation", "eager")],
    ),
    (
        {"model__loss": "chunked", "precision": "fp16"},
        ["model.loss", "precision"],
        [("model.loss", "auto")],
    ),
    (
        {"model__loss": "chunked", "train__engine": "reference"},
        ["model.loss", "train.engine"],
        [("model.loss", "auto")],
    ),
    (
        {"parallel__offload_params": "cpu"},
        ["parallel.offload_params", "parallel.zero_stage"],
        [("parallel.zero_stage", 3), ("parallel.offload_params", "none")],
    ),
    (
        {"parallel__offload_optimizer": "cpu", "parallel__zero_stage": 0},
        ["parallel.offload_optimizer", "parallel.zero_stage"],
        [("parallel.zero_stage", "1, 2 or 3"), ("parallel.offload_optimizer", "none")],
    ),
    (
        {"batch__micro_batch_size": 3},
        ["batch.global_batch_size", "batch.micro_batch_size", "parallel.dp"],
        [("batch.global_batch_size", "6 or 9"), ("batch.micro_batch_size", "one of 1, 2, 4, 8")],
    ),
    (
        {"parallel__dp": 3},
        ["batch.global_batch_size", "batch.micro_batch_size", "parallel.dp"],
        [("batch.global_batch_size", "6 or 12")],
    ),
    (
        {"train__engine": "reference", "precision": "bf16"},
        ["precision", "train.engine"],
        [("precision", "fp32"), ("train.engine", "deepspeed")],
    ),
    (
        {"train__engine": "reference", "precision": "fp16"},
        ["precision", "train.engine"],
        [("precision", "fp32"), ("train.engine", "deepspeed")],
    ),
    (
        {"train__engine": "ddp", "precision": "fp16"},
        ["precision", "train.engine"],
        [("precision", "bf16"), ("train.engine", "deepspeed")],
    ),
    (
        {"train__engine": "fsdp", "precision": "fp16"},
        ["precision", "train.engine"],
        [("precision", "bf16"), ("train.engine", "deepspeed")],
    ),
    (
        {"train__engine": "reference", "parallel__dp": 2},
        ["parallel.dp", "train.engine"],
        [("parallel.dp", 1)],
    ),
    (
        {"train__engine": "ddp", "parallel__offload_optimizer": "cpu"},
        ["parallel.offload_optimizer", "train.engine"],
        [("parallel.offload_optimizer", "none"), ("train.engine", "deepspeed")],
    ),
    (
        {"train__engine": "fsdp", "parallel__offload_params": "cpu", "parallel__zero_stage": 3},
        ["parallel.offload_params", "train.engine"],
        [("parallel.offload_params", "none"), ("train.engine", "deepspeed")],
    ),
    (
        {"train__on_nonfinite": "rollback"},
        ["train.on_nonfinite", "checkpoint.every"],
        [("checkpoint.every", "1 or more"), ("train.on_nonfinite", "stop or skip")],
    ),
    (
        {"train__spike_sigmas": 6.0},
        ["train.spike_sigmas", "checkpoint.every"],
        [("checkpoint.every", "1 or more"), ("train.spike_sigmas", 0)],
    ),
    (
        {"optimizer__name": "lion", "parallel__pp": 2, "parallel__schedule": "zb-h1"},
        ["parallel.schedule", "optimizer.name"],
        [("parallel.schedule", None), ("optimizer.name", "adamw")],
    ),
    (
        {"train__repeat_check": 10, "parallel__pp": 2},
        ["parallel.pp", "train.repeat_check"],
        [("train.repeat_check", 0), ("parallel.pp", 1)],
    ),
    (
        {"train__repeat_check": 10, "parallel__zero_stage": 3},
        ["parallel.zero_stage", "train.repeat_check"],
        [("train.repeat_check", 0), ("parallel.zero_stage", 2)],
    ),
    (
        {"train__repeat_check": 10, "train__engine": "fsdp"},
        ["train.engine", "train.repeat_check"],
        [("train.repeat_check", 0), ("train.engine", "deepspeed")],
    ),
    (
        {"train__spike_window": 100},
        ["train.spike_window", "train.spike_sigmas"],
        ["remove it", ("train.spike_sigmas", "1 or more")],
    ),
    (
        {"train__max_incidents": 5},
        ["train.max_incidents", "train.on_nonfinite", "train.spike_sigmas"],
        ["remove it", ("train.on_nonfinite", "skip or rollback")],
    ),
    (
        {"optimizer__momentum": 0.9},
        ["optimizer.momentum", "optimizer.name"],
        ["remove it", ("optimizer.name", "sgd or muon")],
    ),
    (
        {"optimizer__name": "adam", "optimizer__momentum": 0.9},
        ["optimizer.momentum", "optimizer.name"],
        ["remove it", ("optimizer.name", "sgd or muon")],
    ),
    (
        {"optimizer__name": "sgd", "optimizer__betas": [0.9, 0.95]},
        ["optimizer.betas", "optimizer.name"],
        ["remove it", ("optimizer.name", "adamw or adam or lion or muon or adamw8bit")],
    ),
    (
        {"optimizer__name": "sgd", "optimizer__eps": 1e-06},
        ["optimizer.eps", "optimizer.name"],
        ["remove it", ("optimizer.name", "adamw or adam or muon or adamw8bit")],
    ),
    (
        {"optimizer__name": "lion", "optimizer__eps": 1e-06},
        ["optimizer.eps", "optimizer.name"],
        ["remove it", ("optimizer.name", "adamw or adam or muon or adamw8bit")],
    ),
    (
        {"optimizer__adamw_lr": 1e-3},
        ["optimizer.adamw_lr", "optimizer.name"],
        ["remove it", ("optimizer.name", "muon")],
    ),
    (
        {"optimizer__adjust_lr": "original"},
        ["optimizer.adjust_lr", "optimizer.name"],
        ["remove it", ("optimizer.name", "muon")],
    ),
    (
        {"optimizer__name": "muon", "parallel__zero_stage": 2, "parallel__offload_optimizer": "cpu"},
        ["optimizer.name", "parallel.offload_optimizer"],
        [("parallel.offload_optimizer", "none"), ("optimizer.name", "adamw")],
    ),
    (
        {"optimizer__name": "adafactor", "optimizer__eps": 1e-06},
        ["optimizer.eps", "optimizer.name"],
        ["remove it", ("optimizer.name", "adamw or adam or muon or adamw8bit")],
    ),
    (
        {"optimizer__name": "adafactor", "parallel__zero_stage": 3, "parallel__offload_optimizer": "cpu"},
        ["optimizer.name", "parallel.offload_optimizer"],
        [("parallel.offload_optimizer", "none"), ("optimizer.name", "adamw")],
    ),
    (
        {"optimizer__name": "adamw8bit", "parallel__zero_stage": 3, "parallel__offload_optimizer": "cpu"},
        ["optimizer.name", "parallel.offload_optimizer"],
        [("parallel.offload_optimizer", "none"), ("optimizer.name", "adamw")],
    ),
    (
        {"optimizer__name": "adamw8bit", "train__engine": "fsdp"},
        ["optimizer.name", "train.engine"],
        [("train.engine", "deepspeed")],
    ),
    (
        {
            "optimizer__name": "adamw8bit",
            "parallel__zero_stage": 1,
            "parallel__tp": 16,
            "model": {"name_or_path": "llama-3.2-1b"},
        },
        ["optimizer.name", "parallel.tp", "model.name_or_path"],
        [("parallel.tp", "a divisor of 8")],
    ),
    (
        {"schedule__name": "constant", "schedule__warmup_steps": 2},
        ["schedule.warmup_steps", "schedule.name"],
        ["remove it", ("schedule.name", "constant_with_warmup")],
    ),
    (
        {"schedule__min_lr_ratio": 0.1},
        ["schedule.min_lr_ratio", "schedule.name"],
        ["remove it", ("schedule.name", "cosine_with_min_lr or polynomial or warmup_stable_decay")],
    ),
    (
        {"schedule__decay_steps": 2},
        ["schedule.decay_steps", "schedule.name"],
        ["remove it", ("schedule.name", "warmup_stable_decay")],
    ),
    (
        {"schedule__warmup_steps": 11},
        ["schedule.warmup_steps", "train.steps"],
        ["lower schedule.warmup_steps", ("train.steps", "11 or more")],
    ),
    (
        {"schedule__name": "warmup_stable_decay", "schedule__warmup_steps": 6, "schedule__decay_steps": 5},
        ["schedule.warmup_steps", "schedule.decay_steps", "train.steps"],
        ["lower schedule.warmup_steps", ("train.steps", "11 or more")],
    ),
    (
        {"schedule__name": "warmup_stable_decay", "schedule__warmup_steps": 10},
        ["schedule.warmup_steps", "schedule.decay_steps", "train.steps"],
        ["lower schedule.warmup_steps", ("train.steps", "11 or more")],
    ),
    (
        {"schedule__name": "warmup_stable_decay", "schedule__warmup_steps": 5, "train__steps": 5},
        ["schedule.warmup_steps", "schedule.decay_steps", "train.steps"],
        ["lower schedule.warmup_steps", ("train.steps", "6 or more")],
    ),
    ({"data__split": "test"}, ["data.split", "data.source"], ["remove it", "name a dataset in data.source"]),
    ({"data__subset": "en"}, ["data.subset", "data.source"], ["remove it", "name a dataset in data.source"]),
    ({"data__stream_rows": 9}, ["data.stream_rows", "data.source"], ["remove it", "name a dataset in data.source"]),
    (
        {"data__source": "markov", "data__tokenizer": "bpe-257", "data__bos": "always"},
        ["data.bos", "data.source"],
        ["remove it"],
    ),
    (
        {"data__source": "a.jsonl", "data__format": "chat", "data__tokenizer": "x", "data__separator": "none"},
        ["data.separator", "data.format"],
        ["remove it"],
    ),
    (
        {"data__source": "a.jsonl", "data__format": "pretokenized", "data__tokenizer": "x", "data__bos": "never"},
        ["data.bos", "data.format"],
        ["remove it"],
    ),
    (
        {"data__text_field": "content"},
        ["data.text_field", "data.source"],
        ["remove it", "name JSONL, Parquet or a dataset in data.source"],
    ),
    (
        {"train__eval_samples": 8},
        ["train.eval_samples", "train.eval_every"],
        ["remove it", ("train.eval_every", "1 or more")],
    ),
    (
        {"checkpoint__keep": 5},
        ["checkpoint.keep", "checkpoint.every"],
        ["remove it", ("checkpoint.every", "1 or more")],
    ),
    (
        {"data__eval_fraction": 0.0, "train__eval_every": 5},
        ["train.eval_every", "data.eval_fraction"],
        [("data.eval_fraction", 0.01), ("train.eval_every", 0)],
    ),
    (
        {"data__seq_len": 1025},
        ["data.seq_len", "model.name_or_path"],
        [("data.seq_len", "1024 or less")],
    ),
    (
        {"model__overrides": {"n_positions": 64}},
        ["data.seq_len", "model.name_or_path"],
        [("data.seq_len", "64 or less")],
    ),
    ({"model__overrides": {"n_layer": 0}}, ["n_layer", "model_type"], []),
    (
        {"model__name_or_path": "./gone"},
        ["model.name_or_path"],
        ["name a directory with a config.json, a hub name, or a shape of the catalogue such as gpt2"],
    ),
]


@pytest.mark.parametrize(("changes", "fields", "remedy"), CONFLICTS)
def test_a_conflict_is_one_refusal(changes: dict[str, object], fields: list[str], remedy: list[object]) -> None:
    check_conflict(recipe(**changes), fields, remedy)


CONSISTENT: list[dict[str, object]] = [
    {},
    {"train__engine": "reference"},
    {"train__engine": "reference", "parallel__zero_stage": 3},
    {"train__engine": "ddp", "precision": "bf16", "parallel__dp": 2},
    {"train__engine": "fsdp"},
    {"precision": "fp16", "parallel__zero_stage": 3, "parallel__offload_params": "cpu"},
    {"optimizer__name": "sgd", "optimizer__momentum": 0.9},
    {"optimizer__name": "lion", "optimizer__betas": [0.9, 0.99]},
    {"optimizer__name": "adafactor", "optimizer__weight_decay": 0.1, "parallel__zero_stage": 3},
    {"optimizer__name": "adamw8bit", "optimizer__eps": 1e-06, "optimizer__betas": [0.9, 0.95]},
    {"optimizer__name": "adamw8bit", "parallel__zero_stage": 1, "parallel__pp": 2},
    {"optimizer__name": "muon", "optimizer__momentum": 0.9, "optimizer__eps": 1e-06, "optimizer__adamw_lr": 1e-3},
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
