"""A tiny model of any family: small enough for one CPU, with every part of a full-size model.

tiny_model.json has sizes by the names that configs use, and of a few families what no general rule finds. Everything
else keeps the family's default, so that its rotary embedding, window, norm, gates and biases are exercised.
"""

import json
import textwrap
from pathlib import Path
from typing import Any

from toolkit.errors import ModelError

_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_SIZES: dict[str, int] = {name: row["size"] for row in _TABLE["sizes"] for name in row["fields"]}
LAYERS = _SIZES["num_hidden_layers"]
VOCABULARY = _SIZES["vocab_size"]
"""Odd on purpose: not divisible by any number of ranks."""
_UNSET_BY_DEFAULT = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_shared_experts")
_TOKENS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}


def default_config(model_type: str) -> Any:
    """Return the config that transformers builds by default. Raises ModelError."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ModelError.of("model_type", model_type, "transformers has no such model type", "see dstk families")
    try:
        return CONFIG_MAPPING[model_type]()
    except Exception as error:
        raise _no_tiny(error) from error


def tiny_config(model_type: str, **changes: Any) -> Any:
    """Return the config of a model with 4 layers, 4 heads and 99 tokens, with `changes`. Raises ModelError."""
    default = default_config(model_type)
    try:
        return type(default)(**_fields(default, model_type) | changes)
    except Exception as error:
        raise _no_tiny(error) from error


def _no_tiny(error: Exception) -> ModelError:
    return ModelError(f"no tiny config: {brief(error)}")


def brief(error: Exception) -> str:
    """Return the most informative line of an error: a validator's last, otherwise the first."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    line = (
        lines[-1].strip().removeprefix("ValueError: ")
        if "alidation" in type(error).__name__
        else lines[0].split(". ")[0]
    )
    return textwrap.shorten(line, 90, placeholder=" …")


def _fields(default: Any, model_type: str, *, layers: int = LAYERS) -> dict[str, Any]:
    """Return the arguments of a tiny config: sizes by name, sub-configs by recursion, then the family's own.

    A part other than the language model has fewer layers, so that they are not mistaken for the decoder's.
    """
    defaults = default.to_dict()
    fields: dict[str, Any] = {name: size for name, size in _SIZES.items() if defaults.get(name)}
    fields |= {name: _SIZES[name] for name in _UNSET_BY_DEFAULT if name in defaults}
    if "num_hidden_layers" in fields:
        fields["num_hidden_layers"] = layers
    kinds = list(dict.fromkeys(defaults.get("layer_types") or ()))
    if len(kinds) > len(set(defaults["layer_types"][:layers] if kinds else ())):
        # Include the types of layer that the pattern has only later.
        fields["layer_types"] = (kinds * layers)[:layers]
    if "qk_rope_head_dim" in fields:
        # Latent attention: head_dim often is another name of the rotary part, and every head has its own key.
        if defaults.get("head_dim") == defaults["qk_rope_head_dim"]:
            fields["head_dim"] = fields["qk_rope_head_dim"]
        fields["num_key_value_heads"] = _SIZES["num_attention_heads"]
    for name, token in _TOKENS.items():
        if isinstance(defaults.get(name), int):
            fields[name] = token
    if "is_decoder" in defaults:
        fields["is_decoder"] = True
    for part in default.sub_configs:
        value = getattr(default, part, None)
        if value is not None:
            is_text = type(value) is type(default.get_text_config(decoder=True))
            fields[part] = _fields(value, f"{model_type}.{part}", layers=LAYERS if is_text else LAYERS // 2)
    fields |= _TABLE["families"].get(model_type, {})
    return fields
