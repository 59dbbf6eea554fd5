import json
import math
import subprocess
import sys
from functools import cache

import pytest
import torch
import transformers
from refusals import refused
from test_memory_parameters import NEED_HEAD_DIM
from transformers import AutoConfig, AutoModelForCausalLM, BambaConfig
from transformers.pytorch_utils import Conv1D

from toolkit.config.recipe import ModelSection
from toolkit.errors import ModelError
from toolkit.model_init.build_model import load_config
from toolkit.models import shape
from toolkit.models.families.registry import CONFIG_SCHEMAS, FAMILIES
from toolkit.models.shape import ModelShape, find_config, with_overrides
from toolkit.models.weights import matmul_parameters

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}


@cache
def on_meta(config_json):
    config = json.loads(config_json)
    transformers.logging.set_verbosity_error()
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def meta_model(config):
    return on_meta(json.dumps(config))


def weights_of_matmuls(model):
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear | Conv1D))


def test_importing_the_catalogue_does_not_import_torch():
    code = "import sys, toolkit.models.shape; toolkit.models.shape.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def dense_names():
    return [name for name in shape.names() if find_config(name)["model_type"] in CONFIG_SCHEMAS]


@pytest.mark.parametrize("name", shape.names())
def test_a_catalogue_entry_has_the_parameters_it_states(name):
    stated = shape._catalogue()[name]["_parameters"]
    assert sum(p.numel() for p in meta_model(find_config(name)).parameters()) == stated


@pytest.mark.parametrize("name", dense_names())
def test_matmul_parameters_are_the_linear_weights_of_the_hugging_face_model(name):
    config = find_config(name)
    assert matmul_parameters(ModelShape.from_config(config)) == weights_of_matmuls(meta_model(config))


@pytest.mark.parametrize("name", shape.names())
def test_a_catalogue_entry_names_fields_that_its_config_class_has(name):
    config = find_config(name)
    known = AutoConfig.for_model(config["model_type"])
    undeclared = {"head_dim"} if known.model_type == "qwen3_moe" else set()  # its layers read it all the same
    assert config.keys() <= known.to_dict().keys() | known.attribute_map.keys() | undeclared


@pytest.mark.parametrize("name", shape.names())
def test_a_catalogue_entry_names_its_source(name):
    assert shape._catalogue()[name]["_source"]


def test_every_alias_leads_to_an_entry():
    assert set(shape._catalogue()["_aliases"].values()) <= set(shape.names())


@pytest.mark.parametrize("family", shape.families())
def test_defaults_of_a_family_are_those_of_its_config_class(family):
    ours = ModelShape.from_config({"model_type": family})
    # GPT-SW3's config class is GPT-2's, and says so
    theirs = AutoConfig.for_model(family).to_dict() | {"model_type": family}
    assert ours == ModelShape.from_config(theirs)


def tiny(family, **more):
    # gpt_neo states the kind of each layer; the default padding token of phi3 and smollm3 is beyond a tiny vocabulary
    layers = {"attention_types": [[["global"], 2]]} if family == "gpt_neo" else {}
    heads = {"head_dim": 16} if family in NEED_HEAD_DIM else {}
    return with_overrides({"model_type": family}, TINY | layers | heads | {"pad_token_id": 0} | more)


@pytest.mark.parametrize("family", shape.families())
def test_a_resized_family_still_counts_its_matmuls(family):
    config = tiny(family)
    assert matmul_parameters(ModelShape.from_config(config)) == weights_of_matmuls(meta_model(config))


_HEADS_FILL_HIDDEN = [family for family, schema in CONFIG_SCHEMAS.items() if schema.heads_fill_hidden]


@pytest.mark.parametrize("family", sorted({*shape.families()} - {"falcon", *_HEADS_FILL_HIDDEN}))
def test_a_head_dim_counts_if_the_family_reads_it(family):
    config = tiny(family, head_dim=32)
    assert matmul_parameters(ModelShape.from_config(config)) == weights_of_matmuls(meta_model(config))


@pytest.mark.parametrize("family", _HEADS_FILL_HIDDEN)
def test_heads_that_do_not_fill_the_hidden_size_are_refused_if_the_code_requires_it(family):
    with refused(ModelError, "head_dim", remedy=("head_dim", 16)):
        ModelShape.from_config(tiny(family, head_dim=32))


def test_heads_need_not_fill_the_hidden_size():
    qwen = ModelShape.from_config(find_config("qwen3-0.6b"))
    assert (qwen.hidden, qwen.attention_dim, qwen.kv_dim) == (1024, 2048, 1024)


def test_falcon_180b_reads_its_key_value_heads():
    config = {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 232}
    assert ModelShape.from_config(config | {"hidden_size": 14848}).kv_heads == 8


def test_a_bloom_without_a_length_has_no_positions():
    assert ModelShape.from_config({"model_type": "bloom"}).positions is None


def test_old_bloom_files_say_n_embed():
    assert ModelShape.from_config({"model_type": "bloom", "n_embed": 1024, "seq_length": 2048}).hidden == 1024


def test_the_text_model_of_a_multimodal_config_is_read():
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 512}}
    assert ModelShape.from_config(config).hidden == 512


