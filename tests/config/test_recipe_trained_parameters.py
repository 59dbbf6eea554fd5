"""What model.lora, model.freeze and model.train_only must agree on, and on which names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import refused
from transformers import AutoModelForCausalLM

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
    assert [given if isinstance(given, str) else given[0] for given in refusal.given] == fields


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


def test_adapters_of_experts_are_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("mixtral"))
    with refused(ModelError, "model.lora.targets") as found:
        Adapters(model, LoraSection(targets=("all-linear",)), seed=1)
    assert "experts" in found[0].reason
