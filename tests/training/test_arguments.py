"""The arguments of a training script."""

import pytest

from toolkit.errors import RecipeError
from toolkit.training.arguments import parse_arguments


def test_overrides_may_stand_anywhere() -> None:
    found = parse_arguments(["a.b=1", "--config", "r.yaml", "c.d=2"], "")
    assert (found.config, found.overrides) == ("r.yaml", ("a.b=1", "c.d=2"))


@pytest.mark.parametrize("flag", ["--local_rank=3", "--local-rank=3"])
def test_a_launchers_local_rank_is_taken_where_the_environment_has_none(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    monkeypatch.setenv("LOCAL_RANK", "")  # noted first, so that what is set below is undone
    monkeypatch.delenv("LOCAL_RANK")
    parse_arguments(["--config", "r.yaml", flag], "")
    assert os.environ["LOCAL_RANK"] == "3"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--deepspeed", "--deepspeed_config", "ds.json"],
        ["--deepspeed_config", "ds.json", "--deepspeed"],
        ["--deepspeed", "ds.json"],
        ["--deepspeed_config=ds.json"],
    ],
)
def test_deepspeeds_own_arguments_are_accepted(arguments: list[str]) -> None:
    assert parse_arguments(["--config", "r.yaml", *arguments], "").options.deepspeed_config == "ds.json"


def test_the_deepspeed_flag_does_not_swallow_an_override() -> None:
    found = parse_arguments(["--config", "r.yaml", "--deepspeed", "parallel.zero_stage=3"], "")
    assert (found.options.deepspeed_config, found.overrides) == (None, ("parallel.zero_stage=3",))


def test_the_config_of_accelerate_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "theirs.json")
    assert parse_arguments(["--config", "r.yaml"], "").options.deepspeed_config == "theirs.json"


@pytest.mark.parametrize("arguments", [[], ["--config"], ["--config", "r.yaml", "--stesp", "3"]])
def test_wrong_arguments_are_one_line(arguments: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        parse_arguments(arguments, "")
    assert len(error.value.problems) == 1
