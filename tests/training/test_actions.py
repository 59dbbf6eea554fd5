"""The actions that a callback may return from a hook: what each does to the run, and which callback decides."""

from collections.abc import Callable
from typing import Any

import pytest

import toolkit
from toolkit.config.recipe import Recipe
from toolkit.engines.reference_engine import ReferenceEngine
from toolkit.errors import NonFiniteError

Ranks = Callable[..., list[Any]]
MakeRecipe = Callable[..., Recipe]
FAILED_CALL = 2
"""The call of `train_step`, from 1, after whose update the tests interfere."""


class Answers(toolkit.Callback):
    """Returns an action once from one hook, at the step with index 1, and counts how often the hook is called."""

    def __init__(self, hook: str, action: toolkit.Action | None) -> None:
        self.calls = 0
        self._answers = [action]
        setattr(self, hook, self._answer)

    def _answer(self, run: Any, _: Any) -> toolkit.Action | None:
        self.calls += 1
        return self._answers.pop() if run.step == 1 and self._answers else None


def trained(recipe: Recipe, hook: str, *actions: toolkit.Action | None) -> dict[str, Any]:
    """Train three steps in memory; with `on_nonfinite`, the engine's second call fails."""
    callbacks = [Answers(hook, action) for action in actions]
    train_step = ReferenceEngine.train_step
    calls = []

    def failing(engine: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(options["learning_rate"])
        if hook == "on_nonfinite" and len(calls) == FAILED_CALL:
            raise NonFiniteError("the loss is planted")
        return train_step(engine, *arguments, **options)

    ReferenceEngine.train_step = failing  # type: ignore[method-assign]
    run = toolkit.train(toolkit.Job.of(recipe, 1), callbacks, in_memory=True)
    return {
        "steps": [(metrics.step, metrics.skipped) for metrics in run.history],
        "engine_calls": len(calls),
        "callback_calls": [callback.calls for callback in callbacks],
    }


@pytest.fixture
def outcome(make_recipe: MakeRecipe, ranks: Ranks) -> Callable[..., dict[str, Any]]:
    def run(hook: str, *actions: toolkit.Action | None) -> dict[str, Any]:
        recipe = make_recipe(train__steps=3, train__engine="reference")
        return ranks(trained, 1, recipe, hook, *actions)[0]

    return run


def test_a_nonfinite_step_that_is_skipped_counts_and_is_marked(outcome: Callable[..., dict[str, Any]]) -> None:
    result = outcome("on_nonfinite", toolkit.Action.SKIP)
    assert result["steps"] == [(1, False), (2, True), (3, False)]
    assert result["engine_calls"] == 3


def test_a_nonfinite_step_that_is_retried_is_taken_again(outcome: Callable[..., dict[str, Any]]) -> None:
    result = outcome("on_nonfinite", toolkit.Action.RETRY)
    assert result["steps"] == [(1, False), (2, False), (3, False)]
    assert result["engine_calls"] == 4


def test_a_nonfinite_step_without_an_action_ends_the_run(outcome: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(NonFiniteError, match="the loss is planted"):
        outcome("on_nonfinite", None)


def test_an_update_that_is_retried_does_not_count(outcome: Callable[..., dict[str, Any]]) -> None:
    result = outcome("on_after_update", toolkit.Action.RETRY)
    assert result["steps"] == [(1, False), (2, False), (3, False)]
    assert result["engine_calls"] == 4


def test_an_update_cannot_be_skipped_after_it_changed_the_weights(outcome: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(Exception, match=r"on_after_update returned Action\.SKIP"):
        outcome("on_after_update", toolkit.Action.SKIP)


def test_the_first_action_decides_and_later_callbacks_are_not_called(outcome: Callable[..., dict[str, Any]]) -> None:
    result = outcome("on_nonfinite", None, toolkit.Action.SKIP, toolkit.Action.RETRY)
    assert result["steps"][1] == (2, True)
    assert result["callback_calls"] == [1, 1, 0]
