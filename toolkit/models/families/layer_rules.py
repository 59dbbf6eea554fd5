"""Rules of a family's code that the memory estimate follows: which parameters and buffers it has.

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
Rotary = Literal[
    "none", "half", "partial", "interleaved", "fp32", "fp32_tables", "pairs", "pairs_partial", "pairs_fp32_tables",
    "sorted_pairs",
]
# fmt: on
HeadNormForm = Literal["by_head", "before_transpose", "weight_per_head", "module_per_head", "all_heads"]
Block = Literal["attention", "mlp"]
Flag = tuple[str, bool]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRules:
    """What parameters and buffers of one family depend on. The defaults are Llama's."""

    norm: Norm = "rms"
    rotary: Rotary = "half"
    rotary_share: float = 1.0
    """Default share of a head's features that the rotary embedding rotates."""
    rotary_per_kind: bool = False
    """Sliding and full attention have rotary tables of their own."""
    head_norm: Norm | None = None
    """Norm of queries and keys, where `head_norm_field` is on."""
    head_norm_field: Flag = ("", True)
    head_norm_form: HeadNormForm = "by_head"
    """`by_head`: one weight for all heads, applied behind the transpose. `weight_per_head`, `module_per_head`: one for
    each head. `all_heads`: over all heads together."""
    pre_norms_field: Flag = ("", True)
    mlp_bias: Flag = ("mlp_bias", False)
    full_every: int = 0
    """Every so many layers have full attention, by default, and the others a window; 0: all have full attention."""
    pattern_field: bool = False
    """The config's `sliding_window_pattern` overrides `full_every`."""
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
    *("head_norm_field", "pre_norms_field", "mlp_bias", "qkv_bias", "out_bias", "affine"),
}
"""The fields above that are pairs."""
