"""The DeepSpeed config for Hugging Face: `auto` where TrainingArguments or the model decide.

The Trainer resolves all of them, and `Accelerator` too.
"""

import json

from toolkit.dsconfig.build import Config, loss_scaling
from toolkit.dsconfig.job import ConfigJob
from toolkit.errors import ConfigError
from toolkit.recipe import Recipe

AUTO = "auto"

_BY_ARGUMENTS = {
    "train_batch_size": "the other two and the number of ranks",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
_BY_THE_MODEL = {
    "reduce_bucket_size": "the model: hidden²",
    "stage3_prefetch_bucket_size": "the model: 0.9 x hidden²",
    "stage3_param_persistence_threshold": "the model: 10 x hidden",
}
_BY_THE_SCHEDULE = {
    "warmup_min_lr": "nothing: it is 0",
    "warmup_max_lr": "learning_rate",
    "warmup_num_steps": "warmup_steps",
    "total_num_steps": "max_steps or num_train_epochs",
}
AUTO_SOURCES = {
    **_BY_ARGUMENTS,
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    **{f"zero_optimization.{key}": source for key, source in _BY_THE_MODEL.items()},
    **{f"scheduler.params.{key}": source for key, source in _BY_THE_SCHEDULE.items()},
}
"""Which of TrainingArguments, or what else, each `auto` takes its value from."""


def trainer_config(job: ConfigJob) -> Config:
    """The job's config with `auto`. Raises ConfigError for a layout that the Trainer cannot run.

    There is no optimizer section: with one, the Trainer hands DeepSpeed all parameters in one group, and weight decay
    reaches biases and norms. Without one it builds its own, with two groups; where optimizer states are offloaded,
    accelerate puts DeepSpeed's CPU kernels in its place (`zero_force_ds_cpu_optimizer`).
    """
    layout = job.layout
    if job.recipe.parallel.recompute == "selective":
        raise ConfigError(
            "recompute=selective for the Hugging Face Trainer: its gradient_checkpointing computes whole layers again, "
            "never attention alone. Set recompute to full or none, or train with this toolkit."
        )
    if layout.tp > 1 or layout.pp > 1 or layout.ulysses > 1:
        raise ConfigError(
            f"layout {layout} for the Hugging Face Trainer: it has no pipeline and cannot cut this toolkit's layers. "
            "Choose tp=1, pp=1 and ulysses=1, or train with this toolkit."
        )
    config = dict(job.config)
    config.pop("optimizer", None)
    config |= dict.fromkeys(_BY_ARGUMENTS, AUTO)
    config |= {"bf16": config["bf16"] | {"enabled": AUTO}, "fp16": loss_scaling() | {"enabled": AUTO}}
    if layout.zero_stage == 0:
        # bf16 or fp16 under a Trainer means weights in 16 bits; without ZeRO, DeepSpeed then refuses fp32 sums.
        config |= {"data_types": {"grad_accum_dtype": None}, "torch_autocast": {"enabled": False}}
    zero = dict(config["zero_optimization"])
    zero |= {key: AUTO for key in _BY_THE_MODEL if key in zero}
    config["zero_optimization"] = zero
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = "offload_optimizer" in zero and job.device == "cuda"
    if "scheduler" in config:
        config["scheduler"] = _scheduler(config["scheduler"])
    return config


def trainer_arguments(job: ConfigJob) -> list[str]:
    """What TrainingArguments must be told so that the Trainer fills in this job's values."""
    recipe, section = job.recipe, job.recipe.optimizer
    arguments: dict[str, object] = {
        "per_device_train_batch_size": job.batch.micro_size,
        "gradient_accumulation_steps": job.batch.accumulation,
        "max_grad_norm": recipe.train.grad_clip,
        "max_steps": recipe.train.steps,
        "learning_rate": section.lr,
        "weight_decay": section.weight_decay,
        "adam_beta1": section.betas[0],
        "adam_beta2": section.betas[1],
        "adam_epsilon": section.eps,
        "warmup_steps": recipe.schedule.warmup_steps,
        "lr_scheduler_type": recipe.schedule.name,
    }
    extras = schedule_arguments(recipe)
    if extras:
        arguments["lr_scheduler_kwargs"] = json.dumps(extras)
    if recipe.precision != "fp32":
        arguments[recipe.precision] = "true"
    if recipe.parallel.recompute == "full":
        arguments["gradient_checkpointing"] = "true"
    return [word for name, value in arguments.items() for word in (f"--{name}", str(value))]


def schedule_arguments(recipe: Recipe) -> dict[str, float]:
    """What the schedule needs beyond a name and warm-up, as `transformers.get_scheduler` names it."""
    section = recipe.schedule
    match section.name:
        case "cosine_with_min_lr":
            return {"min_lr_rate": section.min_lr_ratio}
        case "polynomial":
            return {"lr_end": section.min_lr_ratio * recipe.optimizer.lr}
        case "warmup_stable_decay":
            decay = section.decay_steps or max(1, recipe.train.steps // 10)
            return {"num_decay_steps": decay, "min_lr_ratio": section.min_lr_ratio}
        case _:
            return {}


def _scheduler(section: Config) -> Config:
    params = {key: AUTO if key in _BY_THE_SCHEDULE else value for key, value in section["params"].items()}
    return section | {"params": params}
