"""The diagnosis: for the pattern of each mistake the rule that knows it speaks first, and names its cause."""

import numpy as np
import pytest
from planted_patterns import BASELINE, PATTERNS, Pattern, grown, times
from synthetic_trial import with_gradients, with_losses

from toolkit.parity import Bounds, Cause, Verdict
from toolkit.parity.diagnosis import RULES, diagnose
from toolkit.parity.diagnosis.update import JUMP, largest_jump


def verdict_on(pattern: Pattern) -> Verdict:
    return Verdict.of(pattern.plant(pattern.baseline), pattern.baseline)


def speaks(verdict: Verdict) -> list[str]:
    return [rule.__name__ for rule in RULES if rule(verdict.case) is not None]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
class TestEveryPattern:
    def test_raises_an_alarm(self, pattern: Pattern) -> None:
        assert not verdict_on(pattern).passed

    def test_is_known_by_its_rule_and_by_none_before_it(self, pattern: Pattern) -> None:
        assert speaks(verdict_on(pattern))[0] == pattern.rule

    def test_has_its_cause(self, pattern: Pattern) -> None:
        assert diagnose(verdict_on(pattern).case).cause == pattern.cause

    def test_is_explained(self, pattern: Pattern) -> None:
        assert pattern.says in diagnose(verdict_on(pattern).case).sentence


def test_every_rule_has_a_pattern() -> None:
    assert {pattern.rule for pattern in PATTERNS} == {rule.__name__ for rule in RULES}


def test_every_cause_has_a_pattern() -> None:
    assert {pattern.cause for pattern in PATTERNS} == set(Cause)


def test_the_same_trial_has_no_diagnosis() -> None:
    assert Verdict.of(BASELINE, BASELINE).diagnosis is None


def test_rounding_has_no_diagnosis() -> None:
    rounded = with_gradients(with_losses(BASELINE, lambda step, loss: loss * (1 + 1e-7)), times(1 + 2e-7))
    assert Verdict.of(rounded, BASELINE).diagnosis is None


def test_what_no_bound_notices_is_mentioned_by_no_rule_but_the_last() -> None:
    assert speaks(Verdict.of(BASELINE, BASELINE)) == ["growth"]


class TestTheOrder:
    """Of two mistakes the earlier one in a step is named: the later one may be its consequence."""

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ("another order of samples", "other starting weights"),
            ("other starting weights", "a wrong softmax"),
            ("a layer that is cut wrongly", "norms and biases that are not summed"),
            ("gradients twice as long", "a wrong softmax"),
            ("one layer", "a norm of half the parameters"),
            ("a norm of half the parameters", "another learning rate from step 4 on"),
            ("another learning rate from step 4 on", "another optimizer"),
            ("another optimizer", "a difference that sets in at once"),
            ("copies that drift apart", "a difference that sets in at once"),
            ("biases that are added twice", "chaos"),
        ],
    )
    def test_the_earlier_one_is_named(self, first: str, second: str) -> None:
        found = {pattern.name: pattern for pattern in PATTERNS}
        both = Verdict.of(found[second].plant(found[first].plant(BASELINE)), BASELINE)
        assert diagnose(both.case).cause == found[first].cause


class TestChaosOrJump:
    def test_growth_below_the_jump_is_chaos(self) -> None:
        verdict = Verdict.of(grown(JUMP * 0.3, until=6)(BASELINE), BASELINE, Bounds.fixed(1e-4))
        assert diagnose(verdict.case).cause == Cause.CHAOS

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
