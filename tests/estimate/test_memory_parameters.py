"""The parameter walk, which reads config.json alone, against the modules that Hugging Face builds from the same."""

import json
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from refusals import refused
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.errors import ModelError
from toolkit.estimate.parameters import Architecture
from toolkit.models import shape
from toolkit.models.shape import find_config, with_overrides

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 131,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}

NEED_HEAD_DIM = ("ministral", "hunyuan_v1_dense", "helium")
"""transformers computes with the head_dim of their configs, which is None by default, or fits no other hidden_size."""

VARIATIONS: dict[str, list[dict[str, Any]]] = {
    "gpt_bigcode": [{"multi_query": False}],
    "gpt_neox": [
        {"attention_bias": False},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
    "opt": [
        {"enable_bias": False, "layer_norm_elementwise_affine": False},
        {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    ],
    "falcon": [
        {"multi_query": False, "parallel_attn": False, "bias": True},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "alibi": True},
    ],
    "phi": [{"qk_layernorm": True}],
    "starcoder2": [{"use_bias": False}],
    "llama": [{"attention_bias": True}, {"mlp_bias": True}, {"head_dim": 32}],
    "qwen3": [{"attention_bias": True}],
    "gemma": [{"attention_bias": True}],
    "stablelm": [{"use_qkv_bias": True}, {"qk_layernorm": True}, {"use_parallel_residual": True}],
    "granite": [{"attention_bias": True, "mlp_bias": True}],
    "cohere": [{"use_qk_norm": True}],
    "smollm3": [{"attention_bias": True}, {"mlp_bias": True}],
    "olmo3": [{"attention_bias": True}, {"layer_types": ["full_attention"] * 2}],
    "cohere2": [{"attention_bias": True}],
    "glm": [{"attention_bias": False}, {"partial_rotary_factor": 0.25}],
    "nemotron": [{"attention_bias": True, "mlp_bias": True}],
    "seed_oss": [{"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}],
    "ernie4_5": [{"use_bias": True}],
    "hunyuan_v1_dense": [{"attention_bias": True}],
    "apertus": [{"attention_bias": True, "hidden_act": "relu2"}],
    "arcee": [{"attention_bias": True, "mlp_bias": True}],
    "nanochat": [{"attention_bias": True}],
    "internlm3": [{"qkv_bias": True, "bias": True}],
    "helium": [{"attention_bias": True, "mlp_bias": True}],
    "cwm": [{"mlp_bias": True}],
    "jais2": [{"attention_bias": False, "mlp_bias": False}],
    "hyperclovax": [{"use_post_norm": False, "attention_bias": True, "mlp_bias": True}],
    "bitnet": [{"attention_bias": True}],
    "vaultgemma": [{"attention_bias": True}],
    "diffllama": [{"attention_bias": True}],
    "minicpm3": [{"attention_bias": True, "mlp_bias": True}, {"q_lora_rank": None, "v_head_dim": 8, "scale_emb": 2.5}],
    "youtu": [{"attention_bias": True}, {"q_lora_rank": None}],
    "persimmon": [{"qk_layernorm": False}, {"partial_rotary_factor": 0.25}],
}
CASES = [(family, {}) for family in shape.families()] + [
    (family, changes) for family, variations in VARIATIONS.items() for changes in variations
]


def tiny(family: str, **changes: Any) -> dict[str, Any]:
    layers = {"attention_types": [[["global"], 2]]} if family == "gpt_neo" else {}
    rotary = {"rotary_dim": 8} if family in ("gptj", "codegen") else {}
    heads = {"head_dim": 16} if family in NEED_HEAD_DIM else {}
    if family in ("minicpm3", "youtu"):  # every head has a key of its own
        heads = {"num_key_value_heads": TINY["num_attention_heads"]}
    return with_overrides({"model_type": family}, TINY | layers | rotary | heads | changes)


@cache
def on_meta(config_json: str) -> Any:
    transformers.logging.set_verbosity_error()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(config_json)))


def hugging_face(config: dict[str, Any]) -> Any:
    return on_meta(json.dumps(config))


@pytest.mark.parametrize(("family", "changes"), CASES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_parameters_are_those_of_the_model_in_order(family, changes, tied):
    config = tiny(family, tie_word_embeddings=tied, **changes)
    named = list(hugging_face(config).named_parameters())
    walked = list(Architecture.from_config(config).parameters())
    assert [tensor.shape for tensor in walked] == [tuple(parameter.shape) for _, parameter in named]
    for tensor, (name, _) in zip(walked, named, strict=True):
        if tensor.place == "layer":
            assert name.endswith("." + tensor.name)


DENSE = [name for name in shape.names() if (find_config(name) or {})["model_type"] in shape.families()]


@pytest.mark.parametrize("name", DENSE)
def test_a_catalogue_model_has_the_parameters_of_its_modules(name):
    config = find_config(name)
    assert Architecture.from_config(config).numel == sum(p.numel() for p in hugging_face(config).parameters())


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_buffers_take_the_bytes_that_the_modules_take(family, changes):
    config = tiny(family, **changes)
    held = sum(buffer.numel() * buffer.element_size() for buffer in hugging_face(config).buffers())
    assert Architecture.from_config(config).rank_parameters(layers=2).buffer_bytes == held


def test_a_model_with_experts_is_refused_by_name():
    with refused(ModelError, "model_type", remedy="see dstk families mixtral"):
        Architecture.from_config({"model_type": "mixtral"})


@pytest.mark.parametrize("family", shape.families())
def test_a_config_as_transformers_saves_it_gives_the_same_parameters(family, tmp_path):
    config = tiny(family)
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    saved = find_config(str(tmp_path))
    assert saved is not None
    assert list(Architecture.from_config(saved).parameters()) == list(Architecture.from_config(config).parameters())
