"""Rules of a family's code that the memory estimate follows: how a decoder layer computes, and which parameters it has.

Fields that are pairs name a field of the config and its default; the name "" stands for a constant, which families.json
has alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# fmt: off
Norm = Literal[
    "layer", "layer_bare", "layer_fp32", "layer_1p", "rms", "rms_bare", "rms_torch", "rms_fp32_weight", "rms_olmo2",
    "rms_helium", "cohere",
]
"""`layer`: torch's LayerNorm. `rms`: written out in fp32, scaled in the model's dtype. The others are variations."""
Projection = Literal[
    "separate", "split", "heads", "interleaved_heads", "interleaved_groups", "narrowed", "chunks", "multi_query",
    "latent",
]
"""How query, key and value leave their linear layers."""
Scores = Literal[
    "standard", "same_dtype", "softmax_dtype", "fp32", "fp32_causal_table", "bloom", "falcon", "falcon_alibi", "mpt",
    "xglm", "openai",
]
"""How eager attention computes scores, and in which dtype."""
Rotary = Literal[
    "none", "half", "partial", "interleaved", "fp32", "fp32_tables", "pairs", "pairs_partial", "pairs_fp32_tables",
    "sorted_pairs",
]
# fmt: on
HeadNormForm = Literal["by_head", "before_transpose", "weight_per_head", "module_per_head", "all_heads"]
LayerKind = Literal["full", "sliding", "no_rotary"]
Activation = Literal["kernel", "relu", "relu2", "gelu_new", "gelu_fast", "quick_gelu", "bloom", "xielu"]
Block = Literal["attention", "mlp"]
Flag = tuple[str, bool]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRules:
    """How the decoder layers, the embedding and the head of one family compute. The defaults are Llama's.

    Compared by identity, which makes styles cheap to hash.
    """

    norm: Norm = "rms"
    projection: Projection = "separate"
    scores: Scores = "standard"
    rotary: Rotary = "half"
    rotary_share: float = 1.0
    """Default share of a head's features that the rotary embedding rotates."""
    rotary_per_kind: bool = False
    """Sliding and full attention have rotary tables of their own."""
    positions: Literal["shared", "none", "mask", "alibi"] = "shared"
    """Position ids: one row for all samples, none, OPT's (from a mask, for each sample), or MPT's ALiBi table."""
    sinusoidal_positions: bool = False
    """A computed table of positions is added to the embeddings."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """With the name "" an Activation, otherwise Hugging Face's name of one."""
    activation_aliases: Mapping[str, str] = field(default_factory=dict)
    """Names that stand for another function in this family."""
    attention_dropout: tuple[str, float] = ("attention_dropout", 0.0)
    hidden_dropout: tuple[str, float] = ("", 0.0)
    first_dropout: tuple[str, float] | None = None
    """Dropout of attention's output; None: as `hidden_dropout`."""
    embedding_dropout: tuple[str, float] = ("", 0.0)
    activation_dropout: tuple[str, float] = ("", 0.0)
    head_norm: Norm | None = None
    """Norm of queries and keys, where `head_norm_field` is on."""
    head_norm_field: Flag = ("", True)
    head_norm_form: HeadNormForm = "by_head"
    """`by_head`: one weight for all heads, applied behind the transpose. `weight_per_head`, `module_per_head`: one for
    each head. `all_heads`: over all heads together."""
    head_norm_behind: bool = False
    """The norm of queries and keys follows the rotary embedding."""
    differential: bool = False
    """Attention subtracts the second half of its heads from the first."""
    output_bias: bool = False
    """Whether the bias of attention's output projection counts as an operation."""
    inner_norms: bool = False
    """Norms in front of the row-parallel layers."""
    parallel: bool = False
    """Attention and MLP read the same hidden state and their outputs are added."""
    parallel_field: Flag | None = None
    """The config's switch for that, if it has one."""
    norms_when_parallel: int = 1
    sums_branches: bool = False
    """A parallel layer adds attention and MLP before dropout."""
    pre_norms: bool = True
    pre_norms_field: Flag = ("", True)
    post_norms: bool = False
    """Norms behind attention and MLP."""
    mlp_bias: Flag = ("mlp_bias", False)
    fused_gate: bool = False
    """Gate and up-projection are one matrix."""
    flattens_mlp: bool = False
    """The MLP works on [b * s, h]."""
    window: int | None = None
    """Default of sliding_window."""
    window_field: str = ""
    """The config's switch that turns the window on (off by default), for layers from `max_window_layers` on."""
    slides: Literal["never", "always", "unless_listed"] = "never"
    """All layers have the window, if the config has one: whatever it lists, or where it has no `layer_types`."""
    full_every: int = 0
    """Every so many layers have full attention, by default, and the others a window; 0: all have full attention."""
    full_first: bool = False
    """Of those layers the first has full attention, not the last."""
    pattern_field: bool = False
    """The config's `sliding_window_pattern` overrides `full_every`."""
    no_rotary: Literal["never", "full", "full_beside_window", "listed"] = "never"
    """Layers without rotary embedding: those with full attention, the same if others have a window, or listed ones."""
    scales: tuple[str, ...] = ()
    """What is multiplied by a number in every config of the family: see LayerStyle."""
    clips: Literal["never", "nonzero", "given"] = "never"
    """When `clip_qkv` clamps queries, keys and values."""
    softcaps: Mapping[str, float | None] = field(default_factory=dict)
    """Defaults of those of `final_logit_softcapping` and `attn_logit_softcapping` that the code reads."""
    embedding_norm: bool = False
    """A norm behind the embedding."""
    gathers: tuple[Block, ...] = ()
    """Blocks of which every tensor-parallel rank computes all heads or columns: only their matrices are sharded."""
    sdpa: bool = True
    """Whether transformers runs scaled_dot_product_attention for it."""
    flash: bool = True
    """Whether transformers runs flash attention for it."""
    nested_config: str = ""
    """A section of the config whose fields count as the config's own."""


@dataclass(frozen=True, kw_only=True)
class ParameterRules:
    """Which parameters one family has. Norms have biases where `LayerRules.norm` is torch's LayerNorm."""

    modules: Mapping[str, str] = field(default_factory=dict)
    """Modules of a decoder layer, in Hugging Face's order -> role: see toolkit.estimate.parameters.layer_parameters."""
    qkv_bias: Flag = ("attention_bias", False)
    out_bias: Flag = ("attention_bias", False)
    affine: Flag = ("", True)
    """Whether norms have parameters."""
    conv1d: bool = False
    """Linear layers are [inputs, outputs]."""
    positions_offset: int = 0
    """Rows of the position table beside those that the config counts."""
    head_bias: bool = False
    """The LM head has a bias."""
    final_norm: str = "norm"
    """Name of the norm in front of the head; "" for none."""
    final_norm_first: bool = False
    """It is registered in front of the decoder layers."""
    embedding_scale: Literal["none", "buffer", "scale_emb"] = "none"
    """The embedding's scale as a buffer of the model: fp32, or of the dtype of the config's `scale_emb`."""
    buffers: Literal["rotary", "causal_mask", "sinusoids", "position_ids", "none"] = "rotary"
    """Buffers of the model outside its layers."""
    layer_buffers: Literal["none", "xielu", "causal_mask", "causal_mask_fp32", "rotary_table"] = "none"


CONFIG_FIELDS = {
    *("activation", "attention_dropout", "hidden_dropout", "first_dropout", "embedding_dropout", "activation_dropout"),
    *("head_norm_field", "parallel_field", "pre_norms_field", "mlp_bias", "qkv_bias", "out_bias", "affine"),
}
"""The fields above that are pairs."""
