"""Job -> the DeepSpeed config, with every value that matters written out.

The one function behind the engine, the command line and the files in ds_configs/.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from toolkit.config.job import Job
from toolkit.config.layout import Layout
from toolkit.config.recipe import Recipe
from toolkit.dsconfig.buckets import of_a_layer
from toolkit.dsconfig.optional_sections import NVME_SUB_GROUP, SECTIONS, extra_sections, offload_section
from toolkit.dsconfig.options import PLAIN, ConfigOptions, check
from toolkit.errors import LayoutError
from toolkit.models.shape import ModelShape, hidden_size_of, local_config, with_overrides

Config = dict[str, Any]
Device = Literal["cuda", "cpu"]


def build(
    job: Job, *, hidden_size: int, device: Device = "cuda", options: ConfigOptions = PLAIN, nodes: int | None = None
) -> Config:
    """Return the DeepSpeed config as a dict, ready for `deepspeed.initialize(config=…)` or `json.dump`.

    `hidden_size` is the model's width, from which bucket sizes follow. `device` decides only what DeepSpeed can run
    there: the implementation of the optimizer, pinned memory, overlap with communication streams. `options` are what no
    recipe has; the engine uses none. `nodes` only allows more options to be checked.

    Raises ConfigError for options that DeepSpeed rejects or ignores in this layout.
    """
    recipe = job.recipe
    layout = job.layout
    batch = job.batch
    check(options, recipe, layout, nodes=nodes)
    config: Config = {
        # DeepSpeed counts ranks that share a sequence as replicas, with samples of their own.
        "train_batch_size": batch.global_batch_size * layout.cp,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation,
        # DeepSpeed's own default changed from 0 (off) to 1.0 in 0.19.3.
        # Of Muon, ZeRO would clip the orthogonal updates (docs/known-bugs.md).
        "gradient_clipping": 0.0 if options.optimizer == "muon" and layout.zero_stage else recipe.train.grad_clip,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        # fp32 sums over micro-batches and ranks, so that a sum does not depend on how it is partitioned.
        "communication_data_type": options.communication_dtype,
        **_precision(recipe, layout, options),
        "zero_optimization": _zero(job, hidden_size, device, options),
        "zero_allow_untested_optimizer": options.optimizer is None
        and recipe.optimizer.name in ("sgd", "lion", "muon", "adafactor", "adamw8bit"),
        "zero_force_ds_cpu_optimizer": False,
        # The pipeline engine divides by it when it has timed a step.
        "steps_per_print": 10 if options.wall_clock_breakdown and layout.pp > 1 else None,
        "wall_clock_breakdown": options.wall_clock_breakdown,
        "dump_state": False,
    }
    if layout.ulysses > 1:
        # Replaces communication_data_type if ranks share sequences.
        config["seq_parallel_communication_data_type"] = "fp32"
    if layout.pp > 1:
        config["pipeline"] = _pipeline(options)
    optimizer = _optimizer(recipe, layout, device, options)
    if optimizer is not None:
        config["optimizer"] = optimizer
    return config | extra_sections(options, recipe, layout)


def _precision(recipe: Recipe, layout: Layout, options: ConfigOptions) -> Config:
    # Without ZeRO, DeepSpeed accumulates gradients in the model's own 16 bits or not at all. Autocast over fp32 weights
    # takes the same memory (4+4+8 bytes per parameter against 2+2+12) and keeps fp32 sums.
    autocast = layout.zero_stage == 0 and recipe.precision != "fp32"
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(recipe.precision)
    return {
        "data_types": {"grad_accum_dtype": options.gradient_dtype},
        # Without the check, ZeRO 1 and 2 apply a gradient that is not finite.
        "bf16": {"enabled": recipe.precision == "bf16" and not autocast, "check_grad_overflow": True},
        "fp16": loss_scaling() if recipe.precision == "fp16" and not autocast else {"enabled": False},
        "torch_autocast": {"enabled": True, "dtype": dtype} if autocast else {"enabled": False},
    }


def loss_scaling() -> Config:
    """Return the `fp16` section of a run with fp16 weights: a dynamic loss scale."""
    return dict(SECTIONS["fp16"])


def _zero(job: Job, hidden_size: int, device: Device, options: ConfigOptions) -> Config:
    layout = job.layout
    section = job.recipe.parallel
    buckets = options.buckets or of_a_layer(hidden_size)
    zero: Config = {"stage": layout.zero_stage}
    if layout.zero_stage == 0:
        return zero
    zero |= {
        "contiguous_gradients": True,
        "overlap_comm": device == "cuda",
        # Muon needs whole gradients.
        "reduce_scatter": options.optimizer != "muon",
        "reduce_bucket_size": buckets.reduce,
    }
    if layout.zero_stage < 3:  # ZeRO-3 reads none of these
        zero |= {
            "allgather_partitions": True,
            "allgather_bucket_size": buckets.allgather,
            "round_robin_gradients": False,
            "ignore_unused_parameters": True,
        }
    if layout.offload_optimizer != "none":
        zero["offload_optimizer"] = offload_section(job, of="optimizer", pin_memory=device == "cuda")
    if layout.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": buckets.prefetch,
            # Biases and norms (at most 4 h elements) stay whole: gathering them costs more than keeping them.
            "stage3_param_persistence_threshold": 10 * hidden_size,
            "stage3_max_live_parameters": 1_000_000_000,
            # A weight that is kept for its next use keeps its buffer, and of those there are five.
            "stage3_max_reuse_distance": 0 if layout.offload_params == "nvme" else 1_000_000_000,
            "stage3_gather_16bit_weights_on_model_save": True,
            # What is updated at once: on NVMe four buffers in host memory have its size.
            "sub_group_size": NVME_SUB_GROUP if layout.offload_optimizer == "nvme" else 1_000_000_000,
        }
        if layout.offload_params != "none":
            zero["offload_param"] = offload_section(job, of="params", pin_memory=device == "cuda")
    if layout.hpz > 1 or section.quantized_weights or section.quantized_gradients:
        zero |= {
            "zero_hpz_partition_size": layout.hpz,
            "zero_quantized_weights": section.quantized_weights,
            "zero_quantized_gradients": section.quantized_gradients,
        }
    return zero


def _pipeline(options: ConfigOptions) -> Config:
    """Return what the pipeline engine reads. The toolkit partitions the stages, and the model recomputes by itself."""
    return {
        "activation_checkpoint_interval": int(options.activation_checkpointing),
        "use_reentrant": False,
        # Partitioned, each tensor-parallel rank would send a slice of an activation that all of them have; under
        # sequence parallelism they have different ones.
        "pipe_partitioned": False,
        "grad_partitioned": False,
    }


def _optimizer(recipe: Recipe, layout: Layout, device: Device, options: ConfigOptions) -> Config | None:
    """Return the `optimizer` section, or None if the program passes its own (for Lion, Muon, Adafactor, 8 bits)."""
    section = recipe.optimizer
    # Host-side updates of a GPU's optimizer states are only fast with DeepSpeed's vectorized CPU kernels.
    ds_cpu_kernels = layout.offload_optimizer != "none" and device == "cuda"
    shared = {"lr": section.lr, "weight_decay": section.weight_decay}
    betas = list(section.betas)
    match options.optimizer:
        case "none":
            return None
        case "adagrad":
            return {"type": "Adagrad", "params": shared | {"eps": section.eps}}
        case "lamb":
            bounds = {"max_coeff": 10.0, "min_coeff": 0.01}
            return {"type": "Lamb", "params": shared | {"betas": betas, "eps": section.eps} | bounds}
        case "muon":
            # Matrices inside the model get Muon, all else AdamW with betas and eps.
            params = shared | {"momentum": section.momentum or 0.95, "ns_method": "gram"}
            return {"type": "Muon", "params": params | {"betas": betas, "eps": section.eps, "torch_adam": True}}
        case None:
            pass
    match section.name:
        case "adamw" | "adam":
            params = shared | {
                "betas": betas,
                "eps": section.eps,
                # DeepSpeed decouples the decay of "Adam" too unless this says otherwise.
                "adam_w_mode": section.name == "adamw",
                # PyTorch's own kernels need no compiler on the machine; its fused ones are as fast as FusedAdam.
                "torch_adam": not ds_cpu_kernels,
            }
            if not ds_cpu_kernels:
                params["fused"] = device == "cuda"
            return {"type": "AdamW" if section.name == "adamw" else "Adam", "params": params}
        case "sgd":
            return {"type": "SGD", "params": shared | {"momentum": section.momentum}}
        case "lion":
            if ds_cpu_kernels:
                return {"type": "Lion", "params": shared | {"betas": betas}}
            return None
        case "muon" | "adafactor" | "adamw8bit":
            return None


@dataclass(frozen=True, kw_only=True)
class ConfigJob(Job):
    """A job on machines, with options. `config` raises ConfigError for options that cannot be combined.

    The config needs the model's width, and only with ZeRO.
    """

    width: int | None = None
    """The model's width; None: that of the shape, or of the model's config."""
    nodes: int = 1
    device: Device = "cuda"
    options: ConfigOptions = PLAIN

    def __post_init__(self) -> None:
        if self.layout.world_size % self.nodes:
            settings = (("nodes", self.nodes), ("world_size", self.layout.world_size))
            advice = "choose a number of nodes that divides the ranks"
            raise LayoutError.between(settings, "every node starts the same number of ranks", advice)

    @property
    def gpus_per_node(self) -> int:
        return self.layout.world_size // self.nodes

    @cached_property
    def hidden_size(self) -> int:
        """The model's width. Raises ModelError where nothing says it."""
        if self.shape is not None:
            return self.width or self.shape.hidden
        model = self.recipe.model
        return self.width or hidden_size_of(with_overrides(local_config(model.name_or_path), model.overrides))

    @cached_property
    def config(self) -> Config:
        """The DeepSpeed JSON as a dict."""
        width = self.hidden_size if self.layout.zero_stage else 0
        return build(self, hidden_size=width, device=self.device, options=self.options, nodes=self.nodes)


def shape_of(name: str, overrides: Mapping[str, Any] | None = None) -> ModelShape:
    """Return the shape of a known model or of a local directory. Raises ModelError."""
    return ModelShape.from_config(with_overrides(local_config(name), overrides or {}))
