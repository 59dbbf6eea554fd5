"""What a cut model's ranks hold together is the uncut model, parameter by parameter, to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from toolkit.parallel.gather import whole_parameters
from toolkit.parallel.groups import ParallelGroups
from toolkit.parallel.shard import shard_of
from toolkit.recipe import Recipe
from toolkit.train.cut import ModelCut
from toolkit.train.model import build_model

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


def uncut(recipe: Recipe) -> Named:
    return [(name, parameter.detach()) for name, parameter in build_model(recipe).named_parameters()]


def cut_model(recipe: Recipe) -> tuple[Any, ModelCut]:
    groups = ParallelGroups.create(recipe.layout(dist.get_world_size()))
    cut = ModelCut(recipe, groups, torch.device("cpu"))
    return build_model(recipe, part=cut), cut


def gathered(recipe: Recipe) -> Named:
    model, cut = cut_model(recipe)
    return [(name, value.clone()) for name, value in whole_parameters(cut.names, model.parameters(), cut.groups)]


@pytest.mark.parametrize(
    ("model", "layout", "world_size"),
    [*((model, "tp2-pp2", 4) for model in MODELS), ("gpt2-tied", "dp2-tp2", 4), ("llama-multi-query", "pp2", 2)],
)
def test_every_rank_gathers_the_uncut_model(
    make_recipe: Make, ranks: Ranks, model: str, layout: str, world_size: int
) -> None:
    expected = uncut(recipe_of(make_recipe, model))
    for found in ranks(gathered, world_size, recipe_of(make_recipe, model, layout)):
        assert [name for name, _ in found] == [name for name, _ in expected]
        pairs = zip(found, expected, strict=True)
        assert [name for (name, value), (_, whole) in pairs if not torch.equal(value, whole)] == []


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_the_ranks_really_hold_parts(make_recipe: Make, ranks: Ranks, layout: str) -> None:
    def numbers(recipe: Recipe) -> int:
        return sum(parameter.numel() for parameter in cut_model(recipe)[0].parameters())

    whole = sum(value.numel() for _, value in uncut(recipe_of(make_recipe, "gpt2-untied")))
    held = ranks(numbers, 2, recipe_of(make_recipe, "gpt2-untied", layout))
    assert max(held) < 0.6 * whole
    assert sum(held) >= whole


def test_exactly_one_rank_counts_each_number_of_the_model(make_recipe: Make, ranks: Ranks) -> None:
    def counted(recipe: Recipe) -> int:
        model, cut = cut_model(recipe)
        real = (p.numel() - shard_of(p).padding * p[0].numel() for p in model.parameters() if cut.counts(p))
        return sum(real)

    for model in ("gpt2-untied", "llama-multi-query"):
        whole = sum(value.numel() for _, value in uncut(recipe_of(make_recipe, model)))
        assert sum(ranks(counted, 4, recipe_of(make_recipe, model, "tp2-pp2"))) == whole


def test_something_else_of_each_parameter_can_be_gathered_and_what_is_missing_is_zero(
    make_recipe: Make, ranks: Ranks
) -> None:
    def doubled(recipe: Recipe) -> Named:
        model, cut = cut_model(recipe)
        found = whole_parameters(
            cut.names,
            model.parameters(),
            cut.groups,
            values=lambda p: None if ".mlp." in shard_of(p).name else p.detach() * 2,
        )
        return [(name, value.clone()) for name, value in found]

    expected = dict(uncut(recipe_of(make_recipe, "gpt2-untied")))
    for name, value in ranks(doubled, 4, recipe_of(make_recipe, "gpt2-untied", "tp2-pp2"))[0]:
        assert torch.equal(value, expected[name] * (0 if ".mlp." in name else 2)), name
