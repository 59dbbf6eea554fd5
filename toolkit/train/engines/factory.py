"""From a recipe to the engine that it names."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.batch import Batch
from toolkit.errors import RunError
from toolkit.layout import Layout
from toolkit.recipe import Recipe
from toolkit.train.engines.base import Engine
from toolkit.train.host_memory import keep_freed_memory
from toolkit.train.model import build_model


def create_engine(
    recipe: Recipe,
    layout: Layout,
    batch: Batch,
    device: torch.device,
    ds_config: Mapping[str, Any] | None = None,
    *,
    eos_id: int | None = None,
    trust_remote_code: bool = False,
) -> Engine:
    """Build the model and put the recipe's engine around it. `ds_config` is needed for train.engine=deepspeed.

    Raises ModelError for a model that cannot be built and RunError for a precision that the device does not have.
    """
    check_precision(recipe, device)
    if device.type == "cpu":
        keep_freed_memory()
    # The imports are here because each engine's library is slow to import and only one is used.
    match recipe.train.engine:
        case "deepspeed":
            assert ds_config is not None
            build = partial(build_model, recipe, eos_id=eos_id, trust_remote_code=trust_remote_code)
            return _deepspeed(recipe, layout, batch, device, ds_config, build)
        case "reference":
            from toolkit.train.engines.reference_engine import ReferenceEngine

            model = build_model(recipe, eos_id=eos_id, trust_remote_code=trust_remote_code)
            return ReferenceEngine(recipe, model, device)
        case "ddp" | "fsdp":
            from toolkit.train.engines.accelerate_engine import AccelerateEngine

            model = build_model(recipe, eos_id=eos_id, trust_remote_code=trust_remote_code)
            return AccelerateEngine(recipe, layout, batch, model, device)


def _deepspeed(
    recipe: Recipe,
    layout: Layout,
    batch: Batch,
    device: torch.device,
    ds_config: Mapping[str, Any],
    build: Callable[..., PreTrainedModel],
) -> Engine:
    from toolkit.train.engines import deepspeed_engine as ds

    dtype = ds.model_dtype(ds_config)
    cut = None
    if layout.tp > 1 or layout.pp > 1:
        from toolkit.parallel.groups import ParallelGroups
        from toolkit.train.cut import ModelCut

        cut = ModelCut(recipe, ParallelGroups.create(layout), device)
    sharder = ds.zero3_sharder(ds_config, dtype, cut, ulysses=layout.ulysses) if layout.zero_stage == 3 else None
    model = build(dtype=dtype, part=cut, on_layer=sharder)
    if cut is not None and cut.stage is not None:
        from toolkit.train.engines.pipeline_engine import PipelineEngine

        return PipelineEngine(recipe, layout, batch, ds_config, model, device, cut)
    if layout.ulysses > 1:
        from toolkit.train.engines.ulysses_engine import UlyssesEngine

        return UlyssesEngine(recipe, layout, batch, ds_config, model, device)
    return ds.DeepSpeedEngine(recipe, layout, batch, ds_config, model, device, cut)


def check_precision(recipe: Recipe, device: torch.device) -> None:
    """Raise RunError where the device lacks the recipe's precision."""
    if recipe.precision == "fp16" and device.type == "cpu":
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            raise RunError("precision=fp16 on a CPU: DeepSpeed has fp16 on GPUs only. Set precision to bf16 or fp32.")
    if (
        recipe.precision == "bf16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise RunError(
            f"precision=bf16 on {torch.cuda.get_device_name(device)}: this GPU has no bf16. "
            "Set precision to fp16 or fp32."
        )
