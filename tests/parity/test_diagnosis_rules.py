"""The diagnosis: for the pattern of each mistake its rule is the first that matches, and names its cause."""

import ast
import json
from dataclasses import replace
from pathlib import Path
from string import Formatter

import numpy as np
import pytest
from planted_patterns import BASELINE, PATTERNS, Pattern, grown, times
from synthetic_run import with_gradients, with_losses

from toolkit.parity import Bounds, Cause, ParityResult
from toolkit.parity.diagnosis import RULES, cause, diagnose
from toolkit.parity.diagnosis.update import JUMP, first_update, largest_jump


def result_of(pattern: Pattern) -> ParityResult:
    return ParityResult.of(pattern.plant(pattern.baseline), pattern.baseline)


def matching_rules(result: ParityResult) -> list[str]:
    return [rule.__name__ for rule in RULES if rule(result) is not None]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_a_planted_mistake_fails_and_its_own_rule_is_the_first_to_name_it(pattern: Pattern) -> None:
    result = result_of(pattern)
    assert not result.passed
    assert matching_rules(result)[0] == pattern.rule
    diagnosis = diagnose(result)
    assert diagnosis.cause == pattern.cause
    assert pattern.says in diagnosis.sentence


def test_every_rule_has_a_pattern() -> None:
    assert {pattern.rule for pattern in PATTERNS} == {rule.__name__ for rule in RULES}


def test_every_cause_has_a_pattern() -> None:
    assert {pattern.cause for pattern in PATTERNS} == set(Cause)


def test_an_equal_run_has_no_diagnosis() -> None:
    assert ParityResult.of(BASELINE, BASELINE).diagnosis is None


def test_rounding_has_no_diagnosis() -> None:
    rounded = with_gradients(with_losses(BASELINE, lambda step, loss: loss * (1 + 1e-7)), times(1 + 2e-7))
    assert ParityResult.of(rounded, BASELINE).diagnosis is None


def test_first_updates_that_differ_by_rounding_are_not_of_another_weight_decay() -> None:
    """A fit of an update by the baseline's and the weights has some decay, whatever the difference is."""
    chance = np.random.default_rng(3)
    updates = {
        name: value * (1 + 1e-4 * chance.normal(size=value.shape).astype(np.float32))
        for name, value in BASELINE.first_updates.items()
    }
    result = ParityResult.of(replace(BASELINE, first_updates=updates), BASELINE)
    assert result.wrong_updates
    assert first_update(result) is None


def test_an_equal_run_matches_no_rule_but_the_last() -> None:
    assert matching_rules(ParityResult.of(BASELINE, BASELINE)) == ["growth"]


class TestTheOrder:
    """Of two mistakes the earlier one in a step is named: the later one may be its consequence."""

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("another order of samples", "other initial weights"),
            ("other initial weights", "a wrong softmax"),
            ("a layer with a wrong shard", "norms and biases that are not summed"),
            ("gradients twice as long", "a wrong softmax"),
            ("one layer", "a norm of half the parameters"),
            ("a norm of half the parameters", "another learning rate from step 4 on"),
            ("another learning rate from step 4 on", "another optimizer"),
            ("another optimizer", "a difference that sets in at once"),
            ("replicas that diverge", "a difference that sets in at once"),
            ("biases that are added twice", "chaos"),
        ],
    )
    def test_the_earlier_one_is_named(self, first: str, second: str) -> None:
        patterns = {pattern.name: pattern for pattern in PATTERNS}
        earlier = patterns[first]
        both = ParityResult.of(patterns[second].plant(earlier.plant(earlier.baseline)), earlier.baseline)
        assert diagnose(both).cause == earlier.cause


class TestChaosOrJump:
    def test_growth_below_the_jump_is_chaos(self) -> None:
        result = ParityResult.of(grown(JUMP * 0.3, until=6)(BASELINE), BASELINE, Bounds.fixed(1e-4))
        assert diagnose(result).cause == Cause.CHAOS

    def test_a_rise_is_counted_from_the_largest_difference_so_far(self) -> None:
        assert largest_jump([1e-6, 1e-9, 2e-6], floor=1e-9) == (3, 2.0)

    def test_differences_below_the_floor_count_as_the_floor(self) -> None:
        assert largest_jump([0.0, 1e-6], floor=1e-7) == (2, pytest.approx(10))

    def test_the_first_step_is_no_rise(self) -> None:
        assert largest_jump([1.0, 1.0], floor=1e-9) == (2, 1.0)

    def test_where_nothing_may_differ_any_difference_is_a_jump(self) -> None:
        assert largest_jump([0.0, 0.0, 1e-9], floor=0.0) == (3, np.inf)

    def test_equal_bits_have_no_jump(self) -> None:
        assert largest_jump([0.0, 0.0], floor=0.0) == (1, 0.0)


def test_every_text_has_a_rule_that_fills_it_in() -> None:
    folder = Path(cause.__file__).parent
    used = {}
    for file in folder.parent.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "diagnosis":
                one = call.args[0]
                names = (one.body, one.orelse) if isinstance(one, ast.IfExp) else (one,)
                used |= {ast.literal_eval(name): {keyword.arg for keyword in call.keywords} for name in names}
    texts = json.loads((folder / "diagnoses.json").read_text(encoding="utf-8"))
    fields = {
        name: {
            field for key in ("sentence", "evidence") for _, field, *_ in Formatter().parse(row.get(key, "")) if field
        }
        for name, row in texts.items()
    }
    assert used == fields
