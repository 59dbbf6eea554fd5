"""LayerStyle: how a family's decoder layer computes, as far as memory can tell; read from a config, without torch.

ModelShape says how wide a layer is. This says which norm, which rotary embedding, which form of attention and which
activation function its Hugging Face code runs, and what it drops. Fields that a config leaves out have the defaults of
transformers 5.23.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from toolkit.errors import ModelError, nearest
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
from toolkit.model_types import MODEL_TYPES, SAME_CODE


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
    """GPT-J's and CodeGen's number of them."""
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

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The style of the model that Hugging Face would build. Raises ModelError for a family it does not know."""
        text = config.get("text_config")
        config = text if isinstance(text, Mapping) else config
        model_type = str(config.get("model_type"))
        family = SAME_CODE.get(model_type, model_type)
        rules = FAMILIES.get(family)
        if rules is None:
            raise ModelError(
                f"model_type={family}: the activations of this family are not modelled.{nearest(family, MODEL_TYPES)} "
                f"Known: {', '.join(MODEL_TYPES)}."
            )
        config = {**config, **(config.get("attn_config") or {})} if family == "mpt" else config
        parallel, norms = _parallel(family, config, rules)
        is_old_opt = family == "opt" and not config.get("do_layer_norm_before", True)
        window = config.get("sliding_window", rules.window)
        head_norm = _head_norm(family, config, rules)
        return cls(
            family=family,
            norm=rules.norm,
            head_norm=head_norm,
            head_norm_behind=rules.head_norm_behind,
            inner_norms=rules.inner_norms,
            mlp_bias=not MODEL_TYPES[model_type].gated and bool(config.get(*rules.mlp_bias)),
            fused_gate=rules.fused_gate,
            gathers=frozenset({"attention"} if family in ("stablelm", "cohere") and head_norm else rules.gathers),
            projection=_projection(family, config, rules),
            scores="falcon_alibi" if family == "falcon" and config.get("alibi") else rules.scores,
            rotary=_rotary(family, config, rules),
            rotary_share=_rotary_share(config, rules),
            rotary_dim=config.get("rotary_dim", 64),
            activation=_activation(family, config, rules),
            attention_dropout=_number(config, rules.attention_dropout),
            hidden_dropout=_number(config, rules.hidden_dropout),
            first_dropout=_first_dropout(family, config, rules),
            embedding_dropout=_number(config, rules.embedding_dropout),
            activation_dropout=_number(config, rules.activation_dropout),
            parallel=parallel,
            norms_when_parallel=norms,
            pre_norms=rules.pre_norms and not is_old_opt,
            post_norms=rules.post_norms and bool(config.get("use_post_norm", True)),
            scales=_scales(family, config, rules),
            embedding_norm=rules.embedding_norm,
            is_final_norm=not is_old_opt and family != "openai-gpt" and not config.get("_remove_final_layer_norm"),
            window=window,
            kinds=_kinds(family, config, rules, window),
            sdpa=rules.sdpa,
        )


def _number(config: Mapping[str, Any], field: tuple[str, float]) -> float:
    return float(config.get(field[0], field[1]) or 0.0)


def _first_dropout(family: str, config: Mapping[str, Any], rules: Rules) -> float:
    if family in ("stablelm", "persimmon"):
        return 0.0
    return _number(config, rules.attention_dropout if family == "falcon" else rules.hidden_dropout)


def _activation(family: str, config: Mapping[str, Any], rules: Rules) -> Activation:
    field, default = rules.activation
    if family == "bloom":
        return "bloom"
    name = str(config.get(field) or default)
    if name not in ACTIVATIONS:
        raise ModelError(
            f"{field}={name}: the memory of this activation function is not modelled.{nearest(name, ACTIVATIONS)} "
            f"Known: {', '.join(ACTIVATIONS)}."
        )
    if family == "openai-gpt" and name == "gelu":
        return "gelu_new"
    return ACTIVATIONS[name]


