"""Recipe + layout -> the DeepSpeed config, with every value that matters written out.

The one function behind the engine, the command line and the files in ds_configs/.
"""

from typing import Any, Literal

from toolkit.batch import Batch
from toolkit.layout import Layout
from toolkit.recipe import Recipe

Config = dict[str, Any]
Device = Literal["cuda", "cpu"]

_SMALLEST_BUCKET = 1 << 20
_LARGEST_BUCKET = 500_000_000


def build(recipe: Recipe, layout: Layout, batch: Batch, *, hidden_size: int, device: Device = "cuda") -> Config:
    """The DeepSpeed config as a dict, ready for `deepspeed.initialize(config=…)` or `json.dump`.

    `hidden_size` is the model's width, from which bucket sizes follow. `device` decides only what DeepSpeed can run
    there: which implementation of the optimizer, pinned memory, overlap with communication streams.
    """
    config: Config = {
        "train_batch_size": batch.global_size,
        "train_micro_batch_size_per_gpu": batch.micro_size,
        "gradient_accumulation_steps": batch.accumulation,
        # DeepSpeed's own default changed from 0 (off) to 1.0 in 0.19.3.
        "gradient_clipping": recipe.train.grad_clip,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        # Gradients are summed over micro-batches and over ranks in fp32, so that a sum does not depend on its split.
        "communication_data_type": "fp32",
        **_precision(recipe, layout),
        "zero_optimization": _zero(layout, hidden_size, device),
        "zero_allow_untested_optimizer": recipe.optimizer.name in ("sgd", "lion"),
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "dump_state": False,
    }
    if layout.ulysses > 1:
        # Takes the place of communication_data_type where ranks share sequences.
        config["seq_parallel_communication_data_type"] = "fp32"
    if layout.pp > 1:
        config["pipeline"] = _pipeline()
    optimizer = _optimizer(recipe, layout, device)
    if optimizer is not None:
        config["optimizer"] = optimizer
    return config


def _precision(recipe: Recipe, layout: Layout) -> Config:
    # Without ZeRO, DeepSpeed accumulates gradients in the model's own 16 bits or not at all. Autocast over fp32 weights
    # takes the same memory (4+4+8 bytes per parameter against 2+2+12) and keeps fp32 sums.
    autocast = layout.zero_stage == 0 and recipe.precision != "fp32"
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(recipe.precision)
    return {
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": recipe.precision == "bf16" and not autocast},
        "fp16": _loss_scaling() if recipe.precision == "fp16" and not autocast else {"enabled": False},
        "torch_autocast": {"enabled": True, "dtype": dtype} if autocast else {"enabled": False},
    }


def _loss_scaling() -> Config:
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


def _zero(layout: Layout, hidden_size: int, device: Device) -> Config:
    # A decoder layer of width h has about 12 h^2 parameters (Megatron-LM, Narayanan et al. 2021, eq. 2): one bucket
    # carries one layer, so communication of a layer overlaps with the computation of its neighbour.
    bucket = min(max(12 * hidden_size**2, _SMALLEST_BUCKET), _LARGEST_BUCKET)
    zero: Config = {"stage": layout.zero_stage}
    if layout.zero_stage == 0:
        return zero
    zero |= {
        "contiguous_gradients": True,
        "overlap_comm": device == "cuda",
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
        "allgather_partitions": True,
        "allgather_bucket_size": bucket,
        "round_robin_gradients": False,
        "ignore_unused_parameters": True,
    }
    if layout.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": layout.offload_optimizer, "pin_memory": device == "cuda"}
    if layout.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": bucket,
            # Biases and norms (at most 4 h elements) stay whole: gathering them costs more than keeping them.
            "stage3_param_persistence_threshold": 10 * hidden_size,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            "stage3_gather_16bit_weights_on_model_save": True,
            "sub_group_size": 1_000_000_000,
        }
        if layout.offload_params != "none":
            zero["offload_param"] = {"device": layout.offload_params, "pin_memory": device == "cuda"}
    return zero


def _pipeline() -> Config:
    """What the pipeline engine reads. Stages are cut by the toolkit, and recomputation is the model's own."""
    return {
        "activation_checkpoint_interval": 0,
        "use_reentrant": False,
        # Partitioned, each tensor-parallel rank would send a slice of an activation that all of them hold; under
        # sequence parallelism they hold different ones.
        "pipe_partitioned": False,
        "grad_partitioned": False,
    }


def _optimizer(recipe: Recipe, layout: Layout, device: Device) -> Config | None:
    """The `optimizer` section, or None where the toolkit passes its own (Lion: PyTorch has none)."""
    section = recipe.optimizer
    # Host-side updates of a GPU's optimizer states need DeepSpeed's vectorised CPU kernels to be bearable.
    ds_cpu_kernels = layout.offload_optimizer == "cpu" and device == "cuda"
    shared = {"lr": section.lr, "weight_decay": section.weight_decay}
    match section.name:
        case "adamw" | "adam":
            params = shared | {
                "betas": list(section.betas),
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
                return {"type": "Lion", "params": shared | {"betas": list(section.betas)}}
            return None
