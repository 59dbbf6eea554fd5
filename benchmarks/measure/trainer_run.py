"""A timed run of the Hugging Face Trainer, over the tokens and the DeepSpeed config of the toolkit's run."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from measure.our_run import Stamps
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.tokens.token_cache import prepare
from toolkit.launch.rank_environment import RankEnvironment
from toolkit.model_init.build_model import build_model
from toolkit.training.preflight import check_model, deepspeed_config


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """The samples in the order in which the toolkit trains on them, in memory."""

    def __init__(self, recipe: Recipe) -> None:
        # One rank whose micro-batch is the global batch reads the samples in their order.
        whole = recipe.batch.model_copy(update={"micro_batch_size": recipe.batch.global_batch_size})
        alone = recipe.model_copy(update={"batch": whole})
        loader = MicroBatchLoader.open(Job.of(alone, 1), prepare(recipe.data, progress=False), rank=0)
        with loader.prefetch() as ahead:
            self.rows = torch.cat([batch.input_ids for batch in ahead])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class StampCallback(TrainerCallback):  # type: ignore[misc]
    """When the Trainer logged each step."""

    def __init__(self, log: Callable[[float], None] | None = None) -> None:
        self.stamps = Stamps()
        self.log = log

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Called once a step, and once more for the summary, which has no `loss`."""
        if "loss" in logs:
            self.stamps.add(logs["loss"])
            if self.log is not None:
                self.log(logs["loss"])


def trainer_run(
    recipe: Recipe,
    tokens: Tokens,
    folder: Path,
    device: torch.device,
    model: PreTrainedModel | None = None,
    log: Callable[[float], None] | None = None,
) -> Stamps:
    """Train on this rank with the Trainer; `model` takes the place of one that is built here.

    `log` is called with the loss of each step, once that is logged.
    """
    job = Job.of(recipe, RankEnvironment.detect().world_size)
    batch = job.batch
    on_cpu = device.type == "cpu"
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if on_cpu:
        # Without a GPU the Trainer finds no backend and would train alone without a word: give it a configured state.
        PartialState(backend="gloo")
    arguments = TrainingArguments(
        accelerator_config={"use_configured_state": on_cpu},
        output_dir=str(folder),
        per_device_train_batch_size=batch.micro_batch_size,
        gradient_accumulation_steps=batch.accumulation,
        max_steps=recipe.train.steps,
        learning_rate=recipe.optimizer.lr,
        adam_beta1=recipe.optimizer.betas[0],
        adam_beta2=recipe.optimizer.betas[1],
        adam_epsilon=recipe.optimizer.eps,
        weight_decay=recipe.optimizer.weight_decay,
        max_grad_norm=recipe.train.grad_clip,
        lr_scheduler_type=recipe.schedule.name,
        warmup_steps=recipe.schedule.warmup_steps,
        bf16=recipe.precision == "bf16",
        use_cpu=on_cpu,
        logging_steps=1,
        disable_tqdm=False,
        save_strategy="no",
        report_to="none",
        train_sampling_strategy="sequential",
        deepspeed=deepspeed_config(job, check_model(recipe, device), device),
    )
    callback = StampCallback(log)
    model = model or build_model(recipe, eos_id=prepare(recipe.data, progress=False).eos_id)
    trainer = Trainer(model=model, args=arguments, train_dataset=tokens, callbacks=[callback])
    trainer.train()
    engine = trainer.model_wrapped
    assert isinstance(engine, deepspeed.DeepSpeedEngine), type(engine)
    assert engine.zero_optimization_stage() == job.layout.zero_stage
    assert engine.dp_world_size == dist.get_world_size() == job.layout.world_size
    assert len(callback.stamps.times) == recipe.train.steps
    return callback.stamps
