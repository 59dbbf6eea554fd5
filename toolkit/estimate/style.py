"""LayerStyle: how a model's decoder layer computes, as far as it affects memory; read from a config, without torch.

ModelShape says how wide a layer is. This says which norm, which rotary embedding, which form of attention and which
activation function its Hugging Face code runs, and what it drops. Fields that a config leaves out have the defaults of
transformers 5.23.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

from toolkit.errors import ModelError, nearest
from toolkit.estimate.parameters.model_config import ModelConfig
from toolkit.models import config_fields
from toolkit.models.families import layer_rules

_ACTIVATIONS: Mapping[str, layer_rules.Activation] = {
    **dict.fromkeys(("gelu", "gelu_pytorch_tanh", "silu", "swish"), "kernel"),
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_fast",
    "quick_gelu": "quick_gelu",
}
"""Hugging Face's name -> how it is computed: `kernel` is one kernel, the others are Python."""


@dataclass(frozen=True, kw_only=True)
class LayerStyle:
    """What a decoder layer, the embedding and the head of a model do. Build it with `from_config`."""

    family: str
    rules: layer_rules.LayerRules
    """What every model of the family has in common."""
    head_norm: layer_rules.Norm | None
    """Norm of queries and keys."""
    mlp_bias: bool
    """Its layers add a bias."""
    gathers: frozenset[layer_rules.Block]
    """Blocks of which every tensor-parallel rank computes all heads or columns."""
    projection: layer_rules.Projection
    scores: layer_rules.Scores
    rotary: layer_rules.Rotary
    rotated_features: int
    """Of a head."""
    activation: layer_rules.Activation
    attention_dropout: float
    hidden_dropout: float
    first_dropout: float
    """Of attention's output."""
    embedding_dropout: float
    activation_dropout: float
    """Behind the activation function."""
    parallel: bool
    norms_when_parallel: int
    """1: attention and MLP share a norm; 2: each has its own."""
    pre_norms: bool
    post_norms: bool
    scales: frozenset[str]
    """What is multiplied by a number (`embedding`, `residual`, `head_input`, `logits`, `projected_queries`; `queries`,
    by one for each position) or capped (`scores_softcap`, `logits_softcap`, `clipped` queries, keys and values)."""
    is_final_norm: bool
    window: int | None
    kinds: tuple[layer_rules.LayerKind, ...]
    """One a layer."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the style of the model that Hugging Face would build. Raises ModelError for what cannot be read."""
        m = ModelConfig.read(config)
        for part in (config, m.config):
            _refuse_quantized(part)
        rules = m.rules
        pre_norms = m.flag(rules.pre_norms_field)
        parallel, norms_when_parallel = _parallel(m)
        window = _window(m)
        with_alibi = rules.scores == "falcon" and m.flag(("alibi", False))
        style = cls(
            family=m.shape.family,
            rules=rules,
            head_norm=m.head_norm,
            mlp_bias=not m.shape.gated and m.flag(rules.mlp_bias),
            gathers=m.gathers,
            projection="heads"
            if rules.projection == "multi_query" and not m.flag(("multi_query", True))
            else rules.projection,
            scores="falcon_alibi" if with_alibi else rules.scores,
            rotary="none" if with_alibi else _rotary(m),
            rotated_features=m.rotary_features() if rules.rotary != "interleaved" else m.interleaved_features(),
            activation=_activation(m),
            attention_dropout=_dropout(m, rules.attention_dropout),
            hidden_dropout=_dropout(m, rules.hidden_dropout),
            first_dropout=_dropout(m, rules.hidden_dropout if rules.first_dropout is None else rules.first_dropout),
            embedding_dropout=_dropout(m, rules.embedding_dropout),
            activation_dropout=_dropout(m, rules.activation_dropout),
            parallel=parallel,
            norms_when_parallel=norms_when_parallel,
            pre_norms=rules.pre_norms and pre_norms,
            post_norms=rules.post_norms and m.flag(("use_post_norm", True)),
            scales=_scales(m),
            is_final_norm=bool(m.parameter_rules.final_norm)
            and pre_norms
            and not m.flag(("_remove_final_layer_norm", False)),
            window=window,
            kinds=_kinds(m, window),
        )
        _check_heads(style, m)
        return style


def _refuse_quantized(config: Mapping[str, Any]) -> None:
    """Quantized weights train as adapters beside them, if at all, which the estimate does not cover."""
    if config.get("quantization_config"):
        raise ModelError(
            "The config has a quantization_config: quantized weights are not modeled. "
            "Take quantization_config out, to estimate the same model in 16 or 32 bits."
        )


def _dropout(m: ModelConfig, field: tuple[str, float]) -> float:
    name, default = field
    return config_fields.number(m.config, name, default, least=0, most=1) if name else default


