"""fp16 where it can be tried without a GPU.

DeepSpeed refuses fp16 on CPUs because they are slow at it, not because PyTorch cannot: the tests lift the refusal.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
from nonempty import nonempty

from toolkit.config.recipe import Recipe
from toolkit.parity import LossCurve, ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory

Make = Callable[..., Recipe]
Ranks = Callable[..., list[Any]]


def fp16_trial(recipe: Recipe) -> ParityRun:
    import torch
    from deepspeed.accelerator import get_accelerator

    kind = type(get_accelerator())
    kind.is_fp16_supported = lambda self: True
    kind.supported_dtypes = lambda self: [torch.float, torch.half, torch.bfloat16]
    return train_in_memory(recipe)


@pytest.fixture(scope="module")
def fp32_curve(make_recipe: Make, ranks: Ranks) -> LossCurve:
    curve: LossCurve = ranks(train_in_memory, 1, make_recipe(train__engine="reference"))[0].curve
    return curve


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_learns_what_fp32_learns(make_recipe: Make, ranks: Ranks, fp32_curve: LossCurve, stage: int) -> None:
    half = ranks(fp16_trial, 2, make_recipe(parallel={"zero_stage": stage}, precision="fp16"))[0].curve
    # 11 bits of mantissa: a relative rounding of 2^-11 on each value.
    assert half.losses[-1] == pytest.approx(fp32_curve.losses[-1], rel=2**-10)
    assert half.grad_norms[-1] == pytest.approx(fp32_curve.grad_norms[-1], rel=2**-7)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_fp16_overflow_skips_the_step_and_training_goes_on(
    make_recipe: Make, ranks: Ranks, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.engines.deepspeed_engine import DeepSpeedEngine

    update, results = DeepSpeedEngine._update, []
    backward, calls = DeepSpeedEngine._backward, []

    def overflowing(self: Any, loss: Any) -> None:
        calls.append(1)
        backward(self, loss * 1e30 if len(calls) == 5 else loss)  # step 3: two micro-batches a step

    def recorded(self: Any, loss: float) -> Any:
        results.append(update(self, loss))
        if len(results) == 5:
            assert [result.skipped for result in results] == [False, False, True, False, False]
        return results[-1]

    monkeypatch.setattr(DeepSpeedEngine, "_backward", overflowing)
    monkeypatch.setattr(DeepSpeedEngine, "_update", recorded)
    recipe = make_recipe(parallel={"zero_stage": stage}, precision="fp16", train__steps=5)
    losses = ranks(fp16_trial, 2, recipe)[0].curve.losses
    assert all(nonempty(map(math.isfinite, losses)))
