"""What a recipe's run takes of its GPUs: its DeepSpeed config, layout and batch, handed to the memory estimate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from toolkit.batch import Batch
from toolkit.dsconfig import build
from toolkit.errors import ModelError
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.memory import Attention, Framework, MemoryModel, Workload
from toolkit.estimate.states import DeepSpeedSettings, fsdp2, plain
from toolkit.hardware import Gpu
from toolkit.layout import Layout
from toolkit.recipe import Precision, Recipe
from toolkit.shape import find_config, with_overrides

Device = Literal["cuda", "cpu"]
Implementation = Literal["eager", "sdpa", "flash_attention_2"]


def estimate_for_run(
    recipe: Recipe,
    layout: Layout,
    batch: Batch,
    *,
    config: Mapping[str, Any] | None = None,
    gpu: Gpu | None = None,
    device: Device = "cuda",
) -> tuple[MemoryBreakdown, ...]:
    """One breakdown a pipeline stage: the ranks of a stage all take the same, but for a few bytes of padding.

    `config` is the model's, where the recipe names one that is neither in the catalogue nor a local directory.
    Raises ModelError for a model that cannot be estimated.
    """
    model = MemoryModel.from_config(model_config(recipe) if config is None else config)
    framework = framework_of(recipe, layout, batch, hidden_size=model.architecture.shape.hidden, device=device)
    return model.breakdowns(layout, workload_of(recipe, batch), framework, gpu)


def model_config(recipe: Recipe) -> dict[str, Any]:
    """The model's config.json with the recipe's overrides. Raises ModelError for a model that is only on a hub."""
    found = find_config(recipe.model.name_or_path)
    if found is None:
        raise ModelError(
            f"model.name_or_path={recipe.model.name_or_path}: not a known shape or local directory. Name a directory "
            "with a config.json, or one of the catalogue, for instance gpt2."
        )
    return with_overrides(found, recipe.model.overrides)


def workload_of(recipe: Recipe, batch: Batch) -> Workload:
    """What one step of the recipe computes."""
    attention: Mapping[str, Attention] = {"eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash"}
    return Workload(
        micro_batch_size=batch.micro_size,
        seq_len=recipe.data.seq_len,
        accumulation=batch.accumulation,
        attention=attention[recipe.model.attn_implementation],
        recompute=recipe.parallel.recompute,
        **_computed_in(recipe),
    )


def _computed_in(recipe: Recipe) -> dict[str, Any]:
    """Dtypes where no DeepSpeed config says them: accelerate runs DDP, and FSDP over bf16 weights, under autocast."""
    if recipe.train.engine == "deepspeed":
        return {}
    in_bf16 = recipe.precision == "bf16"
    sharded = recipe.train.engine == "fsdp"
    return {"activation_bytes": 2 if in_bf16 and sharded else 4, "autocast": in_bf16}


def framework_of(
    recipe: Recipe, layout: Layout, batch: Batch, *, hidden_size: int, device: Device = "cuda"
) -> Framework:
    """How the recipe's engine keeps model states."""
    if recipe.train.engine == "deepspeed":
        config = build(recipe, layout, batch, hidden_size=hidden_size, device=device)
        return settings_of(config, recipe, device)
    if recipe.train.engine == "fsdp":
        return fsdp2(precision="bf16" if recipe.precision == "bf16" else "fp32")
    return plain(with_buckets=recipe.train.engine == "ddp")


def settings_of(config: Mapping[str, Any], recipe: Recipe, device: Device) -> DeepSpeedSettings:
    """The settings of a DeepSpeed config under this recipe, whose optimizer the config may leave out."""
    settings = DeepSpeedSettings.from_config(config, device=device)
    if "optimizer" in config:
        return settings
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
    attention: Implementation = "sdpa",
    optimizer: str = "adamw",
) -> Recipe:
    """A recipe that trains `model` in `layout`, with the toolkit's defaults for all that memory does not depend on."""
    global_size = micro_batch_size * accumulation * layout.dp
    section = {
        "dp": layout.dp,
        "tp": layout.tp,
        "pp": layout.pp,
        "ulysses": layout.ulysses,
        "sequence_parallel": layout.sequence_parallel,
        "zero_stage": layout.zero_stage,
        "offload_optimizer": layout.offload_optimizer,
        "offload_params": layout.offload_params,
        "recompute": layout.recompute,
    }
    return Recipe.model_validate(
        {
            "model": {"name_or_path": model, "attn_implementation": attention},
            "data": {"seq_len": seq_len},
            "parallel": section,
            "batch": {"global_size": global_size, "micro_size": micro_batch_size},
            "precision": precision,
            "optimizer": {"name": optimizer, "lr": 1e-4},
            "train": {"steps": 1},
        }
    )
