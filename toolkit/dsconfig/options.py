"""ConfigOptions: what a DeepSpeed config can have beyond a recipe, and combinations that DeepSpeed does not support.

The training engine builds its config without any of these; they are for configs of other programs, or that are merged
with a recipe's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from toolkit.config.layout import Layout
from toolkit.config.recipe import Recipe
from toolkit.dsconfig.buckets import Buckets
from toolkit.errors import ConfigError, Refusal

Dtype = Literal["fp32", "bf16", "fp16"]
OtherOptimizer = Literal["adagrad", "lamb", "muon", "none"]
SchedulerName = Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]
MonitorName = Literal["tensorboard", "wandb", "csv", "comet"]

REMOVED_OPTIMIZERS = {"onebitadam": "1-bit Adam", "zerooneadam": "0/1 Adam", "onebitlamb": "1-bit LAMB"}
"""Compressed optimizers of older versions, by their lowercase type."""


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """Extras of a generated config. The defaults add nothing."""

    buckets: Buckets | None = None
    """Bucket sizes for a link; None: one decoder layer."""
    activation_checkpointing: bool = False
    """Whether the config has the section for models that call `deepspeed.checkpointing.checkpoint`, and for plain
    pipeline modules."""
    cpu_checkpointing: bool = False
    gradient_dtype: Dtype = "fp32"
    """Dtype in which gradients are accumulated."""
    communication_dtype: Dtype = "fp32"
    """Dtype in which gradients are reduced."""
    optimizer: OtherOptimizer | None = None
    """An optimizer that no recipe has, or `none` for a program that passes its own; None: the recipe's."""
    scheduler: SchedulerName | None = None
    monitors: tuple[MonitorName, ...] = ()
    log_dir: str = "logs"
    run_name: str = "run"
    profile_step: int | None = None
    """Steps before the one that the flops profiler measures."""
    wall_clock_breakdown: bool = False


PLAIN = ConfigOptions()


def check(options: ConfigOptions, recipe: Recipe, layout: Layout, *, nodes: int | None = None) -> None:
    """Raise ConfigError with every combination that DeepSpeed rejects or ignores.

    `nodes` is the number of machines, None if it is not known.
    """
    values = {**vars(options), **vars(layout), "precision": recipe.precision, "nodes": nodes}
    of_recipe = ("recompute", "nvme_path", "quantized_weights", "quantized_gradients")
    values |= {name: getattr(recipe.parallel, name) for name in of_recipe}
    values["optimizer"] = options.optimizer or recipe.optimizer.name
    problems = [
        *_quantized(recipe, layout, nodes),
        *_nvme(recipe, layout),
        *_dtypes(options, recipe, layout),
        *_optimizer(options, recipe, layout),
        *_activations(options, recipe),
        *_rest(options),
    ]
    refusals = []
    for fields, reason, *remedies in problems:
        settings = tuple((field, values[field]) for field in fields.split())
        refusals.append(Refusal.between(settings, reason, *remedies))
    if refusals:
        raise ConfigError(refusals)


def removed_optimizer(name: str) -> ConfigError:
    """Return the error for a compressed optimizer of older versions."""
    reason = (
        f"{REMOVED_OPTIMIZERS[name]} was removed from DeepSpeed, 0.19.8 has none of the compressed optimizers "
        "(https://github.com/deepspeedai/DeepSpeed/issues/8489)"
    )
    return ConfigError.of("optimizer", name, reason, "use adamw, and ZeRO++'s quantization to send less")


_Problem = tuple[str, str, *tuple[Any, ...]]
"""The fields that do not go together (names with blanks between them), the reason, and remedies."""


def _quantized(recipe: Recipe, layout: Layout, nodes: int | None) -> Iterator[_Problem]:
    for field in ("quantized_weights", "quantized_gradients"):
        if getattr(recipe.parallel, field) and layout.zero_stage < 3:
            reason = "ZeRO++ is a part of ZeRO-3, and DeepSpeed would ignore it"
            yield f"{field} zero_stage", reason, ("zero_stage", 3), "leave it out"
    if recipe.parallel.quantized_gradients and nodes == 1:
        reason = "DeepSpeed quantizes gradients only between nodes and would ignore it"
        yield "quantized_gradients nodes", reason, "give the number of nodes", "leave it out"


def _nvme(recipe: Recipe, layout: Layout) -> Iterator[_Problem]:
    for field in ("offload_optimizer", "offload_params"):
        if getattr(layout, field) == "nvme" and recipe.parallel.nvme_path is None:
            reason = "nothing says where the drive is mounted"
            yield f"nvme_path {field}", reason, ("nvme_path", "a directory on a drive of each node"), (field, "cpu")
            return


def _dtypes(options: ConfigOptions, recipe: Recipe, layout: Layout) -> Iterator[_Problem]:
    for field in ("gradient_dtype", "communication_dtype"):
        dtype = getattr(options, field)
        if dtype == "fp32":
            continue
        if dtype != recipe.precision:
            allowed = "fp32" if recipe.precision == "fp32" else f"fp32 or {recipe.precision}"
            yield f"{field} precision", "gradients are fp32 or have the precision of the weights", (field, allowed)
        elif layout.zero_stage == 0:
            reason = "weights and gradients are fp32 there, and the forward pass runs under autocast"
            yield f"{field} zero_stage", reason, (field, "fp32"), ("zero_stage", 1)


def _optimizer(options: ConfigOptions, recipe: Recipe, layout: Layout) -> Iterator[_Problem]:
    if options.optimizer == "lamb" and layout.zero_stage != 0:
        reason = "LAMB needs the norm of each whole tensor, and ZeRO flattens and partitions them"
        yield "optimizer zero_stage", reason, ("zero_stage", 0), "use adamw"
    if options.optimizer == "muon" and layout.offload_optimizer != "none":
        reason = "the matrix products of Muon would run on the CPU"
        yield "optimizer offload_optimizer", reason, "keep the optimizer on the GPU", "use adamw"
    if options.optimizer is None and recipe.optimizer.name == "adamw8bit" and layout.offload_optimizer != "none":
        reason = "bitsandbytes updates host memory without kernels, out of fp32 copies"
        yield "optimizer offload_optimizer", reason, "keep the optimizer on the GPU", "use adamw"
    if options.optimizer == "muon" and layout.ep > 1 and layout.zero_stage in (1, 2):
        reason = "Muon needs whole gradients, and DeepSpeed scatters those of experts"
        yield "optimizer ep zero_stage", reason, ("ep", 1), "use adamw"


def _activations(options: ConfigOptions, recipe: Recipe) -> Iterator[_Problem]:
    if options.cpu_checkpointing and not options.activation_checkpointing:
        yield "cpu_checkpointing activation_checkpointing", "nothing would be moved", "switch both on"
    if options.activation_checkpointing and recipe.parallel.recompute != "none":
        reason = "layers would be recomputed twice, by the model's own checkpointing and by DeepSpeed's"
        yield "activation_checkpointing recompute", reason, "choose one"


def _rest(options: ConfigOptions) -> Iterator[_Problem]:
    if options.scheduler and options.optimizer == "none":
        yield "scheduler optimizer", "the program that passes the optimizer schedules it", "leave the scheduler out"
    if options.profile_step is not None and options.profile_step < 1:
        yield "profile_step", "the first step is never typical", ("profile_step", 10)
