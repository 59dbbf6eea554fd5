"""A set-up of the Trainer as fields of a recipe: its TrainingArguments, and the DeepSpeed JSON or FSDP config in them.

Source of the arguments, their defaults and their meaning: training_args.py and trainer.py of transformers 5.23.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from toolkit.config.recipe import ScheduleName
from toolkit.convert.setups.argument_reader import ArgumentReader
from toolkit.convert.setups.deepspeed_setup import contradiction, take_deepspeed

_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_torch_xla": "adamw",
    "adamw_torch_npu_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "paged_adamw_32bit": "adamw",
    "adamw_bnb_8bit": "adamw8bit",
    "adamw_8bit": "adamw8bit",
    "paged_adamw_8bit": "adamw8bit",
    "sgd": "sgd",
    "lion_32bit": "lion",
    "paged_lion_32bit": "lion",
    "muon": "muon",
}
"""Optimizers by the Trainer's names, of those that a recipe has with the same update."""
_SCHEDULE_DEFAULTS: dict[str, dict[str, Any]] = {
    "cosine": {"num_cycles": 0.5},
    "cosine_with_restarts": {"num_cycles": 1},
    "cosine_with_min_lr": {"num_cycles": 0.5},
    "polynomial": {"power": 1.0},
    "warmup_stable_decay": {"warmup_type": "linear", "decay_type": "cosine", "num_cycles": 0.5},
}
"""Arguments of schedules that no field changes: the defaults of transformers' functions."""
_DATA = ("samples are packed from the text of data, in an order that train.seed decides: other ones than the Trainer's "
         "sampler draws")  # fmt: skip


