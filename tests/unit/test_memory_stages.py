"""Where a pipeline is cut: the calculation against the count on the meta device that training makes."""

import copy
from typing import Any

import pytest
import torch
from test_memory_parameters import tiny
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit import shape
from toolkit.errors import LayoutError
from toolkit.estimate.parameters import Architecture
from toolkit.estimate.stages import EqualLayers, balanced_bounds, fastest_cut, uniform_bounds
from toolkit.families.anatomy import examine
from toolkit.parallel.balance import Costs, balance, count_costs
from toolkit.shape import find_config


@pytest.mark.parametrize("stages", [2, 3, 5, 8, 12])
@pytest.mark.parametrize("count", [12, 13, 29])
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (0.1, 2.7), (0.3, 1.0), (3.4, 0.2), (9.0, 9.0), (0.0, 40.0)])
def test_the_cut_of_equal_layers_is_the_one_that_training_searches(stages, count, before, after):
    layers = EqualLayers(before=before, layer=1.0, after=after, count=count)
    searched = balance(Costs(before=before, layers=(1.0,) * count, after=after), stages)
    assert fastest_cut(layers, stages) == searched


def trained_cut(config: dict[str, Any], stages: int, **step: Any) -> tuple[int, ...]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(config)))
        model.tie_weights()
    return balance(count_costs(model, examine(model), flops_per_byte=120.0, **step), stages)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.whole] if i % 4 else []) for i, name in enumerate(shape.families())],
)
def test_a_family_is_cut_where_training_cuts_it(family):
    config = tiny(family, num_hidden_layers=7)
    if family == "gpt_neo":
        config["attention_types"] = [[["global"], 7]]
    architecture = Architecture.from_config(config)
    for recompute in ("none", "selective", "full"):
        bounds = balanced_bounds(architecture, 3, micro_batch_size=2, seq_len=32, recompute=recompute)
        assert bounds == trained_cut(config, 3, micro_batch_size=2, seq_len=32, recompute=recompute)


@pytest.mark.parametrize(("name", "stages"), [("gpt2-xl", 4), ("llama-2-7b", 8), ("gemma-2-2b", 2), ("opt-350m", 4)])
def test_a_known_model_is_cut_where_training_cuts_it(name, stages):
    config = find_config(name)
    assert config is not None
    bounds = balanced_bounds(Architecture.from_config(config), stages, micro_batch_size=1, seq_len=1024)
    assert bounds == trained_cut(config, stages, micro_batch_size=1, seq_len=1024)


def test_layers_that_do_not_divide_go_to_the_earliest_stages():
    assert uniform_bounds(10, 4) == (0, 3, 6, 8, 10)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(LayoutError, match=r"pp=13 with 12 decoder layers: .* Set pp to 1 … 12\."):
        uniform_bounds(12, 13)
