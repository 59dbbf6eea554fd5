"""What model.lora, model.freeze and model.train_only must agree on, and on which names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import refused
from transformers import AutoModelForCausalLM, PreTrainedModel

from toolkit.config import recipe_problems
from toolkit.config.recipe import LoraSection, Recipe
from toolkit.config.trained_parameters import trained_parameter_conflicts
from toolkit.errors import ModelError
from toolkit.model_init.adapters import Adapters
from toolkit.model_init.build_model import check_trained, load_config
from toolkit.parallel.tiny_model import tiny_config

MakeRecipe = Callable[..., Recipe]


QLORA: dict[str, Any] = {"model__load_in_4bit": True, "model__init": "pretrained", "model__lora": {}}


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"model__freeze": ["*.mlp.*"], "model__train_only": ["*.attn.*"]}, ["model.freeze", "model.train_only"]),
        ({"model__lora": {}, "model__train_only": ["*.attn.*"]}, ["model.train_only", "model.lora"]),
        ({"model__lora": {}, "model__freeze": ["*lora_A*"]}, ["model.freeze", "model.lora"]),
        ({"model__lora": {"targets": ["all-linear", "c_attn"]}}, ["model.lora.targets"]),
        (QLORA | {"model__lora": None}, ["model.load_in_4bit", "model.lora"]),
        (QLORA | {"model__lora": {"dora": True}}, ["model.load_in_4bit", "model.lora.dora"]),
        (QLORA | {"model__init": "random"}, ["model.load_in_4bit", "model.init"]),
        (QLORA | {"parallel": {"tp": 2}}, ["model.load_in_4bit", "parallel.tp"]),
        (QLORA | {"parallel": {"pp": 2}}, ["model.load_in_4bit", "parallel.pp"]),
        (QLORA | {"parallel": {"zero_stage": 3}}, ["model.load_in_4bit", "parallel.zero_stage"]),
        (QLORA | {"train__engine": "fsdp"}, ["model.load_in_4bit", "train.engine"]),
    ],
)
def test_what_does_not_go_together_is_refused(
    make_recipe: MakeRecipe, changes: dict[str, Any], fields: list[str]
) -> None:
    (refusal,) = trained_parameter_conflicts(make_recipe(**changes))
    assert [given if isinstance(given, str) else given[0] for given in refusal.settings] == fields


def test_defaults_of_peft_are_the_defaults(make_recipe: MakeRecipe) -> None:
    from peft import LoraConfig

    recipe, theirs = make_recipe(model__lora={}), LoraConfig()
    assert recipe_problems(recipe) == []
    lora = recipe.model.lora
    assert lora is not None
    assert (lora.r, lora.alpha, lora.dropout) == (theirs.r, theirs.lora_alpha, theirs.lora_dropout)
    assert (lora.rslora, lora.dora, lora.targets) == (theirs.use_rslora, theirs.use_dora, ())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lora": {"targets": ["q_proj"]}}, "model.lora.targets"),
        ({"lora": {"targets": ["wte"]}}, "model.lora.targets"),
        ({"lora": {"targets": ["lm_head"]}}, "model.lora.targets"),
        ({"freeze": ["*.q_proj.*"]}, "model.freeze"),
        ({"freeze": ["*"]}, "model.freeze"),
        ({"train_only": ["*"]}, "model.train_only"),
        ({"train_only": ["*.c_attn.*", "nothing"]}, "model.train_only"),
    ],
    ids=str,
)
def test_names_that_the_model_does_not_have_are_refused(
    make_recipe: MakeRecipe, changes: dict[str, Any], field: str
) -> None:
    recipe = make_recipe(**{f"model__{name}": value for name, value in changes.items()})
    with refused(ModelError, field):
        check_trained(recipe, load_config(recipe.model))


def tiny_model(family: str) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(family))
    return model


@pytest.mark.parametrize(
    ("targets", "reason", "advice"),
    [
        (("q_proj", "foo"), "no layer of this model is called foo", "choose among down_proj"),
        (("q_proj", "v_porj"), "no layer of this model is called v_porj", "Did you mean v_proj?"),
        (("q_proj", "v_porj", "foo"), "no layer of this model is called v_porj or foo", "choose among down_proj"),
        (("layers.9.self_attn.q_proj", "q_proj"), "called layers.9.self_attn.q_proj", "choose among"),
        (("q_proj", "lm_head"), "lm_head is no part of a decoder layer", "choose among down_proj"),
        (("q_proj", "self_attn"), "model.layers.0.self_attn is no linear layer", "choose among down_proj"),
    ],
    ids=str,
)
def test_every_target_must_be_linear_layers_of_the_model(targets: tuple[str, ...], reason: str, advice: str) -> None:
    with refused(ModelError, "model.lora.targets") as found:
        Adapters(tiny_model("llama"), LoraSection(targets=targets), seed=1)
    assert reason in found[0].reason
    (remedy,) = found[0].remedy
    assert isinstance(remedy, str)
    assert remedy.startswith(advice)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_every_target_that_is_offered_is_accepted(family: str) -> None:
    with refused(ModelError, "model.lora.targets") as found:
        Adapters(tiny_model(family), LoraSection(targets=("nothing",)), seed=1)
    offered = str(found[0].remedy[0]).removeprefix("choose among ").split(", ")
    assert len(offered) >= 3
    for target in offered:
        adapters = Adapters(tiny_model(family), LoraSection(targets=(target,)), seed=1)
        assert all(f".{target}." in name for name, _ in adapters.names)


@pytest.mark.parametrize("target", ["all-linear", "o_a_proj"])
def test_adapters_of_a_linear_layer_with_a_forward_of_its_own_are_refused(target: str) -> None:
    """DeepSeek V4 multiplies each group of heads by a matrix of its own: adapters would have other shapes."""
    with refused(ModelError, "model.lora.targets") as refusals:
        Adapters(tiny_model("deepseek_v4"), LoraSection(targets=(target,)), seed=1)
    assert "DeepseekV4GroupedLinear" in refusals[0].reason
    assert "o_a_proj" not in str(refusals[0].remedy[0])


def test_adapters_of_experts_are_refused() -> None:
    with refused(ModelError, "model.lora.targets") as found:
        Adapters(tiny_model("mixtral"), LoraSection(targets=("all-linear",)), seed=1)
    assert "experts" in found[0].reason
