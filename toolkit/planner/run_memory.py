"""What a recipe's run takes of its GPUs: its DeepSpeed config, layout and batch, handed to the memory estimate."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

from toolkit.config.job import Job
from toolkit.config.layout import Batch, Layout
from toolkit.config.recipe import EngineName, OptimizerName, Precision, Recipe
from toolkit.dsconfig import build
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.memory_model import Framework, MemoryModel, Workload
from toolkit.estimate.recorded.recording import Attention, Device
from toolkit.estimate.states import TorchStates
from toolkit.estimate.trainable import EVERYTHING, Trainable
from toolkit.models.chunked_head import is_chunked
from toolkit.models.shape import ModelShape, local_config, with_overrides
from toolkit.models.support import attention_kinds

Implementation = Literal["eager", "sdpa", "flash_attention_2"]


def estimate_for_run(recipe: Recipe, layout: Layout, batch: Batch) -> tuple[MemoryBreakdown, ...]:
    """One breakdown a pipeline stage: the ranks of a stage all take the same, but for a few bytes of padding.

    Raises ModelError for a model that cannot be estimated.
    """
    model = MemoryModel.from_config(model_config(recipe))
    framework = framework_of(recipe, layout, batch, shape=model.shape)
    return model.breakdowns(layout, workload_of(recipe, batch, model), framework)


def model_config(recipe: Recipe) -> dict[str, Any]:
    """The model's config.json with the recipe's overrides. Raises ModelError for a model that is only on a hub."""
    return with_overrides(local_config(recipe.model.name_or_path), recipe.model.overrides)


def workload_of(recipe: Recipe, batch: Batch, model: MemoryModel) -> Workload:
    """What one step of the recipe computes."""
    default: Attention = "sdpa" if "sdpa" in attention_kinds(model.shape.family) else "eager"
    attention: Mapping[str | None, Attention] = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash"}
    return Workload(
        micro_batch_size=batch.micro_batch_size,
        seq_len=recipe.data.seq_len,
        accumulation=batch.accumulation,
        attention=attention.get(recipe.model.attention, default),
        recompute=recipe.parallel.recompute,
        documents=recipe.data.masks_documents,
        trainable=Trainable.of(recipe.model).text,
        chunked_loss=is_chunked(
            recipe.model.loss,
            engine=recipe.train.engine,
            precision=recipe.precision,
            model_type=model.shape.family,
        ),
        router_losses=_router_losses(recipe, model),
        **_computed_in(recipe),
    )


def _router_losses(recipe: Recipe, model: MemoryModel) -> int:
    """How many losses of routers are added."""
    section, config = recipe.model, json.loads(model.config)
    asked = section.router_aux_loss
    own = config.get("router_aux_loss_coef")
    coefficient = own if asked is None or asked.coefficient is None else asked.coefficient
    has_auxiliary = (asked is not None or bool(config.get("output_router_logits"))) and coefficient != 0
    return has_auxiliary + (section.router_z_loss > 0)


def _computed_in(recipe: Recipe) -> dict[str, Any]:
    """Dtypes where no DeepSpeed config says them: accelerate runs DDP, and FSDP over bf16 weights, under autocast."""
    if recipe.train.engine == "deepspeed":
        return {}
    in_bf16 = recipe.precision == "bf16"
    sharded = recipe.train.engine == "fsdp"
    return {"activation_bytes": 2 if in_bf16 and sharded else 4, "autocast": in_bf16}


def framework_of(recipe: Recipe, layout: Layout, batch: Batch, *, shape: ModelShape) -> Framework:
    """How the recipe's engine keeps model states."""
    if recipe.train.engine == "deepspeed":
        job = Job(recipe=recipe, layout=layout, batch=batch, shape=shape)
        return settings_of(build(job, hidden_size=shape.hidden, device="cuda"), recipe, "cuda")
    moments = {"lion": 1, "adafactor": 0, "sgd": int(recipe.optimizer.momentum > 0)}.get(recipe.optimizer.name, 2)
    kinds = {"muon": recipe.optimizer.name == "muon", "factored": recipe.optimizer.name == "adafactor"}
    kinds["hidden_in_8_bits"] = recipe.optimizer.name == "adamw8bit"
    if recipe.train.engine == "fsdp":
        return TorchStates(gathered_bytes=2 if recipe.precision == "bf16" else 4, moments=moments, **kinds)
    return TorchStates(has_buckets=recipe.train.engine == "ddp", moments=moments, **kinds)


def settings_of(config: Mapping[str, Any], recipe: Recipe, device: Device) -> DeepSpeedSettings:
    """The settings of a DeepSpeed config under this recipe, whose optimizer the config may leave out."""
    settings = DeepSpeedSettings.from_config(config, device=device)
    if "optimizer" in config:
        return settings
    if recipe.optimizer.name == "muon":
        return replace(settings, muon=True, counts_in_tensors=True, fused=False)
    if recipe.optimizer.name == "adafactor":
        return replace(settings, factored=True)
    if recipe.optimizer.name == "adamw8bit":
        return replace(settings, hidden_in_8_bits=True, counts_in_tensors=False, fused=True)
    # Lion: one moment, and its steps are not counted in tensors.
    moments = 1 if recipe.optimizer.name == "lion" else settings.moments
    return replace(settings, moments=moments, counts_in_tensors=False, fused=True)


def recipe_of(
    model: str,
    layout: Layout,
    *,
    micro_batch_size: int,
    seq_len: int,
    accumulation: int,
    precision: Precision,
    engine: EngineName = "deepspeed",
    optimizer: OptimizerName = "adamw",
    attention: Implementation | None = None,
    trainable: Trainable = EVERYTHING,
) -> Recipe:
    """A recipe that trains `model` in `layout`, with the toolkit's defaults for all that memory does not depend on."""
    global_batch_size = micro_batch_size * accumulation * layout.dp
    return Recipe.model_validate(
        {
            "model": {"name_or_path": model, "attn_implementation": attention, **trainable.fields},
            "data": {"seq_len": seq_len},
            "parallel": asdict(layout),
            "batch": {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size},
            "precision": precision,
            "optimizer": {"name": optimizer, "lr": 1e-4},
            "train": {"steps": 1, "engine": engine},
        }
    )
