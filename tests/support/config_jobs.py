"""Jobs to generate configs for: GPT-2 XL on a layout, with options."""

import dataclasses
from typing import Any

from toolkit.config.layout import Batch, Layout
from toolkit.config.recipe import Recipe
from toolkit.dsconfig.build import ConfigJob, shape_of
from toolkit.dsconfig.options import ConfigOptions
from toolkit.models.shape import ModelShape


def shape(name: str = "gpt2-xl") -> ModelShape:
    return shape_of(name)


def job(layout: str = "dp8-z3", *, nodes: int = 1, precision: str = "bf16", **options: Any) -> ConfigJob:
    document: dict[str, Any] = {
        "model": {"name_or_path": "gpt2-xl"},
        "data": {"seq_len": 1024},
        "batch": {"global_batch_size": 64, "micro_batch_size": 2},
        "optimizer": {"lr": 2e-4, "betas": (0.9, 0.95), "weight_decay": 0.1},
        "schedule": {"name": "cosine_with_min_lr", "warmup_steps": 10, "min_lr_ratio": 0.1},
        "train": {"steps": 100, "grad_clip": 0.7},
        "precision": precision,
    }
    document |= {name: options.pop(name) for name in ("parallel",) if name in options}
    recipe = Recipe.model_validate(document)
    placed = {name: getattr(recipe.parallel, name) for name in ("offload_optimizer", "offload_params", "hpz")}
    parsed = dataclasses.replace(Layout.parse(layout), **placed | options.pop("placed", {}))
    batch = Batch.resolve(global_batch_size=64, micro_batch_size=2, dp=parsed.dp)
    return ConfigJob(
        recipe=recipe, layout=parsed, batch=batch, shape=shape(), nodes=nodes, options=ConfigOptions(**options)
    )
