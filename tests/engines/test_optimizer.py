"""Parameter groups, Lion, and the learning rate as a function of the step."""

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import nn

from toolkit.config.recipe import OptimizerSection, Recipe, ScheduleName
from toolkit.engines.optimizer import Lion, learning_rate, parameter_groups

Make = Callable[..., Recipe]


def test_biases_and_norms_do_not_decay() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    decayed, spared = parameter_groups(model.named_parameters(), OptimizerSection(lr=1, weight_decay=0.1))
    assert (decayed["weight_decay"], len(decayed["params"])) == (0.1, 2)
    assert (spared["weight_decay"], len(spared["params"])) == (0.0, 3)


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert [len(group["params"]) for group in parameter_groups(model.named_parameters(), OptimizerSection(lr=1))] == [1]


def test_lion_follows_algorithm_2_of_its_paper() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5, dtype=torch.float64))
    w, m = parameter.detach().clone(), torch.zeros(5, dtype=torch.float64)
    optimizer = Lion([parameter], lr=0.1, betas=(0.9, 0.99), weight_decay=0.3)
    for step in range(4):
        g = torch.sin(torch.arange(5, dtype=torch.float64) * (step + 1))
        parameter.grad = g.clone()
        optimizer.step()
        w = w - 0.1 * (torch.sign(0.9 * m + 0.1 * g) + 0.3 * w)
        m = 0.99 * m + 0.01 * g
        assert torch.allclose(parameter.detach(), w, atol=1e-12)


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_the_learning_rate_is_what_stepping_the_scheduler_gives(make_recipe: Make, name: str) -> None:
    from transformers import get_scheduler

    warmup = 0 if name == "constant" else 4
    recipe = make_recipe(schedule={"name": name, "warmup_steps": warmup}, train__steps=20)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=recipe.optimizer.lr)
    specific = {"cosine_with_min_lr": {"min_lr_rate": 0.0}, "warmup_stable_decay": {"num_decay_steps": 2}}
    specific["polynomial"] = {"lr_end": 0.0}
    scheduler = get_scheduler(name, optimizer, warmup, 20, scheduler_specific_kwargs=specific.get(name))
    rate = learning_rate(recipe)
    for step in range(20):
        assert rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-15)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("name", ["cosine_with_min_lr", "polynomial", "warmup_stable_decay"])
def test_the_rate_ends_at_its_minimum(make_recipe: Make, name: str) -> None:
    recipe = make_recipe(schedule={"name": name, "min_lr_ratio": 0.2}, train__steps=100)
    assert learning_rate(recipe)(100) == pytest.approx(0.2 * recipe.optimizer.lr)


def test_every_schedule_of_ours_is_one_of_transformers() -> None:
    from transformers import SchedulerType

    assert set(get_args(ScheduleName)) <= {kind.value for kind in SchedulerType}


def test_the_rate_does_not_depend_on_who_asked_before(make_recipe: Make) -> None:
    rate = learning_rate(make_recipe(schedule={"name": "cosine", "warmup_steps": 3}))
    later = rate(20)
    rate(3)
    assert rate(20) == later
    assert math.isclose(rate(3), make_recipe().optimizer.lr)
