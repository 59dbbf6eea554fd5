"""Create the engine that a recipe selects."""

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from toolkit.config.data_section import PREFERENCE_FORMATS
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.engines.base import Engine
from toolkit.engines.objectives.distillation import Distillation
from toolkit.engines.objectives.token_weights import TokenWeights
from toolkit.errors import ModelError, RunError
from toolkit.imports import no_garbage_collection
from toolkit.model_init.build_model import build_model
from toolkit.model_init.freed_memory import keep_freed_memory
from toolkit.models.chunked_head import is_chunked
from toolkit.parallel.chunked_loss import LossInHead


def create_engine(
    job: Job,
    device: torch.device,
    ds_config: Mapping[str, Any] | None = None,
    *,
    eos_id: int | None = None,
    trust_remote_code: bool = False,
) -> Engine:
    """Build the model and the recipe's engine around it. train.engine=deepspeed requires `ds_config`.

    Raises ModelError for a model that cannot be built and RunError for a precision that the device does not have.
    """
    check_precision(job.recipe, device)
    _check_compiler(job.recipe, device)
    if device.type == "cpu":
        keep_freed_memory()
    build = partial(
        build_model, job.recipe, eos_id=eos_id, trust_remote_code=trust_remote_code, on_gpu=device.type == "cuda"
    )
    # Imported here, because each engine's library is slow to import and only one is used.
    match job.recipe.train.engine:
        case "deepspeed":
            assert ds_config is not None
            return _with_objective(_deepspeed(job, device, ds_config, build), job)
        case "reference":
            from toolkit.engines.reference_engine import ReferenceEngine

            return _with_objective(ReferenceEngine(job, build(), device), job)
        case "ddp" | "fsdp":
            from toolkit.engines.accelerate_engine import AccelerateEngine

            model = build()
            loss = _head_loss(job.recipe, model)
            engine = AccelerateEngine(job, model, device)
            engine.head_loss = loss
            return _with_objective(engine, job)


def _with_objective(engine: Engine, job: Job) -> Engine:
    """Give an engine the weights of tokens, where the data is that of an objective, and what it knows of a teacher."""
    section = job.recipe.train.distill
    if section is not None:
        engine.distillation = Distillation(section, engine.device)
        if engine.head_loss is not None:
            engine.head_loss.distillation = engine.distillation
    if job.recipe.data.format in PREFERENCE_FORMATS:
        engine.objective = TokenWeights(job.recipe.train.objective, engine.device, engine.sequence_group)
        if engine.head_loss is not None:
            engine.head_loss.weigh = engine.objective.weigh
    return engine


def _deepspeed(
    job: Job, device: torch.device, ds_config: Mapping[str, Any], build: Callable[..., PreTrainedModel]
) -> Engine:
    with no_garbage_collection():
        from toolkit.engines import deepspeed_engine as ds

    layout = job.layout
    if "nvme" in (layout.offload_optimizer, layout.offload_params):
        from toolkit.engines.nvme import use_private_directory

        ds_config = use_private_directory(ds_config)
    dtype = ds.model_dtype(ds_config)
    partition = None
    if layout.tp > 1 or layout.pp > 1 or layout.ep > 1:
        from toolkit.model_init.model_partition import ModelPartition
        from toolkit.parallel.groups import ParallelGroups

        partition = ModelPartition(job, ParallelGroups.create(layout), device)
    sharder = ds.zero3_sharder(ds_config, partition, ulysses=layout.ulysses) if layout.zero_stage == 3 else None
    model = build(dtype=dtype, partition=partition, on_layer=sharder)
    stage = None if partition is None else partition.stage
    loss = _head_loss(job.recipe, model) if stage is None or stage.is_last else None
    engine: Engine
    if partition is not None and stage is not None:
        from toolkit.engines.pipeline_engine import PipelineEngine

        engine = PipelineEngine(job, ds_config, model, device, partition)
    elif layout.ulysses > 1:
        from toolkit.engines.ulysses_engine import UlyssesEngine

        engine = UlyssesEngine(job, ds_config, model, device)
    else:
        engine = ds.DeepSpeedEngine(job, ds_config, model, device, partition)
    engine.head_loss = loss
    return engine


def _head_loss(recipe: Recipe, model: PreTrainedModel) -> LossInHead | None:
    """Place the loss in the model's head, where the recipe wants it there."""
    loss = None
    if is_chunked(
        recipe.model.loss,
        engine=recipe.train.engine,
        precision=recipe.precision,
        model_type=model.config.model_type,
    ):
        loss = LossInHead.of(model, is_liger=recipe.model.kernels == "liger")
    if loss is None and recipe.model.loss == "chunked":
        reason = "the logits of its head are not known to be those of a linear layer"
        raise ModelError.of("model.loss", "chunked", reason, ("model.loss", "auto"))
    return loss


def _check_compiler(recipe: Recipe, device: torch.device) -> None:
    """Raise RunError where torch.compile would not find the compiler that its code for CPUs needs."""
    compiler = os.environ.get("CXX", "g++")
    if recipe.train.compile and device.type == "cpu" and shutil.which(compiler) is None:
        reason = f"on a CPU torch.compile needs a C++ compiler, and there is no {compiler}"
        raise RunError.of("train.compile", True, reason, "install g++", ("train.compile", False))


def check_precision(recipe: Recipe, device: torch.device) -> None:
    """Raise RunError if the device does not support the recipe's precision."""
    if recipe.precision == "fp16" and device.type == "cpu":
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            reason = "on a CPU DeepSpeed has no fp16"
            remedy = ("precision", "bf16 or fp32")
            raise RunError.of("precision", "fp16", reason, remedy)
    if (
        recipe.precision == "bf16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        reason = f"a {torch.cuda.get_device_name(device)} has no bf16"
        raise RunError.of("precision", "bf16", reason, ("precision", "fp16 or fp32"))
