"""LayerStyle: how a family's decoder layer computes, as far as memory can tell; read from a config, without torch.

ModelShape says how wide a layer is. This says which norm, which rotary embedding, which form of attention and which
activation function its Hugging Face code runs, and what it drops. Fields that a config leaves out have the defaults of
transformers 5.23.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from toolkit import config_fields
from toolkit.errors import ModelError, nearest
from toolkit.estimate import layer_fields
from toolkit.estimate.family_rules import (
    ACTIVATIONS,
    FAMILIES,
    Activation,
    Block,
    LayerKind,
    Norm,
    Projection,
    Rotary,
    Rules,
    Scores,
)
from toolkit.model_types import SAME_CODE
from toolkit.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class LayerStyle:
    """What a decoder layer, the embedding and the head of a model do. Build it with `from_config`."""

    family: str
    norm: Norm
    head_norm: Norm | None
    """Norm of queries and keys."""
    head_norm_behind: bool
    inner_norms: bool
    mlp_bias: bool
    """Its layers add a bias."""
    fused_gate: bool
    gathers: frozenset[Block]
    """Blocks of which every tensor-parallel rank computes all heads or columns."""
    projection: Projection
    scores: Scores
    rotary: Rotary
    rotary_share: float
    """Share of a head's features that is rotated."""
    rotary_dim: int | None
    """GPT-J's and CodeGen's number of them; None in other families."""
    activation: Activation
    attention_dropout: float
    hidden_dropout: float
    first_dropout: float
    """Of what attention adds to the hidden state, where the MLP follows it."""
    embedding_dropout: float
    activation_dropout: float
    """Behind the activation function."""
    parallel: bool
    norms_when_parallel: int
    """1: attention and MLP share a norm; 2: each has its own."""
    pre_norms: bool
    post_norms: bool
    scales: frozenset[str]
    """What is multiplied by a number (`embedding`, `residual`, `head_input`, `logits`; `queries`, by one for each
    position) or capped (`scores_softcap`, `logits_softcap`, `clipped` queries, keys and values)."""
    embedding_norm: bool
    is_final_norm: bool
    window: int | None
    kinds: tuple[LayerKind, ...]
    """One a layer."""
    sdpa: bool
    flash: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The style of the model that Hugging Face would build. Raises ModelError for a config it cannot read."""
        shape = ModelShape.from_config(config)
        text = config.get("text_config")
        for part in (config, text):
            if isinstance(part, Mapping):
                _refuse_quantised(part)
        config = text if isinstance(text, Mapping) else config
        family = SAME_CODE.get(shape.family, shape.family)
        rules = FAMILIES[family]
        config = {**config, **config_fields.mapping(config, "attn_config")} if family == "mpt" else config
        parallel, norms = _parallel(family, config, rules)
        is_old_opt = family == "opt" and not config_fields.flag(config, "do_layer_norm_before", True)
        window = _window(family, config, rules)
        head_norm = _head_norm(family, config, rules)
        style = cls(
            family=family,
            norm=rules.norm,
            head_norm=head_norm,
            head_norm_behind=rules.head_norm_behind,
            inner_norms=rules.inner_norms,
            mlp_bias=not shape.gated and _mlp_bias(config, rules),
            fused_gate=rules.fused_gate,
            gathers=frozenset({"attention"} if family in ("stablelm", "cohere") and head_norm else rules.gathers),
            projection=_projection(family, config, rules),
            scores="falcon_alibi" if _falcon_alibi(family, config) else rules.scores,
            rotary=_rotary(family, config, rules),
            rotary_share=layer_fields.rotary_share(config, rules.rotary_share),
            rotary_dim=_rotary_dim(config, shape, rules),
            activation=_activation(family, config, rules),
            attention_dropout=_dropout(config, rules.attention_dropout),
            hidden_dropout=_dropout(config, rules.hidden_dropout),
            first_dropout=_first_dropout(family, config, rules),
            embedding_dropout=_dropout(config, rules.embedding_dropout),
            activation_dropout=_dropout(config, rules.activation_dropout),
            parallel=parallel,
            norms_when_parallel=norms,
            pre_norms=rules.pre_norms and not is_old_opt,
            post_norms=rules.post_norms and config_fields.flag(config, "use_post_norm", True),
            scales=_scales(family, config, rules),
            embedding_norm=rules.embedding_norm,
            is_final_norm=not is_old_opt
            and family != "openai-gpt"
            and not config_fields.flag(config, "_remove_final_layer_norm", False),
            window=window,
            kinds=_kinds(family, config, rules, window, shape.layers),
            sdpa=rules.sdpa,
            flash=rules.flash,
        )
        _check_heads(style, shape)
        return style


def _refuse_quantised(config: Mapping[str, Any]) -> None:
    """Quantised weights train as adapters beside them, if at all: nothing here would be theirs."""
    if config.get("quantization_config"):
        raise ModelError(
            "The config has a quantization_config: quantised weights are not modelled. "
            "Take quantization_config out, to estimate the same model in 16 or 32 bits."
        )


def _dropout(config: Mapping[str, Any], field: tuple[str, float]) -> float:
    name, default = field
    return config_fields.number(config, name, default, least=0, most=1) if name else default


def _mlp_bias(config: Mapping[str, Any], rules: Rules) -> bool:
    field, default = rules.mlp_bias
    return config_fields.flag(config, field, default) if field else default


def _check_heads(style: LayerStyle, shape: ModelShape) -> None:
    """Raise ModelError for heads that the family's code cannot compute with."""
    if style.family == "diffllama" and (shape.heads % 2 or shape.kv_heads % 2):
        raise ModelError(
            f"diffllama subtracts half of its heads from the others, of {shape.heads} query and {shape.kv_heads} "
            "key-value heads. Choose even numbers."
        )
    if style.rotary in ("none", "interleaved"):
        return
    turned = int(shape.head_dim * style.rotary_share) if shape.latent is None else shape.latent.rotary_dim
    if turned < 2 or turned % 2:
        raise ModelError(
            f"{turned} of a head's {shape.head_dim} features have a rotary embedding, which turns them in pairs. "
            "Choose a head_dim (hidden size over heads) of which an even number turns."
        )


