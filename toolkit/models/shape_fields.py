"""Reads the fields of a ModelShape from a Hugging Face config, as the Hugging Face class would.

A family has its own spelling of each fact, and its defaults; a value that its class could not use is refused.
"""

from collections.abc import Mapping
from typing import Any

from toolkit.errors import ModelError, nearest
from toolkit.models.config_fields import checked_count, flag, name, text_config, wrong
from toolkit.models.families.registry import CONFIG_SCHEMAS, find_spec
from toolkit.models.families.spec import MAPPED_BY_ALL, SPELLINGS, ConfigSchema
from toolkit.models.latent_attention import LatentAttention
from toolkit.units import LARGEST_COUNT

_MOST = {"layers": 10_000, "heads": 10_000}
"""Largest counts that are accepted: more than any model has, and few enough to enumerate quickly."""

_SIMILARITY = 0.8
"""Cutoff of similarity for "Did you mean": names of models are closer to each other than other words are."""


def shape_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the ModelShape of a config. Raises ModelError for what cannot be read."""
    config = text_config(config)
    family = _schema(config)
    model_type = config["model_type"]
    hidden = _count(config, family, "hidden")
    heads = _count(config, family, "heads")
    kv_heads = _kv_heads(config, family, heads)
    latent = None
    if family.latent is None:
        head_dim = _head_dim(config, family, hidden, heads)
    else:
        latent = LatentAttention.read(config, family.latent, default_dim=hidden // heads)
        head_dim = latent.head_dim
    if family.heads_fill_hidden and heads * head_dim != hidden:
        reason = f"the {heads} heads of a {model_type} fill its hidden_size of {hidden}"
        raise ModelError.of("head_dim", head_dim, reason, ("head_dim", hidden // heads))
    return {
        "family": str(model_type),
        "hidden": hidden,
        "layers": _count(config, family, "layers"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": _count(config, family, "ffn", 4 * hidden),
        "gated": family.gated,
        "vocab": _count(config, family, "vocab"),
        "positions": _positions(config, family),
        "tied": _tied(config, family),
        "learned_positions": family.learned_positions,
        "embed_dim": _count(config, family, "embed_dim", hidden),
        "latent": latent,
    }


def _schema(config: Mapping[str, Any]) -> ConfigSchema:
    """Return the schema of the config's family. Raises ModelError for a family whose shape is not read."""
    model_type = config.get("model_type")
    if model_type is None:
        raise ModelError.of("model_type", None, "the config names no family", "choose one of dstk families")
    spec = find_spec(model_type)
    if spec.config is None:
        raise _not_read(model_type, spec.not_read_because, is_dense=spec.is_dense)
    if flag(config, "add_cross_attention", False):
        field = "add_cross_attention"
        raise ModelError.of(field, True, f"such a {model_type} attends to an encoder", (field, False))
    return spec.config


def _kv_heads(config: Mapping[str, Any], family: ConfigSchema, heads: int) -> int:
    """Return the number of key-value heads, which query heads share equally."""
    kv_heads = _count(config, family, "kv_heads", heads)
    # Falcon's new architecture reads num_kv_heads and ignores multi_query.
    has_flag = family.multi_query and flag(config, "multi_query", True)
    if has_flag and not flag(config, "new_decoder_architecture", False):
        kv_heads = 1
    if heads % kv_heads:
        settings = ((family.spelling.get("kv_heads", "kv_heads"), kv_heads), (family.spelling["heads"], heads))
        raise ModelError.between(settings, "query heads share key-value heads equally", "choose a divisor")
    return kv_heads


def _head_dim(config: Mapping[str, Any], family: ConfigSchema, hidden: int, heads: int) -> int:
    """Return the width of a head: the config's, or an equal share of the hidden size."""
    head_dim = _optional_count(config, family, "head_dim")
    if head_dim is not None:
        return head_dim
    if hidden % heads:
        settings = ((family.spelling["heads"], heads), (family.spelling["hidden"], hidden))
        raise ModelError.between(settings, "heads share the hidden size equally", "choose a divisor")
    return hidden // heads


def _read(config: Mapping[str, Any], family: ConfigSchema, fact: str) -> Any:
    """Return the value Hugging Face would use for `fact`; None if the family does not have it."""
    field = family.spelling.get(fact)
    if field is None:
        return None
    legacy = family.legacy_hidden if fact == "hidden" else ()
    mapped = SPELLINGS[fact][:1] if fact in MAPPED_BY_ALL else ()
    for spelling in (*legacy, field, *mapped):
        if spelling in config:
            return config[spelling]
    for spelling in SPELLINGS[fact]:
        if spelling in config:  # Hugging Face would ignore it and take its default: a model nobody asked for
            reason = f"it is not a field of a {config['model_type']} config"
            raise ModelError.of(spelling, config[spelling], reason, f"write {field}")
    return family.fields[field]


def _not_read(model_type: Any, reason: str | None, *, is_dense: bool) -> ModelError:
    """Return the error for a family whose shape is not read; it names a similar family only where that may be meant."""
    shown = name(model_type)
    if reason:
        refusal = "it is not counted" if is_dense else "it is not a dense decoder that this toolkit reads"
        return ModelError.of("model_type", shown, f"{refusal}: {reason}", f"see dstk families {shown}")
    hint = nearest(shown, CONFIG_SCHEMAS, cutoff=_SIMILARITY).strip()
    refusal = "it is not a causal LM that this toolkit reads"
    return ModelError.of("model_type", shown, refusal, hint or "see dstk families")


def _tied(config: Mapping[str, Any], family: ConfigSchema) -> bool:
    value = _read(config, family, "tied")
    if value is None or isinstance(value, bool):
        return bool(value)
    raise wrong(family.spelling["tied"], value, config, "true or false")


def _positions(config: Mapping[str, Any], family: ConfigSchema) -> int | None:
    """Return the longest sequence; None if the config names none, which a family with a table of positions must."""
    if family.learned_positions or family.needs_positions:
        return _count(config, family, "positions")
    return _optional_count(config, family, "positions")


def _optional_count(config: Mapping[str, Any], family: ConfigSchema, fact: str) -> int | None:
    value = _read(config, family, fact)
    if value is None:
        return None
    return checked_count(config, family.spelling[fact], value, most=_MOST.get(fact, LARGEST_COUNT))


def _count(config: Mapping[str, Any], family: ConfigSchema, fact: str, default: int | None = None) -> int:
    value = _optional_count(config, family, fact)
    value = default if value is None else value
    if value is None:
        field = family.spelling[fact]
        raise wrong(field, None, config, "a whole number from 1")
    return value
