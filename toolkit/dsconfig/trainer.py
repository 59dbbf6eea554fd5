"""The DeepSpeed config for Hugging Face, with `auto` for what TrainingArguments or the model decide.

The Trainer and `Accelerator` replace every `auto`.
"""

import json
from dataclasses import replace

from toolkit.config.recipe import Recipe
from toolkit.dsconfig.build import Config, ConfigJob, loss_scaling
from toolkit.dsconfig.explain import AUTO, KEYS
from toolkit.errors import ConfigError


def trainer_config(job: ConfigJob) -> Config:
    """Return the job's config with `auto`. Raises ConfigError for a layout that the Trainer cannot run.

    There is no optimizer section: with one, the Trainer passes DeepSpeed all parameters in one group, and weight decay
    applies to biases and norms. Without one it builds its own, with two groups; if optimizer states are offloaded,
    accelerate replaces it with DeepSpeed's CPU kernels (`zero_force_ds_cpu_optimizer`).
    """
    layout = job.layout
    recompute = job.recipe.parallel.recompute
    if recompute not in ("none", "full"):
        reason = "gradient_checkpointing of the Hugging Face Trainer recomputes all layers, whole"
        remedy = ("parallel.recompute", "full or none")
        raise ConfigError.of("parallel.recompute", recompute, reason, remedy, "train with this toolkit")
    if (name := job.recipe.optimizer.name) in ("muon", "adafactor", "adamw8bit"):
        reason = "the Trainer would build AdamW instead"
        raise ConfigError.of("optimizer.name", name, reason, ("optimizer.name", "adamw"), "train with this toolkit")
    if max(layout.tp, layout.pp, layout.ulysses, layout.cp, layout.ep) > 1:
        reason = "the Hugging Face Trainer has no pipelines, and does not shard layers or experts of these models"
        advice = "choose tp=1, pp=1, ulysses=1 and ep=1"
        raise ConfigError.of("layout", str(layout), reason, advice, "train with this toolkit")
    if layout.zero_stage == 3:
        job = replace(job, width=1)  # everything that follows from it becomes `auto`
    config = accelerate_config(job) | {"fp16": loss_scaling()}
    if layout.zero_stage == 0:
        # bf16 or fp16 under a Trainer means weights in 16 bits; without ZeRO, DeepSpeed then rejects fp32 sums.
        config |= {"data_types": {"grad_accum_dtype": None}, "torch_autocast": {"enabled": False}}
    return _with_auto(config)


def _with_auto(section: Config, prefix: str = "") -> Config:
    """The section with `auto` for every value that the Trainer fills in."""
    filled = dict(section)
    for key, value in section.items():
        if isinstance(value, dict):
            filled[key] = _with_auto(value, f"{prefix}{key}.")
        elif KEYS[prefix + key].auto is not None:
            filled[key] = AUTO
    return filled


def accelerate_config(job: ConfigJob) -> Config:
    """Return the job's config for a program that passes its own optimizer to `Accelerator.prepare`, which refuses two.

    Nothing in it is `auto`: accelerate would fill in what its own command line says, for accumulation 1.
    """
    config = {key: value for key, value in job.config.items() if key != "optimizer"}
    offload = "offload_optimizer" in config["zero_optimization"]
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = offload and job.device == "cuda"
    return config


def trainer_arguments(job: ConfigJob) -> list[str]:
    """Return the TrainingArguments with which the Trainer fills in this job's values."""
    recipe = job.recipe
    section = job.recipe.optimizer
    arguments: dict[str, object] = {
        "per_device_train_batch_size": job.batch.micro_batch_size,
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
    if extras := schedule_arguments(recipe):
        arguments["lr_scheduler_kwargs"] = json.dumps(extras)
    if recipe.precision != "fp32":
        arguments[recipe.precision] = "true"
    if recipe.parallel.recompute == "full":
        arguments["gradient_checkpointing"] = "true"
    return [word for name, value in arguments.items() for word in (f"--{name}", str(value))]


def schedule_arguments(recipe: Recipe) -> dict[str, float]:
    """Return the schedule's extra arguments, under the names of `transformers.get_scheduler`."""
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
