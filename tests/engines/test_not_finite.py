"""A step whose loss or gradient is not finite leaves no trace: training continues as if the step had not been there."""

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import non_finite_steps
import pytest
from engine_states import assert_same_bits, build, cell, changes
from non_finite_steps import STEPS, train_around
from nonempty import nonempty

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.engines.host_read import HostNumbers, base_optimizer, skips_on_device

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
SKIPPED_ON_DEVICE = [
    *(name for name in STRATEGIES if name != "reference" and "offload" not in name),
    "cp2-z1",
    "pp2-zbh1-z1",
]
DAILY_ON_DEVICE = {
    ("z0", "gradient", "fp32"),
    ("z1", "loss", "bf16"),
    ("z3", "gradient", "bf16"),
    ("pp2-z1", "gradient", "fp32"),
}


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
    assert_same_runs(broken, whole, what)


def assert_same_runs(broken: list[Any], whole: list[Any], what: str) -> None:
    """Runs in which a step failed, and runs without it, rank by rank."""
    for (curve, values, updates, message), (wanted_curve, wanted, wanted_updates, nothing) in nonempty(
        zip(broken, whole, strict=True)
    ):
        assert message.startswith("the loss is" if what == "loss" else "the gradient norm is"), message
        assert nothing == ""
        assert curve == wanted_curve
        assert updates == wanted_updates
        assert_same_bits(values, wanted)


def train_with_fused_kernels(recipe: Recipe, what: str) -> tuple[Any, list[str]]:
    """Train as on a GPU, where PyTorch's Adam is one kernel that can skip an update; return when the host has read."""
    events: list[str] = []
    read = HostNumbers.read

    def build_fused(recipe: Recipe) -> Any:
        engine, loader, rate = build(recipe)
        optimizer = base_optimizer(engine.optimizer)
        for group in optimizer.param_groups:
            group["fused"] = True
            group["foreach"] = False
        optimizer.register_step_post_hook(lambda *_: events.append("update"))
        assert skips_on_device(engine.optimizer)
        return engine, loader, rate

    def noted(numbers: HostNumbers) -> Any:
        events.append("read")
        return read(numbers)

    with mock.patch.object(non_finite_steps, "build", build_fused), mock.patch.object(HostNumbers, "read", noted):
        return train_around(recipe, what), events


@pytest.mark.parametrize(
    ("name", "what", "precision"),
    [
        cell(*case, daily=case in DAILY_ON_DEVICE)
        for case in product(SKIPPED_ON_DEVICE, ("loss", "gradient"), ("fp32", "bf16"))
        if case[2] == "fp32" or case[0] not in FP32_ONLY
    ],
)
def test_an_update_that_the_device_skips_leaves_no_trace(
    name: str, what: str, precision: str, make_recipe: Callable[..., Any], ranks: Callable[..., list[Any]]
) -> None:
    strategy = Strategy.parse(name)
    recipe = strategy.apply(make_recipe(**changes("adamw"), precision=precision), 2)
    broken = ranks(train_with_fused_kernels, strategy.world_size(2), recipe, what)
    whole = ranks(train_with_fused_kernels, strategy.world_size(2), recipe, "")
    assert_same_runs([run for run, _ in broken], [run for run, _ in whole], what)
    for _, events in nonempty(broken):
        steps = ["update" in step for step in _in_front_of_reads(events)]
        assert steps == [True] * STEPS, events


def _in_front_of_reads(events: list[str]) -> list[list[str]]:
    """Return the events between each read of the host and the one before."""
    reads = [index for index, event in enumerate(events) if event == "read"]
    return [events[start:end] for start, end in zip([0, *reads[:-1]], reads, strict=True)]
