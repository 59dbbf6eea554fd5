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
EXPERT_BIASES = ("expert_bias_E", "expert_bias")
"""Last names of the biases by which torchtitan's routers balance experts. Routers of the families here have none."""
_BACKEND = "model."
"""What stands before the names of transformers in torchtitan's `transformers_modeling_backend`."""
_EXPERTS = "routed_experts.inner_experts"
"""The module of a block of torchtitan's that has the weights of its experts."""
_OLD_EXPERTS = "experts"
"""The same module in older versions, where the names of weights have no dimensions (`w1`)."""
_GATE_UP = ".experts.gate_up_proj"
"""The end of the name of the parameter that has gate and up of a block's experts in transformers."""
_BLOCK_PARAMETERS = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
"""Parameters of a block with experts in transformers that has a block of torchtitan's in its place."""
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


def torchtitan_map(config: Config, shapes: Shapes) -> WeightMap:
    """The map of a model with these parameters. Raises CheckpointError for a family that torchtitan does not have."""
    if config.model_type not in FAMILIES:
        reason = "its names in torchtitan are not known here"
        raise CheckpointError.of("model_type", config.model_type, reason, ("model_type", " or ".join(FAMILIES)))
    return WeightMap("torchtitan", list(_weights(config, shapes)))


def backend_map(shapes: Shapes) -> WeightMap:
    """The map of a model of transformers in torchtitan's `transformers_modeling_backend`.

    Of a model that the backend does not train (`check_backend`) it is not one that torchtitan reads.
    """
    return WeightMap("torchtitan (transformers_modeling_backend)", list(_backend_weights(shapes)))


def check_backend(config: Config, shapes: Shapes) -> None:
    """Refuse a model whose names in torchtitan's `transformers_modeling_backend` are not known. Raises CheckpointError.

    The backend looks for `model.embed_tokens` and `model.layers`. Of blocks with experts these are known that have a
    router and routed experts alone.
    """
    reason = None
    if "model.embed_tokens.weight" not in shapes:
        reason = "torchtitan's transformers_modeling_backend trains models with model.embed_tokens and model.layers"
    for block in _routed_blocks(shapes):
        prefix = f"{block}."
        names = [name.removeprefix(prefix) for name in shapes if name.startswith(prefix)]
        other = next((name for name in names if name not in _BLOCK_PARAMETERS), None)
        if other is not None:
            reason = f"where torchtitan stores {block}.{other} is not known here"
            break
    if reason is not None:
        raise CheckpointError.of("model_type", config.model_type, reason, "use --format dcp")


def _routed_blocks(shapes: Shapes) -> list[str]:
    """The names of all blocks with experts."""
    return [name.removesuffix(_GATE_UP) for name in shapes if name.endswith(_GATE_UP)]


def _backend_weights(shapes: Shapes) -> Iterator[StoredWeight]:
    blocks = _routed_blocks(shapes)
    of_experts = {f"{block}.experts.{last}" for block in blocks for last in ("gate_up_proj", "down_proj")}
    routers = {f"{block}.gate.weight": f"{block}.router.gate.weight" for block in blocks}
    for name in shapes:
        if name not in of_experts:
            yield StoredWeight(key=f"{_BACKEND}{routers.get(name, name)}", parts=(WeightPart(name=name),))
    for block in blocks:
        yield from _experts(shapes, block, f"{_BACKEND}{block}")


def _experts(shapes: Shapes, block: str, stored_block: str) -> Iterator[StoredWeight]:
    """The experts of a block of transformers, whose gate and up are one parameter [experts, 2f, h]."""
    gate_up = f"{block}{_GATE_UP}"
    experts, rows, _ = shapes[gate_up]
    half = rows // 2
    for expert in range(experts):
        gate = WeightPart(name=gate_up, index=(expert,), rows=range(half))
        up = WeightPart(name=gate_up, index=(expert,), rows=range(half, rows))
        down = WeightPart(name=f"{block}.experts.down_proj", index=(expert,))
        for key, old_key, part in (("w1_EFD", "w1", gate), ("w3_EFD", "w3", up), ("w2_EDF", "w2", down)):
            yield StoredWeight(
                key=f"{stored_block}.{_EXPERTS}.{key}",
                parts=(part,),
                index=(expert,),
                alias=f"{stored_block}.{_OLD_EXPERTS}.{old_key}",
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
        if f"{block}{_GATE_UP}" in shapes:
            yield from _experts(shapes, block, f"layers.{layer}.moe")


def _to_halves(value: torch.Tensor, *, heads: int) -> Tensors:
    return [pairs_to_halves(value, heads=heads)]


def _to_pairs(values: Tensors, *, heads: int) -> torch.Tensor:
    return halves_to_pairs(values[0], heads=heads)