def test_an_override_in_any_spelling_reaches_the_familys_field():
    config = with_overrides(find_config("gpt2"), {"num_hidden_layers": 3})
    assert config["n_layer"] == 3
    assert "num_hidden_layers" not in config


def test_an_override_reaches_the_text_model_of_a_multimodal_config():
    config = with_overrides({"text_config": {"model_type": "llama"}}, {"n_layer": 3})
    assert config["text_config"]["num_hidden_layers"] == 3


def test_overrides_leave_the_catalogue_alone():
    find_config("llama-3-8b")["rope_parameters"]["rope_theta"] = 1
    assert find_config("llama-3-8b")["rope_parameters"]["rope_theta"] == 500000.0


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({}, ["model_type"]),
        ({"model_type": "mixtral"}, ["model_type"]),
        ({"model_type": "phi4_multimodal"}, ["model_type"]),
        ({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}, ["model_type"]),
        ({"model_type": "xglm", "add_cross_attention": True}, ["add_cross_attention"]),
        ({"model_type": "youtu", "kv_lora_rank": 0}, ["kv_lora_rank", "model_type"]),
        ({"model_type": "llama", "hidden_size": None}, ["hidden_size", "model_type"]),
        ({"model_type": "llama", "hidden_size": "4096"}, ["hidden_size", "model_type"]),
        ({"model_type": "llama", "hidden_size": True}, ["hidden_size", "model_type"]),
        ({"model_type": "gpt2", "n_layer": 0}, ["n_layer", "model_type"]),
        ({"model_type": "llama", "n_layer": 4}, ["n_layer"]),
        ({"model_type": "gpt2", "n_head": 7}, ["n_head", "n_embd"]),
        ({"model_type": "llama", "num_key_value_heads": 5}, ["num_key_value_heads", "num_attention_heads"]),
    ],
)
def test_a_config_that_cannot_be_read_says_why(config, fields):
    with refused(ModelError, *fields):
        ModelShape.from_config(config)


def test_a_mistyped_family_or_field_gets_the_right_one():
    with refused(ModelError, "model_type", remedy="Did you mean llama?"):
        ModelShape.from_config({"model_type": "lama"})
    with refused(ModelError, "n_layer", remedy="write num_hidden_layers"):
        ModelShape.from_config({"model_type": "llama", "n_layer": 4})


def test_a_family_either_has_a_config_schema_or_a_reason_why_it_is_not_read():
    assert len(shape.families()) > 50
    assert not [name for name, spec in FAMILIES.items() if spec.config is not None and spec.not_read_because]
    unread = [name for name, spec in FAMILIES.items() if spec.config is None and not spec.not_read_because]
    assert all(FAMILIES[name].attention == "own" for name in unread)


def test_a_directory_gives_its_config(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert find_config(str(tmp_path)) == {"model_type": "gpt2"}


def test_an_infinite_number_is_read_as_transformers_saves_it(tmp_path):
    config = BambaConfig(time_step_limit=(0.0, math.inf))
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert find_config(str(tmp_path))["time_step_limit"] == [0.0, math.inf]
    assert load_config(ModelSection(name_or_path=str(tmp_path))).time_step_limit == config.time_step_limit


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not JSON"),
        (b"[]", "not a JSON object but a list"),
        (b"\xff", "cannot be read"),
        (None, "has no config.json"),
    ],
)
def test_a_directory_without_a_readable_config_says_why(tmp_path, content, says):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=says) as error:
        find_config(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_path_that_is_no_directory_is_not_taken_for_a_hub_name():
    with refused(ModelError, "model.name_or_path"):
        find_config("./missing")


_STATEFUL = ("mamba", "rwkv", "xlstm", "recurrent_gemma", "lfm2", "falcon_h1", "qwen3_next", "kimi_linear")


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "qwen3_moe", "llama4_text", *_STATEFUL])
def test_a_model_that_is_not_dense_is_refused_for_what_it_is(name):
    with pytest.raises(ModelError) as error:
        ModelShape.from_config({"model_type": name})
    assert ("carries a state" if name in _STATEFUL else "layers have experts") in str(error.value)
    assert "Did you mean" not in str(error.value)


def test_every_decoder_whose_config_counts_experts_is_refused_for_them_or_for_its_state():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    dense_but_not_read = {name for name, spec in FAMILIES.items() if spec.not_read_because and spec.is_dense}
    found = set()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - dense_but_not_read - {"gemma4", "gemma4_assistant"}:
        fields = AutoConfig.for_model(name).to_dict()
        fields |= fields.get("text_config") or {}
        if any(count in fields for count in counts):
            found.add(name)
    assert len(found) > 40
    assert found <= {name for name, spec in FAMILIES.items() if not spec.is_dense}


def test_a_family_that_only_the_hub_has_is_not_called_dense():
    with pytest.raises(ModelError) as error:
        ModelShape.from_config({"model_type": "minicpm"})
    assert "it is not a causal LM that this toolkit reads. Did you mean minicpm3?" in str(error.value)


@pytest.mark.parametrize("name", ["t5", "mt5", "qwen2_vl", "janus", "paligemma"])
def test_another_models_name_is_not_treated_as_a_typo(name):
    with pytest.raises(ModelError) as error:
        ModelShape.from_config({"model_type": name})
    assert "Did you mean" not in str(error.value)
