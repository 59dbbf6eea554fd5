"""What is fixed in each family's code: the rules from which a LayerStyle is read. One entry a model_type.

To add a family, say here what differs from Llama, run the tests of activations for it, and look at what they report.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Norm = Literal["layer", "layer_fp32", "rms", "rms_fp32_weight", "rms_olmo2", "cohere"]
"""`layer`: torch's LayerNorm. `rms`: written out in fp32, scaled in the model's dtype. The others are variations."""
Projection = Literal["separate", "split", "heads", "grouped", "phi3", "codegen", "multi_query"]
"""How query, key and value leave their linear layers."""
Scores = Literal["standard", "same_dtype", "fp32", "bloom", "falcon", "falcon_alibi"]
"""Which dtype eager attention has where."""
Rotary = Literal["none", "half", "partial", "interleaved", "fp32", "fp32_tables"]
LayerKind = Literal["full", "sliding", "no_rotary"]
Activation = Literal["kernel", "relu", "gelu_new", "gelu_fast", "quick_gelu", "bloom"]

ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("gelu", "gelu_pytorch_tanh", "silu", "swish"), "kernel"),
    "relu": "relu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_fast",
    "quick_gelu": "quick_gelu",
}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """One model_type: what is fixed in its code, and the names and defaults of what its config says."""

    norm: Norm = "rms"
    projection: Projection = "separate"
    scores: Scores = "standard"
    rotary: Rotary = "half"
    activation: tuple[str, str] = ("hidden_act", "silu")
    attention_dropout: tuple[str, float] = ("attention_dropout", 0.0)
    hidden_dropout: tuple[str, float] = ("", 0.0)
    embedding_dropout: tuple[str, float] = ("", 0.0)
    rotary_share: float = 1.0
    head_norm: Norm | None = None
    """A norm of queries and keys that every config of the family has."""
    parallel: bool = False
    """Attention and MLP read the same hidden state and are added together."""
    post_norms: bool = False
    """Norms behind attention and MLP."""
    pre_norms: bool = True
    window: int | None = None
    """Default of sliding_window."""
    sdpa: bool = True
    """Whether transformers runs scaled_dot_product_attention for it."""


_GPT2 = Rules(
    norm="layer", projection="split", scores="same_dtype", rotary="none",
    activation=("activation_function", "gelu_new"), attention_dropout=("attn_pdrop", 0.1),
    hidden_dropout=("resid_pdrop", 0.1), embedding_dropout=("embd_pdrop", 0.1),
)  # fmt: skip
_GPTJ = Rules(
    norm="layer", scores="fp32", rotary="interleaved", activation=("activation_function", "gelu_new"), parallel=True,
    attention_dropout=("attn_pdrop", 0.0), hidden_dropout=("resid_pdrop", 0.0), embedding_dropout=("embd_pdrop", 0.0),
    sdpa=False,
)  # fmt: skip
_LLAMA = Rules()

FAMILIES: Mapping[str, Rules] = {
    "gpt2": _GPT2,
    "gpt_bigcode": Rules(
        norm="layer", projection="multi_query", rotary="none", activation=("activation_function", "gelu_pytorch_tanh"),
        attention_dropout=("attn_pdrop", 0.1), hidden_dropout=("resid_pdrop", 0.1),
        embedding_dropout=("embd_pdrop", 0.1),
    ),
    "gpt_neo": Rules(
        norm="layer", scores="fp32", rotary="none", activation=("activation_function", "gelu_new"),
        hidden_dropout=("resid_dropout", 0.0), embedding_dropout=("embed_dropout", 0.0), sdpa=False,
    ),
    "gptj": _GPTJ,
    "codegen": Rules(
        norm="layer", projection="codegen", scores="fp32", rotary="interleaved", parallel=True, sdpa=False,
        activation=("activation_function", "gelu_new"), attention_dropout=("attn_pdrop", 0.0),
        hidden_dropout=("resid_pdrop", 0.0), embedding_dropout=("embd_pdrop", 0.0),
    ),
    "gpt_neox": Rules(
        norm="layer", projection="heads", rotary="partial", activation=("hidden_act", "gelu"), rotary_share=0.25,
        hidden_dropout=("hidden_dropout", 0.0), embedding_dropout=("hidden_dropout", 0.0),
    ),
    "opt": Rules(
        norm="layer", rotary="none", activation=("activation_function", "relu"), hidden_dropout=("dropout", 0.1),
    ),
    "bloom": Rules(
        norm="layer", projection="grouped", scores="bloom", rotary="none", activation=("", "bloom"),
        hidden_dropout=("hidden_dropout", 0.0), sdpa=False,
    ),
    "falcon": Rules(
        norm="layer", projection="grouped", scores="falcon", activation=("activation", "gelu"),
        hidden_dropout=("hidden_dropout", 0.0),
    ),
    "phi": Rules(
        norm="layer", rotary="partial", rotary_share=0.5, activation=("hidden_act", "gelu_new"), parallel=True,
        hidden_dropout=("resid_pdrop", 0.0), embedding_dropout=("embd_pdrop", 0.0),
    ),
    "starcoder2": Rules(
        norm="layer", activation=("hidden_act", "gelu_pytorch_tanh"), hidden_dropout=("residual_dropout", 0.0),
        embedding_dropout=("embedding_dropout", 0.0),
    ),
    "llama": _LLAMA,
    "mistral": Rules(window=4096),
    "qwen2": _LLAMA,
    "qwen3": Rules(head_norm="rms"),
    "gemma": Rules(norm="rms_fp32_weight", activation=("hidden_act", "gelu_pytorch_tanh")),
    "gemma2": Rules(
        norm="rms_fp32_weight", activation=("hidden_activation", "gelu_pytorch_tanh"), post_norms=True, window=4096,
        sdpa=False,
    ),
    "gemma3_text": Rules(
        norm="rms_fp32_weight", activation=("hidden_activation", "gelu_pytorch_tanh"), post_norms=True, window=4096,
        head_norm="rms_fp32_weight",
    ),
    "phi3": Rules(projection="phi3", rotary="partial", hidden_dropout=("resid_pdrop", 0.0)),
    "olmo": Rules(norm="layer_fp32", rotary="fp32_tables"),
    "olmo2": Rules(norm="rms_olmo2", rotary="fp32_tables", head_norm="rms_olmo2", pre_norms=False, post_norms=True),
    "stablelm": Rules(norm="layer", rotary="partial", rotary_share=0.25, hidden_dropout=("hidden_dropout", 0.0)),
    "granite": _LLAMA,
    "cohere": Rules(norm="cohere", rotary="fp32", parallel=True),
    "smollm3": _LLAMA,
}  # fmt: skip
