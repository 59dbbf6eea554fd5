"""What an objective cannot be computed with is refused, with what is allowed instead."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.config import load_recipe, recipe_problems
from toolkit.config.recipe import Recipe
from toolkit.errors import RecipeError

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
        (PAIRS | objective("dpo", reference="nope"), "there is no such directory. Did you mean none?"),
        (PAIRS | objective("dpo", reference="run.yaml"), "there is no such directory. Name a model or a checkpoint"),
        (PAIRS | objective("dpo", reference="./nope"), "reference=./nope: there is no such directory. Name a model"),
        (PAIRS | objective("dpo", reference="/nope/x"), "there is no such directory"),
        (PAIRS | objective("dpo", reference="~/nope"), "there is no such directory"),
        (PAIRS | objective("dpo", reference="runs/none/model"), "there is no such directory"),
        (PAIRS | objective("dpo", reference="org/a model"), "there is no such directory"),
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


@pytest.mark.parametrize("name", ["./nope", "/nope/x", "~/nope", "runs/none/model", "org/a model", ".", "run.yaml"])
def test_a_teacher_that_is_no_model_is_refused_by_its_own_field(make_recipe: Callable[..., Recipe], name: str) -> None:
    problems = recipe_problems(make_recipe(train__distill={"teacher": name}))
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"train.distill.teacher={name}: ")
    assert ".." not in problems[0]


@pytest.mark.parametrize(
    "name", ["a/b", "org/a.b-c_d", "org/a--b", "org/a..b", "org/a.git", "-o/a", "org/a-", "o/" + "a" * 97]
)
def test_names_that_the_hub_does_not_allow_are_paths(make_recipe: Callable[..., Recipe], name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    problems = recipe_problems(make_recipe(train__distill={"teacher": name}))
    try:
        validate_repo_id(name)
    except HFValidationError:
        assert len(problems) == 1
    else:
        assert problems == []


def test_a_directory_without_a_config_is_refused_by_the_field_that_names_it(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    (reference,) = recipe_problems(make_recipe(**PAIRS, **objective("dpo", reference=str(tmp_path))))
    assert reference.startswith(f"train.objective.reference={tmp_path}: it has no config.json. ")
    (teacher,) = recipe_problems(make_recipe(train__distill={"teacher": str(tmp_path)}))
    assert teacher.startswith(f"train.distill.teacher={tmp_path}: it has no config.json. ")
    (tmp_path / "config.json").write_text("{}")
    assert recipe_problems(make_recipe(train__distill={"teacher": str(tmp_path)})) == []


def test_a_teacher_has_no_more_top_tokens_than_the_model_has_tokens(make_recipe: Callable[..., Recipe]) -> None:
    def problems(name: str, top_k: int) -> list[str]:
        overrides = {"vocab_size": 321} if name == "llama-tiny" else {}
        model = {"name_or_path": name, "overrides": overrides}
        return recipe_problems(make_recipe(model=model, train__distill={"teacher": "org/teacher", "top_k": top_k}))

    assert problems("llama-tiny", 321) == problems("org/unknown", 1000) == []
    (problem,) = problems("llama-tiny", 322)
    assert problem.startswith("train.distill.top_k=322: the model has a vocabulary of 321. ")


def test_a_format_that_an_objective_needs_is_not_to_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {name_or_path: llama-tiny}\n"
        "data: {source: org/pairs, format: preference, tokenizer: org/name, seq_len: 64}\n"
        "batch: {global_batch_size: 4, micro_batch_size: 1}\n"
        "optimizer: {lr: 1e-3}\n"
        "train: {steps: 4, objective: {name: dpo}}\n"
    )
    with pytest.raises(RecipeError) as refused:
        load_recipe(path, ["data.overlong=split"])
    assert str(refused.value).endswith("a pair is compared as a whole. Set data.overlong to truncate or drop.")
