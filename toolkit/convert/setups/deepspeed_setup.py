"""The DeepSpeed JSON of a Trainer as fields of a recipe.

The Trainer fills in every `auto` and refuses values that contradict its arguments; so does this.
"""

import math
from collections.abc import Mapping
from typing import Any

from toolkit.convert.setups.argument_reader import ArgumentReader
from toolkit.errors import RecipeError

_TRANSLATED = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
    "fp16", "zero_optimization", "optimizer", "scheduler", "data_types",
}  # fmt: skip
_SILENT = {
    "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "activation_checkpointing", "communication_data_type", "prescale_gradients", "dump_state", "memory_breakdown",
    "comms_logger", "flops_profiler", "tensorboard", "wandb", "csv_monitor",
}  # fmt: skip


def take_deepspeed(
    reader: ArgumentReader, config: Mapping[str, Any] | None, fields: dict[str, Any], notes: list[str]
) -> None:
    """Add the fields that the JSON decides. Raises RecipeError where it contradicts the arguments."""
    if config is None:
        return
    _zero(reader, _section(reader, config, "zero_optimization"), fields, notes)
    _same(
        reader,
        config,
        "train_micro_batch_size_per_gpu",
        "per_device_train_batch_size",
        fields,
        "batch.micro_batch_size",
    )
    _same(reader, config, "gradient_accumulation_steps", "gradient_accumulation_steps", fields, "accumulation")
    _same(reader, config, "gradient_clipping", "max_grad_norm", fields, "train.grad_clip")
    if "gradient_clipping" not in config:
        notes.append(
            "the DeepSpeed JSON has no gradient_clipping: DeepSpeed clips to 1.0 since 0.19.3 and did not before, "
            "whatever max_grad_norm says, which the recipe clips to"
        )
    size = config.get("train_batch_size")
    if isinstance(size, int) and not isinstance(size, bool):
        fields["batch.global_batch_size"] = size
    _precision(reader, config, fields)
    _optimizer(reader, _section(reader, config, "optimizer"), fields, notes)
    _scheduler(reader, _section(reader, config, "scheduler"), fields, notes)
    for key, axis in (("sequence_parallel_size", "ulysses"), ("tensor_parallel", "tp")):
        value = config.get(key)
        ranks = value.get("autotp_size", 1) if isinstance(value, Mapping) else value
        if isinstance(ranks, int) and ranks > 1:
            fields[f"parallel.{axis}"] = ranks
    others = [key for key in config if key not in _TRANSLATED | _SILENT | {"sequence_parallel_size", "tensor_parallel"}]
    if others:
        notes.append(
            f"{', '.join(others)} of the DeepSpeed JSON: no field; dstk train --deepspeed-config merges a JSON"
        )


