"""What a config says about single layers and heads, where parameters and activations both need it."""

from collections.abc import Mapping
from typing import Any

from toolkit import config_fields
from toolkit.errors import ModelError

_LAYER_TYPES = ("full_attention", "sliding_attention")


def layer_types(config: Mapping[str, Any], layers: int) -> list[str] | None:
    """One of `full_attention` and `sliding_attention` a layer; None where the config lists none."""
    found = config_fields.sequence(config, "layer_types")
    if found is None:
        return None
    for kind in found:
        if kind not in _LAYER_TYPES:
            raise ModelError(
                f"layer_types has {config_fields.shown(kind)}: known are {' and '.join(_LAYER_TYPES)}. "
                "Correct it, or leave layer_types out."
            )
    if len(found) != layers:
        raise ModelError(f"layer_types lists {len(found)} layers, and the model has {layers}. List every layer once.")
    return found


def rotary_share(config: Mapping[str, Any], default: float) -> float:
    """Share of a head's features that the rotary embedding turns."""
    nested = {"model_type": config.get("model_type"), **config_fields.mapping(config, "rope_parameters")}
    for source, field in (
        (nested, "partial_rotary_factor"),
        (config, "partial_rotary_factor"),
        (config, "rotary_pct"),
    ):
        if source.get(field) is not None:
            share = config_fields.number(source, field, default, least=0, most=1)
            if not share:
                raise config_fields.wrong(field, share, source, "a number above 0, up to 1")
            return share
    return default


def window_pattern(config: Mapping[str, Any], default: int) -> int:
    """Every so many layers see everything, and the others through a window."""
    for field in ("sliding_window_pattern", "_sliding_window_pattern"):
        if config.get(field) is not None:
            return config_fields.count(config, field)
    return default


def interleaved_features(config: Mapping[str, Any], head_dim: int) -> int:
    """GPT-J's and CodeGen's number of features that turn, in pairs of neighbours."""
    found = config_fields.checked_count(config, "rotary_dim", config.get("rotary_dim", 64), least=2)
    if found > head_dim or found % 2:
        raise config_fields.wrong("rotary_dim", found, config, f"an even number up to a head's {head_dim} features")
    return found
