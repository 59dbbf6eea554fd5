"""Memory that a recipe's run takes: its DeepSpeed config, layout and batch, handed to the memory estimate."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

from toolkit.config.data_section import PREFERENCE_FORMATS
from toolkit.config.job import Job
from toolkit.config.layout import Batch, Layout
from toolkit.config.objective_section import UNPAIRED
from toolkit.config.recipe import EngineName, OptimizerName, Precision, Recipe
from toolkit.dsconfig import build
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.computation import Attention, Computation, Device
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.memory_request import Framework, MemoryRequest
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.states import TorchStates
from toolkit.estimate.trainable import EVERYTHING, Trainable
from toolkit.estimate.training_setup import TeacherSetup, TrainingSetup
from toolkit.hardware import Gpu
from toolkit.models.chunked_head import is_chunked
from toolkit.models.shape import ModelShape, find_config, local_config, with_overrides
from toolkit.models.support import attention_kinds

Implementation = Literal["eager", "sdpa", "flash_attention_2"]


def estimate_for_run(recipe: Recipe, layout: Layout, batch: Batch) -> tuple[MemoryBreakdown, ...]:
    """One breakdown a pipeline stage: the ranks of a stage all take the same, but for a few bytes of padding.

    Raises ModelError for a model that cannot be estimated.
    """
    return memory_request(recipe, layout, batch).stages()


def memory_request(recipe: Recipe, layout: Layout, batch: Batch, *, gpu: Gpu | None = None) -> MemoryRequest:
    """Return the memory request of a recipe in a layout. Raises ModelError for a model that cannot be estimated."""
    model = ModelFacts.from_config(model_config(recipe))
    return MemoryRequest(
        setup=training_setup(recipe, layout, batch, model),
        framework=framework_of(recipe, layout, batch, shape=model.shape),
        gpu=gpu,
    )


def model_config(recipe: Recipe) -> dict[str, Any]:
    """The model's config.json with the recipe's overrides. Raises ModelError for a model that is only on a hub."""
    return with_overrides(local_config(recipe.model.name_or_path), recipe.model.overrides)


def training_setup(recipe: Recipe, layout: Layout, batch: Batch, model: ModelFacts) -> TrainingSetup:
    """Describe what a recipe trains in a layout; `model` is the recipe's."""
    return TrainingSetup(
        model=model,
        layout=layout,
        micro_batch_size=batch.micro_batch_size,
        accumulation=batch.accumulation,
        seq_len=recipe.data.seq_len,
        computation=Computation(
            attention=_attention(recipe, model),
            documents=recipe.data.masks_documents,
            trainable=Trainable.of(recipe.model).text,
        ),
        chunked_loss=_is_chunked(recipe, model),
        cp_exchange=recipe.parallel.cp_exchange,
        blocks=recipe.model.attn_implementation == "blocks",
        keeps_reference=_keeps_reference(recipe),
        forward_passes=_forward_passes(recipe),
        teacher=_teacher(recipe),
        router_losses=_router_losses(recipe, model),
    )


def _attention(recipe: Recipe, model: ModelFacts) -> Attention:
    default: Attention = "sdpa" if "sdpa" in attention_kinds(model.shape.family) else "eager"
    attention: Mapping[str | None, Attention] = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash"}
    return attention.get(recipe.model.attention, default)


def _is_chunked(recipe: Recipe, model: ModelFacts) -> bool:
    """Whether the head of a model computes its loss in chunks."""
    return is_chunked(
        recipe.model.loss,
        engine=recipe.train.engine,
        precision=recipe.precision,
        model_type=model.shape.family,
    )


def _teacher(recipe: Recipe) -> TeacherSetup | None:
    """Describe the teacher of a distillation; None without one, or where its config is only on a hub."""
    section = recipe.train.distill
    config = None if section is None else find_config(section.teacher, tuned=True)
    if section is None or config is None:
        return None
    model = ModelFacts.from_config(config)
    return TeacherSetup(
        model=model,
        top_k=section.top_k,
        attention=_attention(recipe, model),
        chunked_loss=_is_chunked(recipe, model),
    )


def computes_reference(recipe: Recipe) -> bool:
    """Whether a forward pass over the data set comes before the first step: of a reference that is not in memory."""
    return _has_reference(recipe) and recipe.train.objective.reference != "online"


def _keeps_reference(recipe: Recipe) -> bool:
    """Whether the reference of the recipe's objective is a copy in memory."""
    return _has_reference(recipe) and recipe.train.objective.reference == "online"


def _has_reference(recipe: Recipe) -> bool:
    return recipe.data.format in PREFERENCE_FORMATS and recipe.train.objective.needs_reference


def _forward_passes(recipe: Recipe) -> int:
    """Count the passes of a step before the one that trains: of a reference, and for a mean of completions."""
    has_mean = recipe.data.format in PREFERENCE_FORMATS and recipe.train.objective.name in UNPAIRED
    return _keeps_reference(recipe) + has_mean


def _router_losses(recipe: Recipe, model: ModelFacts) -> int:
    """Return the number of router losses that are added to the loss: 0, 1 or 2."""
    config = json.loads(model.config)
    section = recipe.model.router_aux_loss
    coefficient = config.get("router_aux_loss_coef")
    if section is not None and section.coefficient is not None:
        coefficient = section.coefficient
    is_asked_for = section is not None or bool(config.get("output_router_logits"))
    has_auxiliary = is_asked_for and coefficient != 0
    return has_auxiliary + (recipe.model.router_z_loss > 0)


def framework_of(recipe: Recipe, layout: Layout, batch: Batch, *, shape: ModelShape) -> Framework:
    """Describe how the recipe's engine keeps model states."""
    if recipe.train.engine == "deepspeed":
        job = Job(recipe=recipe, layout=layout, batch=batch, shape=shape)
        return settings_of(build(job, hidden_size=shape.hidden, device="cuda"), recipe, "cuda")
    optimizer = recipe.optimizer.name
    in_bf16 = recipe.precision == "bf16"
    states = TorchStates(
        # FSDP gathers weights in the precision of products, which autocast then finds in 16 bits.
        autocast=in_bf16,
        moments={"lion": 1, "adafactor": 0, "sgd": int(recipe.optimizer.momentum > 0)}.get(optimizer, 2),
        muon=optimizer == "muon",
        factored=optimizer == "adafactor",
        hidden_in_8_bits=optimizer == "adamw8bit",
    )
    if recipe.train.engine == "fsdp":
        return replace(states, gathered_bytes=2 if in_bf16 else 4)
    return replace(states, has_buckets=recipe.train.engine == "ddp")


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
