"""Recipes from the Trainer's own arguments: held against its schedulers, and against ten of its losses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_script import train_here
from trainer_runs import train_with_trainer
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from toolkit.config.recipe import Recipe
from toolkit.convert.setups.recipe_of_setup import recipe_of_setup
from toolkit.data.tokens.corpora import prepare_all
from toolkit.engines.optimizer import learning_rate
from toolkit.model_init.build_model import load_config

DATA = ("data.source=a.txt", "data.seq_len=64")
STEPS = 10


def recipe_of(tmp_path: Path, arguments: dict[str, Any]) -> Recipe:
    file = tmp_path / "args.json"
    file.write_text(json.dumps(arguments))
    return recipe_of_setup(file, model="org/name", gpus=2, overrides=DATA).recipe


@pytest.mark.whole
def test_ten_losses_are_those_of_the_trainer_that_it_was_made_from(
    make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    start = make_recipe(train__steps=STEPS, train__seed=42, overrides__vocab_size=321)
    theirs = ranks(train_with_trainer, 2, str(tmp_path / "theirs"), start, 0, STEPS)[0]
    torch.manual_seed(0)
    initial = AutoModelForCausalLM.from_config(load_config(start.model), dtype=torch.float32)
    initial.save_pretrained(tmp_path / "initial")
    prepare_all(start.data, progress=False).tokenizer().save_pretrained(tmp_path / "initial")
    data = {name: getattr(start.data, name) for name in ("source", "seq_len", "eval_fraction", "cache_dir")}
    done = recipe_of_setup(
        tmp_path / "theirs" / f"checkpoint-{STEPS}" / "training_args.bin",
        model=str(tmp_path / "initial"),
        overrides=[*(f"data.{name}={value}" for name, value in data.items()), "run_dir=ours", "checkpoint.every=0"],
    )
    assert done.recipe.batch.global_batch_size == start.batch.global_batch_size
    (tmp_path / "made.yaml").write_text(done.text)
    ranks(train_here, 2, str(tmp_path), ["--config", "made.yaml"], joined=False)
    lines = (tmp_path / "ours" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"lr_scheduler_type": "cosine", "warmup_steps": 0.13},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}, "warmup_steps": 3},
        {"lr_scheduler_type": "polynomial"},
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 1}},
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5},
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "warmup_steps": 2,
            "lr_scheduler_kwargs": {"num_decay_steps": 7, "num_stable_steps": 11, "min_lr_ratio": 0.2},
        },
    ],
)
def test_learning_rates_are_those_of_the_trainers_scheduler(arguments: dict[str, Any], tmp_path: Path) -> None:
    settings = arguments | {"learning_rate": 1e-3, "max_steps": 20}
    ours = learning_rate(recipe_of(tmp_path, settings))
    trainer = Trainer(nn.Linear(1, 1), TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **settings))
    trainer.create_optimizer_and_scheduler(20)
    assert trainer.lr_scheduler is not None
    theirs = []
    for _ in range(20):
        theirs.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert [ours(step) for step in range(20)] == pytest.approx(theirs, rel=1e-12)


def test_training_arguments_become_fields(tmp_path: Path) -> None:
    saved = TrainingArguments(
        str(tmp_path / "out"),
        use_cpu=True,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=0.3,
        max_steps=50,
        gradient_checkpointing=True,
        label_smoothing_factor=0.1,
        save_steps=0.1,
        report_to=["wandb"],
    )
    torch.save(saved, tmp_path / "training_args.bin")
    done = recipe_of_setup(tmp_path / "training_args.bin", model="org/name", gpus=4, overrides=[*DATA, "train.seed=7"])
    recipe = done.recipe
    assert (recipe.batch.global_batch_size, recipe.batch.micro_batch_size) == (24, 3)
    assert (recipe.optimizer.betas, recipe.optimizer.weight_decay, recipe.train.grad_clip) == ((0.9, 0.95), 0.1, 0.3)
    assert (recipe.schedule.name, recipe.train.seed, recipe.precision) == ("linear", 7, "fp32")
    assert (recipe.parallel.recompute, recipe.checkpoint.every, recipe.log.report_to) == ("full", 5, ("wandb",))
    assert recipe.model.init == "pretrained"
    assert len(done.notes) == 2
    assert done.notes[1] == "label_smoothing_factor=0.1 has no counterpart: the recipe trains on the plain token loss"
    assert done.text.startswith("# From training_args.bin of the Trainer, by dstk recipe.")