@dataclass(kw_only=True)
class SetUp:
    """What is known of a run: fields of a recipe (`optimizer.lr`), and a line for each thing that is not the same."""

    program: str
    fields: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What a recipe needs and the set-up does not say: an override for each, with what it would be."""


@dataclass(frozen=True, kw_only=True)
class Overridden:
    """Fields that the user gives beside the set-up, and how many GPUs it is for."""

    names: frozenset[str]
    steps: int | None
    gpus: int | None


def trainer_setup(
    program: str,
    reader: ArgumentReader,
    deepspeed: Mapping[str, Any] | None,
    given_by_user: Overridden,
) -> SetUp:
    """Translate TrainingArguments. Raises RecipeError for values that the Trainer itself would refuse, or that no
    recipe can train with."""
    setup = SetUp(program=program, notes=[_DATA])
    fields = setup.fields
    fields["optimizer.name"] = _optimizer(reader)
    fields["parallel.zero_stage"] = 0
    take_deepspeed(reader, deepspeed, fields, setup.notes)
    is_deepspeed = deepspeed is not None
    _precision(reader, fields, setup.notes, is_deepspeed=is_deepspeed)
    if not is_deepspeed:
        _fsdp(reader, fields, setup.notes)
    _parallelism(reader, fields, setup.notes)
    _batch(reader, setup, given_by_user)
    steps = _steps(reader, setup, given_by_user)
    lr = fields["optimizer.lr"] = reader.number("learning_rate", fields.get("optimizer.lr", 5e-5))
    beta1 = reader.number("adam_beta1", 0.9)
    beta2 = reader.number("adam_beta2", 0.999)
    epsilon = reader.number("adam_epsilon", 1e-8)
    decay = reader.number("weight_decay", 0.0)
    fields.setdefault("optimizer.weight_decay", decay)
    if fields["optimizer.name"] != "sgd":
        fields.setdefault("optimizer.betas", [beta1, beta2])
        fields.setdefault("optimizer.eps", epsilon)
    clip = reader.number("max_grad_norm", 1.0)
    fields.setdefault("train.grad_clip", clip)
    fields["train.seed"] = reader.count("seed", 42, least=0)
    _schedule(reader, setup, steps, lr)
    if reader.flag("gradient_checkpointing") | reader.flag("activation_checkpointing"):
        fields["parallel.recompute"] = "full"
    if reader.flag("torch_compile"):
        fields["train.compile"] = True
    if reader.flag("use_liger_kernel", "enable_liger_kernel"):
        fields["model.kernels"] = "liger"
    averages = reader.take("average_tokens_across_devices")
    if averages is False:
        setup.notes.append(
            "average_tokens_across_devices=false has no counterpart: the loss of a step is the mean over all its "
            "target tokens, which is the same where all samples have as many"
        )
    if reader.take("train_sampling_strategy") not in (None, "random"):
        setup.notes.append("train_sampling_strategy has no counterpart: train.seed alone decides the order of samples")
    _records(reader, setup, steps, given_by_user.names)
    return setup


def _optimizer(reader: ArgumentReader) -> str:
    name = reader.text("optim") or "adamw_torch"
    if name not in _OPTIMIZERS:
        advice = "Choose one with --from-trainer's optim: adamw_torch, adamw_bnb_8bit, sgd or lion_32bit"
        raise reader.refused("optim", name, "no optimizer of a recipe has the same update", advice)
    return _OPTIMIZERS[name]


def _precision(reader: ArgumentReader, fields: dict[str, Any], notes: list[str], *, is_deepspeed: bool) -> None:
    is_bf16 = reader.flag("bf16")
    is_fp16 = reader.flag("fp16")
    if is_bf16 and is_fp16:
        raise reader.refused("bf16", True, "fp16 is true as well", "Switch one of them off")
    fields.setdefault("precision", "bf16" if is_bf16 else "fp16" if is_fp16 else "fp32")
    if is_deepspeed and fields["precision"] == "bf16" and fields["parallel.zero_stage"] > 0:
        notes.append(
            "gradients are summed in fp32; DeepSpeed under the Trainer sums them as data_types says, or in bf16"
        )


def _fsdp(reader: ArgumentReader, fields: dict[str, Any], notes: list[str]) -> None:
    kind = reader.take("fsdp")
    config = reader.mapping("fsdp_config")
    words = " ".join(map(str, kind)) if isinstance(kind, list) else str(kind or "")
    if not words or words == "False":
        return
    plain = {str(name).removeprefix("fsdp_"): value for name, value in config.items()}
    offloads = "offload" in words or plain.get("cpu_offload") is True or plain.get("offload_params") is True
    strategy = str(plain.get("sharding_strategy") or words).lower()
    keeps = plain.get("reshard_after_forward") is False or "shard_grad_op" in strategy
    if "no_shard" in strategy:
        fields["train.engine"] = "ddp"
    elif offloads or keeps:
        fields["parallel.zero_stage"] = 3 if offloads else 2
        if offloads:
            fields["parallel.offload_params"] = "cpu"
            fields["parallel.offload_optimizer"] = "cpu"
        notes.append(f"FSDP becomes ZeRO-{fields['parallel.zero_stage']} of DeepSpeed, which shards the same")
    else:
        fields["train.engine"] = "fsdp"
    if plain.get("activation_checkpointing") is True:
        fields["parallel.recompute"] = "full"


_AXES = {"tp_size": "tp", "cp_size": "cp", "sp_size": "ulysses"}


def _parallelism(reader: ArgumentReader, fields: dict[str, Any], notes: list[str]) -> None:
    named = reader.mapping("parallelism_config")
    config = {name: 1 if named.get(name) is None else named[name] for name in (*_AXES, "dp_shard_size")}
    for name, size in config.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise reader.refused(name, size, "a whole number is needed")
    for name, axis in _AXES.items():
        if config[name] > 1:
            fields[f"parallel.{axis}"] = config[name]
    has_axes = any(f"parallel.{axis}" in fields for axis in _AXES.values())
    is_fsdp = fields.get("train.engine") == "fsdp"
    shards = config["dp_shard_size"] > 1 and fields["parallel.zero_stage"] == 0
    if has_axes:
        fields.pop("train.engine", None)
    if (is_fsdp and has_axes) or (shards and not is_fsdp):
        fields["parallel.zero_stage"] = 3
        source = "FSDP" if is_fsdp else "dp_shard_size"
        notes.append(f"{source} becomes parallel.zero_stage: 3, over all replicas")


def _batch(reader: ArgumentReader, setup: SetUp, given_by_user: Overridden) -> None:
    fields = setup.fields
    micro = reader.count("per_device_train_batch_size", fields.get("batch.micro_batch_size", 8))
    accumulation = reader.count("gradient_accumulation_steps", fields.pop("accumulation", 1))
    fields.setdefault("batch.micro_batch_size", micro)
    state = reader.mapping("distributed_state")
    processes = given_by_user.gpus or state.get("num_processes")
    stated = fields.get("batch.global_batch_size")
    if "batch.global_batch_size" in given_by_user.names or (stated is not None and not isinstance(processes, int)):
        return
    if not isinstance(processes, int):
        setup.missing.append("--gpus N, the number of GPUs of the run, of which its global batch is a multiple")
        return
    shared = math.prod(fields.get(f"parallel.{axis}", 1) for axis in _AXES.values())
    if processes % shared:
        raise reader.refused("parallelism_config", shared, f"it does not divide {processes} GPUs", "Correct --gpus")
    product = micro * accumulation * processes // shared
    if stated is not None and stated != product:
        factors = "per_device_train_batch_size x gradient_accumulation_steps x replicas"
        raise contradiction("train_batch_size", stated, factors, product)
    fields["batch.global_batch_size"] = product
    if given_by_user.gpus is None:
        setup.notes.append(f"the global batch is that of {processes} process{'es' if processes > 1 else ''}, as saved")


def _steps(reader: ArgumentReader, setup: SetUp, given_by_user: Overridden) -> int | None:
    limit = reader.take("max_steps")
    epochs = reader.number("num_train_epochs", 3.0)
    if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
        setup.fields["train.steps"] = limit
    elif "train.steps" not in given_by_user.names:
        setup.missing.append(
            f"train.steps=N, {epochs:g} x the samples of its data / the global batch, as it has no max_steps"
        )
    return given_by_user.steps or setup.fields.get("train.steps")


def _schedule(reader: ArgumentReader, setup: SetUp, steps: int | None, lr: float) -> None:
    fields = setup.fields
    name = reader.text("lr_scheduler_type") or "linear"
    extras = dict(reader.mapping("lr_scheduler_kwargs"))
    is_warmup_given = "warmup_steps" in reader or "warmup_ratio" in reader
    warmup = reader.number("warmup_steps", 0.0)
    ratio = reader.number("warmup_ratio", 0.0)
    share = warmup if 0 < warmup < 1 else ratio if warmup == 0 else 0.0
    warmup_steps = math.ceil((steps or 0) * share) if share else int(warmup)
    if "schedule.name" in fields:  # the DeepSpeed JSON has a scheduler, which the Trainer prefers
        _agree(fields, steps, warmup_steps if is_warmup_given else None)
        return
    if name not in get_args(ScheduleName):
        allowed = ", ".join(get_args(ScheduleName))
        raise reader.refused(
            "lr_scheduler_type", name, f"no schedule of a recipe is the same ({allowed})", "Choose one"
        )
    fields["schedule.name"] = name
    fields["schedule.warmup_steps"] = warmup_steps
    if name in ("cosine_with_min_lr", "warmup_stable_decay"):
        fields["schedule.min_lr_ratio"] = _least(extras, lr)
    if name == "polynomial":
        fields["schedule.min_lr_ratio"] = min(1.0, float(extras.pop("lr_end", 1e-7)) / lr)
    if "num_decay_steps" in extras and name == "warmup_stable_decay":
        decay = extras.pop("num_decay_steps")
        fields["schedule.decay_steps"] = decay
        rest = (steps or 0) - fields["schedule.warmup_steps"]
        if isinstance(decay, int) and extras.get("num_stable_steps") == rest - decay:
            del extras["num_stable_steps"]
    defaults = _SCHEDULE_DEFAULTS.get(name, {})
    for key, value in extras.items():
        if value is not None and value != defaults.get(key):
            reason = (
                f"the {name} of a recipe has {defaults[key]}" if key in defaults else f"{name} has none in a recipe"
            )
            raise reader.refused(f"lr_scheduler_kwargs.{key}", value, reason, "Remove it, or choose another schedule")


def _agree(fields: dict[str, Any], steps: int | None, warmup_steps: int | None) -> None:
    """Hold the scheduler of the DeepSpeed JSON to the arguments, where both say something."""
    total = fields.pop("total_num_steps", None)
    length = fields.get("train.steps", steps)
    if total is not None and length is not None and total != length:
        raise contradiction("scheduler.params.total_num_steps", total, "max_steps", length)
    stated = fields.setdefault("schedule.warmup_steps", warmup_steps or 0)
    if warmup_steps is not None and steps is not None and max(1, stated) != max(1, warmup_steps):
        raise contradiction("scheduler.params.warmup_num_steps", stated, "warmup_steps", warmup_steps)


def _least(extras: dict[str, Any], lr: float) -> float:
    """The least learning rate as a share of the largest."""
    ratio = extras.pop("min_lr_rate", extras.pop("min_lr_ratio", None))
    least = extras.pop("min_lr", None)
    return float(ratio if ratio is not None else (least or 0.0) / lr)


def _records(reader: ArgumentReader, setup: SetUp, steps: int | None, names: frozenset[str]) -> None:
    """Checkpoints, validation and logs, which change nothing of what is trained."""
    fields = setup.fields
    if output := reader.text("output_dir"):
        fields["run_dir"] = output
    strategy = reader.take("save_strategy")
    every = reader.number("save_steps", 500)
    limit = reader.take("save_total_limit")
    fields["checkpoint.every"] = _period(every, steps) if strategy in (None, "steps") else 0
    if strategy in ("epoch", "best") and "checkpoint.every" not in names:
        setup.notes.append(f"save_strategy={strategy} has no counterpart: give checkpoint.every=STEPS")
    if isinstance(limit, int) and limit > 0:
        if fields["checkpoint.every"] or "checkpoint.every" in names:
            fields["checkpoint.keep"] = limit
    elif fields["checkpoint.every"] and "checkpoint.every" not in names:
        fields["checkpoint.keep_every"] = fields["checkpoint.every"]
    logging = reader.number("logging_steps", 500)
    if reader.take("logging_strategy") in (None, "steps"):
        fields["log.every"] = max(1, _period(logging, steps))
    evaluation = reader.take("eval_strategy", "evaluation_strategy")
    eval_steps = reader.number("eval_steps", logging)
    if evaluation == "steps":
        fields["train.eval_every"] = _period(eval_steps, steps)
    elif evaluation not in (None, "no", False):
        setup.notes.append(f"eval_strategy={evaluation} has no counterpart: give train.eval_every=STEPS")
    trackers = reader.take("report_to")
    tracker_names = trackers if isinstance(trackers, list) else [trackers]
    if kept_names := [name for name in tracker_names if isinstance(name, str) and name not in ("none", "all")]:
        fields["log.report_to"] = kept_names
    if "all" in tracker_names:
        setup.notes.append("report_to=all has no counterpart: name the trackers in log.report_to")


def _period(value: float, steps: int | None) -> int:
    """Steps between two events; below 1 it is a share of the run."""
    return math.ceil(value * (steps or 0)) if value < 1 else int(value)
