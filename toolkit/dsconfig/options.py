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
from toolkit.units import english_list

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
    nvme_path: str | None = None
    nvme_optimizer: bool = False
    nvme_params: bool = False
    nvme_buffer_elements: int = 100_000_000
    """At least a rank's shard of the largest parameter."""
    hpz_partition_size: int = 1
    """ZeRO++ hpZ: size of the groups with a secondary parameter partition; usually the GPUs of a node."""
    quantized_weights: bool = False
    """ZeRO++ qwZ: parameters are gathered in 8 bits."""
    quantized_gradients: bool = False
    """ZeRO++ qgZ: gradients cross nodes in 4 bits."""
    activation_checkpointing: bool = False
    """For models that call `deepspeed.checkpointing.checkpoint`, and for plain pipeline modules."""
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

    @property
    def nvme(self) -> bool:
        """Whether anything is kept on NVMe."""
        return self.nvme_optimizer or self.nvme_params

    @property
    def zeropp(self) -> bool:
        """Whether any part of ZeRO++ is on."""
        return self.hpz_partition_size > 1 or self.quantized_weights or self.quantized_gradients


PLAIN = ConfigOptions()


def check(options: ConfigOptions, recipe: Recipe, layout: Layout, *, nodes: int | None = None) -> None:
    """Raise ConfigError with every combination that DeepSpeed rejects or ignores.

    `nodes` is the number of machines, None if it is not known.
    """
    values = {**vars(options), **vars(layout), "precision": recipe.precision, "nodes": nodes}
    values["recompute"] = recipe.parallel.recompute
    found = [*_nvme(options, layout), *_zeropp(options, layout, nodes), *_dtypes(options, recipe, layout)]
    found += [*_optimizer(options, layout), *_activations(options, recipe), *_rest(options)]
    if found:
        given = [tuple((field, values[field]) for field in fields.split()) for fields, *_ in found]
        raise ConfigError(Refusal.between(one, *rest) for one, (_, *rest) in zip(given, found, strict=True))


def removed_optimizer(name: str) -> ConfigError:
    """Return the error for a compressed optimizer of older versions."""
    reason = (
        f"{REMOVED_OPTIMIZERS[name]} was removed from DeepSpeed, 0.19.8 has none of the compressed optimizers "
        "(https://github.com/deepspeedai/DeepSpeed/issues/8489)"
    )
    return ConfigError.of("optimizer", name, reason, "use adamw, and ZeRO++'s quantization to send less")


_Problem = tuple[str, *tuple[Any, ...]]
"""The fields that do not go together, the reason, and remedies."""
_ZERO_3 = ("zero_stage", 3)


def _nvme(options: ConfigOptions, layout: Layout) -> Iterator[_Problem]:
    if options.nvme_params and layout.zero_stage != 3:
        yield "nvme_params zero_stage", "only ZeRO-3 shards parameters", _ZERO_3
    if options.nvme_optimizer and layout.zero_stage != 3:
        reason = "DeepSpeed would silently keep optimizer states in host memory"
        yield "nvme_optimizer zero_stage", reason, _ZERO_3, "offload them to cpu"
    if options.nvme and not options.nvme_path:
        yield "nvme_path", "nothing says where the drive is mounted", "give its mount point"
    if options.nvme_path and not options.nvme:
        yield "nvme_path", "nothing is offloaded to NVMe", "offload the optimizer or parameters"


def _zeropp(options: ConfigOptions, layout: Layout, nodes: int | None) -> Iterator[_Problem]:
    size = options.hpz_partition_size
    wanted = {
        "hpz_partition_size": size != 1,
        "quantized_weights": options.quantized_weights,
        "quantized_gradients": options.quantized_gradients,
    }
    for field in (field for field, is_on in wanted.items() if is_on):
        if layout.zero_stage != 3:
            yield f"{field} zero_stage", "ZeRO++ is a part of ZeRO-3", _ZERO_3
        if layout.tp > 1 or layout.ulysses > 1:
            reason = "ZeRO++ groups ranks as if all of them were data-parallel"
            yield f"{field} tp ulysses", reason, "set tp=1 and ulysses=1"
        if layout.ep > 1:
            yield f"{field} ep", "DeepSpeed shards experts over other ranks than ZeRO++'s groups", ("ep", 1)
    if size < 1 or layout.dp % size:
        divisors = [str(n) for n in range(1, layout.dp + 1) if layout.dp % n == 0]
        yield "hpz_partition_size dp", "it must divide dp", ("hpz_partition_size", english_list(divisors, "or"))
    if options.quantized_gradients and layout.zero_stage == 3 and nodes == 1:
        reason = "DeepSpeed quantizes gradients only between nodes and would ignore it"
        yield "quantized_gradients nodes", reason, "give the number of nodes", "leave it out"


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


def _optimizer(options: ConfigOptions, layout: Layout) -> Iterator[_Problem]:
    if options.optimizer == "lamb" and layout.zero_stage != 0:
        reason = "LAMB needs the norm of each whole tensor, and ZeRO flattens and partitions them"
        yield "optimizer zero_stage", reason, ("zero_stage", 0), "use adamw"
    offload = "nvme_optimizer" if options.nvme_optimizer else "offload_optimizer"
    if options.optimizer == "muon" and (options.nvme_optimizer or layout.offload_optimizer != "none"):
        reason = "the matrix products of Muon would run on the CPU"
        yield f"optimizer {offload}", reason, "keep the optimizer on the GPU", "use adamw"
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
