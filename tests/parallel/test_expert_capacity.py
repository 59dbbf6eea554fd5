"""Token dropping: what a plain loop over experts drops, and nothing else."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from toolkit.config import recipe_conflicts
from toolkit.config.recipe import Recipe
from toolkit.parallel.experts.capacity import _drop, keep_heaviest, limit_capacity
from toolkit.parallel.tiny_model import tiny_config


@pytest.mark.parametrize("capacity", [1, 3, 100])
def test_an_expert_keeps_the_heaviest_of_its_tokens(capacity: int) -> None:
    torch.manual_seed(0)
    weights, index = torch.rand(40, 6).topk(2)  # experts 0 to 5; below, those that nobody chose
    weights[7] = weights[5]  # equal ones, of which the first is kept
    kept = keep_heaviest(index, weights, 8, capacity)
    for expert in range(8):
        pairs = [(-float(weights[t, j]), t, j) for t, j in (index == expert).nonzero().tolist()]
        assert sorted((index == expert).logical_and(kept).nonzero().tolist()) == sorted(
            [t, j] for _, t, j in sorted(pairs)[:capacity]
        )


def weights_after_dropping(group: dist.ProcessGroup | None) -> torch.Tensor:
    """Weights [2, positions of this rank, 1] of two samples whose pairs all weigh the same."""
    index = torch.randint(0, 3, (2, 12, 1), generator=torch.Generator().manual_seed(0))
    if group is not None:
        index = index.chunk(group.size(), dim=1)[group.rank()]
    weights = torch.ones(index.shape).flatten(0, 1)
    arguments = (torch.zeros(len(weights), 4), index.flatten(0, 1), weights)
    dropped = _drop(nn.Identity().train(), arguments, factor=0.5, count=3, group=group, samples=2)
    assert dropped is not None
    return dropped[2].view(2, -1, 1)


def weights_on_all_ranks() -> torch.Tensor:
    group: Any = dist.group.WORLD
    parts = [torch.empty(2, 12 // group.size(), 1) for _ in range(group.size())]
    dist.all_gather(parts, weights_after_dropping(group).contiguous())
    return torch.cat(parts, dim=1)


def test_ranks_that_split_sequences_keep_the_same_of_equal_pairs(ranks: Callable[..., list[Any]]) -> None:
    whole = weights_after_dropping(None)
    assert 0 < whole.sum() < whole.numel()
    assert torch.equal(ranks(weights_on_all_ranks, 2)[0], whole)


def test_a_dropped_token_passes_its_experts_by_in_training_alone() -> None:
    torch.manual_seed(0)
    config = tiny_config("mixtral")
    model = AutoModelForCausalLM.from_config(config)
    seen: list[torch.Tensor] = []
    experts = model.model.layers[0].mlp.experts
    limit_capacity(model, 0.5, config.num_local_experts, None, samples=2)
    experts.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[2].detach()))
    ids = torch.randint(0, config.vocab_size, (2, 16))
    model.train()(ids)
    model.eval()(ids)
    most = math.ceil(0.5 * ids.numel() * config.num_experts_per_tok / config.num_local_experts)
    assert 0 < int((seen[0] > 0).sum()) <= most * config.num_local_experts
    assert int((seen[0] > 0).sum()) < seen[0].numel() == int((seen[1] > 0).sum())


def test_a_capacity_needs_experts_and_whole_sequences(make_recipe: Callable[..., Recipe]) -> None:
    [refusal] = recipe_conflicts(make_recipe(model__expert_capacity_factor=1.0))
    assert refusal.field == "model.expert_capacity_factor"
    assert refusal.reason == "the model has no experts"
    shared = recipe_conflicts(make_recipe(model__expert_capacity_factor=1.0, parallel={"ulysses": 2}))
    assert ("parallel.ulysses", 2) in shared[0].settings
