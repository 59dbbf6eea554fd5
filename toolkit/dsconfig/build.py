"""Recipe + layout -> the DeepSpeed config, with every value that matters written out.

The one function behind the engine, the command line and the files in ds_configs/.
"""

from typing import Any, Literal

from toolkit.batch import Batch
from toolkit.dsconfig.buckets import of_a_layer
from toolkit.dsconfig.options import PLAIN, ConfigOptions, check
from toolkit.dsconfig.sections import extra_sections, offload_section
from toolkit.layout import Layout
from toolkit.recipe import Recipe

Config = dict[str, Any]
Device = Literal["cuda", "cpu"]


def build(
    recipe: Recipe,
    layout: Layout,
    batch: Batch,
    *,
    hidden_size: int,
    device: Device = "cuda",
    options: ConfigOptions = PLAIN,
    nodes: int | None = None,
) -> Config:
    """The DeepSpeed config as a dict, ready for `deepspeed.initialize(config=…)` or `json.dump`.

    `hidden_size` is the model's width, from which bucket sizes follow. `device` decides only what DeepSpeed can run
    there: which implementation of the optimizer, pinned memory, overlap with communication streams. `options` are what
    no recipe says; the engine has none. `nodes` only lets more of them be refused.

    Raises ConfigError for options that DeepSpeed refuses or ignores in this layout.
    """
    check(options, recipe, layout, nodes=nodes)
    config: Config = {
        "train_batch_size": batch.global_size,
        "train_micro_batch_size_per_gpu": batch.micro_size,
        "gradient_accumulation_steps": batch.accumulation,
        # DeepSpeed's own default changed from 0 (off) to 1.0 in 0.19.3.
        "gradient_clipping": recipe.train.grad_clip,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        # Gradients are summed over micro-batches and over ranks in fp32, so that a sum does not depend on its split.
        "communication_data_type": options.communication_dtype,
        **_precision(recipe, layout, options),
        "zero_optimization": _zero(layout, hidden_size, device, options),
        "zero_allow_untested_optimizer": options.optimizer is None and recipe.optimizer.name in ("sgd", "lion"),
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": options.wall_clock_breakdown,
        "dump_state": False,
    }
    if layout.ulysses > 1:
        # Takes the place of communication_data_type where ranks share sequences.
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
    """The `fp16` section of a run whose weights are fp16: a dynamic loss scale."""
    return {
        "enabled": True,
        "auto_cast": False,
        "loss_scale": 0,  # 0 means dynamic
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
    }


def _zero(layout: Layout, hidden_size: int, device: Device, options: ConfigOptions) -> Config:
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
    optimizer_device = "nvme" if options.nvme_optimizer else layout.offload_optimizer
    if optimizer_device != "none":
        zero["offload_optimizer"] = offload_section(
            optimizer_device, options, of="optimizer", pin_memory=device == "cuda"
        )
    if layout.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": buckets.prefetch,
            # Biases and norms (at most 4 h elements) stay whole: gathering them costs more than keeping them.
            "stage3_param_persistence_threshold": 10 * hidden_size,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            "stage3_gather_16bit_weights_on_model_save": True,
            "sub_group_size": 1_000_000_000,
        }
        params_device = "nvme" if options.nvme_params else layout.offload_params
        if params_device != "none":
            zero["offload_param"] = offload_section(params_device, options, of="params", pin_memory=device == "cuda")
    if options.zeropp:
        zero |= {
            "zero_hpz_partition_size": options.hpz_partition_size,
            "zero_quantized_weights": options.quantized_weights,
            "zero_quantized_gradients": options.quantized_gradients,
        }
    return zero


def _pipeline(options: ConfigOptions) -> Config:
    """What the pipeline engine reads. Stages are cut by the toolkit, and recomputation is the model's own."""
    return {
        "activation_checkpoint_interval": int(options.activation_checkpointing),
        "use_reentrant": False,
        # Partitioned, each tensor-parallel rank would send a slice of an activation that all of them hold; under
        # sequence parallelism they hold different ones.
        "pipe_partitioned": False,
        "grad_partitioned": False,
    }


def _optimizer(recipe: Recipe, layout: Layout, device: Device, options: ConfigOptions) -> Config | None:
    """The `optimizer` section, or None where a program passes its own (ours for Lion: PyTorch has none)."""
    section = recipe.optimizer
    # Host-side updates of a GPU's optimizer states need DeepSpeed's vectorised CPU kernels to be bearable.
    ds_cpu_kernels = (layout.offload_optimizer == "cpu" or options.nvme_optimizer) and device == "cuda"
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
