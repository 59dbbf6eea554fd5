"""A replay tells rounding that training amplified from a mistake that shows after the first step only."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from planted_faults import forget_moments
from synthetic_run import RATE, STEPS, Array, baseline, changed, draw, with_losses

from toolkit.config.recipe import Precision
from toolkit.config.strategy import Strategy
from toolkit.engines.base import Engine
from toolkit.engines.deepspeed_engine import DeepSpeedEngine
from toolkit.engines.factory import create_engine
from toolkit.parity import Bounds, Cause, ParityResult, Tolerance
from toolkit.parity.replay import StepRecord, explain, steps_to_replay
from toolkit.parity.run.compare_strategies import compare_strategies, plan
from toolkit.parity.tolerance import RoundingBound

NOISE = 1e-3
KINDS = ("update", "exp_avg", "exp_avg_sq")


def record(step: int) -> StepRecord:
    gradient, weights = draw(step), draw(100)
    changes = {"update": {name: -RATE * value for name, value in gradient.items()}}
    changes |= {kind: draw(step + 10 * place) for place, kind in enumerate(KINDS[1:], start=1)}
    return StepRecord(
        step=step,
        loss=4.0,
        grad_norm=2.0,
        tensors={"gradient": gradient} | changes,
        state={"master": weights},
        updates=step,
        loss_scale={},
    )


def noisy(record: StepRecord, seed: int, scale: float = NOISE) -> StepRecord:
    chance = np.random.default_rng([seed, record.step])

    def moved(value: Array) -> Array:
        return (value * (1 + scale * chance.normal(size=value.shape))).astype(value.dtype)

    return replace(
        record,
        loss=record.loss * (1 + scale * chance.normal()),
        grad_norm=record.grad_norm * (1 + scale * chance.normal()),
        tensors={kind: changed(tensors, moved) for kind, tensors in record.tensors.items()},
    )


BASELINE = [record(step) for step in range(1, 9)]
RERUNS = [[noisy(one, seed) for one in BASELINE] for seed in (1, 2, 3, 4)]
OWN = [noisy(one, 5) for one in BASELINE]


def with_change(place: int, **fields: Any) -> list[StepRecord]:
    return [replace(one, **fields) if index == place else one for index, one in enumerate(OWN)]


def with_tensors(kind: str, change: Callable[[Array], Array], *parts: str) -> list[StepRecord]:
    """The fourth step with a changed gradient, update or optimizer state."""
    return with_change(3, tensors=OWN[3].tensors | {kind: changed(OWN[3].tensors[kind], change, *parts)})


def test_rounding_of_one_step_in_every_step_is_no_mistake() -> None:
    found = explain(OWN, BASELINE, RERUNS, None)
    assert found.cause == Cause.CHAOS
    assert found.sentence.startswith("cannot tell from rounding at this learning rate")
    assert "took 8 of its steps" in found.sentence


@pytest.mark.parametrize(
    ("own", "cause", "says"),
    [
        (with_change(3, loss=4.1), Cause.FORWARD, "step 5 is wrong"),
        (with_tensors("gradient", lambda value: 1.1 * value, "mlp"), Cause.BACKWARD, "the baseline's gradient is"),
        (with_change(3, grad_norm=2.1), Cause.CLIPPING, "gradient norm"),
        (with_change(3, loss=float("nan")), Cause.FORWARD, "loss"),
        (with_tensors("update", lambda value: 1.1 * value), Cause.OPTIMIZER, "the baseline's update"),
        (with_tensors("exp_avg", np.zeros_like), Cause.OPTIMIZER, "optimizer state exp_avg "),
        (with_tensors("exp_avg_sq", lambda value: 1.1 * value, "mlp"), Cause.OPTIMIZER, "exp_avg_sq"),
    ],
    ids=["loss", "gradient", "norm", "nan", "update", "moment", "square"],
)
def test_one_wrong_step_is_named(own: list[StepRecord], cause: Cause, says: str) -> None:
    found = explain(own, BASELINE, RERUNS, None)
    assert found.cause == cause
    assert says in found.sentence


def test_the_parameter_that_differs_most_is_the_evidence() -> None:
    found = explain(with_tensors("update", lambda value: 2 * value, "layers.2.mlp"), BASELINE, RERUNS, None)
    assert found.evidence.startswith("model.layers.2.mlp.weight: relative difference")


def test_reruns_that_agree_by_chance_in_one_step_raise_no_alarm() -> None:
    reruns = [[replace(one, loss=4.0) if one.step == 3 else one for one in rerun] for rerun in RERUNS]
    assert explain(OWN, BASELINE, reruns, None).cause == Cause.CHAOS


def test_fp32_allows_its_rounding_where_reruns_show_none() -> None:
    least = RoundingBound(loss=5 * NOISE, gradient=5 * NOISE, grad_norm=5 * NOISE)
    assert explain(OWN, BASELINE, [BASELINE], None).cause == Cause.FORWARD
    assert explain(OWN, BASELINE, [BASELINE], least).cause == Cause.CHAOS


class TestTheSteps:
    @pytest.fixture
    def late(self) -> ParityResult:
        run = with_losses(baseline(), lambda step, loss: loss * (1 + 1e-9 * 2**step if step < 8 else 1.1))
        return ParityResult.of(run, baseline())

    def test_are_all_after_the_first_of_a_small_model(self, late: ParityResult) -> None:
        assert steps_to_replay(late, 100) == list(range(1, STEPS))

    def test_are_those_around_the_first_that_differs_of_a_large_one(self, late: ParityResult) -> None:
        assert late.curves.first_diverging_step == 8
        assert {6, 7} <= set(steps_to_replay(late, 4))
        assert len(steps_to_replay(late, 4)) == 4

    def test_are_spread_where_only_weights_differ(self) -> None:
        run = replace(baseline(), parameters=changed(baseline().parameters, lambda value: value * 2))
        steps = steps_to_replay(ParityResult.of(run, baseline()), 4)
        assert len(steps) == 4
        assert steps[-1] > STEPS // 2


def _scale_later_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = DeepSpeedEngine._backward
    calls: list[int] = []

    def scaled(engine: DeepSpeedEngine, loss: torch.Tensor) -> None:
        calls.append(1)
        backward(engine, loss * (1.5 if len(calls) > 3 * engine.accumulation else 1))

    monkeypatch.setattr(DeepSpeedEngine, "_backward", scaled)


def _turn_moments_once(monkeypatch: pytest.MonkeyPatch) -> None:
    set_rate = DeepSpeedEngine._set_learning_rate
    calls: list[int] = []

    def turning(engine: DeepSpeedEngine, rate: float) -> None:
        calls.append(1)
        set_rate(engine, rate)
        if len(calls) == 5:
            for state in engine.engine.optimizer.optimizer.state.values():
                state["exp_avg"].neg_()

    monkeypatch.setattr(DeepSpeedEngine, "_set_learning_rate", turning)


FAULTS = (forget_moments, _scale_later_gradients, _turn_moments_once)


def _faulty_engine(fault: Callable[[pytest.MonkeyPatch], None], *arguments: Any, **options: Any) -> Engine:
    """In the ranks of the strategy alone, which end with it."""
    fault(pytest.MonkeyPatch())
    return create_engine(*arguments, **options)


@pytest.mark.usefixtures("ranks")
@pytest.mark.whole
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_where_rounding_grows_right_strategies_cannot_be_told_and_wrong_ones_differ(
    make_recipe: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, precision: Precision
) -> None:
    """At a learning rate that amplifies rounding, and within bounds that do not grow with it."""
    measured = Bounds.measured

    def of_the_first_step(*arguments: Any, **options: Any) -> Bounds:
        bounds = measured(*arguments, **options)
        loss, norm = bounds.curve.at(0)
        return replace(bounds, curve=Tolerance(loss=(loss,), grad_norm=(norm,), source="step 1"))

    monkeypatch.setattr(Bounds, "measured", of_the_first_step)
    # fp32 rounds so little that it takes a higher rate and more steps until the curve shows it.
    rate, steps = {"fp32": (0.3, 24), "bf16": (3e-2, 8)}[precision]
    optimizer = {"name": "adamw", "lr": rate, "weight_decay": 0.1}
    recipe = make_recipe(optimizer=optimizer, train__steps=steps, precision=precision, overrides__vocab_size=321)
    *right, wrong = plan(recipe, Strategy.parse_list("tp2-sp,z1"), 2)
    faulty = [replace(wrong, name=fault.__name__, engine_factory=partial(_faulty_engine, fault)) for fault in FAULTS]
    jobs = [*right, *faulty]
    baselines = plan(recipe, [Strategy.parse(Strategy.parse("z1").baseline(precision))], 2) * len(jobs)
    found = compare_strategies(recipe, jobs, baselines, title="t", rounding_seeds=1)
    print([f"{result.name}: {result.diagnosis}" for result in found.results])  # shown where the test fails
    outcomes = [result.outcome for result in found.results]
    assert outcomes[: len(right)] == ["cannot tell"] * len(right)
    assert outcomes[len(right) :] == ["differs"] * len(FAULTS)
