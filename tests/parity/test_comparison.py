"""Comparison: the results as data, for JSON and for the report."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from synthetic_run import STEPS, baseline, with_losses, with_norms, without_tensors

from toolkit.parity import Bounds, Cause, Diagnosis, ParityResult, ParityRun
from toolkit.parity.comparison import Baseline, Comparison, StrategyResult

BASELINE = baseline()


def strategy_result(run: ParityRun = BASELINE, *, name: str = "z1", bounds: Bounds | None = None) -> StrategyResult:
    return StrategyResult(name=name, result=ParityResult.of(run, BASELINE, bounds).with_diagnosis(), seconds=1.26)


def wrong(run: ParityRun = BASELINE) -> ParityRun:
    return with_losses(run, lambda step, loss: loss * (1.01 if step > 5 else 1))


GROWN = replace(
    strategy_result(wrong()),
    closer_diagnosis=Diagnosis(Cause.CHAOS, "cannot tell from rounding at this learning rate."),
)
FAILED = StrategyResult(name="tp2", error="rank 1 died without an error message", command="dstk train …")


def comparison(*entries: StrategyResult, **fields: Any) -> Comparison:
    own = Baseline(run=BASELINE, bounds=Bounds.fixed(), reruns=[replace(BASELINE.curve, label="rounding seed 1")])
    return Comparison(title="t", baselines=[own], results=entries, **fields)


def strategy(*entries: StrategyResult) -> dict[str, Any]:
    found: dict[str, Any] = comparison(*entries).to_dict()["strategies"][0]
    return found


@pytest.mark.parametrize(
    ("found", "outcome"),
    [(strategy_result(), "same"), (strategy_result(wrong()), "differs"), (GROWN, "cannot tell"), (FAILED, "failed")],
    ids=["same", "differs", "cannot tell", "failed"],
)
class TestAStrategyResult:
    def test_has_an_outcome(self, found: StrategyResult, outcome: str) -> None:
        assert found.outcome == outcome

    def test_passes_only_where_it_is_the_same(self, found: StrategyResult, outcome: str) -> None:
        assert found.passed == (outcome == "same")

    def test_decides_whether_the_comparison_passes(self, found: StrategyResult, outcome: str) -> None:
        assert comparison(strategy_result(), found).passed == (outcome == "same")

    def test_is_plain_data(self, found: StrategyResult, outcome: str) -> None:
        assert json.loads(json.dumps(strategy(found), allow_nan=False))["result"] == outcome


@pytest.mark.parametrize(
    ("entries", "outcome"),
    [
        ([strategy_result()], "same"),
        ([strategy_result(), GROWN], "cannot tell"),
        ([GROWN, strategy_result(wrong())], "differs"),
        ([GROWN, FAILED], "differs"),
    ],
)
def test_the_outcome_of_a_comparison_is_that_of_its_worst_result(entries: list[StrategyResult], outcome: str) -> None:
    assert comparison(*entries).outcome == comparison(*entries).to_dict()["outcome"] == outcome


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_becomes_none(value: float) -> None:
    run = with_norms(with_losses(BASELINE, lambda step, loss: value), lambda step, norm: value)
    found = strategy(strategy_result(run))
    assert json.dumps(found, allow_nan=False)
    assert found["losses"] == found["grad_norms"] == [None] * STEPS
    assert found["loss_difference"] is None


def test_a_baseline_without_learning_rates_is_plain_data_too() -> None:
    bare = Baseline(run=replace(BASELINE, learning_rates=(math.nan,) * STEPS), bounds=Bounds.fixed())
    data = replace(comparison(strategy_result()), baselines=[bare]).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False))["baselines"][0]["learning_rates"] == [None] * STEPS


def test_a_failed_strategy_says_why() -> None:
    found = strategy(FAILED)
    assert (found["error"], found["command"]) == ("rank 1 died without an error message", "dstk train …")


def test_a_failed_strategy_has_the_fields_of_the_others() -> None:
    assert strategy(FAILED).keys() == strategy(strategy_result()).keys()


def test_one_that_differs_has_its_cause() -> None:
    found = strategy(strategy_result(wrong()))
    assert found["cause"] == "optimizer state"
    assert "step 6 is not" in found["sentence"]
    assert found["first_diverging_step"] == 6


def test_one_that_is_the_same_has_none() -> None:
    found = strategy(strategy_result())
    assert (found["cause"], found["sentence"], found["first_diverging_step"]) == ("", "", None)


@pytest.mark.parametrize(
    ("run", "agreement"),
    [
        (BASELINE, "bitwise"),
        (with_losses(BASELINE, lambda step, loss: loss * (1 + 1e-8)), "curve"),
        (wrong(), "first step"),
        (with_losses(BASELINE, lambda step, loss: loss * 1.01), "none"),
    ],
)
def test_the_agreement_says_how_far_two_runs_agree(run: ParityRun, agreement: str) -> None:
    assert strategy(strategy_result(run))["agreement"] == agreement


def test_equal_curves_with_diverged_replicas_are_not_bitwise() -> None:
    assert strategy(strategy_result(replace(BASELINE, diverged=frozenset({"a"}))))["agreement"] != "bitwise"


def test_other_learning_rates_fail() -> None:
    assert not strategy_result(replace(BASELINE, learning_rates=(0.2,) * STEPS)).passed


def test_the_tolerance_is_the_one_that_judged() -> None:
    found = strategy(strategy_result(bounds=Bounds.fixed(1e-3)))
    assert found["tolerance"]["loss"] == [1e-3] * STEPS


def test_gradients_come_in_the_order_of_the_model() -> None:
    assert [row["name"] for row in strategy(strategy_result())["gradients"]] == list(BASELINE.initial)


def test_without_weights_there_is_no_difference_of_weights() -> None:
    bare = without_tensors(BASELINE)
    found = Comparison(
        title="t",
        baselines=[Baseline(run=bare, bounds=Bounds.fixed())],
        results=[StrategyResult(name="b", result=ParityResult.of(bare, bare))],
    )
    assert found.to_dict()["strategies"][0]["parameter_difference"] is None


def test_a_baseline_whose_files_are_gone_keeps_the_order() -> None:
    emptied = Baseline(run=BASELINE.without_values(), bounds=Bounds.fixed())
    found = replace(comparison(strategy_result()), baselines=[emptied]).to_dict()
    assert [row["name"] for row in found["strategies"][0]["gradients"]] == list(BASELINE.initial)


def test_reruns_are_curves_with_their_names() -> None:
    (data,) = comparison(strategy_result()).to_dict()["baselines"]
    assert [curve["label"] for curve in data["reruns"]] == ["rounding seed 1"]


def test_a_strategy_names_the_baseline_that_it_was_compared_with() -> None:
    other = replace(BASELINE, curve=replace(BASELINE.curve, label="dp1-z0"))
    entry = StrategyResult(name="ddp", result=ParityResult.of(BASELINE, other))
    assert strategy(entry)["baseline"] == "dp1-z0"
