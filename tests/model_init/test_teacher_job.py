"""What is refused while a teacher is built, in the fields that the recipe has."""

import pytest

from toolkit.errors import ModelError, Refusal, Setting
from toolkit.model_init.teacher_job import refused_as_teacher

NAME = ("model.name_or_path", "org/teacher")
REASON = "its weights cannot be read"


def problems_of(*problems: str | Refusal) -> list[str]:
    """Return the lines of an error that is raised while the teacher is built."""
    with pytest.raises(ModelError) as refused, refused_as_teacher("org/teacher"):
        raise ModelError(problems)
    return refused.value.problems


def test_problems_that_are_sentences_stay_beside_refusals() -> None:
    first = "/teacher/config.json: no JSON."
    last = "/teacher/tokenizer.json: no JSON."
    refused = f"train.distill.teacher=org/teacher: {REASON}. Set train.distill=null."
    assert problems_of(first, Refusal.between((NAME,), REASON), last) == [first, refused, last]


@pytest.mark.parametrize("advice", ["give a directory with model.safetensors", "check the files of the model."])
def test_advice_that_names_no_field_of_the_model_stays(advice: str) -> None:
    (problem,) = problems_of(Refusal.between((NAME,), REASON, advice))
    assert advice[1:] in problem


@pytest.mark.parametrize(
    "advice",
    [
        ("model.init", "random"),
        "remove the model.overrides that change sizes",
        "choose model.attn_implementation=eager",
    ],
)
def test_advice_about_the_student_is_left_out(advice: Setting | str) -> None:
    (problem,) = problems_of(Refusal.between((NAME,), REASON, advice))
    assert problem == f"train.distill.teacher=org/teacher: {REASON}. Set train.distill=null."
