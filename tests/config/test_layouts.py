"""The layouts that a recipe lists: what an entry says, and which of them a run takes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.cli.main import main
from toolkit.config import dump_recipe, load_recipe
from toolkit.config.strategy import Strategy
from toolkit.errors import RecipeError
from toolkit.training.arguments import parse_arguments

LISTED = {"8xH100": "z3-recompute-m4", "64xH100": ["dp8-tp8-z1-sp", "tp8-pp2-z1"], "1xL40S": "z2-offload"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path)


def write(folder: Path, **sections: Any) -> Path:
    values = {
        "model": {"name_or_path": "llama-3.1-8b"},
        "data": {"seq_len": 64},
        "batch": {"global_batch_size": 512, "micro_batch_size": 1},
        "optimizer": {"lr": 1e-3},
        "train": {"steps": 2},
        "layouts": LISTED,
    }
    (folder / "r.yaml").write_text(yaml.safe_dump(values | sections, sort_keys=False))
    return folder / "r.yaml"


def taken(path: Path, *overrides: str, **asked: Any) -> tuple[Any, ...]:
    """Axes, stage and micro-batch of what is loaded."""
    recipe = load_recipe(path, overrides, **asked)
    p = recipe.parallel
    return p.dp, p.tp, p.pp, p.zero_stage, p.recompute, recipe.batch.micro_batch_size


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"layout": "8xH100"}, (8, 1, 1, 3, "full", 4)),
        ({"layout": "64xH100"}, (8, 8, 1, 1, "none", 1)),
        ({"layout": "tp2-z0-m2", "world_size": 8}, (None, 2, 1, 0, "none", 2)),
        ({"world_size": 8}, (8, 1, 1, 3, "full", 4)),
        ({"world_size": 4}, (None, 1, 1, 1, "none", 1)),
        ({}, (8, 1, 1, 3, "full", 4)),
    ],
    ids=str,
)
def test_a_layout_is_taken_by_its_name_by_its_text_or_by_the_number_of_ranks(
    asked: dict[str, Any], wanted: tuple[Any, ...], path: Path
) -> None:
    assert taken(path, **asked) == wanted


def test_parallel_holds_where_no_layout_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, parallel={"zero_stage": 2, "recompute": "selective"})
    assert taken(path, world_size=8) == (None, 1, 1, 2, "selective", 1)
    assert taken(path, world_size=8, layout="8xH100") == (8, 1, 1, 3, "full", 4)


def test_overrides_come_after_the_layout_and_replace_the_one_for_the_ranks(path: Path) -> None:
    assert taken(path, "parallel.zero_stage=2", "batch.micro_batch_size=8", layout="8xH100")[3:] == (2, "full", 8)
    assert taken(path, "parallel.zero_stage=2", world_size=8) == (None, 1, 1, 2, "none", 1)


def test_two_entries_for_as_many_ranks_are_not_guessed_between(tmp_path: Path) -> None:
    path = write(tmp_path, layouts={"8xH100": "z3", "8xL40S": "z2"})
    assert taken(path, world_size=8)[3] == 1


def test_a_run_keeps_the_layout_that_it_took_and_repeats_it(path: Path, tmp_path: Path) -> None:
    first = load_recipe(path, layout="64xH100")
    assert first.layouts == {"64xH100": "dp8-tp8-z1-sp"}
    (tmp_path / "stored.yaml").write_text(dump_recipe(first))
    again = load_recipe(tmp_path / "stored.yaml", world_size=64)
    assert again.model_copy(update={"layouts": first.layouts}) == first


def test_an_engine_is_a_layout_too(path: Path) -> None:
    recipe = load_recipe(path, layout="fsdp-recompute", world_size=2)
    assert (recipe.train.engine, recipe.parallel.recompute) == ("fsdp", "full")


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({"8xH100": "dp4"}, "it needs 4 ranks, and the name says 8"),
        ({"8xH100": "tp3"}, "it needs a multiple of 3 ranks, and the name says 8"),
        ({"many": "dp4"}, "Write 8xH100"),
        ({"8xH100": 8}, "layouts.8xH100 is a whole number"),
        ({"8xH100": ["z3", 8]}, "a layout or a list of them is allowed"),
        ({"8xH100": "z4"}, "ZeRO has the stages 0, 1, 2 and 3"),
        ([], "a mapping is allowed"),
    ],
    ids=str,
)
def test_an_entry_that_means_nothing_is_refused_at_its_line(layouts: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(write(tmp_path, layouts=layouts))
    (problem,) = refused.value.problems
    assert message in problem
    assert problem.startswith(f"{tmp_path}/r.yaml:")


@pytest.mark.parametrize("command", ["validate", "train", "config", "memory --recipe", "compare --recipe"])
def test_a_wrong_word_is_one_line_that_lists_the_layouts(
    command: str, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), str(path), "--layout", "8xH10"])
    out, err = capfd.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1)
    assert "8xH100, 64xH100, 1xL40S" in err
    assert "Did you mean 8xH100?" in err


def test_ranks_of_several_machines_are_not_started_on_one(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(path), "--layout", "64xH100"])
    assert stopped.value.code == 2
    assert "--launcher slurm" in capfd.readouterr().err


def test_the_script_of_every_launcher_takes_a_layout() -> None:
    arguments = parse_arguments(["--config", "r.yaml", "--layout", "8xH100", "train.steps=3"], "")
    assert (arguments.layout, arguments.overrides) == ("8xH100", ("train.steps=3",))


@pytest.mark.parametrize(
    ("text", "small"),
    [
        ("dp8-tp8-pp4-z1-sp-m2", "dp2-tp2-pp2-z1-sp"),
        ("dp2-u8-z3-recompute", "dp2-u2-z3-recompute"),
        ("dp2-u8-cp4-z3-recompute", "dp2-cp2-u2-z3-recompute"),
        ("dp2-u8-cp1-z3", "dp2-cp1-u2-z3"),
        ("ddp", "ddp"),
        ("dp1", "dp1"),
    ],
)
def test_a_shrunk_strategy_has_two_ranks_where_there_were_more(text: str, small: str) -> None:
    assert Strategy.parse(text).shrunk().text == small


def test_memory_takes_the_gpu_from_the_name(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["memory", "--recipe", str(path), "--layout", "64xH100", "--json"])
    assert stopped.value.code == 0
    assert '"gpu": "H100-SXM-80GB"' in capfd.readouterr().out
