"""HF: `auto`, and conflicts with the arguments of the Hugging Face Trainer."""

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.config.source_text import Path
from toolkit.lint.finding import Violation, dotted, set_to, shown
from toolkit.lint.key_schema import FACTS, lookup
from toolkit.lint.values import is_number
from toolkit.lint.view import View

_ACCELERATE = FACTS["accelerate"]
_TRAINER = FACTS["trainer"]
REPLACED: Mapping[str, set[str]] = {
    "accelerate": {*_ACCELERATE["auto"]},
    "trainer": {*_ACCELERATE["auto"], *_TRAINER["auto"]},
}
"""The keys whose `auto` a runner replaces, by runner."""
_MEANS_AUTO = ("data_types.keep_in_fp32_modules",)


def check(view: View) -> Iterator[Violation]:
    """Check every `auto`, then every value against the arguments."""
    for path, value in view.walk():
        if isinstance(value, str) and value.lower() == "auto":
            yield from _auto(path, value, view)
    if view.context.trainer:
        yield from _arguments(view)
        yield from _sections(view)


def _auto(path: Path, value: str, view: View) -> Iterator[Violation]:
    name = ".".join(map(str, path))
    runner = view.context.runner
    node = lookup(path)
    if value != "auto":
        if (node is not None and "words" not in node) or name in REPLACED["trainer"]:
            message = f"{dotted(path)}: {shown(value)} is not auto"
            yield Violation("HF107", path, message, edits=set_to(path, "auto"))
        return
    if name in _MEANS_AUTO or (node and (node.get("default") == "auto" or "auto" in node.get("words", ()))):
        return
    if runner in REPLACED:
        if name not in {*REPLACED[runner], "steps_per_print"}:  # which accelerate overwrites
            reader = "the Trainer" if runner == "trainer" else "Accelerator"
            yield Violation("HF101", path, f"{dotted(path)}=auto, which {reader} does not replace")
        elif name in _ACCELERATE["auto_from_its_own_settings"] and not view.context.mixed_precision:
            yield Violation("HF108", path, f"{dotted(path)}=auto, which only a config of accelerate replaces")
    elif runner == "deepspeed":
        in_params = path[:2] in (("optimizer", "params"), ("scheduler", "params"))
        fails = in_params or name in FACTS["deepspeed"]["checked_in_use"]
        rule = "HF102" if fails else "HF103"
        yield Violation(rule, path, f"{dotted(path)}=auto, and DeepSpeed does not replace it")


def _arguments(view: View) -> Iterator[Violation]:
    arguments = view.context.trainer
    expected: dict[str, tuple[str, Any]] = {
        key: (argument, arguments[argument]) for key, argument in _TRAINER["arguments"].items() if argument in arguments
    }
    if "adam_beta1" in arguments and "adam_beta2" in arguments:
        expected["optimizer.params.betas"] = (
            "adam_beta1, adam_beta2",
            [arguments["adam_beta1"], arguments["adam_beta2"]],
        )
    for precision, opposite in (("bf16", "fp16"), ("fp16", "bf16")):
        if arguments.get(precision) is True:  # then the other is off
            expected.setdefault(f"{opposite}.enabled", (opposite, False))
    micro = arguments.get("per_device_train_batch_size")
    steps = arguments.get("gradient_accumulation_steps", 1)
    if is_number(micro) and is_number(steps) and view.context.gpus:
        expected["train_batch_size"] = ("the product", micro * steps * view.context.gpus)
    for key, (argument, wanted) in expected.items():
        value = view.get(key, "auto")
        if key == "scheduler.params.warmup_num_steps" and is_number(wanted):
            wanted = max(1, wanted)
        unset = key.startswith("scheduler.params.t") and wanted == -1
        if value in ("auto", None) or value == wanted or unset or isinstance(value, str):
            continue
        path: Path = tuple(key.split("."))
        message = f"{key}={shown(value)}, but {argument}={shown(wanted)}"
        yield Violation("HF104", path, message, edits=set_to(path, "auto"))


def _sections(view: View) -> Iterator[Violation]:
    arguments = view.context.trainer
    schedule = arguments.get("lr_scheduler_type")
    kind = view.get("scheduler.type")
    if schedule is not None and isinstance(kind, str) and _TRAINER["schedules"].get(kind) != schedule:
        message = f"scheduler.type={kind}, but lr_scheduler_type={schedule}"
        yield Violation("HF105", ("scheduler",), message)
    optim = arguments.get("optim")
    kind = view.get("optimizer.type")
    if isinstance(optim, str) and isinstance(kind, str) and not optim.startswith(("adamw_torch", kind.lower())):
        message = f"optimizer.type={kind}, but optim={optim}"
        yield Violation("HF106", ("optimizer",), message)
    path = ("zero_optimization", "offload_optimizer")
    device = view.get(".".join((*path, "device")))
    forces = view.get("zero_force_ds_cpu_optimizer", True)
    replaced = isinstance(optim, str) and not optim.startswith(("adamw", "adagrad")) and "lion" not in optim
    if replaced and kind is None and device in ("cpu", "nvme") and forces:
        yield Violation("HF109", path, f"optim={optim}, with the optimizer offloaded to {device}")
