"""What of a recipe's model trains reaches the memory estimate."""

from typing import Any

import pytest

from toolkit.config.layout import Batch, Layout
from toolkit.config.recipe import Recipe
from toolkit.errors import ConfigError
from toolkit.estimate.model_facts import ModelFacts
from toolkit.estimate.trainable import Trainable
from toolkit.planner.run_memory import model_config, training_setup


def trained(model: dict[str, Any]) -> str:
    recipe = Recipe.model_validate(
        {
            "model": {"name_or_path": "llama-3.1-8b"} | model,
            "data": {"seq_len": 64},
            "batch": {"global_batch_size": 1, "micro_batch_size": 1},
            "optimizer": {"lr": 1e-4},
            "train": {"steps": 1},
        }
    )
    batch = Batch.resolve(global_batch_size=1, micro_batch_size=1, dp=1)
    model = ModelFacts.from_config(model_config(recipe))
    return training_setup(recipe, Layout(), batch, model).computation.trainable


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ({}, ""),
        ({"lora": {"r": 16, "targets": ("v_proj", "q_proj")}}, "lora:r=16,targets=q_proj+v_proj,fp32=no"),
        ({"lora": {"dropout": 0.1}}, "lora:r=8,targets=default,dropout=0.1,fp32=no"),
        ({"train_only": ("*norm*",)}, "*norm*"),
        ({"freeze": ("*norm*", "*.mlp.*")}, "freeze:*.mlp.*,*norm*"),
    ],
    ids=str,
)
def test_what_trains_is_asked_of_the_estimate(model: dict[str, Any], wanted: str) -> None:
    assert trained(model) == wanted
    assert Trainable.parse(wanted or "all").text == wanted


@pytest.mark.parametrize("option", ["fp32=false", "fp32=0", "4bit=true", "fp32="])
def test_options_of_lora_that_are_neither_yes_nor_no_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="4bit and fp32 are yes or no"):
        Trainable.parse(f"lora:r=8,{option}")
    assert not Trainable.parse("lora:r=8,fp32=no").in_fp32
    assert Trainable.parse("lora:r=8,fp32=yes").in_fp32
