"""The norm that an engine reports, and clips by, is that of the gradient that it holds, also where that is large.

torch's own norm of a tensor of four million elements is wrong in the fifth digit on a CPU.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_states import build
from nonempty import nonempty

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.engines.gradient_norm import clip_gradients, total_norm

WIDE = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 65536}
CASES = (
    *(("reference", "fp32"), ("ddp", "fp32"), ("fsdp", "fp32"), ("z0", "fp32"), ("z1", "fp32"), ("z1", "bf16")),
    *(("z3", "fp32"), ("tp2-z0", "fp32"), ("tp2-z1", "bf16"), ("pp2-z0", "fp32"), ("pp2-z1", "bf16")),
)


def norms(recipe: Recipe) -> list[tuple[float, float]]:
    """Of two steps: what the engine reports, and the sum of squares of its gradients in fp64."""
    engine, loader, _ = build(recipe)
    squares: list[float] = []
    engine.before_update = lambda: squares.append(
        sum(float(gradient.double().square().sum()) for _, gradient in engine.full_gradients())
    )
    reported = []
    with loader.prefetch(0) as ahead:
        for step in range(2):
            batches = loader.micro_batches(step, ahead)
            result = engine.train_step(batches, target_tokens=loader.target_tokens(step), learning_rate=1e-3)
            reported.append(result.grad_norm)
    return [(norm, math.sqrt(square)) for norm, square in zip(reported, squares, strict=True)]


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_the_reported_norm_is_that_of_the_gradient(
    name: str, precision: str, make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]
) -> None:
    strategy = Strategy.parse(name)
    recipe = make_recipe(model={"name_or_path": "gpt2-tiny", "overrides": WIDE}, precision=precision)
    for reported, wanted in nonempty(ranks(norms, strategy.world_size(2), strategy.apply(recipe, 2))[0]):
        assert reported == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 3_000_001])
def test_a_norm_of_any_length_has_the_precision_of_fp32(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).exp()
    assert float(total_norm([values])) == pytest.approx(float(values.double().norm()), rel=2e-7)


def test_gradients_are_scaled_down_to_the_limit_and_never_up() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3, 5)), torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter()]
    for limit, left in ((0.0, 5.0), (10.0, 5.0), (0.5, 0.5)):
        parameters[0].grad, parameters[1].grad = torch.full((3, 5), 4 / math.sqrt(15)), torch.tensor([3.0, 0.0])
        assert float(clip_gradients(parameters, limit)) == pytest.approx(5)
        assert float(clip_gradients(parameters, 0)) == pytest.approx(left, rel=1e-5)
