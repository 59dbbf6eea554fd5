"""Values that a config's fields may have, beyond those of the shape: transformers' classes take others, and then fail
in the middle of a pass, or train what nobody asked for."""

from collections.abc import Mapping
from typing import Any

from toolkit.errors import ModelError
from toolkit.models import config_fields
from toolkit.models.config_fields import text_config
from toolkit.models.families.registry import CONFIG_SCHEMAS
from toolkit.models.shape import ModelShape
from toolkit.models.weights import matmul_parameters
from toolkit.units import LARGEST_COUNT

_LAYER_TYPES = ("full_attention", "sliding_attention")
_OBJECTS = ("rope_parameters", "attn_config")
_SHARES = ("partial_rotary_factor", "rotary_pct")


_MOST_EXPERTS = 65_536
"""Limit of the experts of a layer: more than any model has, and few enough to record quickly."""
_MOST_WEIGHTS = 10**15
"""More than any model has, and few enough that what is computed from them fits into a table."""


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raise ModelError for a whole number that counts nothing real, before a model with it is recorded.

    For families whose fields no `ModelShape` reads, which are checked one by one.
    """
    text = text_config(config)
    for name, value in text.items():
        if type(value) is not int or name.endswith("_token_id"):
            continue
        most = _MOST_EXPERTS if "expert" in name and not name.endswith(("size", "dim", "capacity")) else LARGEST_COUNT
        if abs(value) > most:
            raise config_fields.wrong(name, value, text, f"a whole number up to {most}")


def check_weights(config: Mapping[str, Any], shape: ModelShape) -> None:
    """Raise ModelError for a model with more weights than are counted; all of a mixture's experts count."""
    experts = 0 if shape.experts is None else shape.experts.layers * shape.experts.routed
    numel = matmul_parameters(shape) + shape.vocab * shape.embed_dim + experts
    numel += (shape.positions or 0) * shape.hidden * shape.learned_positions
    if numel > _MOST_WEIGHTS:
        reason = f"the model has some {numel:.2g} weights, and up to {_MOST_WEIGHTS:.0e} are counted"
        names = {"hidden_size": shape.hidden, "intermediate_size": shape.ffn, "vocab_size": shape.vocab}
        raise ModelError.between((*names.items(), ("layers", shape.layers)), reason, "correct the config")


def check_fields(config: Mapping[str, Any], *, layers: int, head_dim: int) -> None:
    """Raise ModelError for a value that a model with so many layers cannot be built with. Null is the default."""
    text = text_config(config)
    for part in (config, text):
        if part.get("quantization_config"):
            remedy = "take it out, to estimate the same model in 16 or 32 bits"
            raise ModelError.of("quantization_config", "…", "quantized weights are not modeled", remedy)
    nested = [config_fields.mapping(text, name) for name in _OBJECTS]
    for part in (text, *({"model_type": text.get("model_type"), **section} for section in nested)):
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
            reason = f"known are {' and '.join(_LAYER_TYPES)}"
            raise ModelError.of("layer_types", config_fields.shown(kind), reason, "correct it", "leave layer_types out")
    if len(listed) != layers:
        reason = f"it lists {len(listed)} layers, and the model has {layers}"
        raise ModelError.of("layer_types", config_fields.shown(listed), reason, "list every layer once")


def _check_rotary(text: Mapping[str, Any], layers: int, head_dim: int) -> None:
    config_fields.optional_count(text, "no_rope_layer_interval")
    config_fields.optional_count(text, "num_ln_in_parallel_attn", most=2)
    listed = config_fields.sequence(text, "no_rope_layers")
    if listed and (len(listed) < layers or any(type(flag) is not int or flag not in (0, 1) for flag in listed)):
        raise config_fields.wrong("no_rope_layers", listed, text, f"a list of 0 or 1 for each of {layers} layers")
    if text.get("rotary_dim") is not None:
        rotary_dim = config_fields.checked_count(text, "rotary_dim", text["rotary_dim"], least=2)
        if rotary_dim > head_dim or rotary_dim % 2:
            allowed = f"an even number up to a head's {head_dim} features"
            raise config_fields.wrong("rotary_dim", rotary_dim, text, allowed)
