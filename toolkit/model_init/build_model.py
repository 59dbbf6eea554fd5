"""The model: a Hugging Face causal LM whose weights are the same in every layout.

The model is constructed on the meta device. A `ModelPartition` removes what other ranks own, and the rest is filled one
decoder layer at a time: drawn at random with one seed per module name, so that a rank which builds a part of the model
draws the same numbers, or read from safetensors, local shards only. Each finished layer is sharded at once (tensor
parallelism, ZeRO-3), so a rank never holds more than its shard and one layer.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from toolkit.config.recipe import ModelSection, Recipe
from toolkit.errors import ModelError, Refusal
from toolkit.files import reason_of
from toolkit.model_init.adapters import Adapters
from toolkit.model_init.float8 import multiply_in_float8
from toolkit.model_init.frozen import freeze_others, trained_names
from toolkit.model_init.liger import take_liger
from toolkit.model_init.model_modules import OnLayer, parameters_on_meta, round_buffers
from toolkit.model_init.model_partition import ModelPartition
from toolkit.model_init.new_tokens import train_every_token, without_padding_token
from toolkit.model_init.offload_activations import offload_activations
from toolkit.model_init.pretrained_weights import read_weights
from toolkit.model_init.random_weights import initialize
from toolkit.model_init.recompute import recompute
from toolkit.model_init.tiled_mlp import tile_mlps
from toolkit.models import shape
from toolkit.models.override_fields import unknown_overrides
from toolkit.parallel.context.attention import NAME as CONTEXT_PARALLEL
from toolkit.parallel.context.attention import register
from toolkit.units import english_list

_NAME = "model.name_or_path"


def load_config(section: ModelSection, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Load the Hugging Face config and apply the recipe's overrides. Raises ModelError for an unknown name or field."""
    # Published weights come with a config of their own, which also knows the tokenizer's ids.
    published = section.init == "pretrained" and shape.find_name(section.name_or_path)
    facts = None if published else shape.find_config(section.name_or_path)
    if facts is not None and "auto_map" in facts and not trust_remote_code:
        reason = "the model brings its own code (auto_map in config.json), which a recipe cannot allow"
        raise ModelError.of(_NAME, section.name_or_path, reason, "pass --trust-remote-code if you trust it")
    if facts is not None and not isinstance(facts.get("model_type"), str):
        reason = "its config.json has no model_type, the name of its family"
        raise ModelError.of(_NAME, section.name_or_path, reason, "add it")
    try:
        if facts is None and "/" not in section.name_or_path:
            raise ValueError("hub names have the form org/name")
        if facts is None or "auto_map" in facts:
            config = AutoConfig.from_pretrained(section.name_or_path, trust_remote_code=trust_remote_code)
        else:
            config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    except Exception as error:  # of a model's own code, whatever it raises
        problem = "its own code or config fails" if facts else "not a known shape, directory or readable hub name"
        reason = f"{problem} ({type(error).__name__}: {reason_of(error)})"
        advice = "" if facts or published else shape.nearest_names(section.name_or_path).strip()
        raise ModelError.of(_NAME, section.name_or_path, reason, advice) from error
    return _overridden(config, section.overrides) if section.overrides else config


def _overridden(config: PretrainedConfig, overrides: Mapping[str, Any]) -> PretrainedConfig:
    """Rebuild the config from the changed fields, so that fields which the class derives from them follow."""
    facts = config.to_dict()
    for refusal in unknown_overrides(facts, overrides, [*facts, *config.attribute_map]):
        raise ModelError(refusal)
    changes = {config.attribute_map.get(key, key): value for key, value in overrides.items()}
    for derived, sources in shape.DERIVED_FIELDS.items():
        if derived not in changes and sources & changes.keys():
            facts.pop(derived, None)
    try:
        changed: PretrainedConfig = type(config).from_dict(facts | changes)
    except Exception as error:
        reason = f"{config.model_type} cannot take them ({reason_of(error)})"
        raise ModelError(Refusal(field="model.overrides", settings=("model.overrides",), reason=reason)) from error
    return changed


