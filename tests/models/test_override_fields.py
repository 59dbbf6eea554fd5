"""What `model.overrides` may name: as transformers' config classes have it, and refused without transformers."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from toolkit.config import load_recipe
from toolkit.errors import RecipeError
from toolkit.models.override_fields import PATH, unknown_overrides
from toolkit.models.shape import find_config, names

RECIPE = """
model: {name_or_path: NAME, overrides: OVERRIDES}
data: {seq_len: 8}
batch: {global_batch_size: 1, micro_batch_size: 1}
optimizer: {lr: 1e-3}
train: {steps: 1}
"""


def refusals(config: dict[str, Any], **overrides: Any) -> list[str]:
    return [str(refusal) for refusal in unknown_overrides(config, overrides)]


def test_the_table_is_that_of_the_installed_transformers() -> None:
    path = Path(__file__).parents[2] / "docs" / "generate_override_fields.py"
    spec = importlib.util.spec_from_file_location("generate_override_fields", path)
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert PATH.read_text(encoding="utf-8") == generator.encoded(generator.override_fields())


def test_every_field_of_every_named_shape_may_be_overridden() -> None:
    known = names()
    assert len(known) > 50
    for name in known:
        config = find_config(name)
        assert config is not None
        overrides = {key: value for key, value in config.items() if key != "rope_theta"}
        assert refusals(config, **overrides) == [], name


def test_a_field_that_layers_read_and_their_config_class_does_not_declare_may_be_overridden() -> None:
    config = find_config("qwen3-30b-a3b")
    assert config is not None
    assert not hasattr(AutoConfig.for_model("qwen3_moe"), "head_dim")
    assert refusals(config, head_dim=64) == []
    (refusal,) = refusals({"model_type": "qwen3_moe"}, head_dim=64)
    assert "the config of qwen3_moe has no such field" in refusal


def test_a_field_of_a_config_that_no_code_reads_is_refused() -> None:
    (refusal,) = refusals({"model_type": "gpt2", "n_ctx": 1024}, n_ctx=512)
    assert "the config of gpt2 has no such field" in refusal


ROPE: list[tuple[str, dict[str, Any], str]] = [
    ("rope_parameters.rope_thet", {"rope_thet": 1e6}, "Did you mean rope_theta?"),
    ("rope_parameters.rope_type", {"rope_type": "yarnn", "factor": 2.0}, "Did you mean yarn?"),
    ("rope_parameters.beta_fast", {"rope_type": "linear", "factor": 2.0, "beta_fast": 1}, "It has "),
    ("rope_parameters.factr", {"rope_type": "yarn", "factr": 2.0}, "Did you mean factor?"),
]


@pytest.mark.parametrize(("field", "rope", "hint"), ROPE, ids=[row[0] for row in ROPE])
def test_a_key_that_a_rotary_embedding_does_not_read_is_refused(field: str, rope: dict[str, Any], hint: str) -> None:
    (refusal,) = unknown_overrides({"model_type": "llama"}, {"rope_parameters": rope})
    assert refusal.field == f"model.overrides.{field}"
    assert hint in str(refusal)


def test_every_rotary_embedding_takes_its_own_keys() -> None:
    types = json.loads(PATH.read_text())["rope_types"]
    assert len(types) >= 6
    for rope_type, keys in types.items():
        given = dict.fromkeys(keys.split(), 1.0) | {"rope_type": rope_type}
        assert refusals({"model_type": "llama"}, rope_parameters=given) == [], rope_type


def test_rotary_embeddings_by_type_of_layer_are_checked_inside() -> None:
    config = {"model_type": "gemma3_text", "layer_types": ["full_attention", "sliding_attention"]}
    good = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert refusals(config, rope_parameters=good) == []
    (inner,) = refusals(config, rope_parameters=good | {"full_attention": {"rope_thet": 1e6}})
    assert "rope_parameters.full_attention.rope_thet" in inner
    (label,) = refusals(config, rope_parameters=good | {"sliding_atention": {"rope_theta": 1e6}})
    assert "Did you mean sliding_attention?" in label


def test_a_config_inside_a_config_is_checked() -> None:
    (refusal,) = refusals({"model_type": "mpt"}, attn_config={"alibi": True, "attn_pdropp": 0.1})
    assert "model.overrides.attn_config.attn_pdropp" in refusal
    assert "Did you mean attn_pdrop?" in refusal


def test_nothing_is_known_of_a_models_own_code_or_of_another_family() -> None:
    assert refusals({"model_type": "llama", "auto_map": {}}, nonsense=1) == []
    assert refusals({"model_type": "of_next_year"}, nonsense=1) == []


def test_the_spelling_of_another_family_is_refused_with_the_own_one() -> None:
    (refusal,) = refusals({"model_type": "llama"}, n_layer=2)
    assert refusal.endswith("Did you mean num_hidden_layers?")


def test_a_recipe_with_an_unknown_override_is_refused_where_it_stands(tmp_path: Path) -> None:
    text = RECIPE.replace("NAME", "llama-tiny").replace("OVERRIDES", "{rope_parameters: {rope_thet: 1e6}}")
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"r\.yaml:2:.*rope_thet.* Did you mean rope_theta\?"):
        load_recipe(tmp_path / "r.yaml")