def _projection(family: str, config: Mapping[str, Any], rules: Rules) -> Projection:
    if family == "gpt_bigcode" and not config.get("multi_query", True):
        return "heads"
    return rules.projection


def _head_norm(family: str, config: Mapping[str, Any], rules: Rules) -> Norm | None:
    if family in ("phi", "stablelm", "persimmon") and config.get("qk_layernorm", family == "persimmon"):
        return "layer"
    if family == "cohere" and config.get("use_qk_norm"):
        return "cohere"
    return rules.head_norm


def _rotary(family: str, config: Mapping[str, Any], rules: Rules) -> Rotary:
    if family == "youtu" and not config.get("rope_interleave", True):
        return "half"
    return "none" if family == "falcon" and config.get("alibi") else rules.rotary


def _rotary_share(config: Mapping[str, Any], rules: Rules) -> float:
    parameters = config.get("rope_parameters") or {}
    for value in (
        parameters.get("partial_rotary_factor"),
        config.get("partial_rotary_factor"),
        config.get("rotary_pct"),
    ):
        if value is not None:
            return float(value)
    return rules.rotary_share


def _parallel(family: str, config: Mapping[str, Any], rules: Rules) -> tuple[bool, int]:
    """Whether attention and MLP run side by side, and how many norms feed them."""
    if family == "gpt_neox":
        return bool(config.get("use_parallel_residual", True)), 2
    if family == "stablelm":
        return bool(config.get("use_parallel_residual", False)), 1
    if family == "falcon":
        new = bool(config.get("new_decoder_architecture"))
        norms = config.get("num_ln_in_parallel_attn") or (2 if new else 1)
        return new or bool(config.get("parallel_attn", True)), norms if new else 1
    return rules.parallel, 1


def _scales(family: str, config: Mapping[str, Any], rules: Rules) -> frozenset[str]:
    found = set(rules.scales)
    for field, default in rules.softcaps:
        if config.get(field, default):
            found.add("logits_softcap" if field.startswith("final") else "scores_softcap")
    if (family == "olmo" and config.get("clip_qkv") is not None) or (family == "mpt" and config.get("clip_qkv")):
        found.add("clipped")
    return frozenset(found)


def _kinds(family: str, config: Mapping[str, Any], rules: Rules, window: int | None) -> tuple[LayerKind, ...]:
    """Empty where all layers are alike."""
    if family == "smollm3":
        return _smollm3_kinds(config)
    if rules.slides:
        return ("full",) if window is None else ("sliding",)
    kinds = _listed(config) or _default_kinds(family, config, rules, window)
    if family == "cohere2" or (family == "exaone4" and window is not None):
        # Only layers with a window turn their queries and keys.
        return tuple("no_rotary" if kind == "full" else kind for kind in kinds)
    return kinds


def _listed(config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    return tuple("sliding" if kind == "sliding_attention" else "full" for kind in config.get("layer_types") or ())


def _default_kinds(family: str, config: Mapping[str, Any], rules: Rules, window: int | None) -> tuple[LayerKind, ...]:
    """Where the config does not list them."""
    layers = int(config.get("num_hidden_layers") or MODEL_TYPES[family].default("layers") or 0)
    if family == "ministral":
        return ("full",) if window is None else ("sliding",)
    if family == "cwm":
        return tuple("sliding" if i % rules.full_every else "full" for i in range(layers))
    if family in ("qwen2", "qwen3") and config.get("use_sliding_window") and window is not None:
        first = int(config.get("max_window_layers", 28))
        return tuple("sliding" if i >= first else "full" for i in range(layers))
    if not rules.full_every or (family == "exaone4" and window is None):
        return ("full",)
    given = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    every = int(given) if given and family in ("gemma3_text", "cohere2", "exaone4") else rules.full_every
    return tuple("sliding" if (i + 1) % every else "full" for i in range(layers))


def _smollm3_kinds(config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    layers = int(config.get("num_hidden_layers") or 36)
    interval = int(config.get("no_rope_layer_interval") or 4)
    given = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    return tuple("full" if rotates else "no_rotary" for rotates in given)