def _window(family: str, config: Mapping[str, Any], rules: Rules) -> int | None:
    if family in ("qwen2", "qwen3") and not config_fields.flag(config, "use_sliding_window", False):
        return None
    return config_fields.optional_count(config, "sliding_window", rules.window)


def _first_dropout(family: str, config: Mapping[str, Any], rules: Rules) -> float:
    if family in ("stablelm", "persimmon"):
        return 0.0
    return _dropout(config, rules.attention_dropout if family == "falcon" else rules.hidden_dropout)


def _activation(family: str, config: Mapping[str, Any], rules: Rules) -> Activation:
    field, default = rules.activation
    if family == "bloom":
        return "bloom"
    name = config_fields.name(config.get(field) or default) if field else default
    if name not in ACTIVATIONS:
        raise ModelError(
            f"{field}={name}: the memory of this activation function is not modelled.{nearest(name, ACTIVATIONS)} "
            f"Known: {', '.join(ACTIVATIONS)}."
        )
    if family == "openai-gpt" and name == "gelu":
        return "gelu_new"
    return ACTIVATIONS[name]


def _projection(family: str, config: Mapping[str, Any], rules: Rules) -> Projection:
    if family == "gpt_bigcode" and not config_fields.flag(config, "multi_query", True):
        return "heads"
    return rules.projection


def _head_norm(family: str, config: Mapping[str, Any], rules: Rules) -> Norm | None:
    if family in ("phi", "stablelm", "persimmon") and config_fields.flag(config, "qk_layernorm", family == "persimmon"):
        return "layer"
    if family == "cohere" and config_fields.flag(config, "use_qk_norm", False):
        return "cohere"
    return rules.head_norm


def _rotary(family: str, config: Mapping[str, Any], rules: Rules) -> Rotary:
    if family == "youtu" and not config_fields.flag(config, "rope_interleave", True):
        return "half"
    return "none" if _falcon_alibi(family, config) else rules.rotary


