"""A timed run of the Hugging Face Trainer, over the tokens of the toolkit's run.

`trainer_run` has the toolkit's DeepSpeed config; `sharded_run` a model that transformers shards as it loads it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig, PartialState
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

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
        # Pinned memory would initialize CUDA, and forks of this process could not use it.
        with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu"), loader.prefetch() as ahead:
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
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    # Before the arguments, which under ZeRO-3 have transformers build models without memory in this process.
    model = model or build_model(recipe, eos_id=prepare(recipe.data, progress=False).eos_id)
    config = deepspeed_config(job, check_model(recipe, device), device)
    arguments = training_arguments(TrainingArguments, job, folder, device, deepspeed=config)
    callback = StampCallback(log)
    trainer = Trainer(model=model, args=arguments, train_dataset=tokens, callbacks=[callback])
    trainer.train()
    engine = trainer.model_wrapped
    assert isinstance(engine, deepspeed.DeepSpeedEngine), type(engine)
    assert engine.zero_optimization_stage() == job.layout.zero_stage
    assert engine.dp_world_size == dist.get_world_size() == job.layout.world_size
    assert len(callback.stamps.times) == recipe.train.steps
    return callback.stamps


def sharded_run(
    recipe: Recipe,
    tokens: Tokens,
    folder: Path,
    device: torch.device,
    config: DistributedConfig,
    log: Callable[[float], None] | None = None,
) -> Stamps:
    """Train on this rank with the Trainer and pretrained weights that transformers shards as it loads them.

    `config` says how: FSDP2 over replicas, tensor parallelism, expert parallelism. Weights stay in fp32 and are cast
    for each use, by FSDP2 or by autocast.
    """
    job = Job.of(recipe, RankEnvironment.detect().world_size)
    arguments = training_arguments(TrainingArguments, job, folder, device)
    model = AutoModelForCausalLM.from_pretrained(
        recipe.model.name_or_path, dtype=torch.float32, distributed_config=config
    )
    model.train()
    callback = StampCallback(log)
    # accelerate takes tensor-parallel ranks to need GPUs and refuses others, by nothing but this check.
    with mock.patch.object(ParallelismConfig, "_validate_accelerator"):
        trainer = Trainer(model=model, args=arguments, train_dataset=tokens, callbacks=[callback])
    trainer.train()
    assert model.is_distributed_loading_by_transformers
    assert trainer.accelerator.num_processes == dist.get_world_size() == job.layout.world_size
    assert len(callback.stamps.times) == recipe.train.steps
    return callback.stamps


Arguments = TypeVar("Arguments", bound=TrainingArguments)


def training_arguments(kind: type[Arguments], job: Job, folder: Path, device: torch.device, **more: Any) -> Arguments:
    """Return the recipe in the terms of the Trainer, or of another trainer by its `kind` of arguments."""
    recipe = job.recipe
    on_cpu = device.type == "cpu"
    if on_cpu:
        # Without a GPU the Trainer finds no backend and would train alone without a word: give it a configured state.
        # DeepSpeed's is not that of a CPU, and without `cpu` every other one is of one process.
        PartialState(cpu="deepspeed" not in more, backend="gloo")
    arguments: Arguments = kind(
        accelerator_config={"use_configured_state": on_cpu},
        output_dir=str(folder),
        per_device_train_batch_size=job.batch.micro_batch_size,
        gradient_accumulation_steps=job.batch.accumulation,
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
        **more,
    )
    return arguments
