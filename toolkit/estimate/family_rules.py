"""What is fixed in each family's code: the rules from which a LayerStyle is read. One entry a model_type.

To add a family, say here what differs from Llama, run the tests of activations for it, and look at what they report.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Norm = Literal[
    "layer",
    "layer_bare",
    "layer_fp32",
    "layer_1p",
    "rms",
    "rms_bare",
    "rms_torch",
    "rms_fp32_weight",
    "rms_olmo2",
    "rms_helium",
    "cohere",
]
"""`layer`: torch's LayerNorm. `rms`: written out in fp32, scaled in the model's dtype. The others are variations."""
Projection = Literal["separate", "split", "heads", "grouped", "phi3", "codegen", "multi_query", "latent"]
"""How query, key and value leave their linear layers."""
Scores = Literal["standard", "same_dtype", "fp32", "bloom", "falcon", "falcon_alibi", "mpt", "xglm", "openai"]
"""Which dtype eager attention has where."""
Rotary = Literal[
    "none",
    "half",
    "partial",
    "interleaved",
    "fp32",
    "fp32_tables",
    "pairs",
    "pairs_partial",
    "pairs_fp32_tables",
    "sorted_pairs",
]
LayerKind = Literal["full", "sliding", "no_rotary"]
Activation = Literal["kernel", "relu", "relu2", "gelu_new", "gelu_fast", "quick_gelu", "bloom", "xielu"]
Block = Literal["attention", "mlp"]

ACTIVATIONS: Mapping[str, Activation] = {
    **dict.fromkeys(("gelu", "gelu_pytorch_tanh", "silu", "swish"), "kernel"),
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
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
    activation_dropout: tuple[str, float] = ("", 0.0)
    rotary_share: float = 1.0
    head_norm: Norm | None = None
    """A norm of queries and keys that every config of the family has."""
    head_norm_behind: bool = False
    """It comes behind the rotary embedding."""
    inner_norms: bool = False
    """Norms in front of the row-parallel layers."""
    parallel: bool = False
    """Attention and MLP read the same hidden state and are added together."""
    post_norms: bool = False
    """Norms behind attention and MLP."""
    pre_norms: bool = True
    mlp_bias: tuple[str, bool] = ("", True)
    """Of an MLP without a gate."""
    fused_gate: bool = False
    """Gate and up-projection are one matrix."""
    window: int | None = None
    """Default of sliding_window."""
    slides: bool = False
    """All layers have the window, if the config has one; `layer_types` is no field of it."""
    full_every: int = 0
    """Every so many layers see everything, by default, and the others a window; 0: all see everything."""
    scales: frozenset[str] = frozenset()
    """What is multiplied by a number in every config of the family: see LayerStyle."""
    softcaps: tuple[tuple[str, float | None], ...] = ()
    """Defaults of those of `final_logit_softcapping` and `attn_logit_softcapping` that the code reads."""
    embedding_norm: bool = False
    """A norm behind the embedding."""
    gathers: tuple[Block, ...] = ()
    """Blocks of which every rank computes all heads or columns, with only the matrices split."""
    sdpa: bool = True
    """Whether transformers runs scaled_dot_product_attention for it."""
    flash: bool = True
    """Whether transformers runs flash attention for it."""


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
_GEMMA2 = Rules(
    norm="rms_fp32_weight", activation=("hidden_activation", "gelu_pytorch_tanh"), post_norms=True, window=4096,
    sdpa=False, scales=frozenset({"embedding"}), full_every=2,
    softcaps=(("final_logit_softcapping", 30.0), ("attn_logit_softcapping", 50.0)),
)  # fmt: skip
_OLMO2 = Rules(
    norm="rms_olmo2", rotary="fp32_tables", head_norm="rms_olmo2", pre_norms=False, post_norms=True,
    gathers=("attention",),
)  # fmt: skip
_GLM = Rules(rotary="pairs_partial", rotary_share=0.5, fused_gate=True, gathers=("mlp",))

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
        flash=False, activation=("activation_function", "gelu_new"), attention_dropout=("attn_pdrop", 0.0),
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
        hidden_dropout=("hidden_dropout", 0.0), embedding_norm=True, sdpa=False, flash=False,
    ),
    "falcon": Rules(
        norm="layer", projection="grouped", scores="falcon", activation=("activation", "gelu"),
        mlp_bias=("bias", False), hidden_dropout=("hidden_dropout", 0.0),
    ),
    "mpt": Rules(
        norm="layer_bare", projection="split", scores="mpt", rotary="none", activation=("", "gelu"),
        attention_dropout=("attn_pdrop", 0.0), hidden_dropout=("attn_pdrop", 0.0), mlp_bias=("", False),
        sdpa=False, flash=False,
    ),
    "persimmon": Rules(
        norm="layer", projection="grouped", rotary="partial", rotary_share=0.5, activation=("hidden_act", "relu2"),
        hidden_dropout=("hidden_dropout", 0.0),
    ),
    "biogpt": Rules(
        norm="layer", scores="same_dtype", rotary="none", activation=("hidden_act", "gelu"),
        scales=frozenset({"embedding"}), attention_dropout=("attention_probs_dropout_prob", 0.1),
        hidden_dropout=("hidden_dropout_prob", 0.1), embedding_dropout=("hidden_dropout_prob", 0.1),
        activation_dropout=("activation_dropout", 0.0),
    ),
    "xglm": Rules(
        norm="layer", scores="xglm", rotary="none", activation=("activation_function", "gelu"),
        scales=frozenset({"embedding"}), attention_dropout=("attention_dropout", 0.1), hidden_dropout=("dropout", 0.1),
        embedding_dropout=("dropout", 0.1), activation_dropout=("activation_dropout", 0.0), sdpa=False,
        flash=False,
    ),
    "openai-gpt": replace(_GPT2, scores="openai", activation=("afn", "gelu"), pre_norms=False, sdpa=False, flash=False),
    "phi": Rules(
        norm="layer", rotary="partial", rotary_share=0.5, activation=("hidden_act", "gelu_new"), parallel=True,
        hidden_dropout=("resid_pdrop", 0.0), embedding_dropout=("embd_pdrop", 0.0),
    ),
    "starcoder2": Rules(
        norm="layer", activation=("hidden_act", "gelu_pytorch_tanh"), hidden_dropout=("residual_dropout", 0.0),
        embedding_dropout=("embedding_dropout", 0.0), slides=True,
    ),
    "llama": _LLAMA,
    "mistral": Rules(window=4096, slides=True),
    "qwen2": _LLAMA,
    "qwen3": Rules(head_norm="rms"),
    "gemma": Rules(
        norm="rms_fp32_weight", activation=("hidden_act", "gelu_pytorch_tanh"), scales=frozenset({"embedding"}),
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2, head_norm="rms_fp32_weight", full_every=6, sdpa=True, softcaps=(("final_logit_softcapping", None),)
    ),
    "vaultgemma": replace(_GEMMA2, post_norms=False),
    "phi3": Rules(
        projection="phi3", rotary="partial", hidden_dropout=("resid_pdrop", 0.0), fused_gate=True, slides=True,
        gathers=("attention", "mlp"),
    ),
    "olmo": Rules(norm="layer_fp32", rotary="fp32_tables"),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, window=4096, full_every=4),
    "stablelm": Rules(norm="layer", rotary="partial", rotary_share=0.25, hidden_dropout=("hidden_dropout", 0.0)),
    "granite": Rules(scales=frozenset({"embedding", "residual", "logits"})),
    "cohere": Rules(norm="cohere", rotary="fp32", parallel=True, scales=frozenset({"logits"})),
    "cohere2": Rules(
        norm="cohere", rotary="fp32", parallel=True, scales=frozenset({"logits"}), window=4096, full_every=4
    ),
    "smollm3": _LLAMA,
    "ministral": Rules(window=4096),
    "ministral3": Rules(slides=True, scales=frozenset({"queries"})),
    "glm": _GLM,
    "glm4": replace(_GLM, post_norms=True),
    "nemotron": Rules(
        norm="layer_1p", rotary="partial", rotary_share=0.5, activation=("hidden_act", "relu2"),
        mlp_bias=("mlp_bias", False),
    ),
    "seed_oss": Rules(attention_dropout=("attention_dropout", 0.1), hidden_dropout=("residual_dropout", 0.1)),
    "exaone4": Rules(head_norm="rms", pre_norms=False, post_norms=True, window=4096, full_every=4),
    "ernie4_5": Rules(rotary="pairs_fp32_tables", attention_dropout=("", 0.0)),
    "hunyuan_v1_dense": Rules(head_norm="rms", head_norm_behind=True),
    "apertus": Rules(head_norm="rms", activation=("hidden_act", "xielu"), mlp_bias=("", False)),
    "arcee": Rules(activation=("hidden_act", "relu2"), mlp_bias=("mlp_bias", False)),
    "nanochat": Rules(
        norm="rms_bare", head_norm="rms_bare", head_norm_behind=True, embedding_norm=True,
        activation=("hidden_act", "relu2"), mlp_bias=("", False), softcaps=(("final_logit_softcapping", 15.0),),
    ),
    "helium": Rules(norm="rms_helium", rotary="pairs"),
    "cwm": Rules(window=8192, full_every=4),
    "jais2": Rules(norm="layer", activation=("hidden_act", "relu2"), mlp_bias=("mlp_bias", True)),
    "hyperclovax": Rules(scales=frozenset({"embedding", "residual", "logits"}), post_norms=True),
    "minicpm3": Rules(projection="latent", scales=frozenset({"embedding", "residual", "head_input"})),
    "youtu": Rules(projection="latent", rotary="sorted_pairs"),
    "diffllama": Rules(gathers=("attention",)),
    "bitnet": Rules(activation=("hidden_act", "relu2"), inner_norms=True, gathers=("attention", "mlp")),
}  # fmt: skip
"""But for families that run another's code."""
