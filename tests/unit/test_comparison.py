"""Comparison: the verdicts as data, for JSON and for the report."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from synthetic_trial import STEPS, baseline, with_losses, with_norms, without_tensors

from toolkit.parity import Bounds, Trial, Verdict
from toolkit.parity.comparison import Comparison, Entry

BASELINE = baseline()


def entry(trial: Trial = BASELINE, *, asked: str = "z1", bounds: Bounds | None = None) -> Entry:
    return Entry(asked=asked, verdict=Verdict.of(trial, BASELINE, bounds).settled(), seconds=1.26)


def wrong(trial: Trial = BASELINE) -> Trial:
    return with_losses(trial, lambda step, loss: loss * (1.01 if step > 5 else 1))


FAILED = Entry(asked="tp2", error="rank 1 died without a word", command="dstk train …")


def comparison(*entries: Entry, **fields: Any) -> Comparison:
    return Comparison(title="t", baseline=BASELINE, bounds=Bounds.fixed(), entries=entries, **fields)


def strategy(*entries: Entry) -> dict[str, Any]:
    found: dict[str, Any] = comparison(*entries).to_dict()["strategies"][0]
    return found


@pytest.mark.parametrize(
    ("found", "word"),
    [(entry(), "same"), (entry(wrong()), "differs"), (FAILED, "failed")],
    ids=["same", "differs", "failed"],
)
class TestAnEntry:
    def test_has_a_word(self, found: Entry, word: str) -> None:
        assert found.word == word

    def test_passes_only_where_it_is_the_same(self, found: Entry, word: str) -> None:
        assert found.passed == (word == "same")

    def test_decides_whether_the_comparison_passes(self, found: Entry, word: str) -> None:
        assert comparison(entry(), found).passed == (word == "same")

    def test_is_plain_data(self, found: Entry, word: str) -> None:
        assert json.loads(json.dumps(strategy(found), allow_nan=False))["verdict"] == word


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_becomes_none(value: float) -> None:
    trial = with_norms(with_losses(BASELINE, lambda step, loss: value), lambda step, norm: value)
    found = strategy(entry(trial))
    assert json.dumps(found, allow_nan=False)
    assert found["losses"] == found["grad_norms"] == [None] * STEPS
    assert found["loss_difference"] is None


def test_a_baseline_without_learning_rates_is_plain_data_too() -> None:
    data = replace(comparison(entry()), baseline=replace(BASELINE, learning_rates=(math.nan,) * STEPS)).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False))["baseline"]["learning_rates"] == [None] * STEPS


def test_a_failed_strategy_says_why() -> None:
    found = strategy(FAILED)
    assert (found["error"], found["command"]) == ("rank 1 died without a word", "dstk train …")


def test_a_failed_strategy_has_the_fields_of_the_others() -> None:
    assert strategy(FAILED).keys() == strategy(entry()).keys()


def test_one_that_differs_has_its_cause() -> None:
    found = strategy(entry(wrong()))
    assert found["cause"] == "optimizer state"
    assert "step 6 is not" in found["sentence"]
    assert found["first_diverging_step"] == 6


def test_one_that_is_the_same_has_none() -> None:
    found = strategy(entry())
    assert (found["cause"], found["sentence"], found["first_diverging_step"]) == ("", "", None)


@pytest.mark.parametrize(
    ("trial", "rung"),
    [
        (BASELINE, "bitwise"),
        (with_losses(BASELINE, lambda step, loss: loss * (1 + 1e-8)), "curve"),
        (wrong(), "first step"),
        (with_losses(BASELINE, lambda step, loss: loss * 1.01), "none"),
    ],
)
def test_the_rung_says_how_far_two_agree(trial: Trial, rung: str) -> None:
    assert strategy(entry(trial))["rung"] == rung


def test_equal_curves_with_copies_that_differ_are_not_bitwise() -> None:
    assert strategy(entry(replace(BASELINE, torn=frozenset({"a"}))))["rung"] != "bitwise"


def test_other_learning_rates_are_no_pass() -> None:
    assert not entry(replace(BASELINE, learning_rates=(0.2,) * STEPS)).passed


def test_the_tolerance_is_the_one_that_judged() -> None:
    found = strategy(entry(bounds=Bounds.fixed(1e-3)))
    assert found["tolerance"]["loss"] == [1e-3] * STEPS


def test_gradients_come_in_the_order_of_the_model() -> None:
    assert [row["name"] for row in strategy(entry())["gradients"]] == list(BASELINE.initial)


def test_without_weights_there_is_no_difference_of_weights() -> None:
    bare = without_tensors(BASELINE)
    found = Comparison(
        title="t", baseline=bare, bounds=Bounds.fixed(), entries=[Entry(asked="b", verdict=Verdict.of(bare, bare))]
    )
    assert found.to_dict()["strategies"][0]["parameter_difference"] is None


def test_a_baseline_whose_files_are_gone_keeps_the_order() -> None:
    found = replace(comparison(entry()), baseline=BASELINE.without_values()).to_dict()
    assert [row["name"] for row in found["strategies"][0]["gradients"]] == list(BASELINE.initial)


def test_reruns_are_curves_with_their_names() -> None:
    data = comparison(entry(), reruns=[BASELINE.curve.named("rounding seed 1")]).to_dict()
    assert [curve["label"] for curve in data["reruns"]] == ["rounding seed 1"]
