"""What an objective cannot be computed with is refused, with what is allowed instead."""

from collections.abc import Callable
from typing import Any

import pytest

from toolkit.config import recipe_problems
from toolkit.config.recipe import Recipe

PAIRS = {"data__format": "preference", "data__tokenizer": "org/name", "data__source": "org/pairs"}
LABELS = PAIRS | {"data__format": "unpaired"}


def objective(name: str, **fields: Any) -> dict[str, Any]:
    return {"train__objective": {"name": name, **fields}}


@pytest.mark.parametrize(
    "fields",
    [
        PAIRS | objective("dpo", beta=0.2, label_smoothing=0.1),
        PAIRS | objective("dpo", reference="none"),
        PAIRS | objective("dpo", reference="org/other"),
        LABELS | objective("kto", reference="online"),
        PAIRS | objective("sft"),
        PAIRS | objective("dpo") | {"data__tokenizer": "bpe-300"},
        PAIRS | objective("simpo", gamma=1.0, nll_weight=0.5),
        LABELS | objective("kto", desirable_weight=1.3),
        LABELS | objective("bco"),
    ],
    ids=str,
)
def test_what_can_run_is_allowed(make_recipe: Callable[..., Recipe], fields: dict[str, Any]) -> None:
    assert recipe_problems(make_recipe(**fields)) == []


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (objective("dpo"), "rows have nothing to compare. Set data.format=preference"),
        (objective("kto"), "rows have nothing to compare. Set data.format=unpaired"),
        (LABELS | objective("dpo"), "rows have one completion and a label"),
        (LABELS | objective("sft"), "rows have one completion and a label"),
        (PAIRS | objective("kto"), "rows are pairs without a label"),
        (PAIRS | objective("orpo", label_smoothing=0.1), "label_smoothing has no effect"),
        (PAIRS | objective("dpo", gamma=1.0), "gamma has no effect"),
        (PAIRS | objective("orpo", reference="none"), "reference has no effect"),
        (PAIRS | objective("sft", beta=0.3), "beta has no effect"),
        (PAIRS | objective("dpo", reference="onlin"), "there is no such directory. Did you mean online?"),
        (PAIRS | objective("dpo", reference="s3://bucket/run"), "models are read from directories"),
        (LABELS | objective("kto", reference="none"), "log-ratios to a reference"),
        (LABELS | objective("bco") | {"train__eval_every": 2}, "which a validation does not have"),
        (PAIRS | objective("dpo") | {"data__overlong": "split"}, "a pair is compared as a whole"),
        (PAIRS | objective("dpo") | {"data__train_on": "all"}, "train_on has no effect"),
        (PAIRS | objective("dpo") | {"data__source": "stdlib"}, "needs rows with fields"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_in_one_line(
    make_recipe: Callable[..., Recipe], fields: dict[str, Any], problem: str
) -> None:
    problems = recipe_problems(make_recipe(**fields))
    assert len(problems) == 1, problems
    assert problem in problems[0]
    assert "\n" not in problems[0]
