"""Families whose attention does not go through transformers' attention interface: selective recomputation has no hold.

Most families ask the interface for the function between their projections, so it can be put into a checkpoint without
code per family. The older ones write scores, softmax and context out in their own layers. No torch is imported here.
"""

from collections.abc import Mapping
from typing import Any

OWN_ATTENTION = frozenset(
    {
        *("big_bird", "bloom", "codegen", "cpmant", "falcon", "git", "gpt_neo", "gpt_neox_japanese", "gptj"),
        *("megatron-bert", "mpt", "mvp", "openai-gpt", "prophetnet", "reformer", "rembert", "roformer", "trocr"),
        *("xglm", "xlm", "xlnet"),
    }
)
"""Causal LMs of transformers 5.23 that compute attention in their own layers."""
NO_ATTENTION = frozenset({"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"})
REMEDY = "Set parallel.recompute=full or none"


def own_attention(config: Mapping[str, Any], attention: str) -> str | None:
    """Why attention of this config cannot be computed again by itself; None where it can, or nobody knows yet.

    A family that is not known here is looked at when its model is built.
    """
    family = config.get("model_type")
    if family in NO_ATTENTION:
        return f"{family} has no attention"
    if family in OWN_ATTENTION:
        return f"{family} computes attention in its own layers, not through the attention interface of transformers"
    if attention == "eager" and config.get("reorder_and_upcast_attn"):
        return "reorder_and_upcast_attn=true with eager attention does not go through the interface of transformers"
    return None
