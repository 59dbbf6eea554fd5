"""The model: a Hugging Face causal LM, with weights that are the same in every layout.

The model starts on the meta device. A `ModelPart` takes from it what this rank does not own, and then it is filled one
decoder layer at a time: drawn, each module from a seed of its own name, so that a rank which builds only a part of the
model draws the same numbers; or read from safetensors, only what the rank keeps. Each finished layer may be cut (tensor
parallelism) and sharded (ZeRO-3) at once, so a rank never holds more than its shard and one layer.
"""

import textwrap
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from toolkit import shape
from toolkit.errors import ModelError, nearest
from toolkit.recipe import ModelSection, Recipe
from toolkit.train.selective_recomputation import recompute_attention
from toolkit.train.weights import ModelPart, OnLayer, initialise, parameters_on_meta, read_weights


def load_config(section: ModelSection, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The Hugging Face config with the recipe's overrides. Raises ModelError for an unknown name or field."""
    found = shape.find_config(section.name_or_path)
    if found is not None and not trust_remote_code:
        _refuse_remote_code(section.name_or_path, found)
    try:
        if found is None and "/" not in section.name_or_path:
            raise ValueError("hub names have the form org/name")
        if found is None or "auto_map" in found:
            config = AutoConfig.from_pretrained(section.name_or_path, trust_remote_code=trust_remote_code)
        else:
            config = AutoConfig.for_model(found.pop("model_type"), **found)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model.name_or_path={section.name_or_path!r}: not a known shape, and not readable as a directory or hub "
            f"name ({textwrap.shorten(first, 160, placeholder=' …')}).{nearest(section.name_or_path, shape.names())}"
        ) from error
    return _overridden(config, section.overrides) if section.overrides else config


def _overridden(config: PretrainedConfig, overrides: Mapping[str, Any]) -> PretrainedConfig:
    """A config made anew from the changed fields, so that what the class derives from them follows."""
    facts = config.to_dict()
    fields = [*facts, *config.attribute_map]
    for key in overrides:
        if key not in fields:
            raise ModelError(
                f"model.overrides.{key}: the config of {config.model_type} has no such field.{nearest(key, fields)}"
            )
    changes = {config.attribute_map.get(key, key): value for key, value in overrides.items()}
    for derived, sources in shape.DERIVED_FIELDS.items():
        if derived not in changes and sources & changes.keys():
            facts.pop(derived, None)
    try:
        changed: PretrainedConfig = type(config).from_dict(facts | changes)
    except (ValueError, TypeError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"model.overrides: {config.model_type} cannot take them ({first}).") from error
    return changed


def build_model(
    recipe: Recipe,
    *,
    dtype: torch.dtype = torch.float32,
    part: ModelPart | None = None,
    on_layer: OnLayer | None = None,
    eos_id: int | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of the recipe on the CPU, in `dtype`, tied where the config ties; with `part`, what a rank keeps of it.

    `on_layer` is called with every decoder layer, with every other module that has parameters, and at the end with the
    whole model, once their weights are there.
    A new model takes `eos_id`, the tokenizer's end of text, for the special tokens of its config.
    """
    config = load_config(recipe.model, trust_remote_code=trust_remote_code)
    if recipe.model.init == "random":
        config.bos_token_id = config.eos_token_id = eos_id
        # A padding token's embedding would never learn (torch masks its gradient), whatever that id means here.
        config.pad_token_id = None
    attention = recipe.model.attn_implementation
    try:
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=trust_remote_code
            )
        model.tie_weights()  # on the meta device a tie does not survive registration
        if part is not None:
            part.begin(model)
        if recipe.model.init == "pretrained":
            read_weights(model, recipe.model.name_or_path, dtype=dtype, part=part, on_layer=on_layer)
        else:
            initialise(model, seed=recipe.train.seed, dtype=dtype, part=part, on_layer=on_layer)
    except (ValueError, ImportError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(
            f"model.name_or_path={recipe.model.name_or_path}: transformers cannot build it ({type(error).__name__}: "
            f"{first}). Look at model.overrides and model.attn_implementation."
        ) from error
    model.config.dtype = dtype
    if recipe.parallel.recompute == "full":
        # The re-entrant variant fails where the first input needs no gradient, and loses keyword arguments.
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif recipe.parallel.recompute == "selective":
        recompute_attention(model)
    return model


def _refuse_remote_code(name: str, config: dict[str, Any]) -> None:
    if "auto_map" in config:
        raise ModelError(
            f"model {name!r} brings its own code (auto_map in config.json). "
            "If you trust it, start with the flag --trust-remote-code; a recipe cannot allow it."
        )
