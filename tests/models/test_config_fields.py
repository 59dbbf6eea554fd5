"""Whatever stands in a config's field, the estimate answers or says in one line what the field may be."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from training_setups import memory_request
from transformers import AutoConfig

from toolkit.cli.memory.options import read_config
from toolkit.config.layout import Layout
from toolkit.errors import ModelError, ToolkitError
from toolkit.estimate.framework_profile import FrameworkProfile
from toolkit.estimate.memory_request import Framework
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.states import TorchStates
from toolkit.models.config_fields import read_config_json
from toolkit.models.shape import families, find_config, with_overrides

HOSTILE = ["x", [0], {}, -1, None, True, 10**9, float("nan"), 3]
MORE = {
    "falcon": {"new_decoder_architecture": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 64},
    "qwen3": {"use_sliding_window": True, "sliding_window": 64},
}
"""What makes a family's code read all of its fields."""
NESTED = {"rope_parameters": ("partial_rotary_factor", "rope_theta"), "attn_config": ("attn_pdrop", "clip_qkv")}
ALWAYS = ("model_type", "text_config", "quantization_config", "attn_config", "rope_parameters", "layer_types")
QUICK = ("falcon",)
WITHOUT_EFFECT = {"_name_or_path", "architectures", "dtype", "transformers_version", "id2label", "label2id"}


def estimate(config: Mapping[str, Any], framework: Framework | None = None) -> None:
    """By a framework's profile, unless another is given: it needs no recording of activations."""
    model = ModelFacts.from_config(config)
    work = {"micro_batch_size": 1, "seq_len": 8, "attention": "eager"}
    for stage in memory_request(
        model, Layout(dp=1), work, framework or FrameworkProfile(name="megatron-2021")
    ).stages():
        assert stage.total >= 0


def hostile_configs(family: str) -> Iterator[dict[str, Any]]:
    base = with_overrides({"model_type": family, **MORE.get(family, {})}, {"num_hidden_layers": 2})
    own = AutoConfig.for_model(family).to_dict()
    for field in {**own, **dict.fromkeys(ALWAYS)}.keys() - WITHOUT_EFFECT:
        yield from (base | {field: value} for value in HOSTILE)
        for inner in NESTED.get(field, ()):
            yield from (base | {field: {inner: value}} for value in HOSTILE)


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in QUICK else pytest.mark.whole) for family in families()],
)
def test_any_value_of_any_field_is_answered_or_refused_in_one_line(family: str) -> None:
    configs = list(hostile_configs(family))
    assert len(configs) > 100
    for config in configs:
        assert "\n" not in answer(config), config


def answer(config: Mapping[str, Any]) -> str:
    try:
        estimate(config)
    except ToolkitError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{config}: {error!r}") from error
    return ""


LLAMA = {"model_type": "llama", "num_hidden_layers": 4}
SMOLLM3 = {"model_type": "smollm3", "num_hidden_layers": 4}
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("config", "field", "allowed"),
    [
        (LLAMA | {"attention_dropout": "0.1"}, "attention_dropout", "a number from"),
        (LLAMA | {"attention_dropout": float("nan")}, "attention_dropout", "a number from"),
        (LLAMA | {"attention_dropout": 10**400}, "attention_dropout", "a number from"),
        (LLAMA | {"layer_types": "full_attention"}, "layer_types", "a list"),
        (LLAMA | {"rope_parameters": [1]}, "rope_parameters", "an object"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor", "from 0 to 1"),
        (GEMMA | {"layer_types": "full_attention"}, "layer_types", "a list"),
        (GEMMA | {"layer_types": ["full_attention"]}, "layer_types", "1 layers, and the model has 4"),
        (GEMMA | {"layer_types": ["full_attention", "conv"] * 2}, "layer_types", "known are"),
        (LLAMA | {"tie_word_embeddings": "false"}, "tie_word_embeddings", "true or false"),
        (LLAMA | {"attention_bias": "false"}, "attention_bias", "true or false"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers", "from 1 to 10000"),
        (LLAMA | {"num_attention_heads": 10**9}, "num_attention_heads", "from 1 to 10000"),
        (LLAMA | {"hidden_size": 2**70}, "hidden_size", "from 1 to 2147483647"),
        ({"model_type": "gemma3", "text_config": [1]}, "text_config", "an object"),
        ({"model_type": "gpt2", "n_positions": None}, "n_positions", "from 1"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern", "from 1"),
        ({"model_type": "mpt", "attn_config": "x"}, "attn_config", "an object"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window", "from 1, or null for none"),
        ({"model_type": "mistral", "sliding_window": "4096"}, "sliding_window", "from 1, or null for none"),
        (SMOLLM3 | {"no_rope_layers": [1, 0]}, "no_rope_layers", "a list of 0 or 1 for each of 4 layers"),
        (SMOLLM3 | {"no_rope_layer_interval": 0}, "no_rope_layer_interval", "from 1"),
        (
            {"model_type": "falcon", "new_decoder_architecture": True, "num_ln_in_parallel_attn": "x"},
            "num_ln_in_parallel_attn",
            "from 1 to 2",
        ),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "are not modeled"),
        ({"model_type": "gptj", "rotary_dim": -4}, "rotary_dim", "from 2"),
        ({"model_type": "gptj", "rotary_dim": 258}, "rotary_dim", "an even number up to a head's 256 features"),
    ],
)
def test_a_value_that_a_model_cannot_be_built_with_is_refused(config: dict[str, Any], field: str, allowed: str) -> None:
    with pytest.raises(ModelError) as caught:
        estimate(config)
    assert caught.value.refusal.field == field
    assert allowed in caught.value.refusal.reason


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LLAMA | {"head_dim": 127}, "an even rotary dimension"),
        (LLAMA | {"rms_norm_eps": "x"}, "rms_norm_eps"),
        (LLAMA | {"hidden_act": "swishy"}, "swishy"),
        ({"model_type": "diffllama", "num_attention_heads": 1}, "requires `num_key_value_heads` to be even"),
    ],
)
def test_what_cannot_be_recorded_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        estimate(config, TorchStates())


@pytest.mark.parametrize(
    ("config", "same"),
    [
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": -1}, {"model_type": "qwen2"}),
        # As after an override of the number of layers.
        ({"model_type": "smollm3", "num_hidden_layers": 2, "no_rope_layers": [0, 1, 0, 1]}, None),
    ],
)
def test_what_is_not_read_may_have_any_value(config: dict[str, Any], same: dict[str, Any] | None) -> None:
    model = ModelFacts.from_config(config)
    assert same is None or model.parameters.numel == ModelFacts.from_config(same).parameters.numel


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[" * 100_000, "nested too deep"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "a number of thousands of digits"),
        (b"{", "is not JSON"),
        (b"[1]", "not a JSON object but a list"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_file_that_is_not_a_config_is_refused_in_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for read in (lambda: read_config_json(path), lambda: read_config(str(path)), lambda: find_config(str(tmp_path))):
        with pytest.raises(ModelError, match=says) as error:
            read()
        assert "\n" not in str(error.value)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert read_config(str(path)) == find_config(str(tmp_path)) == LLAMA