def _check_heads(style: LayerStyle, m: ModelConfig) -> None:
    """Raise ModelError for heads that the family's code cannot compute with."""
    shape = m.shape
    if m.rules.differential and (shape.heads % 2 or shape.kv_heads % 2):
        raise ModelError(
            f"{style.family} subtracts half of its heads from the others, of {shape.heads} query and "
            f"{shape.kv_heads} key-value heads. Choose even numbers."
        )
    if style.rotary in ("none", "interleaved"):
        return
    rotated = m.rotary_features()
    if rotated < 2 or rotated % 2:
        raise ModelError(
            f"{rotated} of a head's {shape.head_dim} features have a rotary embedding, which rotates them in pairs. "
            "Choose a head_dim (hidden size over heads) of which an even number is rotated."
        )


def _window(m: ModelConfig) -> int | None:
    if m.rules.window_field and not m.flag((m.rules.window_field, False)):
        return None
    return config_fields.optional_count(m.config, "sliding_window", m.rules.window)


def _activation(m: ModelConfig) -> layer_rules.Activation:
    field, default = m.rules.activation
    if not field:
        return cast("layer_rules.Activation", default)
    name = config_fields.name(m.config.get(field) or default)
    if name not in _ACTIVATIONS:
        raise ModelError(
            f"{field}={name}: the memory of this activation function is not modeled.{nearest(name, _ACTIVATIONS)} "
            f"Known: {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[m.rules.activation_aliases.get(name, name)]


def _rotary(m: ModelConfig) -> layer_rules.Rotary:
    if m.rules.rotary == "sorted_pairs" and not m.flag(("rope_interleave", True)):
        return "half"
    return m.rules.rotary


def _parallel(m: ModelConfig) -> tuple[bool, int]:
    """Whether attention and MLP run side by side, and how many norms feed them."""
    rules = m.rules
    if rules.projection == "interleaved_groups":
        new = m.flag(("new_decoder_architecture", False))
        norms = config_fields.optional_count(m.config, "num_ln_in_parallel_attn", most=2) or (2 if new else 1)
        return new or m.flag(("parallel_attn", True)), norms if new else 1
    if rules.parallel_field is not None:
        return m.flag(rules.parallel_field), rules.norms_when_parallel
    return rules.parallel, 1


def _scales(m: ModelConfig) -> frozenset[str]:
    found = set(m.rules.scales)
    for field, default in m.rules.softcaps.items():
        if config_fields.number(m.config, field, default or 0.0):
            found.add("logits_softcap" if field.startswith("final") else "scores_softcap")
    if m.rules.clips != "never":
        limit = config_fields.number(m.config, "clip_qkv", 0.0)
        if limit or (m.rules.clips == "given" and m.config.get("clip_qkv") is not None):
            found.add("clipped")
    return frozenset(found)


def _kinds(m: ModelConfig, window: int | None) -> tuple[layer_rules.LayerKind, ...]:
    """One kind a layer, or one alone where all layers are alike."""
    rules = m.rules
    if rules.no_rotary == "listed":
        return _listed_rotary(m)
    if rules.slides == "always":
        return ("full",) if window is None else ("sliding",)
    listed = m.layer_types()
    if listed:
        kinds: tuple[layer_rules.LayerKind, ...] = tuple(
            "sliding" if kind == "sliding_attention" else "full" for kind in listed
        )
    else:
        kinds = _default_kinds(m, window)
    if rules.no_rotary == "full" or (rules.no_rotary == "full_beside_window" and window is not None):
        return tuple("no_rotary" if kind == "full" else kind for kind in kinds)
    return kinds


def _default_kinds(m: ModelConfig, window: int | None) -> tuple[layer_rules.LayerKind, ...]:
    """The kinds where the config does not list them."""
    rules, layers = m.rules, m.shape.layers
    if rules.slides == "unless_listed":
        return ("full",) if window is None else ("sliding",)
    if rules.window_field and window is not None:
        first = config_fields.count(m.config, "max_window_layers", 28, least=0)
        return tuple("sliding" if i >= first else "full" for i in range(layers))
    if not rules.full_every or (rules.no_rotary == "full_beside_window" and window is None):
        return ("full",)
    every, offset = m.full_every(), 0 if rules.full_first else 1
    return tuple("sliding" if (i + offset) % every else "full" for i in range(layers))


def _listed_rotary(m: ModelConfig) -> tuple[layer_rules.LayerKind, ...]:
    layers = m.shape.layers
    interval = config_fields.count(m.config, "no_rope_layer_interval", 4)
    given = config_fields.sequence(m.config, "no_rope_layers")
    if given is None:
        given = [(i + 1) % interval != 0 for i in range(layers)]
    if len(given) < layers or any(rotates not in (0, 1) for rotates in given):
        raise config_fields.wrong("no_rope_layers", given, m.config, f"a list of 0 or 1 for each of {layers} layers")
    return tuple("full" if rotates else "no_rotary" for rotates in given[:layers])
