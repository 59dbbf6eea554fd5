"""Strategies: what their names mean, what is refused, and what they change in a recipe."""

from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit import recipe_file
from toolkit.errors import LayoutError
from toolkit.parity.strategy import Strategy
from toolkit.recipe import Recipe

MakeRecipe = Callable[..., Recipe]

FULL = {
    "tp": 2,
    "pp": 2,
    "zero_stage": 1,
    "sequence_parallel": True,
    "recompute": "full",
}
"""A recipe that every strategy has something to undo in."""


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("dp4", "dp", 4),
        ("tp2", "tp", 2),
        ("pp3", "pp", 3),
        ("u2", "ulysses", 2),
        ("z3", "zero_stage", 3),
        ("m8", "micro_size", 8),
        ("tp2-sp", "sp", True),
        ("recompute", "recompute", True),
        ("selective", "selective", True),
        ("z2-offload", "offload", True),
        ("ddp", "engine", "ddp"),
        ("fsdp", "engine", "fsdp"),
        ("reference", "engine", "reference"),
        ("z1", "engine", "deepspeed"),
    ],
)
def test_each_part_means_one_field(text: str, field: str, value: object) -> None:
    assert getattr(Strategy.parse(text), field) == value


def test_parts_stand_in_any_order() -> None:
    one, other = Strategy.parse("tp2-pp2-dp2-z1-sp"), Strategy.parse("sp-z1-dp2-pp2-tp2")
    assert vars(one) | {"text": ""} == vars(other) | {"text": ""}


def test_a_list_names_each_strategy_once() -> None:
    assert [strategy.text for strategy in Strategy.parse_list("z1, tp2,z1,,ddp")] == ["z1", "tp2", "ddp"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "strategy '': '' is not a part of one. Write parts such as tp2-pp2-dp2-z1-sp"),
        ("zz", "strategy 'zz': 'zz' is not a part of one. Write parts such as"),
        ("fspd", "strategy 'fspd': 'fspd' is not a part of one. Did you mean fsdp? Write parts such as"),
        ("tp", "strategy 'tp': 'tp' is not a part of one."),
        ("tp2--z1", "strategy 'tp2--z1': '' is not a part of one."),
        ("z1-z2", "strategy 'z1-z2': zero_stage is given twice. Give each part once."),
        ("ddp-fsdp", "strategy 'ddp-fsdp': engine is given twice. Give each part once."),
        ("dp0", "strategy 'dp0': dp=0: an axis has at least one rank. Set dp=1 or more."),
        ("m0", "strategy 'm0': m0: a micro-batch has at least one sample. Write m1 or more."),
        ("z4", "strategy 'z4': zero_stage=4: ZeRO has the stages 0, 1, 2 and 3. Choose one of them."),
        ("pp2-z3", "strategy 'pp2-z3': zero_stage=3 with pp=2: a DeepSpeed pipeline allows zero_stage 0 or 1."),
        ("sp", "strategy 'sp': sequence_parallel=true with tp=1"),
        (
            "recompute-selective",
            "strategy 'recompute-selective': recompute computes whole layers again, selective only their attention.",
        ),
        ("z0-offload", "strategy 'z0-offload': offload_optimizer=cpu with zero_stage=0"),
        ("ddp-tp2", "strategy 'ddp-tp2': ddp has no tp. Leave it out, or leave out ddp."),
        (
            "fsdp-z3-offload",
            "strategy 'fsdp-z3-offload': fsdp has no z and offload. Leave them out, or leave out fsdp.",
        ),
        ("reference-dp2", "strategy 'reference-dp2': reference has no dp. Leave it out, or leave out reference."),
    ],
)
def test_what_is_no_strategy_is_one_line(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as raised:
        Strategy.parse(text)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", " , ,"])
def test_a_list_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match=r"names no strategy. Give a list such as z1"):
        Strategy.parse_list(text)


