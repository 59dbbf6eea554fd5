"""Lion's updates are signs: what rounding decides is no difference, and what a mistake decides is one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from matrix import OPTIMIZERS
from synthetic_run import RATE, Array, draw
from test_matrix_optimizers import DAILY as MATRIX_OPTIMIZERS
from torch import nn

from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.engines import optimizer as optimizers
from toolkit.engines.base import Engine
from toolkit.engines.deepspeed_patches import TESTED_WITH_ZERO
from toolkit.engines.factory import create_engine
from toolkit.engines.optimizer import Lion
from toolkit.parity import Bounds, Cause, ParityResult, ParityRun, Tensors
from toolkit.parity.replay import StepRecord, explain
from toolkit.parity.run.compare_strategies import compare_strategies, plan
from toolkit.parity.run.rounding import flip_undecided_signs
from toolkit.parity.run.train_in_memory import train_in_memory
from toolkit.parity.signs import Directions
from toolkit.parity.tolerance import RoundingBound

BETA = 0.9
NOISE = 1e-7
LEAST = RoundingBound(loss=1e-6, gradient=3e-6, grad_norm=1e-6)
UNDECIDED = "model.layers.1.mlp.weight"
"""Its first element has a direction that is smaller than the noise."""


def momentum() -> dict[str, Array]:
    tensors = {name: value.astype(np.float64) for name, value in draw(3).items()}
    tensors[UNDECIDED][0, 0] = -(1 - BETA) * float(draw(2)[UNDECIDED][0, 0]) / BETA + 1e-10
    return tensors


def step_of(seed: int, *, turned: Callable[[str, Array], Array] = lambda name, signs: signs) -> StepRecord:
    """A step of Lion whose gradient has the noise of this seed; `turned` changes the signs that it takes."""
    chance = np.random.default_rng(seed)
    gradient = {name: value + NOISE * chance.normal(size=value.shape) for name, value in draw(2).items()}
    directions = Directions(gradient=gradient, momentum=momentum(), beta=BETA)
    update = {name: -RATE * turned(name, np.sign(directions[name])) for name in gradient}
    tensors: dict[str, Tensors] = {"gradient": gradient, "update": update}
    return StepRecord(
        step=3, loss=4.0, grad_norm=2.0, tensors=tensors, state={}, updates=3, loss_scale={}, directions=directions
    )


def seed_that(flips: bool) -> int:
    positive = np.sign(step_of(0).directions[UNDECIDED][0, 0])
    return next(
        seed for seed in range(1, 99) if (np.sign(step_of(seed).directions[UNDECIDED][0, 0]) != positive) == flips
    )


def test_a_direction_is_the_clipped_gradient_and_the_momentum() -> None:
    gradient, moments = {"w": np.float32([2.0, -4.0])}, {"w": np.float32([1.0, 1.0])}
    directions = Directions.of_step(gradient, moments, beta=0.75, grad_norm=8.0, grad_clip=4.0)
    assert directions["w"].tolist() == [1.0, 0.25]
    assert Directions.of_step(gradient, {}, beta=0.75, grad_norm=8.0, grad_clip=0.0)["w"].tolist() == [0.5, -1.0]


def test_a_sign_within_rounding_of_zero_is_no_mistake() -> None:
    own, baseline, rerun = step_of(seed_that(flips=True)), step_of(0), step_of(seed_that(flips=False))
    assert own.tensors["update"][UNDECIDED][0, 0] == -baseline.tensors["update"][UNDECIDED][0, 0]
    found = explain([own], [baseline], [[rerun]], LEAST)
    assert found.cause == Cause.CHAOS
    assert "; 1 signs of updates went the other way" in found.evidence


def test_any_other_sign_is_a_mistake() -> None:
    def turned(name: str, signs: Array) -> Array:
        flips = np.where(np.arange(signs.size).reshape(signs.shape) == 5, -1, 1)
        return signs * flips if name == UNDECIDED else signs

    own, baseline, rerun = step_of(1, turned=turned), step_of(0), step_of(seed_that(flips=False))
    found = explain([own], [baseline], [[rerun]], LEAST)
    assert found.cause == Cause.OPTIMIZER
    assert found.evidence.startswith(UNDECIDED)


class TestARerun:
    """Of the baseline turns about half of the signs that are within rounding of zero, and no others."""

    @pytest.fixture
    def parameter(self) -> nn.Parameter:
        parameter = nn.Parameter(torch.zeros(4000))
        gradient = torch.randn(4000, generator=torch.Generator().manual_seed(0))
        gradient[:1000] *= 1e-6
        parameter.grad = gradient
        return parameter

    def test_turns_half_of_what_is_undecided(self, parameter: nn.Parameter) -> None:
        optimizer = Lion([parameter], lr=1.0)
        flip_undecided_signs(optimizer, seed=1)
        assert parameter.grad is not None
        before = parameter.grad.sign()
        optimizer.step()
        flipped = parameter.detach() == before
        assert 300 < int(flipped[:1000].sum()) < 700
        assert not flipped[1000:].any()

    def test_turns_others_with_another_seed(self, parameter: nn.Parameter) -> None:
        other = nn.Parameter(torch.zeros(4000))
        assert parameter.grad is not None
        other.grad = parameter.grad.clone()
        for seed, tensor in enumerate((parameter, other), start=1):
            optimizer = Lion([tensor], lr=1.0)
            flip_undecided_signs(optimizer, seed=seed)
            optimizer.step()
        assert not torch.equal(parameter, other)


STEPS = 8
RECIPE: dict[str, Any] = {
    "optimizer": {"name": "lion", "lr": 3e-4, "betas": [0.9, 0.99], "weight_decay": 0.1},
    "schedule": {"name": "constant"},
    "train__steps": STEPS,
    "overrides__n_embd": 96,
    "train__grad_clip": 0.2,
}


def _flip_what_is_undecided(rank: int) -> None:
    """No mistake: as if rounding had turned each sign that it can turn."""
    step = Lion.step

    def flipping(optimizer: Lion, closure: Any = None) -> Any:
        if not optimizer._optimizer_step_pre_hooks:
            for seed in range(3):  # each turns half of them
                flip_undecided_signs(optimizer, seed=seed)
        return step(optimizer, closure)

    Lion.step = flipping  # type: ignore[method-assign]


def _turn_momentum_of_one_rank(rank: int) -> None:
    _before_step_3(lambda optimizer, tensor: optimizer.state[tensor]["exp_avg"].neg_(), is_here=rank == 1)


def _turn_gradient_of_one_shard(rank: int) -> None:
    def turn(optimizer: Lion, tensor: torch.Tensor) -> None:
        assert tensor.grad is not None
        if tensor.shape == (192, 96):  # of the second MLP projection, under tp2
            tensor.grad.neg_()
            optimizer.state[tensor]["exp_avg"].neg_()

    _before_step_3(turn, is_here=rank == 1)


def _other_beta(rank: int) -> None:
    def other(parameters: Any, lr: float, betas: tuple[float, float]) -> Lion:
        return Lion(parameters, lr=lr, betas=(0.5, betas[1]))

    optimizers.Lion = other  # type: ignore[assignment,misc]


def _before_step_3(change: Callable[[Lion, torch.Tensor], Any], *, is_here: bool) -> None:
    step = Lion.step
    calls: list[int] = []

    def changing(optimizer: Lion, closure: Any = None) -> Any:
        calls.append(1)
        if is_here and len(calls) == 3:
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    change(optimizer, tensor)
        return step(optimizer, closure)

    Lion.step = changing  # type: ignore[method-assign]


CAUSES = {Cause.OPTIMIZER, Cause.REPLICAS}
FAULTS = (_turn_momentum_of_one_rank, _turn_gradient_of_one_shard, _other_beta)


def _with_fault(fault: Callable[[int], None], *arguments: Any, **options: Any) -> Engine:
    """In the ranks of the strategy alone, which end with it."""
    fault(torch.distributed.get_rank())
    return create_engine(*arguments, **options)


def _train(recipe: Recipe, fault: Callable[[int], None] | None = None, seed: int | None = None) -> ParityRun:
    factory = create_engine if fault is None else partial(_with_fault, fault)
    return train_in_memory(recipe, engine_factory=factory, rounding_seed=seed)


class TestUnderTensorParallelism:
    @pytest.fixture(scope="class")
    def baseline(self, make_recipe: Callable[..., Recipe], ranks: Callable[..., list[Any]]) -> tuple[ParityRun, Bounds]:
        recipe = Strategy.parse("reference").apply(make_recipe(**RECIPE), 1)
        first, *reruns = (ranks(_train, 1, recipe, None, seed)[0] for seed in (None, 1, 2, 3))
        return first, Bounds.measured(first, reruns)

    @pytest.fixture
    def compare(
        self,
        baseline: tuple[ParityRun, Bounds],
        make_recipe: Callable[..., Recipe],
        ranks: Callable[..., list[Any]],
    ) -> Callable[[Callable[[int], None]], ParityResult]:
        def run(fault: Callable[[int], None]) -> ParityResult:
            recipe = Strategy.parse("tp2-z0").apply(make_recipe(**RECIPE), 2)
            result = ParityResult.of(ranks(_train, 2, recipe, fault)[0], *baseline)
            print(result)  # shown where a test fails
            return result

        return run

    def test_signs_that_rounding_decides_are_no_difference(
        self, compare: Callable[[Callable[[int], None]], ParityResult]
    ) -> None:
        result = compare(_flip_what_is_undecided)
        assert result.parameters > 0
        assert result.passed

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_mistake_is_found(
        self, compare: Callable[[Callable[[int], None]], ParityResult], fault: Callable[[int], None]
    ) -> None:
        result = compare(fault)
        assert {"loss", "parameters"} <= result.failed_checks
        assert result.diagnosis is not None
        assert result.diagnosis.cause in CAUSES


@pytest.mark.usefixtures("ranks")
@pytest.mark.whole
def test_dstk_compare_tells_mistakes_from_signs_that_rounding_decides(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(**RECIPE)
    (tp2,) = plan(recipe, Strategy.parse_list("tp2-z0"), 2)
    faults = (_flip_what_is_undecided, *FAULTS)
    jobs = [replace(tp2, name=fault.__name__, engine_factory=partial(_with_fault, fault)) for fault in faults]
    baselines = plan(recipe, [Strategy.parse("reference")], 2) * len(jobs)
    found = compare_strategies(recipe, jobs, baselines, title="t")
    print([f"{result.name}: {result.diagnosis}" for result in found.results])  # shown where the test fails
    assert [result.outcome for result in found.results] == ["same", "differs", "differs", "differs"]
    assert {result.diagnosis.cause for result in found.results[1:] if result.diagnosis} == CAUSES


def test_deepspeed_s_warning_is_left_out_for_optimizers_that_are_compared() -> None:
    assert {*OPTIMIZERS, *MATRIX_OPTIMIZERS, RECIPE["optimizer"]["name"]} >= TESTED_WITH_ZERO