def _not_built(recipe: Recipe, error: Exception) -> ModelError:
    reason = f"transformers cannot build it ({type(error).__name__}: {reason_of(error)})"
    settings = []
    if recipe.model.overrides:
        settings.append("model.overrides")
    if recipe.model.attention is not None:
        settings.append("model.attn_implementation")
    advice = f"check {english_list(settings)}" if settings else "choose another model or version of transformers"
    return ModelError.of(_NAME, recipe.model.name_or_path, reason, advice)


def _adapters(model: PreTrainedModel, recipe: Recipe) -> Adapters | None:
    if recipe.model.lora is None:
        return None
    return Adapters(
        model,
        recipe.model.lora,
        seed=recipe.train.seed,
        tensor_parallel=recipe.parallel.tp > 1,
        in_4bit=recipe.model.load_in_4bit,
    )


def check_trained(recipe: Recipe, config: PretrainedConfig) -> None:
    """Raise what `build_model` would raise about model.lora, freeze and train_only, before ranks meet."""
    section = recipe.model
    if section.lora is None and not section.freeze and not section.train_only:
        return
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    except (ValueError, ImportError, KeyError):
        return  # build_model reports what is wrong with it
    model.tie_weights()
    if _adapters(model, recipe) is None:
        trained_names(model, freeze=section.freeze, train_only=section.train_only)


def build_model(
    recipe: Recipe,
    *,
    dtype: torch.dtype = torch.float32,
    partition: ModelPartition | None = None,
    on_layer: OnLayer | None = None,
    eos_id: int | None = None,
    trust_remote_code: bool = False,
    on_gpu: bool = False,
) -> PreTrainedModel:
    """Build the recipe's model on the CPU, in `dtype`; with `partition`, only what this rank keeps of it.

    `on_layer` is called with every decoder layer, with every other module that owns parameters, and finally with the
    model, each when it is initialized. A new model uses `eos_id`, the tokenizer's end of text, as its special tokens.
    `on_gpu`: whether it will train on a GPU.
    """
    config = load_config(recipe.model, trust_remote_code=trust_remote_code)
    if recipe.model.init == "random":
        config.bos_token_id = eos_id
        config.eos_token_id = eos_id
        config = without_padding_token(config)
    # Ulysses replaces sdpa; eager would attend within a rank's own positions.
    attention = recipe.model.attention or ("sdpa" if recipe.parallel.ulysses > 1 else None)
    if recipe.attends_in_blocks:
        register()
        attention = CONTEXT_PARALLEL
    elif attention == "blocks":
        attention = None
    try:
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=trust_remote_code
            )
    except Exception as error:
        raise _not_built(recipe, error) from error
    if recipe.model.init == "random":
        train_every_token(model)
    if recipe.model.kernels == "liger":
        take_liger(model)  # before parts of it go to other pipeline stages
    try:
        model.tie_weights()  # `parameters_on_meta` replaced parameters one by one, which unties them
        adapters = _adapters(model, recipe)
        trained = trained_names(model, freeze=recipe.model.freeze, train_only=recipe.model.train_only)
        if adapters is not None:
            trained = frozenset(name for name, _ in adapters.names)
            on_layer = adapters.before(on_layer, dtype)
        if partition is not None:
            partition.prepare(model, trained, () if adapters is None else adapters.names)
        freeze_others(model, trained)
        if recipe.model.float8 is not None:
            gathers = recipe.parallel.zero_stage == 3
            multiply_in_float8(model, recipe.model.float8, emulate=not on_gpu, gathers=gathers)
        if recipe.model.init == "pretrained":
            read_weights(
                model,
                recipe.model.name_or_path,
                dtype=dtype,
                partition=partition,
                on_layer=on_layer,
                has_overrides=bool(recipe.model.overrides),
            )
        else:
            initialize(model, seed=recipe.train.seed, dtype=dtype, partition=partition, on_layer=on_layer)
    except (ValueError, ImportError, KeyError) as error:
        raise _not_built(recipe, error) from error
    round_buffers(model, dtype)
    model.config.dtype = dtype
    recompute(model, recipe.parallel.recompute)
    if recipe.parallel.tiled_mlp:
        tile_mlps(model)
    if recipe.parallel.offload_activations:
        offload_activations(model)
    return model
