"""Tokens per second on two ranks: this toolkit against the Hugging Face Trainer, both with DeepSpeed ZeRO-2 in fp32.

    python benchmarks/hf_trainer.py                     # both sizes, five rounds, about 15 minutes
    python benchmarks/hf_trainer.py --sizes small --rounds 3
    python benchmarks/hf_trainer.py --quick             # does it run? The figures mean nothing.
    python benchmarks/hf_trainer.py --save              # also writes benchmarks/results/hf_trainer.md

Both sides get the same model with the same initial weights, the same DeepSpeed config (the toolkit's: buckets, AdamW of
PyTorch, clipping, accumulation), the same tokens in the same order on the same rank, and one thread a rank. Both log
every step, and show a live progress bar.

    Trainer   transformers.Trainer with TrainingArguments(deepspeed=…), its default data loader over a torch Dataset of
              tensors in memory, labels=input_ids. It shifts the labels itself, so the last position of a sample is not
              trained on: its loss differs from ours by that, and by nothing else.
    toolkit   the loop of recipes/train.py with its feed from the token cache and its metrics file.

Each round forks two ranks for one side, then two for the other, so that a machine that slows down slows both. The first
steps of a run are left out. Prints the medians of all steps, the ratio of each round's medians, and the target.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import deepspeed
import torch
import torch.distributed as dist
from accelerate import PartialState
from measure.our_run import Stamps, our_run


from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from toolkit.recipe import Recipe
from toolkit.train.data.tokens import prepare
from toolkit.train.feed import Feed
from toolkit.train.launch import quiet
from toolkit.train.local_ranks import run_ranks
from toolkit.train.model import build_model
from toolkit.train.preflight import check_model, deepspeed_config

RANKS = 2
TARGET = 1.10
SIZES: dict[str, dict[str, Any]] = {
    # The model, the batch and the sample length of recipes/demo.yaml: overhead counts.
    "small": {
        "model": {"name_or_path": "gpt2-tiny"},
        "seq_len": 128,
        "batch": {"global_size": 16, "micro_size": 8},
        "steps": 60,
    },
    # Half of GPT-2's layers at half its width, with its whole vocabulary: computation dominates.
    "medium": {
        "model": {
            "name_or_path": "gpt2",
            "overrides": {
                "n_layer": 6,
                "n_embd": 384,
                "n_head": 6,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            },
        },
        "seq_len": 256,
        "batch": {"global_size": 8, "micro_size": 2},
        "steps": 8,
    },
}
WARMUP = {"small": 10, "medium": 2}
"""Steps at the start of a run that are not counted."""


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """The samples in the order in which the toolkit trains on them, in memory."""

    def __init__(self, recipe: Recipe) -> None:
        layout = recipe.layout(1)
        alone = recipe.model_copy(
            update={"batch": recipe.batch.model_copy(update={"micro_size": recipe.batch.global_size})}
        )
        feed = Feed.open(alone, layout, alone.resolve_batch(layout), prepare(recipe.data, progress=False), rank=0)
        with feed.prefetch() as ahead:
            self._rows = torch.cat([batch.input_ids for batch in ahead])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class StampCallback(TrainerCallback):  # type: ignore[misc]
    """When each step ended, with its logging."""

    def __init__(self) -> None:
        self.stamps = Stamps()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """The Trainer logs once a step, and once more at the end of the run."""
        if logs is not None and "loss" in logs:
            self.stamps.add(float(logs["loss"]))


def trainer_run(recipe: Recipe, tokens: Tokens, folder: str) -> Stamps:
    """Train on this rank with the Trainer."""
    device = torch.device("cpu")
    layout = recipe.layout(dist.get_world_size())
    batch = recipe.resolve_batch(layout)
    # Without a GPU the Trainer would find no distributed backend and silently train alone: it must be told.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    arguments = TrainingArguments(
        accelerator_config={"use_configured_state": True},
        output_dir=folder,
        per_device_train_batch_size=batch.micro_size,
        gradient_accumulation_steps=batch.accumulation,
        max_steps=recipe.train.steps,
        learning_rate=recipe.optimizer.lr,
        weight_decay=recipe.optimizer.weight_decay,
        adam_beta1=recipe.optimizer.betas[0],
        adam_beta2=recipe.optimizer.betas[1],
        adam_epsilon=recipe.optimizer.eps,
        max_grad_norm=recipe.train.grad_clip,
        lr_scheduler_type=recipe.schedule.name,
        warmup_steps=recipe.schedule.warmup_steps,
        logging_steps=1,
        disable_tqdm=False,
        save_strategy="no",
        report_to="none",
        train_sampling_strategy="sequential",
        deepspeed=deepspeed_config(recipe, layout, batch, check_model(recipe, device), device),
    )
    callback = StampCallback()
    trainer = Trainer(model=build_model(recipe), args=arguments, train_dataset=tokens, callbacks=[callback])
    trainer.train()
    engine = trainer.model_wrapped
    assert isinstance(engine, deepspeed.DeepSpeedEngine), type(engine)
    assert engine.zero_optimization_stage() == layout.zero_stage
    assert engine.dp_world_size == RANKS
    assert len(callback.stamps.times) == recipe.train.steps
    return callback.stamps
