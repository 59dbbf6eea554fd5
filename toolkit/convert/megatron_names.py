"""The names under which Megatron-Core stores GPT models in its distributed checkpoints (`torch_dist`).

Decoder layers of one kind are one tensor with the layer as first dimension (`decoder.layers.self_attention…`), else one
each (`decoder.layers.3.…`); experts are a dimension after it. Norms before a linear layer have that layer's name, with
Transformer Engine's layers and without; before experts, only without (`is_local`). Query, key and value are fused group
by group, gate and up one above the other, and the rows of the vocabulary are padded. Source: what megatron-core 0.16.1
writes; megatron/core/transformer/{attention,mlp}.py and megatron/core/models/gpt/gpt_layer_specs.py.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from toolkit.convert.weight_map import (
    Config,
    Shapes,
    StoredWeight,
    Tensors,
    WeightMap,
    WeightPart,
    fuse_heads,
    padded,
    split_gated,
    split_heads,
)
from toolkit.errors import CheckpointError

FAMILIES = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
LAYERS = "decoder.layers."
_NORM = "pre_mlp_layernorm.weight"
_LOCAL_NORM = "mlp.linear_fc1.layer_norm_weight"
"""Names of the norm before experts, with Transformer Engine's layers and without."""


def megatron_map(
    config: Config,
    shapes: Shapes,
    *,
    is_stacked: bool,
    is_local: bool = False,
    vocabulary_rows: int | None = None,
) -> WeightMap:
    """The map of a model with these parameters. `is_stacked`: whether layers are one tensor.

    `is_local`: whether layers are Megatron-Core's own, and not Transformer Engine's; either is read.
    `vocabulary_rows`: of the padded vocabulary; by default that of the model. Raises CheckpointError for a family whose
    names are not known.
    """
    if config.model_type not in FAMILIES:
        reason = "its names in Megatron-Core are not known here"
        raise CheckpointError.of("model_type", config.model_type, reason, ("model_type", " or ".join(FAMILIES)))
    names: _Gpt2 | _Llama
    if config.model_type == "gpt2":
        names = _Gpt2(config, is_stacked)
    else:
        names = _Llama(config, shapes, is_stacked, is_local)
    rows = vocabulary_rows or config.vocab_size
    return WeightMap("Megatron-Core", [*names.outside(rows), *names.inside()])


def _vocabulary(key: str, name: str, config: Config, rows: int) -> StoredWeight:
    return StoredWeight(
        key=key,
        parts=(WeightPart(name=name),),
        split=lambda value: [value[: config.vocab_size]],
        fuse=lambda values: padded(values[0], rows),
    )


