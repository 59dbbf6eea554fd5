"""Values that a config's fields may have, beyond those of the shape: transformers' classes take others, and then fail
in the middle of a pass, or train what nobody asked for."""

from collections.abc import Mapping
from typing import Any

from toolkit.errors import ModelError
from toolkit.models import config_fields
from toolkit.models.families.registry import CONFIG_SCHEMAS
from toolkit.models.shape import text_config

_LAYER_TYPES = ("full_attention", "sliding_attention")
_OBJECTS = ("rope_parameters", "attn_config")
_SHARES = ("partial_rotary_factor", "rotary_pct")


def check_fields(config: Mapping[str, Any], *, layers: int, head_dim: int) -> None:
    """Raise ModelError for a value that a model with so many layers cannot be built with. Null is the default."""
    text = text_config(config)
    for part in (config, text):
        if part.get("quantization_config"):
            remedy = "take it out, to estimate the same model in 16 or 32 bits"
            raise ModelError.of("quantization_config", "…", "quantized weights are not modeled", remedy)
    nested = [config_fields.mapping(text, name) for name in _OBJECTS]
    for part in (text, *({"model_type": text.get("model_type"), **each} for each in nested)):
        for name in part:
            if name.endswith(("dropout", "pdrop")):
                config_fields.number(part, name, 0.0, least=0, most=1)
            elif name.endswith("_bias") or name.startswith("use_") or name == "alibi":
                config_fields.flag(part, name, False)
        for name in _SHARES:
            if part.get(name) is not None and not config_fields.number(part, name, 1.0, least=0, most=1):
                raise config_fields.wrong(name, part[name], part, "a number above 0, up to 1")
    _check_windows(text, layers)
    _check_rotary(text, layers, head_dim)


def _check_windows(text: Mapping[str, Any], layers: int) -> None:
    if text.get("use_sliding_window") is not False:
        config_fields.optional_count(text, "sliding_window")
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        config_fields.optional_count(text, name)
    listed = config_fields.sequence(text, "layer_types")
    if listed is None:
        return
    for kind in listed if text.get("model_type") in CONFIG_SCHEMAS else ():
        if kind not in _LAYER_TYPES:
            reason, shown = f"known are {' and '.join(_LAYER_TYPES)}", config_fields.shown(kind)
            raise ModelError.of("layer_types", shown, reason, "correct it", "leave layer_types out")
    if len(listed) != layers:
        reason = f"it lists {len(listed)} layers, and the model has {layers}"
        raise ModelError.of("layer_types", config_fields.shown(listed), reason, "list every layer once")


def _check_rotary(text: Mapping[str, Any], layers: int, head_dim: int) -> None:
    config_fields.optional_count(text, "no_rope_layer_interval")
    config_fields.optional_count(text, "num_ln_in_parallel_attn", most=2)
    listed = config_fields.sequence(text, "no_rope_layers")
    if listed and (len(listed) < layers or any(type(each) is not int or each not in (0, 1) for each in listed)):
        raise config_fields.wrong("no_rope_layers", listed, text, f"a list of 0 or 1 for each of {layers} layers")
    if text.get("rotary_dim") is not None:
        found = config_fields.checked_count(text, "rotary_dim", text["rotary_dim"], least=2)
        if found > head_dim or found % 2:
            allowed = f"an even number up to a head's {head_dim} features"
            raise config_fields.wrong("rotary_dim", found, text, allowed)