def _section(reader: ArgumentReader, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise reader.refused(name, value, "this section of a DeepSpeed JSON is an object")
    return value or {}


def _same(
    reader: ArgumentReader, config: Mapping[str, Any], key: str, argument: str | None, fields: dict[str, Any], name: str
) -> None:
    """A number that both say. The JSON's counts; where the argument is given it must be the same."""
    value = config.get(key)
    if value is None or value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise reader.refused(key, value, "a number or auto is needed")
    if argument is not None and argument in reader:
        other = reader.number(argument, 0.0)
        if not math.isclose(other, value):
            raise contradiction(key, value, argument, other)
    fields[name] = value


def contradiction(key: str, value: Any, argument: str, other: Any) -> RecipeError:
    """The error about a value of the JSON beside an argument that says another."""
    return RecipeError(
        f"{key}={value} of the DeepSpeed JSON with {argument}={other}: the Trainer refuses values that contradict each "
        "other. Make them the same, or write auto in the JSON."
    )


def _zero(reader: ArgumentReader, zero: Mapping[str, Any], fields: dict[str, Any], notes: list[str]) -> None:
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise reader.refused("zero_optimization.stage", stage, "0, 1, 2 or 3 is needed")
    fields["parallel.zero_stage"] = stage
    for key, name in (("offload_optimizer", "offload_optimizer"), ("offload_param", "offload_params")):
        section = _section(reader, zero, key)
        device = section.get("device", "none")
        if device in ("cpu", "nvme") and (stage == 3 or key == "offload_optimizer"):
            fields[f"parallel.{name}"] = device
            if device == "nvme":
                fields["parallel.nvme_path"] = section.get("nvme_path")
    partitions = zero.get("zero_hpz_partition_size", 1)
    if isinstance(partitions, int) and partitions > 1:
        fields["parallel.hpz"] = partitions
    for key, name in (
        ("zero_quantized_weights", "quantized_weights"),
        ("zero_quantized_gradients", "quantized_gradients"),
    ):
        if zero.get(key) is True:
            fields[f"parallel.{name}"] = True


def _precision(reader: ArgumentReader, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """The precision that the JSON switches on, with which both arguments must agree where they are given."""
    enabled = {name: _section(reader, config, name).get("enabled") for name in ("bf16", "fp16")}
    if enabled["bf16"] is True and enabled["fp16"] is True:
        raise reader.refused(
            "fp16.enabled", True, "bf16.enabled of the DeepSpeed JSON is true as well", "Switch one off"
        )
    for name, other in (("bf16", "fp16"), ("fp16", "bf16")):
        if not isinstance(enabled[name], bool):
            continue
        if name in reader and reader.flag(name) is not enabled[name]:
            raise contradiction(f"{name}.enabled", enabled[name], name, not enabled[name])
        if enabled[name] and other in reader and reader.flag(other):
            raise contradiction(f"{name}.enabled", True, other, True)
        if enabled[name]:
            fields["precision"] = name


def _optimizer(reader: ArgumentReader, section: Mapping[str, Any], fields: dict[str, Any], notes: list[str]) -> None:
    if not section:
        return
    kind = section.get("type")
    params = _section(reader, section, "params")
    known = {
        "adamw": "adamw",
        "adam": "adam" if params.get("adam_w_mode") is False else "adamw",
        "lion": "lion",
        "sgd": "sgd",
    }
    name = known.get(str(kind).lower())
    if name is None:
        raise reader.refused("optimizer.type", kind, "no optimizer of a recipe has the same update", "Choose AdamW")
    fields["optimizer.name"] = name
    _same(reader, params, "lr", "learning_rate", fields, "optimizer.lr")
    _same(reader, params, "weight_decay", "weight_decay", fields, "optimizer.weight_decay")
    _same(reader, params, "eps", "adam_epsilon", fields, "optimizer.eps")
    betas = params.get("betas")
    if isinstance(betas, list) and len(betas) == 2:
        for beta, argument in zip(betas, ("adam_beta1", "adam_beta2"), strict=True):
            _same(reader, {"betas": beta}, "betas", argument, {}, "")
        fields["optimizer.betas"] = betas
    elif betas not in (None, "auto"):
        raise reader.refused("optimizer.params.betas", betas, "two numbers or auto are needed")
    notes.append("with an optimizer in the DeepSpeed JSON, biases and norms decay as well; in the recipe they do not")


def _scheduler(reader: ArgumentReader, section: Mapping[str, Any], fields: dict[str, Any], notes: list[str]) -> None:
    if not section:
        return
    kind = section.get("type")
    params = _section(reader, section, "params")
    names = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear"}
    if kind not in names:
        advice = f"Use one of {', '.join(names)}, or remove the section: the Trainer then makes lr_scheduler_type"
        raise reader.refused("scheduler.type", kind, "no schedule of a recipe is the same", advice)
    _same(reader, params, "warmup_max_lr", "learning_rate", fields, "optimizer.lr")
    fields["schedule.name"] = names[kind]
    for key, name in (("warmup_num_steps", "schedule.warmup_steps"), ("total_num_steps", "total_num_steps")):
        _same(reader, params, key, None, fields, name)
    least = params.get("warmup_min_lr")
    if least not in (None, 0, "auto"):
        notes.append(f"warmup_min_lr={least} of the DeepSpeed JSON has no counterpart: the recipe warms up from 0")
    shape = "with a logarithm" if params.get("warmup_type", "log") == "log" else "over at least 2 steps"
    notes.append(f"DeepSpeed's {kind} begins a step later and warms up {shape}; the recipe's {names[kind]} does not")
