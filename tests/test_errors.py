import pickle

import pytest

from toolkit import errors
from toolkit.errors import (
    FinishedError,
    LayoutError,
    PreemptedError,
    RecipeError,
    Refusal,
    SpareError,
    ToolkitError,
    nearest,
)

REFUSAL = Refusal(
    field="zero_stage",
    settings=(("zero_stage", 2), ("pp", 4)),
    reason="a DeepSpeed pipeline allows zero_stage 0 or 1",
    remedy=(("zero_stage", "0 or 1"), ("pp", 1)),
)
ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ToolkitError)]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_exits_with_2_but_a_preemption_and_the_end_of_a_run(kind):
    code = kind("what was given, what is allowed, what to do").exit_code
    assert code == {PreemptedError: 75, FinishedError: 0, SpareError: 0}.get(kind, 2)


@pytest.mark.parametrize("kind", ALL)
def test_an_error_prints_its_message(kind):
    assert str(kind("tp=3 does not divide 4 heads. Set tp=2.")) == "tp=3 does not divide 4 heads. Set tp=2."


def test_a_recipe_error_prints_every_problem_on_its_own_line():
    error = RecipeError(["first", "second"])
    assert str(error).splitlines() == error.problems == ["first", "second"]


def test_a_single_problem_is_not_split_into_letters():
    assert RecipeError("only").problems == ["only"]


def test_a_refusal_is_one_line() -> None:
    line = "zero_stage=2 with pp=4: a DeepSpeed pipeline allows zero_stage 0 or 1. Set zero_stage to 0 or 1, or pp=1."
    assert str(REFUSAL) == line


def test_a_refusal_is_rendered_in_the_spelling_of_a_front_end() -> None:
    line = REFUSAL.render(lambda field, value: f"--{field} {value}", verb="use")
    assert line.startswith("--zero_stage 2 with --pp 4: ")
    assert line.endswith(" Use --zero_stage 0 or 1, or --pp 1.")


def test_a_refusal_of_a_layout_names_the_fields_of_the_recipe() -> None:
    refusal = REFUSAL.in_section("parallel")
    assert refusal.field == "parallel.zero_stage"
    assert dict(refusal.settings) == {"parallel.zero_stage": 2, "parallel.pp": 4}
    assert str(refusal).startswith("parallel.zero_stage=2 with pp=4: ")


def test_an_error_keeps_the_refusal_behind_its_message() -> None:
    error = LayoutError(REFUSAL)
    assert (error.refusal, str(error)) == (REFUSAL, str(REFUSAL))
    assert RecipeError([REFUSAL, "other"]).refusals == [REFUSAL]


def test_what_was_given_is_spelled_as_it_was_given_and_words_are_a_remedy_alone() -> None:
    refusal = Refusal.between(
        (("data.source", "my text"), ("--micro", 2), ("--trainer", True)), "no", ("tp", "1 or 2"), ""
    )
    assert str(refusal) == "data.source=my text with --micro 2 and --trainer: no. Set tp to 1 or 2."
    assert (refusal.field, refusal.remedy) == ("data.source", (("tp", "1 or 2"),))


def test_an_error_without_fields_is_a_refusal_by_its_message() -> None:
    assert ToolkitError("ds.json: not JSON.").as_refusal("model") == Refusal(field="model", reason="ds.json: not JSON.")
    assert LayoutError(REFUSAL).as_refusal() == REFUSAL
    assert LayoutError(REFUSAL).as_refusal("parallel").field == "parallel"


def test_an_error_that_crosses_processes_keeps_its_fields() -> None:
    sent = pickle.loads(pickle.dumps(LayoutError.of("tp", 3, "no", ("tp", 1))))
    assert sent.refusal == Refusal.of("tp", 3, "no", ("tp", 1))


def test_nearest_names_a_typo():
    assert nearest("mirco_size", ["micro_batch_size", "global_batch_size"]) == " Did you mean micro_batch_size?"


def test_nearest_is_silent_when_nothing_is_close():
    assert nearest("colour", ["micro_batch_size", "global_batch_size"]) == ""
