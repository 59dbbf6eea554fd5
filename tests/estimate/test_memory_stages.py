"""Bounds of pipeline stages: the calculation against the count on the meta device that training makes."""

import copy
from typing import Any

import pytest
import torch
from test_memory_parameters import tiny
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.config.stage_balance import balance
from toolkit.errors import LayoutError
from toolkit.estimate.recorded.recording import config_text
from toolkit.estimate.stage_bounds import balanced_bounds
from toolkit.models import shape
from toolkit.models.shape import find_config
from toolkit.parallel.model_structure import analyze_model
from toolkit.parallel.pipeline.balance import count_costs
from toolkit.recorder.parameters import record_parameters


def trained_bounds(config: dict[str, Any], stages: int, **step: Any) -> tuple[int, ...]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(config)))
        model.tie_weights()
    return balance(count_costs(model, analyze_model(model), flops_per_byte=120.0, **step), stages)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.whole] if i % 4 else []) for i, name in enumerate(shape.families())],
)
def test_a_family_is_partitioned_as_in_training(family):
    config = tiny(family, num_hidden_layers=7)
    if family == "gpt_neo":
        config["attention_types"] = [[["global"], 7]]
    model = record_parameters(config_text(config))
    for recompute in ("none", "selective", "full"):
        bounds = balanced_bounds(model, 3, micro_batch_size=2, seq_len=32, recompute=recompute)
        assert bounds == trained_bounds(config, 3, micro_batch_size=2, seq_len=32, recompute=recompute)


@pytest.mark.parametrize(("name", "stages"), [("gpt2-xl", 4), ("llama-2-7b", 8), ("gemma-2-2b", 2), ("opt-350m", 4)])
def test_a_catalogue_model_is_partitioned_as_in_training(name, stages):
    config = find_config(name)
    assert config is not None
    bounds = balanced_bounds(record_parameters(config_text(config)), stages, micro_batch_size=1, seq_len=1024)
    assert bounds == trained_bounds(config, stages, micro_batch_size=1, seq_len=1024)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(LayoutError) as caught:
        balanced_bounds(record_parameters(config_text({"model_type": "gpt2"})), 13, micro_batch_size=1, seq_len=8)
    assert (caught.value.refusal.field, caught.value.refusal.remedy) == ("pp", (("pp", "1 to 12"),))
