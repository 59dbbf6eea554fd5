"""The names under which torchtitan stores Llama 3 and dense Qwen 3 models.

Its Llama turns pairs of neighboring features in rotary embeddings, Hugging Face's the two halves of a head: the rows of
query and key are in another order. Its Qwen 3 keeps the halves. Source: torchtitan/models/{llama3,qwen3}/
state_dict_adapter.py of October 2026, whose older names (`attention.wq`, `output`) are read as well.
"""

from collections.abc import Iterator
from functools import partial

import torch

from toolkit.convert.weight_map import (
    Config,
    Shapes,
    StoredWeight,
    Tensors,
    WeightMap,
    WeightPart,
    halves_to_pairs,
    pairs_to_halves,
)
from toolkit.errors import CheckpointError

FAMILIES = ("llama", "qwen3")
_OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_INSIDE = {
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def torchtitan_map(config: Config, shapes: Shapes) -> WeightMap:
    """The map of a model with these parameters. Raises CheckpointError for a family that torchtitan does not have."""
    if config.model_type not in FAMILIES:
        reason = "its names in torchtitan are not known here"
        raise CheckpointError.of("model_type", config.model_type, reason, ("model_type", " or ".join(FAMILIES)))
    return WeightMap("torchtitan", list(_weights(config, shapes)))


def _weights(config: Config, shapes: Shapes) -> Iterator[StoredWeight]:
    for key, name in _OUTSIDE.items():
        if name in shapes:
            yield StoredWeight(key=key, parts=(WeightPart(name=name),), alias=key.replace("lm_head", "output"))
    heads = {
        "attention.qkv_linear.wq": config.num_attention_heads,
        "attention.qkv_linear.wk": config.num_key_value_heads,
    }
    for layer in range(config.num_hidden_layers):
        for key, name in _INSIDE.items():
            full = f"model.layers.{layer}.{name}.weight"
            if full not in shapes:
                continue
            stored = f"layers.{layer}.{key}.weight"
            alias = stored.replace("qkv_linear.", "")
            if config.model_type == "llama" and key in heads:
                yield StoredWeight(
                    key=stored,
                    parts=(WeightPart(name=full),),
                    split=partial(_to_halves, heads=heads[key]),
                    fuse=partial(_to_pairs, heads=heads[key]),
                    alias=alias,
                )
            else:
                yield StoredWeight(key=stored, parts=(WeightPart(name=full),), alias=alias)


def _to_halves(value: torch.Tensor, *, heads: int) -> Tensors:
    return [pairs_to_halves(value, heads=heads)]


def _to_pairs(values: Tensors, *, heads: int) -> torch.Tensor:
    return halves_to_pairs(values[0], heads=heads)
