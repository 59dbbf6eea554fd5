"""ConfigOptions: what a DeepSpeed config can have beyond a recipe, and combinations that DeepSpeed does not support.

The training engine builds its config without any of these; they are for configs of other programs, or that are merged
with a recipe's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from toolkit.config.layout import Layout
from toolkit.config.recipe import Recipe
from toolkit.dsconfig.buckets import Buckets
from toolkit.errors import ConfigError

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
    """Raise ConfigError with every combination that DeepSpeed rejects or ignores, one line each.

    `nodes` is the number of machines, None if it is not known.
    """
    problems = [*_nvme(options, layout), *_zeropp(options, layout, nodes), *_dtypes(options, recipe, layout)]
    problems += [*_optimizer(options, layout), *_activations(options, recipe), *_rest(options)]
    if problems:
        raise ConfigError("\n".join(problems))


def removed_optimizer(name: str) -> ConfigError:
    """Return the error for a compressed optimizer of older versions."""
    return ConfigError(
        f"optimizer={name}: {REMOVED_OPTIMIZERS[name]} was removed from DeepSpeed, 0.19.8 has none of the compressed "
        "optimizers (https://github.com/deepspeedai/DeepSpeed/issues/8489). Use adamw, and ZeRO++ (quantized weights "
        "and gradients) to send less."
    )


def _nvme(options: ConfigOptions, layout: Layout) -> Iterator[str]:
    stage = layout.zero_stage
    if options.nvme_params and stage != 3:
        yield f"parameters on NVMe with zero_stage={stage}: only ZeRO-3 shards parameters. Set zero_stage=3."
    if options.nvme_optimizer and stage != 3:
        yield (
            f"optimizer states on NVMe with zero_stage={stage}: DeepSpeed would silently keep them in host "
            "memory. Set zero_stage=3, or offload them to cpu."
        )
    if options.nvme and not options.nvme_path:
        yield "offload to NVMe without a path. Give the mount point of the drive, for instance nvme_path=/local_nvme."
    if options.nvme_path and not options.nvme:
        yield f"nvme_path={options.nvme_path}, but nothing is offloaded to NVMe. Offload the optimizer or parameters."


def _zeropp(options: ConfigOptions, layout: Layout, nodes: int | None) -> Iterator[str]:
    size = options.hpz_partition_size
    requested = {
        f"hpZ={size}": size != 1,
        "qwZ (quantized weights)": options.quantized_weights,
        "qgZ (quantized gradients)": options.quantized_gradients,
    }
    for name in (name for name, wanted in requested.items() if wanted):
        if layout.zero_stage != 3:
            yield f"{name} with zero_stage={layout.zero_stage}: ZeRO++ is a part of ZeRO-3. Set zero_stage=3."
        if layout.tp > 1 or layout.ulysses > 1:
            why = "ZeRO++ groups ranks as if all of them were data-parallel"
            yield f"{name} with {layout}: {why}. Set tp=1 and ulysses=1."
    if size < 1 or layout.dp % size:
        divisors = ", ".join(str(n) for n in range(2, layout.dp + 1) if layout.dp % n == 0)
        yield f"hpZ={size} with dp={layout.dp}: it must divide dp. Choose one of 1, {divisors}."
    if options.quantized_gradients and layout.zero_stage == 3 and nodes == 1:
        yield (
            "qgZ (quantized gradients) on one node: DeepSpeed quantizes gradients only between nodes and would ignore "
            "it. Give the number of nodes, or leave it out."
        )


def _dtypes(options: ConfigOptions, recipe: Recipe, layout: Layout) -> Iterator[str]:
    for name, dtype in (("gradient", options.gradient_dtype), ("communication", options.communication_dtype)):
        if dtype == "fp32":
            continue
        if dtype != recipe.precision:
            yield (
                f"{name}_dtype={dtype} with precision={recipe.precision}: gradients are fp32 or have the precision of "
                f"the weights. Set {name}_dtype=fp32{'' if recipe.precision == 'fp32' else f' or {recipe.precision}'}."
            )
        elif layout.zero_stage == 0:
            yield (
                f"{name}_dtype={dtype} with zero_stage=0: weights and gradients are fp32 there, and the forward pass "
                f"runs under autocast. Set {name}_dtype=fp32, or zero_stage=1."
            )


def _optimizer(options: ConfigOptions, layout: Layout) -> Iterator[str]:
    offload = layout.offload_optimizer != "none" or options.nvme_optimizer
    if options.optimizer == "lamb" and layout.zero_stage != 0:
        yield (
            f"optimizer=lamb with zero_stage={layout.zero_stage}: LAMB needs the norm of each whole tensor, and ZeRO "
            "flattens and partitions them. Set zero_stage=0, or use adamw."
        )
    if options.optimizer == "muon" and offload:
        yield (
            "optimizer=muon with offloaded optimizer states: its matrix products would run on the CPU. "
            "Keep the optimizer on the GPU, or use adamw."
        )


def _activations(options: ConfigOptions, recipe: Recipe) -> Iterator[str]:
    if options.cpu_checkpointing and not options.activation_checkpointing:
        yield "cpu_checkpointing without activation_checkpointing: nothing would be moved. Switch both on."
    if options.activation_checkpointing and recipe.parallel.recompute != "none":
        yield (
            f"activation_checkpointing with recompute={recipe.parallel.recompute}: layers would be recomputed twice. "
            "Choose one: recompute is the model's own, activation_checkpointing is DeepSpeed's."
        )


def _rest(options: ConfigOptions) -> Iterator[str]:
    if options.scheduler and options.optimizer == "none":
        yield f"scheduler={options.scheduler} with optimizer=none: the program that passes it schedules it."
    if options.profile_step is not None and options.profile_step < 1:
        yield f"profile_step={options.profile_step}: the first step is never typical. Choose, say, 10."