def _falcon_alibi(family: str, config: Mapping[str, Any]) -> bool:
    return family == "falcon" and config_fields.flag(config, "alibi", False)


def _rotary_dim(config: Mapping[str, Any], shape: ModelShape, rules: Rules) -> int | None:
    return layer_fields.interleaved_features(config, shape.head_dim) if rules.rotary == "interleaved" else None


def _parallel(family: str, config: Mapping[str, Any], rules: Rules) -> tuple[bool, int]:
    """Whether attention and MLP run side by side, and how many norms feed them."""
    if family == "gpt_neox":
        return config_fields.flag(config, "use_parallel_residual", True), 2
    if family == "stablelm":
        return config_fields.flag(config, "use_parallel_residual", False), 1
    if family == "falcon":
        new = config_fields.flag(config, "new_decoder_architecture", False)
        norms = config_fields.optional_count(config, "num_ln_in_parallel_attn", most=2) or (2 if new else 1)
        return new or config_fields.flag(config, "parallel_attn", True), norms if new else 1
    return rules.parallel, 1


def _scales(family: str, config: Mapping[str, Any], rules: Rules) -> frozenset[str]:
    found = set(rules.scales)
    for field, default in rules.softcaps:
        if config_fields.number(config, field, default or 0.0):
            found.add("logits_softcap" if field.startswith("final") else "scores_softcap")
    if family in ("olmo", "mpt"):
        limit = config_fields.number(config, "clip_qkv", 0.0)
        if limit or (family == "olmo" and config.get("clip_qkv") is not None):
            found.add("clipped")
    return frozenset(found)


def _kinds(
    family: str, config: Mapping[str, Any], rules: Rules, window: int | None, layers: int
) -> tuple[LayerKind, ...]:
    """One where all layers are alike."""
    if family == "smollm3":
        return _smollm3_kinds(config, layers)
    if rules.slides:
        return ("full",) if window is None else ("sliding",)
    kinds = _listed(config, layers) or _default_kinds(family, config, rules, window, layers)
    if family == "cohere2" or (family == "exaone4" and window is not None):
        # Only layers with a window turn their queries and keys.
        return tuple("no_rotary" if kind == "full" else kind for kind in kinds)
    return kinds


def _listed(config: Mapping[str, Any], layers: int) -> tuple[LayerKind, ...]:
    found = layer_fields.layer_types(config, layers) or ()
    return tuple("sliding" if kind == "sliding_attention" else "full" for kind in found)


def _default_kinds(
    family: str, config: Mapping[str, Any], rules: Rules, window: int | None, layers: int
) -> tuple[LayerKind, ...]:
    """Where the config does not list them."""
    if family == "ministral":
        return ("full",) if window is None else ("sliding",)
    if family == "cwm":
        return tuple("sliding" if i % rules.full_every else "full" for i in range(layers))
    if family in ("qwen2", "qwen3") and window is not None:
        first = config_fields.count(config, "max_window_layers", 28, least=0)
        return tuple("sliding" if i >= first else "full" for i in range(layers))
    if not rules.full_every or (family == "exaone4" and window is None):
        return ("full",)
    every = rules.full_every
    if family in ("gemma3_text", "cohere2", "exaone4"):
        every = layer_fields.window_pattern(config, every)
    return tuple("sliding" if (i + 1) % every else "full" for i in range(layers))


def _smollm3_kinds(config: Mapping[str, Any], layers: int) -> tuple[LayerKind, ...]:
    interval = config_fields.count(config, "no_rope_layer_interval", 4)
    given = config_fields.sequence(config, "no_rope_layers")
    if given is None:
        given = [(i + 1) % interval != 0 for i in range(layers)]
    if len(given) < layers or any(rotates not in (0, 1) for rotates in given):
        raise config_fields.wrong("no_rope_layers", given, config, f"a list of 0 or 1 for each of {layers} layers")
    return tuple("full" if rotates else "no_rotary" for rotates in given[:layers])
