import pytest

from toolkit import errors
from toolkit.errors import PreemptedError, RecipeError, ToolkitError, nearest

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ToolkitError)]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_exits_with_2_but_the_one_that_asks_to_be_started_again(kind):
    code = kind("what was given, what is allowed, what to do").exit_code
    assert code == (75 if kind is PreemptedError else 2)


@pytest.mark.parametrize("kind", ALL)
def test_an_error_prints_its_message(kind):
    assert str(kind("tp=3 does not divide 4 heads. Set tp=2.")) == "tp=3 does not divide 4 heads. Set tp=2."


def test_a_recipe_error_prints_every_problem_on_its_own_line():
    error = RecipeError(["first", "second"])
    assert str(error).splitlines() == error.problems == ["first", "second"]


def test_a_single_problem_is_not_split_into_letters():
    assert RecipeError("only").problems == ["only"]


def test_nearest_names_a_typo():
    assert nearest("mirco_size", ["micro_size", "global_size"]) == " Did you mean micro_size?"


def test_nearest_is_silent_when_nothing_is_close():
    assert nearest("colour", ["micro_size", "global_size"]) == ""
