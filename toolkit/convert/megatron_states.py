"""Data of a Megatron-Core checkpoint beside its tensors: extra states of layers, and `common.pt` of the whole run.

Extra states hold what FP8 of Transformer Engine needs. Without FP8 they are empty, but Megatron-Core refuses a
checkpoint that lacks one: of each linear layer, of each expert, and of the norms that are Transformer Engine's.

`common.pt` has the parameter groups of the optimizer, one optimizer for all parameters or, with expert parallelism, a
second one for the experts; the scheduler of Megatron-LM, whose steps are samples; and `content_metadata`, by which
Megatron-LM decides how the optimizer is stored. Source: megatron-core 0.16.1 (optimizer/{__init__,optimizer,
distrib_optimizer}.py, optimizer_param_scheduler.py) and load_checkpoint of megatron/training/checkpointing.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.convert.weight_map import WeightMap

SHARDING = "fully_reshardable"
"""How the optimizer is stored: one tensor of each kind for each tensor of the model."""
_LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_NORMS = ("q_layernorm", "k_layernorm", "pre_mlp_layernorm", "final_layernorm")
"""Norms that are layers of their own in Transformer Engine; others are a part of the linear layer behind them."""
_WEIGHT = ".weight"
_STYLES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "polynomial": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "inverse_sqrt": "inverse-square-root",
    "warmup_stable_decay": "WSD",
}
"""Schedules of a recipe, and the `--lr-decay-style` of Megatron-LM that computes the same."""
_WITH_MINIMUM = ("cosine_with_min_lr", "polynomial", "warmup_stable_decay")


@dataclass(frozen=True, kw_only=True)
class MegatronForm:
    """The model and the layout of Megatron-Core that are to read an export."""

    vocabulary_multiple: int = 1
    """What the rows of the vocabulary are padded to a multiple of."""
    is_local: bool = False
    """Whether its layers are Megatron-Core's own (`--transformer-impl local`), and not Transformer Engine's."""
    is_expert_parallel: bool = False
    """Whether experts are on several ranks, and have an optimizer of their own."""


def extra_states(names: WeightMap, *, is_local: bool) -> dict[str, list[None]]:
    """The empty extra states of all layers with these weights, by the key of each."""
    layers = _LINEAR if is_local else (*_LINEAR, *_NORMS)
    sizes = names.leading_sizes()
    states: dict[str, list[None]] = {}
    for weight in names.weights:
        layer = weight.key.removesuffix(_WEIGHT)
        if layer == weight.key or layer.split(".")[-1] not in layers:
            continue
        place = ".".join(str(number) for number in weight.index or (0,))
        shape = ".".join(str(size) for size in sizes[weight.key] or (1,))
        states[f"{layer}._extra_state/shard_{place}_{shape}"] = [None]
    return states


def common_state(
    *,
    step: int,
    updates: int,
    settings: Mapping[str, Any] | None,
    recipe: Mapping[str, Any],
    is_expert_parallel: bool,
) -> dict[str, Any]:
    """The content of `common.pt`. `settings`: those of the optimizer as PyTorch spells them; None: there is none.

    `recipe`: the recipe of the run, empty where it is not known.
    """
    common: dict[str, Any] = {
        "iteration": step,
        "checkpoint_version": 3.0,
        "content_metadata": {
            "distrib_optim_sharding_type": SHARDING,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        },
    }
    if settings is None:
        return common
    scheduler = _scheduler(step, recipe) if recipe else None
    bounds = {} if scheduler is None else {"max_lr": scheduler["max_lr"], "min_lr": scheduler["min_lr"]}
    group = dict(settings) | bounds | {"bias_correction": True, "step": updates, "default_config": True}
    dense = _optimizer(group, is_expert_parallel=False)
    common["optimizer"] = {0: dense, 1: _optimizer(group, is_expert_parallel=True)} if is_expert_parallel else dense
    if scheduler is not None:
        common["opt_param_scheduler"] = scheduler
    return common


def _optimizer(group: Mapping[str, Any], *, is_expert_parallel: bool) -> dict[str, Any]:
    """One optimizer, with a group for weights and one for biases and norms, which do not decay."""
    groups = [
        {
            **group,
            "weight_decay": group["weight_decay"] * wd_mult,
            "wd_mult": wd_mult,
            "lr_mult": 1.0,
            "is_expert_parallel": is_expert_parallel,
            "is_decoupled_lr": False,
        }
        for wd_mult in (1.0, 0.0)
    ]
    return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": SHARDING}


def has_scheduler(recipe: Mapping[str, Any]) -> bool:
    """Whether Megatron-LM has the schedule of a recipe: without a warm-up, its inverse square root is another one."""
    schedule = recipe["schedule"]
    return schedule["name"] in _STYLES and (schedule["name"] != "inverse_sqrt" or schedule["warmup_steps"] > 0)


def _scheduler(step: int, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The state of Megatron-LM's scheduler, after the samples of `step` global batches."""
    schedule = recipe["schedule"]
    optimizer = recipe["optimizer"]
    samples = recipe["batch"]["global_batch_size"]
    steps = recipe["train"]["steps"]
    name = schedule["name"]
    return {
        "max_lr": optimizer["lr"],
        "min_lr": optimizer["lr"] * schedule["min_lr_ratio"] if name in _WITH_MINIMUM else 0.0,
        "lr_warmup_steps": 0 if name == "constant" else schedule["warmup_steps"] * samples,
        "num_steps": step * samples,
        "lr_decay_style": _STYLES.get(name, name),
        "lr_decay_steps": steps * samples,
        "start_wd": optimizer["weight_decay"],
        "end_wd": optimizer["weight_decay"],
        "wd_incr_style": "constant",
        "wd_incr_steps": steps * samples,
    }
