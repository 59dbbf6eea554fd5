"""The model: a Hugging Face causal LM, with initial weights that are the same in every layout.

Random weights are drawn module by module, each from a seed of its own name, so a rank that builds only a part of the
model draws the same numbers. The model starts on the meta device and is materialised one decoder layer at a time;
`on_layer` sees each finished part and may shard it (ZeRO-3), so no rank holds more than its shard, the embeddings and
one layer. Pretrained weights are still read whole by every rank.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from toolkit import shape
from toolkit.errors import ModelError, nearest
from toolkit.recipe import ModelSection, Recipe
from toolkit.train.seeds import derive_seed

OnLayer = Callable[[nn.Module], None]


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
            f"name ({first}).{nearest(section.name_or_path, shape.names())}"
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
    on_layer: OnLayer | None = None,
    eos_id: int | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of the recipe on the CPU, in `dtype`, tied where the config ties.

    `on_layer` is called with every decoder layer, and at the end with the whole model, once their weights are there.
    A new model takes `eos_id`, the tokenizer's end of text, for the special tokens of its config.
    """
    config = load_config(recipe.model, trust_remote_code=trust_remote_code)
    if recipe.model.init == "random":
        config.bos_token_id = config.eos_token_id = eos_id
        # A padding token's embedding would never learn (torch masks its gradient), whatever that id means here.
        config.pad_token_id = None
    attention = recipe.model.attn_implementation
    try:
        if recipe.model.init == "pretrained":
            model = _pretrained(recipe.model, config, attention, trust_remote_code)
            _cast(model, dtype)
            if on_layer is not None:
                on_layer(model)
        else:
            with init_empty_weights(include_buffers=False):
                model = AutoModelForCausalLM.from_config(
                    config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=trust_remote_code
                )
            model.tie_weights()  # on the meta device a tie does not survive registration
            initialise(model, seed=recipe.train.seed, dtype=dtype, on_layer=on_layer)
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
    return model


def initialise(model: PreTrainedModel, *, seed: int, dtype: torch.dtype, on_layer: OnLayer | None = None) -> None:
    """Give every meta parameter of `model` its initial value: the family's own distribution, a seed per module name."""
    layers = {id(child) for module in model.modules() if isinstance(module, nn.ModuleList) for child in module}
    real: dict[nn.Parameter, nn.Parameter] = {}

    def visit(module: nn.Module, name: str, owner: PreTrainedModel, inside_layer: bool) -> None:
        owner = module if isinstance(module, PreTrainedModel) else owner
        is_layer = id(module) in layers and not inside_layer
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}", owner, inside_layer or is_layer)
        direct = list(module.named_parameters(recurse=False, remove_duplicate=False))
        fresh = _materialise(module, direct, real)
        if fresh or not direct:
            # Only a module whose weights are all here may draw: a tied head would draw its embedding a second time.
            torch.manual_seed(derive_seed("initial weights", seed, name))
            owner._init_weights(module)
        if is_layer:
            _cast(module, dtype)
            if on_layer is not None:
                on_layer(module)

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        visit(model, "", model, inside_layer=False)
    _cast(model, dtype)
    if on_layer is not None:
        on_layer(model)


def _materialise(
    module: nn.Module, direct: list[tuple[str, nn.Parameter]], real: dict[nn.Parameter, nn.Parameter]
) -> bool:
    """Put real tensors where meta ones are, tied ones once; True when at least one was new."""
    fresh = False
    for name, parameter in direct:
        if not parameter.is_meta:
            continue
        if parameter not in real:
            values = torch.empty(parameter.shape, dtype=torch.float32)
            real[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            fresh = True
        module._parameters[name] = real[parameter]
    return fresh


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters only: buffers such as rotary frequencies lose their meaning in 16 bits."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(dtype)


def _pretrained(section: ModelSection, config: PretrainedConfig, attention: str, trust: bool) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(
            section.name_or_path,
            config=config,
            attn_implementation=attention,
            dtype=torch.float32,
            trust_remote_code=trust,
            use_safetensors=True,
        )
    except OSError as error:
        raise ModelError(
            f"model.init=pretrained with model.name_or_path={section.name_or_path!r}: no safetensors weights could be "
            f"read ({str(error).strip().splitlines()[0]}). Give a directory with weights, or set model.init=random."
        ) from error


def _refuse_remote_code(name: str, config: dict[str, Any]) -> None:
    if "auto_map" in config:
        raise ModelError(
            f"model {name!r} brings its own code (auto_map in config.json). "
            "If you trust it, start with the flag --trust-remote-code; a recipe cannot allow it."
        )
