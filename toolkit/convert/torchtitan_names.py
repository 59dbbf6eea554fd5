"""The names under which torchtitan stores Llama 3, Qwen 3 and its mixtures, and the models of transformers.

Its Llama turns pairs of neighboring features in rotary embeddings, Hugging Face's the two halves of a head: the rows of
query and key are in another order. Its Qwen 3 keeps the halves. Experts are three tensors a layer, [experts, out, in]:
gate (w1), down (w2) and up (w3). Its `transformers_modeling_backend` trains models of transformers under a module named
`model`, and replaces blocks with experts by its own. Sources: torchtitan/models/{llama3,qwen3}/state_dict_adapter.py of
October 2026, whose older names (`attention.wq`, `output`, `experts.w1`) are read as well, and
torchtitan/experiments/transformers_modeling_backend/state_dict_adapter.py of August 2026.
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

FAMILIES = ("llama", "qwen3", "qwen3_moe")
BACKEND = "model."
"""What stands before the names of transformers in torchtitan's `transformers_modeling_backend`."""
EXPERT_BIASES = ("expert_bias_E", "expert_bias")
"""Last names of the biases by which torchtitan's routers balance experts; no model of transformers has a place for them
where its own router has none."""
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
    "moe.router.gate": "mlp.gate",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


_EXPERTS = "routed_experts.inner_experts"
"""The place of the weights of experts in a block of torchtitan's."""
_OLD_EXPERTS = "experts"


def torchtitan_map(config: Config, shapes: Shapes) -> WeightMap:
    """The map of a model with these parameters. Raises CheckpointError for a family that torchtitan does not have."""
    if config.model_type not in FAMILIES:
        reason = "its names in torchtitan are not known here"
        raise CheckpointError.of("model_type", config.model_type, reason, ("model_type", " or ".join(FAMILIES)))
    return WeightMap("torchtitan", list(_weights(config, shapes)))


def backend_map(shapes: Shapes) -> WeightMap:
    """The map of a model of transformers in torchtitan's `transformers_modeling_backend`."""
    return WeightMap("torchtitan (transformers_modeling_backend)", list(_backend_weights(shapes)))


def _backend_weights(shapes: Shapes) -> Iterator[StoredWeight]:
    routed = {name.removesuffix(".experts.gate_up_proj") for name in shapes if name.endswith(".experts.gate_up_proj")}
    for name in shapes:
        block, _, last = name.rpartition(".experts.")
        if block in routed:
            if last == "gate_up_proj":
                yield from _experts(shapes, block, f"{BACKEND}{block}")
        elif name.removesuffix(".gate.weight") in routed:
            key = f"{BACKEND}{name.removesuffix('.gate.weight')}.router.gate.weight"
            yield StoredWeight(key=key, parts=(WeightPart(name=name),))
        else:
            yield StoredWeight(key=f"{BACKEND}{name}", parts=(WeightPart(name=name),))


def _experts(shapes: Shapes, block: str, stored_block: str) -> Iterator[StoredWeight]:
    """The experts of a block of transformers, whose gate and up are one parameter [experts, 2f, h]."""
    gate_up = f"{block}.experts.gate_up_proj"
    down = f"{block}.experts.down_proj"
    experts, rows, _ = shapes[gate_up]
    parts = {
        ("w1", "EFD"): (gate_up, range(rows // 2)),
        ("w3", "EFD"): (gate_up, range(rows // 2, rows)),
        ("w2", "EDF"): (down, None),
    }
    for (key, dimensions), (name, part_rows) in parts.items():
        for expert in range(experts):
            yield StoredWeight(
                key=f"{stored_block}.{_EXPERTS}.{key}_{dimensions}",
                parts=(WeightPart(name=name, index=(expert,), rows=part_rows),),
                index=(expert,),
                alias=f"{stored_block}.{_OLD_EXPERTS}.{key}",
            )


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
        block = f"model.layers.{layer}.mlp"
        if f"{block}.experts.gate_up_proj" in shapes:
            yield from _experts(shapes, block, f"layers.{layer}.moe")


def _to_halves(value: torch.Tensor, *, heads: int) -> Tensors:
    return [pairs_to_halves(value, heads=heads)]


def _to_pairs(values: Tensors, *, heads: int) -> torch.Tensor:
    return halves_to_pairs(values[0], heads=heads)
