"""Thirty recipes and rows of preferences, weights and teachers that cannot be: each is refused in one line."""

from collections.abc import Callable
from typing import Any

import pytest

from toolkit.config import recipe_problems
from toolkit.config.recipe import Recipe
from toolkit.data.documents.rows import RowReader
from toolkit.errors import DataError

PAIRS = {"data__format": "preference", "data__tokenizer": "org/name", "data__source": "org/pairs"}
LABELS = PAIRS | {"data__format": "unpaired"}
TEXT = {"data__tokenizer": "org/name", "data__source": "org/texts"}
ASKED = [{"role": "user", "content": "why?"}]
GOOD = [{"role": "assistant", "content": "so"}]


def objective(name: str, **fields: Any) -> dict[str, Any]:
    return {"train__objective": {"name": name, **fields}}


def distill(**fields: Any) -> dict[str, Any]:
    return TEXT | {"train__distill": {"teacher": "org/teacher", **fields}}


RECIPES: list[tuple[dict[str, Any], str]] = [
    (objective("dpo") | TEXT, "rows have nothing to compare"),
    (LABELS | objective("dpo"), "rows have one completion and a label"),
    (PAIRS | objective("kto"), "rows are pairs without a label"),
    (PAIRS | objective("dpo", gamma=1.0), "gamma has no effect"),
    (PAIRS | objective("hinge", label_smoothing=0.1), "label_smoothing has no effect"),
    (PAIRS | objective("sft", beta=0.3), "beta has no effect"),
    (PAIRS | objective("dpo", desirable_weight=2.0), "desirable_weight has no effect"),
    (PAIRS | objective("orpo", reference="none"), "reference has no effect"),
    (LABELS | objective("kto", reference="none"), "log-ratios to a reference"),
    (PAIRS | objective("dpo", reference="s3://bucket/run"), "models are read from directories"),
    (PAIRS | objective("dpo", reference="initail"), "Did you mean initial?"),
    (LABELS | objective("bco") | {"train__eval_every": 2}, "which a validation does not have"),
    (PAIRS | objective("dpo") | {"data__overlong": "split"}, "a pair is compared as a whole"),
    (PAIRS | objective("dpo") | {"data__source": "stdlib"}, "needs rows with fields"),
    (distill(teacher="s3://bucket/model"), "models are read from directories"),
    (distill(teacher="missing"), "there is no such directory"),
    (PAIRS | {"train__distill": {"teacher": "org/teacher"}}, "not which of two is better"),
    (TEXT | {"data__weight_field": "score", "data__format": "pretokenized"}, "rows of ids have no weights"),
]
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("preference", {"chosen": "a"}, "rejected"),
    ("preference", {"prompt": "a", "chosen": "", "rejected": "b"}, "chosen is empty"),
    ("preference", {"prompt": "a", "chosen": "b", "rejected": " "}, "rejected is empty"),
    ("preference", {"prompt": ASKED, "chosen": GOOD, "rejected": "b"}, "not both texts or both lists"),
    ("preference", {"prompt": ASKED, "chosen": "a", "rejected": "b"}, "not both texts or both lists"),
    ("preference", {"prompt": ASKED, "chosen": GOOD, "rejected": ASKED}, "rejected is empty"),
    ("preference", {"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt is an int"),
    ("unpaired", {"prompt": "a", "completion": "b"}, "label"),
    ("unpaired", {"prompt": "a", "completion": "b", "label": "yes"}, "label is 'yes'"),
    ("unpaired", {"completion": "b", "label": True}, "prompt"),
    ("unpaired", {"prompt": "a", "completion": "", "label": True}, "completion is empty"),
    ("unpaired", {"prompt": "a", "label": True}, "completion"),
]


@pytest.mark.parametrize("case", [*RECIPES, *ROWS], ids=str)
def test_what_cannot_be_is_refused_in_one_line(make_recipe: Callable[..., Recipe], case: tuple[Any, ...]) -> None:
    if len(case) == 2:
        problems = recipe_problems(make_recipe(**case[0]))
    else:
        with pytest.raises(DataError) as refused:
            RowReader(format=case[0]).read(case[1], lambda: "rows.jsonl:7")
        problems = [str(refused.value)]
        assert problems[0].startswith("rows.jsonl:7")
    assert len(problems) == 1, problems
    assert case[-1] in problems[0]
    assert "\n" not in problems[0]


def test_there_are_thirty_of_them() -> None:
    assert len(RECIPES) + len(ROWS) >= 30
