"""A step whose loss or gradient is not finite leaves no trace: training continues as if the step had not been there."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from engine_states import assert_same_bits, cell, changes
from non_finite_steps import train_around
from nonempty import nonempty

from toolkit.config.strategy import Strategy

STRATEGIES = (
    *("reference", "ddp", "fsdp", "z0", "z1", "z2", "z3", "z1-offload", "z2-offload", "z3-offload", "u2-z1", "u2-z3"),
    *("tp2-z0", "tp2-z1", "tp2-z2", "tp2-z3", "pp2-z0", "pp2-z1", "tp2-pp2-z0", "tp2-pp2-z1"),
)
DAILY = {
    *(("z0", "loss", "fp32"), ("z1", "gradient", "bf16"), ("z2-offload", "loss", "bf16"), ("z3", "loss", "fp32")),
    *(("fsdp", "gradient", "fp32"), ("pp2-z1", "loss", "bf16"), ("pp2-z0", "gradient", "fp32")),
    *(("tp2-pp2-z1", "loss", "fp32"), ("reference", "loss", "fp32"), ("u2-z3", "gradient", "fp32")),
}
FP32_ONLY = ("reference", "tp2-z0", "pp2-z0", "tp2-pp2-z0")


@pytest.mark.parametrize(
    ("name", "what", "precision"),
    [
        cell(*case, daily=case in DAILY)
        for case in product(STRATEGIES, ("loss", "gradient"), ("fp32", "bf16"))
        if case[2] == "fp32" or case[0] not in FP32_ONLY
    ],
)
def test_a_step_that_is_not_finite_leaves_no_trace(
    name: str, what: str, precision: str, make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]
) -> None:
    strategy = Strategy.parse(name)
    recipe = strategy.apply(make_recipe(**changes("adamw"), precision=precision), 2)
    broken = ranks(train_around, strategy.world_size(2), recipe, what)
    whole = ranks(train_around, strategy.world_size(2), recipe, "")
    for (curve, values, updates, message), (wanted_curve, wanted, wanted_updates, nothing) in nonempty(
        zip(broken, whole, strict=True)
    ):
        assert message.startswith("the loss is" if what == "loss" else "the gradient norm is"), message
        assert nothing == ""
        assert curve == wanted_curve
        assert updates == wanted_updates
        assert_same_bits(values, wanted)