@pytest.mark.parametrize(
    ("text", "nproc", "ranks"),
    [
        ("z1", 4, 4),
        ("ddp", 2, 2),
        ("reference", 8, 1),
        ("dp1", 8, 1),
        ("tp2", 2, 2),
        ("tp2", 5, 4),
        ("tp2-pp2", 2, 4),
        ("tp2-pp2-dp2", 2, 8),
        ("u2", 4, 4),
        ("z3", 1, 1),
    ],
)
def test_dp_fills_the_ranks_that_are_offered(text: str, nproc: int, ranks: int) -> None:
    assert Strategy.parse(text).world_size(nproc) == ranks


@pytest.mark.parametrize(
    "text", ["z0", "z1", "z3", "tp2", "tp2-sp", "pp2-z0", "tp2-pp2-dp2", "u2", "ddp", "fsdp", "reference", "m2"]
)
def test_a_recipe_under_a_strategy_fits_its_ranks(make_recipe: MakeRecipe, text: str) -> None:
    strategy = Strategy.parse(text)
    assert recipe_file.problems(strategy.apply(make_recipe(), 2), strategy.world_size(2)) == []


@pytest.mark.parametrize(
    ("text", "recompute"), [("z1", "none"), ("z1-recompute", "full"), ("ddp-selective", "selective")]
)
def test_what_is_recomputed_is_the_strategys_alone(make_recipe: MakeRecipe, text: str, recompute: str) -> None:
    assert Strategy.parse(text).apply(make_recipe(parallel=FULL), 2).parallel.recompute == recompute


@pytest.mark.parametrize("given", [{}, FULL], ids=["plain", "full"])
@pytest.mark.parametrize(
    "text",
    [
        "z1",
        "z3-offload",
        "z2-offload",
        "tp2-sp",
        "tp2-pp2-dp2-z0",
        "u2",
        "ddp",
        "fsdp-recompute",
        "tp2-selective",
        "reference",
        "dp8",
        "m2",
    ],
)
def test_the_overrides_of_a_strategy_give_the_recipe_that_it_applies(
    make_recipe: MakeRecipe, tmp_path: Path, text: str, given: dict[str, object]
) -> None:
    strategy, path = Strategy.parse(text), tmp_path / "recipe.yaml"
    path.write_text(recipe_file.dump(make_recipe(parallel=given)))
    recipe = recipe_file.load(path)
    assert recipe_file.load(path, strategy.overrides(recipe, 2)) == strategy.apply(recipe, 2)


def test_overrides_leave_out_what_the_recipe_says_already(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(parallel={"dp": 2, "zero_stage": 3})
    assert Strategy.parse("z3").overrides(recipe, 2) == []


def test_a_strategy_changes_nothing_of_the_mathematics(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    own = Strategy.parse("tp2-pp2-m1").apply(recipe, 4)
    for section in ("model", "data", "optimizer", "schedule"):
        assert getattr(own, section) == getattr(recipe, section)
    assert own.batch.global_size == recipe.batch.global_size


@pytest.mark.parametrize(("global_size", "micro_size", "dp", "expected"), [(16, 4, 4, 4), (16, 4, 8, 2), (12, 4, 2, 3)])
def test_micro_batches_shrink_to_what_a_replica_has(
    make_recipe: MakeRecipe, global_size: int, micro_size: int, dp: int, expected: int
) -> None:
    recipe = make_recipe(batch__global_size=global_size, batch__micro_size=micro_size)
    assert Strategy.parse(f"dp{dp}").apply(recipe, 1).batch.micro_size == expected


def test_a_micro_batch_that_was_asked_for_is_kept_though_it_does_not_divide(make_recipe: MakeRecipe) -> None:
    own = Strategy.parse("dp8-m4").apply(make_recipe(), 1)
    (problem,) = recipe_file.problems(own, 8)
    assert problem.startswith("batch.global_size=16 with micro_size=4 on dp=8")


@pytest.mark.parametrize(
    ("text", "optimizer", "params"),
    [("z1", "none", "none"), ("z1-offload", "cpu", "none"), ("z3-offload", "cpu", "cpu")],
)
def test_offload_takes_what_the_stage_shards(make_recipe: MakeRecipe, text: str, optimizer: str, params: str) -> None:
    section = Strategy.parse(text).apply(make_recipe(), 2).parallel
    assert (section.offload_optimizer, section.offload_params) == (optimizer, params)