class _Gpt2:
    """GPT-2, whose linear layers store their weights as [in, out]: Megatron's are the transposed ones."""

    def __init__(self, config: Config, is_stacked: bool) -> None:
        self.config = config
        self.is_stacked = is_stacked
        heads = config.num_attention_heads
        self.heads: dict[str, Any] = {"groups": heads, "per_group": 1, "width": config.hidden_size // heads}

    def outside(self, rows: int) -> Iterator[StoredWeight]:
        yield _vocabulary("embedding.word_embeddings.weight", "transformer.wte.weight", self.config, rows)
        positions = WeightPart(name="transformer.wpe.weight")
        yield StoredWeight(key="embedding.position_embeddings.weight", parts=(positions,))
        for kind in ("weight", "bias"):
            yield StoredWeight(
                key=f"decoder.final_layernorm.{kind}", parts=(WeightPart(name=f"transformer.ln_f.{kind}"),)
            )
        if not self.config.tie_word_embeddings:
            yield _vocabulary("output_layer.weight", "lm_head.weight", self.config, rows)

    def inside(self) -> Iterator[StoredWeight]:
        for layer in range(self.config.num_hidden_layers):
            for kind in ("weight", "bias"):
                yield self._weight(layer, f"self_attention.linear_qkv.layer_norm_{kind}", f"ln_1.{kind}")
                yield self._weight(layer, f"mlp.linear_fc1.layer_norm_{kind}", f"ln_2.{kind}")
                yield self._weight(
                    layer, f"self_attention.linear_qkv.{kind}", f"attn.c_attn.{kind}", self._split, self._fuse
                )
                for key, name in (
                    ("self_attention.linear_proj", "attn.c_proj"),
                    ("mlp.linear_fc1", "mlp.c_fc"),
                    ("mlp.linear_fc2", "mlp.c_proj"),
                ):
                    swap = {"split": _transpose_each, "fuse": _transpose_one} if kind == "weight" else {}
                    yield self._weight(layer, f"{key}.{kind}", f"{name}.{kind}", **swap)

    def _weight(self, layer: int, key: str, name: str, split: Any = None, fuse: Any = None) -> StoredWeight:
        functions = {} if split is None else {"split": split, "fuse": fuse}
        return StoredWeight(
            parts=(WeightPart(name=f"transformer.h.{layer}.{name}"),),
            **_place(layer, key, self.is_stacked),
            **functions,
        )

    def _split(self, value: torch.Tensor) -> Tensors:
        fused = torch.cat(list(split_heads(value, **self.heads)))
        return [fused.t() if fused.dim() == 2 else fused]

    def _fuse(self, values: Tensors) -> torch.Tensor:
        fused = values[0].t() if values[0].dim() == 2 else values[0]
        return fuse_heads(fused.chunk(3), **self.heads)


def _transpose_each(value: torch.Tensor) -> Tensors:
    return [value.t()]


def _transpose_one(values: Tensors) -> torch.Tensor:
    return values[0].t()


def _stack(values: Tensors) -> torch.Tensor:
    return torch.cat(list(values))


def _place(layer: int, key: str, is_stacked: bool) -> dict[str, Any]:
    return {"key": f"{LAYERS}{key}", "index": (layer,)} if is_stacked else {"key": f"{LAYERS}{layer}.{key}"}


class _Llama:
    """Llama and its kin: RMS norms, grouped queries, a gated MLP or experts that each are one."""

    def __init__(self, config: Config, shapes: Shapes, is_stacked: bool, is_local: bool) -> None:
        self.config = config
        self.shapes = shapes
        self.is_stacked = is_stacked
        self.expert_norm = _LOCAL_NORM if is_local else _NORM
        self.other_expert_norm = _NORM if is_local else _LOCAL_NORM
        heads = config.num_attention_heads
        groups = config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.heads: dict[str, Any] = {"groups": groups, "per_group": heads // groups, "width": width}

    def outside(self, rows: int) -> Iterator[StoredWeight]:
        yield _vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight", self.config, rows)
        yield StoredWeight(key="decoder.final_layernorm.weight", parts=(WeightPart(name="model.norm.weight"),))
        if not self.config.tie_word_embeddings:
            yield _vocabulary("output_layer.weight", "lm_head.weight", self.config, rows)

    def inside(self) -> Iterator[StoredWeight]:
        for layer in range(self.config.num_hidden_layers):
            for kind in ("weight", "bias"):
                yield from self._attention(layer, kind)
            yield from self._norm(layer, "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
            yield from self._norm(layer, "self_attention.q_layernorm.weight", "self_attn.q_norm.weight")
            yield from self._norm(layer, "self_attention.k_layernorm.weight", "self_attn.k_norm.weight")
            if self._name(layer, "mlp.experts.gate_up_proj") in self.shapes:
                place = _place(layer, self.expert_norm, self.is_stacked)
                other = _place(layer, self.other_expert_norm, self.is_stacked)["key"]
                norm = WeightPart(name=self._name(layer, "post_attention_layernorm.weight"))
                yield StoredWeight(parts=(norm,), alias=other, **place)
                yield from self._experts(layer)
            else:
                yield from self._norm(layer, "mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight")
                yield from self._mlp(layer)

    def _name(self, layer: int, name: str) -> str:
        return f"model.layers.{layer}.{name}"

    def _norm(self, layer: int, key: str, name: str) -> Iterator[StoredWeight]:
        full = self._name(layer, name)
        if full in self.shapes:
            yield StoredWeight(parts=(WeightPart(name=full),), **_place(layer, key, self.is_stacked))

    def _attention(self, layer: int, kind: str) -> Iterator[StoredWeight]:
        names = [self._name(layer, f"self_attn.{part}_proj.{kind}") for part in ("q", "k", "v")]
        if names[0] in self.shapes:
            yield StoredWeight(
                parts=tuple(WeightPart(name=name) for name in names),
                split=partial(split_heads, **self.heads),
                fuse=partial(fuse_heads, **self.heads),
                **_place(layer, f"self_attention.linear_qkv.{kind}", self.is_stacked),
            )
        yield from self._norm(layer, f"self_attention.linear_proj.{kind}", f"self_attn.o_proj.{kind}")

    def _mlp(self, layer: int) -> Iterator[StoredWeight]:
        for kind in ("weight", "bias"):
            names = [self._name(layer, f"mlp.{part}_proj.{kind}") for part in ("gate", "up")]
            if names[0] in self.shapes:
                yield StoredWeight(
                    parts=tuple(WeightPart(name=name) for name in names),
                    split=split_gated,
                    fuse=_stack,
                    **_place(layer, f"mlp.linear_fc1.{kind}", self.is_stacked),
                )
            yield from self._norm(layer, f"mlp.linear_fc2.{kind}", f"mlp.down_proj.{kind}")

    def _experts(self, layer: int) -> Iterator[StoredWeight]:
        yield from self._norm(layer, "mlp.router.weight", "mlp.gate.weight")
        for key, name in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
            full = self._name(layer, f"mlp.experts.{name}")
            for expert in range(self.shapes[full][0]):
                place = _place(layer, f"mlp.experts.experts.{key}.weight", self.is_stacked)
                place["index"] = (*place.get("index", ()), expert)
                yield StoredWeight(parts=(WeightPart(name=full, index=(expert,)),), **place)


def padded_rows(vocabulary: int, *, multiple: int) -> int:
    """Rows of a vocabulary that Megatron-LM pads to a multiple (`--make-vocab-size-divisible-by` times tp)."""
    return -(-vocabulary // multiple) * multiple
