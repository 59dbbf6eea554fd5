"""Recorded parameters against the modules that training builds from the same config, whole, sharded and in stages."""

import json
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from refusals import refused
from training_setups import rank_pass
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.errors import ModelError
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.parameters import ModelParameters
from toolkit.estimate.recorded.recording import RankPass, StagePart, config_text
from toolkit.models import shape
from toolkit.models.shape import find_config, with_overrides
from toolkit.recorder.fake_model import build
from toolkit.recorder.parameters import record_parameters
from toolkit.recorder.record import in_fake_group

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
        {"multi_query": False, "parallel_attn": False, "bias": True, "num_kv_heads": 4},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
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


DAILY = ("gpt2", "gpt_bigcode", "falcon", "llama", "qwen3", "opt", "bloom", "olmo2")


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


def parameters_of(config: dict[str, Any]) -> ModelParameters:
    return record_parameters(config_text(config))


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_parameters_and_buffers_are_those_of_the_model_in_order(family, changes):
    config = tiny(family, tie_word_embeddings=len(changes) % 2 == 0, **changes)
    model, found = hugging_face(config), parameters_of(config)
    named, listed = list(model.named_parameters()), list(found.parameters())
    assert [tensor.shape for tensor in listed] == [tuple(parameter.shape) for _, parameter in named]
    for tensor, (name, _) in zip(listed, named, strict=True):
        assert name.endswith(tensor.name)
    held = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    assert found.rank_parameters().buffer_bytes == held


def built(stage_pass: RankPass) -> list[list[int]]:
    """Sizes of matrices and of the rest on a rank, as training builds its stage."""
    with in_fake_group(stage_pass.config, stage_pass.layout.tp):
        parameters = [*build(stage_pass, torch.device("meta")).model.parameters()]
    return [[p.numel() for p in parameters if (p.dim() > 1) == decays] for decays in (True, False)]


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("part", ["whole", "first", "middle", "last"])
@pytest.mark.parametrize("family", sorted(DAILY))
def test_a_rank_has_the_parameters_that_training_gives_it(family: str, part: StagePart, tp: int) -> None:
    layers = {"whole": range(3), "first": range(3), "middle": range(1, 3), "last": range(1, 4)}[part]
    ends = {"whole": (True, True), "first": (True, False), "middle": (False, False), "last": (False, True)}[part]
    config = tiny(family, num_hidden_layers=3 if part == "whole" else 4)
    held = parameters_of(config).rank_parameters(layers=layers, first=ends[0], last=ends[1], tp=tp)
    found = built(rank_pass(config_text(config), tp=tp, part=part, attention="eager"))
    assert [list(group) for group in held.groups] == [group for group in found if group]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.whole] if at % 4 else []) for at, name in enumerate(shape.names())]
)
def test_a_catalogue_model_has_the_parameters_of_its_modules(name):
    config = find_config(name)
    assert ModelFacts.from_config(config).parameters.numel == sum(p.numel() for p in hugging_face(config).parameters())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("mixtral-8x7b", 46.7),
        ("deepseek-v3", 671),
        ("gpt-oss-20b", 20.9),
        ("llama-3.1-405b", 405.9),
        ("gpt2-xl", 1.558),
    ],
)
def test_the_parameters_are_as_many_as_published(name: str, billions: float) -> None:
    """Jiang et al. 2024, table 1; DeepSeek-AI 2024, section 4.2; OpenAI 2025, table 1; Dubey et al. 2024, table 3."""
    assert ModelFacts.from_config(find_config(name) or {}).parameters.numel == pytest.approx(billions * 1e9, rel=2e-3)


def test_parameters_are_the_same_after_they_were_stored() -> None:
    found = parameters_of(tiny("gpt2"))
    assert ModelParameters.decoded(json.loads(json.dumps(found.encoded()))).encoded() == found.encoded()


def test_a_family_without_an_estimate_is_refused_by_name():
    with refused(ModelError, "model_type", remedy="see dstk families mamba"):
        ModelFacts.from_config({"model_type": "mamba"})
