"""Which decoder layers the backward pass computes again."""

from collections import Counter

import pytest
import torch
from refusals import refused
from torch import nn
from transformers import AutoModelForCausalLM

from toolkit.config.layout import Recompute
from toolkit.errors import ModelError
from toolkit.model_init.model_modules import decoder_layers
from toolkit.model_init.recompute import check_recompute, recompute
from toolkit.parallel.model_structure import analyze_model
from toolkit.parallel.pipeline.stage import NonLocalLayer, PipelineStage
from toolkit.parallel.tiny_model import tiny_config


def passes(recomputed: Recompute) -> list[int]:
    """How often each of 5 layers runs its MLP in a step."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=5)).train()
    recompute(model, recomputed)
    counts = Counter[int]()
    for index, layer in enumerate(decoder_layers(model)):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: counts.update([index]))
    model(input_ids=torch.arange(8)[None], use_cache=False).logits.sum().backward()
    return [counts[index] for index in range(5)]


@pytest.mark.parametrize(
    ("recomputed", "expected"),
    [("none", [1, 1, 1, 1, 1]), ("full", [2, 2, 2, 2, 2]), ("every_2", [2, 1, 2, 1, 2]), ("every_3", [2, 1, 1, 2, 1])],
)
def test_every_nth_layer_runs_twice(recomputed: Recompute, expected: list[int]) -> None:
    assert passes(recomputed) == expected


@pytest.mark.parametrize(("stage", "expected"), [(0, [True, False, True]), (1, [False, True])])
def test_a_pipeline_stage_counts_layers_over_the_whole_model(stage: int, expected: list[bool]) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=5))
    structure = analyze_model(model)
    PipelineStage(model, structure, bounds=(0, 3, 5), stages=[stage])
    recompute(model, "every_2")
    own = [layer for layer in structure.layer_list(model) if not isinstance(layer, NonLocalLayer)]
    assert [layer.gradient_checkpointing for layer in own] == expected


def test_layers_that_transformers_does_not_recompute_one_by_one_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model.model.layers[1] = nn.Identity()
    with refused(ModelError, "parallel.recompute", "model_type"):
        recompute(model, "every_2")
    recompute(model, "full")


@pytest.mark.parametrize("what", ["full", "every_2"])
def test_a_family_that_transformers_does_not_recompute_is_refused(what: Recompute) -> None:
    config = tiny_config("openai-gpt")
    with refused(ModelError, "parallel.recompute", "model_type"):
        check_recompute(what, config)
    with refused(ModelError, "parallel.recompute", "model_type"):
        recompute(AutoModelForCausalLM.from_config(config), what)
    check_recompute("none", config)
