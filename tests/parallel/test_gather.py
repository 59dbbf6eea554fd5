"""Gathering the shards of all ranks gives the full model, parameter by parameter, to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nonempty import nonempty

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.model_init.build_model import build_model
from toolkit.model_init.model_partition import ModelPartition
from toolkit.parallel.gather import gather_parameters
from toolkit.parallel.groups import ParallelGroups
from toolkit.parallel.shard import shard_of

Make = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]
Named = list[tuple[str, torch.Tensor]]
LLAMA = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 321}
# 321 tokens on 2 ranks: the last row of the second is padding.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2-tied": {"overrides__vocab_size": 321, "overrides__tie_word_embeddings": True},
    "gpt2-untied": {"overrides__vocab_size": 321, "overrides__tie_word_embeddings": False},
    "llama-multi-query": {
        "model": {
            "name_or_path": "llama-tiny",
            "overrides": LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 1},
        }
    },
}


def recipe_of(make_recipe: Make, model: str, layout: str = "") -> Recipe:
    parallel = {part[:2]: int(part[2:]) for part in layout.split("-") if part}
    return make_recipe(parallel=parallel, **MODELS[model])


def full_model(recipe: Recipe) -> Named:
    return [(name, parameter.detach()) for name, parameter in build_model(recipe).named_parameters()]


def partitioned_model(recipe: Recipe) -> tuple[Any, ModelPartition]:
    job = Job.of(recipe, dist.get_world_size())
    partition = ModelPartition(job, ParallelGroups.create(job.layout), torch.device("cpu"))
    return build_model(recipe, partition=partition), partition


def gathered(recipe: Recipe) -> Named:
    model, partition = partitioned_model(recipe)
    return [
        (name, value.clone())
        for name, value in gather_parameters(partition.names, model.parameters(), partition.groups)
    ]


@pytest.mark.parametrize(
    ("model", "layout", "world_size"),
    [*((model, "tp2-pp2", 4) for model in MODELS), ("gpt2-tied", "dp2-tp2", 4), ("llama-multi-query", "pp2", 2)],
)
def test_every_rank_gathers_the_full_model(
    make_recipe: Make, ranks: Ranks, model: str, layout: str, world_size: int
) -> None:
    expected = full_model(recipe_of(make_recipe, model))
    for found in nonempty(ranks(gathered, world_size, recipe_of(make_recipe, model, layout))):
        assert [name for name, _ in found] == [name for name, _ in expected]
        pairs = zip(found, expected, strict=True)
        assert [name for (name, value), (_, whole) in pairs if not torch.equal(value, whole)] == []


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_parameter_of_another_dtype_keeps_it(make_recipe: Make, ranks: Ranks, layout: str) -> None:
    """As a router in fp32 in a model in bf16."""

    def gathered_with_a_wide_one(recipe: Recipe) -> Named:
        model, partition = partitioned_model(recipe)
        for parameter in model.parameters():
            if shard_of(parameter).name.endswith("h.1.mlp.c_fc.weight"):
                parameter.data = parameter.detach().double() + 1e-12
        found = gather_parameters(partition.names, model.parameters(), partition.groups)
        return [(name, value.clone()) for name, value in found]

    expected = full_model(recipe_of(make_recipe, "gpt2-untied"))
    for found in nonempty(ranks(gathered_with_a_wide_one, 2, recipe_of(make_recipe, "gpt2-untied", layout))):
        for (name, value), (_, whole) in zip(found, expected, strict=True):
            is_wide = name.endswith("h.1.mlp.c_fc.weight")
            assert torch.equal(value, whole.double() + 1e-12 if is_wide else whole), name


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_the_ranks_hold_different_shards(make_recipe: Make, ranks: Ranks, layout: str) -> None:
    def numbers(recipe: Recipe) -> int:
        return sum(parameter.numel() for parameter in partitioned_model(recipe)[0].parameters())

    whole = sum(value.numel() for _, value in full_model(recipe_of(make_recipe, "gpt2-untied")))
    held = ranks(numbers, 2, recipe_of(make_recipe, "gpt2-untied", layout))
    assert max(held) < 0.6 * whole
    assert sum(held) >= whole


def test_exactly_one_rank_counts_each_number_of_the_model(make_recipe: Make, ranks: Ranks) -> None:
    def counted(recipe: Recipe) -> int:
        model, partition = partitioned_model(recipe)
        real = (p.numel() - shard_of(p).padding * p[0].numel() for p in model.parameters() if partition.counts(p))
        return sum(real)

    for model in ("gpt2-untied", "llama-multi-query"):
        whole = sum(value.numel() for _, value in full_model(recipe_of(make_recipe, model)))
        assert sum(ranks(counted, 4, recipe_of(make_recipe, model, "tp2-pp2"))) == whole


def test_something_else_of_each_parameter_can_be_gathered_and_what_is_missing_is_zero(
    make_recipe: Make, ranks: Ranks
) -> None:
    def doubled(recipe: Recipe) -> Named:
        model, partition = partitioned_model(recipe)
        found = gather_parameters(
            partition.names,
            model.parameters(),
            partition.groups,
            values=lambda p: None if ".mlp." in shard_of(p).name else p.detach() * 2,
        )
        return [(name, value.clone()) for name, value in found]

    expected = dict(full_model(recipe_of(make_recipe, "gpt2-untied")))
    for name, value in nonempty(ranks(doubled, 4, recipe_of(make_recipe, "gpt2-untied", "tp2-pp2"))[0]):
        assert torch.equal(value, expected[name] * (0 if ".mlp." in name else 2)), name
