"""HF: `auto`, and what the Hugging Face Trainer and its arguments say."""

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.dsconfig.lint.finding import ERROR, WARNING, Edit, Found, Path, Rule, dotted, shown
from toolkit.dsconfig.lint.schema import lookup
from toolkit.dsconfig.lint.values import is_number
from toolkit.dsconfig.lint.view import View

_TRAINER = {"runner": "trainer"}
_BATCH = "train_micro_batch_size_per_gpu"

RULES = (
    Rule(
        id="HF101",
        severity=ERROR,
        title="auto that the Trainer and Accelerator do not replace",
        effect="They stop with `not found in kwargs`: each knows only a short list of keys.",
        mend="Write a value.",
        example={"train_batch_size": "auto", "zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}},
        given=_TRAINER,
        sources=("https://github.com/huggingface/accelerate/issues/1644",),
    ),
    Rule(
        id="HF102",
        severity=ERROR,
        title="auto where nobody replaces it",
        effect="DeepSpeed itself does not know the word: it computes with a text, and raises.",
        mend="Write a value, or let the Trainer, Accelerator or this toolkit start the run.",
        example={_BATCH: "auto"},
        given={"runner": "deepspeed"},
        sources=("https://github.com/deepspeedai/DeepSpeed/issues/1270",),
    ),
    Rule(
        id="HF103",
        severity=WARNING,
        title="auto that DeepSpeed drops",
        effect='DeepSpeed takes its own default and says nothing: "enabled": "auto" is off, "stage": "auto" is 0.',
        mend="Write a value, or let the Trainer, Accelerator or this toolkit start the run.",
        example={_BATCH: 4, "bf16": {"enabled": "auto"}},
        given={"runner": "deepspeed"},
    ),
    Rule(
        id="HF104",
        severity=ERROR,
        title="A value that contradicts the TrainingArguments",
        effect="The Trainer stops: please correct the following DeepSpeed config values that mismatch.",
        mend='Write "auto", and say it once, in the TrainingArguments.',
        example={_BATCH: 8, "gradient_accumulation_steps": "auto"},
        given={"trainer": {"per_device_train_batch_size": 4}, "runner": "trainer"},
        sources=("https://github.com/huggingface/transformers/pull/12021",),
        fixable=True,
    ),
    Rule(
        id="HF105",
        severity=WARNING,
        title="A scheduler section beside lr_scheduler_type",
        effect="The section wins: the Trainer's schedule is not used, and the log does not say so.",
        mend="Remove the scheduler section.",
        example={_BATCH: "auto", "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}},
        given={"trainer": {"lr_scheduler_type": "cosine"}, "runner": "trainer"},
        sources=("https://github.com/modelscope/ms-swift/issues/491",),
    ),
    Rule(
        id="HF106",
        severity=WARNING,
        title="An optimizer section beside optim",
        effect="The section wins: the Trainer's optimizer is not used.",
        mend="Remove the optimizer section.",
        example={_BATCH: "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
        given={"trainer": {"optim": "adafactor"}, "runner": "trainer"},
    ),
    Rule(
        id="HF107",
        severity=ERROR,
        title="auto in another spelling",
        effect='The Trainer and Accelerator replace exactly "auto"; the text goes on to DeepSpeed.',
        mend='Write "auto".',
        example={_BATCH: "Auto"},
        sources=("https://github.com/LianjiaTech/BELLE/issues/558",),
        fixable=True,
    ),
    Rule(
        id="HF108",
        severity=WARNING,
        title="auto that turns a feature off",
        effect="accelerate fills it from its own settings, without which stage is 2, offload is none, and"
        " stage3_gather_16bit_weights_on_model_save is false.",
        mend="Write a value.",
        example={_BATCH: "auto", "zero_optimization": {"stage": "auto"}},
        given=_TRAINER,
    ),
)

_ACCELERATE = {
    *("train_batch_size", _BATCH, "gradient_accumulation_steps", "gradient_clipping", "bf16.enabled", "fp16.enabled"),
    *("zero_optimization.stage", "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    *(f"zero_optimization.offload_{what}.{key}" for what in ("optimizer", "param") for key in ("device", "nvme_path")),
    *("zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
    "zero_optimization.stage3_param_persistence_threshold",
    *("optimizer.params.lr", "optimizer.params.weight_decay"),
    *(f"scheduler.params.{key}" for key in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")),
}
_TRAINER_TOO = _ACCELERATE | {"optimizer.params.betas", "optimizer.params.eps"}
_FROM_ITS_OWN_SETTINGS = {
    name for name in _ACCELERATE if name.startswith("zero_optimization.") and "size" not in name
} - {"zero_optimization.stage3_param_persistence_threshold"}
REPLACED: Mapping[str, set[str]] = {"accelerate": _ACCELERATE, "trainer": _TRAINER_TOO}
"""The keys whose `auto` each replaces."""

_STILL_A_TEXT = {
    *("train_batch_size", _BATCH, "gradient_accumulation_steps", "gradient_clipping", "steps_per_print"),
    *("wall_clock_breakdown", "communication_data_type", "seq_parallel_communication_data_type", "log_level"),
    *("gradient_allreduce_op", "vocabulary_size", "sequence_parallel_size", "optimizer.type", "scheduler.type"),
    *("data_types.grad_accum_dtype", "data_types.param_dtype", "checkpoint.tag_validation", "torch_autocast.dtype"),
    *("checkpoint.parallel_write.pipeline_stage", "flops_profiler.enabled", "checkpoint.writer.type"),
    "checkpoint.writer.data_parallel",
    "torch_autocast.lower_precision_safe_modules",
}
"""Where DeepSpeed trips over the word."""
_MEANS_AUTO = ("data_types.keep_in_fp32_modules",)
_ARGUMENTS = {
    _BATCH: "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
    "scheduler.params.total_num_steps": "max_steps",
    "scheduler.params.warmup_num_steps": "warmup_steps",
}
_SCHEDULES = {"WarmupLR": "constant_with_warmup", "WarmupDecayLR": "linear"}


def check(view: View) -> Iterator[Found]:
    """Every `auto`, then every value against the arguments."""
    for path, value in view.walk():
        if isinstance(value, str) and value.lower() == "auto":
            yield from _auto(path, value, view)
    if view.facts.trainer:
        yield from _arguments(view)
        yield from _sections(view)


def _auto(path: Path, value: str, view: View) -> Iterator[Found]:
    name, runner = ".".join(map(str, path)), view.facts.runner
    node = lookup(path)
    if value != "auto":
        if (node is not None and "words" not in node) or name in _TRAINER_TOO:
            message = f"{dotted(path)}: {shown(value)} is not auto"
            yield Found("HF107", path, message, edits=(Edit("set", path, "auto"),))
        return
    if name in _MEANS_AUTO or (node and (node.get("default") == "auto" or "auto" in node.get("words", ()))):
        return
    if runner in REPLACED:
        if name not in REPLACED[runner]:
            yield Found("HF101", path, f"{dotted(path)}=auto, which {_who(runner)} does not replace")
        elif name in _FROM_ITS_OWN_SETTINGS and not view.facts.mixed_precision:
            yield Found("HF108", path, f"{dotted(path)}=auto, which only a config of accelerate replaces")
    elif runner == "deepspeed":
        text = name in _STILL_A_TEXT or path[:2] in (("optimizer", "params"), ("scheduler", "params"))
        rule = "HF102" if text else "HF103"
        yield Found(rule, path, f"{dotted(path)}=auto, and DeepSpeed does not replace it")


def _who(runner: str) -> str:
    return "the Trainer" if runner == "trainer" else "Accelerator"


def _arguments(view: View) -> Iterator[Found]:
    given = view.facts.trainer
    expected: dict[str, tuple[str, Any]] = {
        key: (argument, given[argument]) for key, argument in _ARGUMENTS.items() if argument in given
    }
    if "adam_beta1" in given and "adam_beta2" in given:
        expected["optimizer.params.betas"] = ("adam_beta1, adam_beta2", [given["adam_beta1"], given["adam_beta2"]])
    micro, steps = given.get("per_device_train_batch_size"), given.get("gradient_accumulation_steps", 1)
    if is_number(micro) and is_number(steps) and view.facts.gpus:
        expected["train_batch_size"] = ("the product", micro * steps * view.facts.gpus)
    for key, (argument, wanted) in expected.items():
        value = view.get(key, "auto")
        if key == "scheduler.params.warmup_num_steps" and is_number(wanted):
            wanted = max(1, wanted)
        unset = key.startswith("scheduler.params.t") and wanted == -1
        if value in ("auto", None) or value == wanted or unset or isinstance(value, str):
            continue
        path: Path = tuple(key.split("."))
        message = f"{key}={shown(value)}, but {argument}={shown(wanted)}"
        yield Found("HF104", path, message, edits=(Edit("set", path, "auto"),))


def _sections(view: View) -> Iterator[Found]:
    given = view.facts.trainer
    schedule, kind = given.get("lr_scheduler_type"), view.get("scheduler.type")
    if schedule is not None and isinstance(kind, str) and _SCHEDULES.get(kind) != schedule:
        message = f"scheduler.type={kind}, but lr_scheduler_type={schedule}"
        yield Found("HF105", ("scheduler",), message)
    optim, kind = given.get("optim"), view.get("optimizer.type")
    if isinstance(optim, str) and isinstance(kind, str) and not optim.startswith(("adamw_torch", kind.lower())):
        message = f"optimizer.type={kind}, but optim={optim}"
        yield Found("HF106", ("optimizer",), message)
