"""Strategies: what their names mean, what is refused, and what they change in a recipe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.config import dump_recipe, load_recipe, overrides_between, recipe_problems
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy, layout_text, parse_layout
from toolkit.errors import LayoutError

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
        ("m8", "micro_batch_size", 8),
        ("tp2-sp", "sp", True),
        ("recompute", "recompute", True),
        ("selective", "selective", True),
        ("every2", "every", 2),
        ("z2-offload", "offload", True),
        ("z0-offacts", "offacts", True),
        ("z3-tiled", "tiled", True),
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


@pytest.mark.parametrize(
    ("text", "ranks", "replicas", "loads_sharded"),
    [
        ("trainer:", 1, 1, False),
        ("trainer:ddp", 4, 4, False),
        ("trainer:fsdp2", 4, 4, True),
        ("trainer:tp2", 4, 2, True),
        ("trainer:fsdp2-tp2", 4, 2, True),
        ("trainer:ep2", 4, 4, True),
        ("trainer:tp2-dp1", 2, 1, True),
    ],
)
def test_a_layout_of_the_trainer_shares_samples_among_its_replicas(
    make_recipe: MakeRecipe, text: str, ranks: int, replicas: int, loads_sharded: bool
) -> None:
    (strategy,) = Strategy.parse_list(text)
    assert strategy.trainer
    assert strategy.loads_sharded == loads_sharded
    assert strategy.world_size(4) == ranks
    recipe = strategy.apply(make_recipe(parallel=FULL), 4)
    assert (recipe.parallel.dp, recipe.parallel.tp, recipe.train.engine) == (replicas, 1, "ddp")
    assert not recipe_problems(recipe, replicas)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer:pp2", "'pp2' is unknown after trainer:"),
        ("trainer:ddp-tp2", "no ddp beside tp or ep"),
        ("trainer:ddp-fsdp2", "data parallelism is given twice"),
        ("trainer:ep3-tp2", "ep is a multiple of its tp"),
        ("trainer:dp0", "sizes are 1 or more"),
    ],
)
def test_a_layout_that_the_trainer_does_not_have_is_refused(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Strategy.parse_list(text)
    with pytest.raises(LayoutError, match="for dstk compare --against alone"):
        Strategy.parse(text)


def test_a_list_names_each_strategy_once() -> None:
    assert [strategy.text for strategy in Strategy.parse_list("z1, tp2,z1,,ddp")] == ["z1", "tp2", "ddp"]


ANY = "Write parts such as tp2-pp2-dp2-z1-sp, z3-offload, ddp, fsdp or reference."


@pytest.mark.parametrize(
    ("text", "reason", "remedy"),
    [
        ("", "'' is unknown", ANY),
        ("zz", "'zz' is unknown", ANY),
        ("fspd", "'fspd' is unknown", "Did you mean fsdp?"),
        ("tp", "'tp' is unknown", ANY),
        ("tp2--z1", "'' is unknown", ANY),
        ("z1-z2", "zero_stage is given twice", "give each part once"),
        ("ddp-fsdp", "engine is given twice", "give each part once"),
        ("m0", "a micro-batch has at least one sample", "write m1 or more"),
        (
            "recompute-selective",
            "recompute is for whole layers, selective for their attention only",
            "remove one of them",
        ),
        (
            "every2-recompute",
            "recompute is for whole layers, selective for their attention only",
            "remove one of them",
        ),
        ("every9", "every2 to every8 recompute a part of the layers", "choose one of them"),
        ("ddp-tp2", "ddp has no tp", "remove it"),
        ("ddp-u2-cp2", "ddp has no cp", "remove it"),
        ("u2-cp2-u2", "ulysses is given twice", "give each part once"),
        ("fsdp-z3-offload", "fsdp has no z and offload", "remove them"),
        ("ddp-offacts", "ddp has no offacts", "remove it"),
        ("reference-dp2", "reference has no dp", "remove it"),
    ],
)
def test_what_is_no_strategy_is_refused(text: str, reason: str, remedy: str) -> None:
    with pytest.raises(LayoutError) as raised:
        Strategy.parse(text)
    refusal = raised.value.refusal
    assert (refusal.field, refusal.settings, refusal.reason) == ("strategy", (("strategy", text),), reason)
    assert refusal.remedy[0].lower() == remedy.lower().rstrip(".")


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("dp0", {"dp": 0}),
        ("ep0", {"ep": 0}),
        ("tp0", {"tp": 0}),
        ("dp4-ep3", {"ep": 3, "dp": 4}),
        ("inner", {"experts": "inner", "tp": 1}),
        ("tp2-ep2-inner", {"experts": "inner", "ep": 2}),
        ("ep2-u2", {"ep": 2, "ulysses": 2}),
        ("u0-cp2", {"ulysses": 0}),
        ("u2-cp2-hpz2-z3-dp2", {"hpz": 2, "cp": 4}),
        ("z4", {"zero_stage": 4}),
        ("pp2-z3", {"zero_stage": 3, "pp": 2}),
        ("sp", {"sequence_parallel": True, "tp": 1}),
        ("z0-offload", {"offload_optimizer": "cpu", "zero_stage": 0}),
    ],
)
def test_a_strategy_is_refused_as_its_layout_is(text: str, given: dict[str, object]) -> None:
    with pytest.raises(LayoutError) as raised:
        Strategy.parse(text)
    assert dict(raised.value.refusal.settings) == {"strategy": text} | given


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("u2", {"ulysses": 2, "cp": 1, "cp_ulysses": 1}),
        ("cp4", {"ulysses": 1, "cp": 4, "cp_ulysses": 1}),
        ("u2-cp2", {"ulysses": 1, "cp": 4, "cp_ulysses": 2}),
        ("u4-cp1", {"ulysses": 1, "cp": 4, "cp_ulysses": 4}),
    ],
)
def test_ulysses_beside_cp_is_the_field_that_lets_its_ranks_exchange_heads(
    make_recipe: MakeRecipe, text: str, fields: dict[str, int]
) -> None:
    section = Strategy.parse(text).apply(make_recipe(parallel={"cp": 2, "cp_ulysses": 2}), 4).parallel
    assert {name: getattr(section, name) for name in fields} == fields


@pytest.mark.parametrize("text", ["dp1-cp2-tp1-pp1-u2-z1", "dp2-cp1-tp2-pp1-u4-z3-sp-recompute"])
def test_a_layout_whose_ranks_exchange_heads_reads_back_from_its_text(text: str) -> None:
    assert layout_text(parse_layout(text)) == text


def test_a_refused_strategy_is_one_line() -> None:
    with pytest.raises(LayoutError) as raised:
        Strategy.parse("fspd")
    assert str(raised.value) == "strategy=fspd: 'fspd' is unknown. Did you mean fsdp?"


@pytest.mark.parametrize("text", ["", " , ,"])
def test_a_list_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(LayoutError) as raised:
        Strategy.parse_list(text)
    assert dict(raised.value.refusal.settings) == {"strategy": text}


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
        ("u2-cp2", 2, 4),
        ("u2-cp2", 8, 8),
        ("z3", 1, 1),
    ],
)
def test_dp_fills_the_ranks_that_are_offered(text: str, nproc: int, ranks: int) -> None:
    assert Strategy.parse(text).world_size(nproc) == ranks


@pytest.mark.parametrize(
    "text",
    ["z0", "z1", "z3", "tp2", "tp2-sp", "pp2-z0", "tp2-pp2-dp2", "u2", "u2-cp2", "ddp", "fsdp", "reference", "m2"],
)
def test_a_recipe_under_a_strategy_fits_its_ranks(make_recipe: MakeRecipe, text: str) -> None:
    strategy = Strategy.parse(text)
    assert recipe_problems(strategy.apply(make_recipe(), 2), strategy.world_size(2)) == []


@pytest.mark.parametrize(
    ("text", "recompute"), [("z1", "none"), ("z1-recompute", "full"), ("ddp-selective", "selective")]
)
def test_what_is_recomputed_is_the_strategys_alone(make_recipe: MakeRecipe, text: str, recompute: str) -> None:
    assert Strategy.parse(text).apply(make_recipe(parallel=FULL), 2).parallel.recompute == recompute


@pytest.mark.parametrize(("field", "value"), [("model__loss", "chunked"), ("model__kernels", "liger")])
def test_the_reference_takes_a_recipe_with_what_only_engines_have(
    make_recipe: MakeRecipe, field: str, value: str
) -> None:
    recipe = make_recipe(**{"model": {"name_or_path": "llama-tiny", "overrides": {"vocab_size": 320}}, field: value})
    section, _, name = field.partition("__")
    assert getattr(getattr(Strategy.parse("dp1-z1").apply(recipe, 1), section), name) == value
    assert recipe_problems(Strategy.parse("reference").apply(recipe, 1), 1) == []


@pytest.mark.parametrize("text", ["reference", "z1", "tp2-pp2", "ddp"])
@pytest.mark.parametrize(
    "parallel", [{"cp": 2, "cp_exchange": "ring"}, {"dp": 2, "zero_stage": 3, "quantized_weights": True}], ids=str
)
def test_a_strategy_takes_a_recipe_with_fields_of_axes_that_it_lacks(
    make_recipe: MakeRecipe, parallel: dict[str, Any], text: str
) -> None:
    strategy = Strategy.parse(text)
    recipe = make_recipe(parallel=parallel)
    assert recipe_problems(strategy.apply(recipe, 2), strategy.world_size(2)) == []


def test_a_strategy_with_the_axis_leaves_its_fields_as_they_are(make_recipe: MakeRecipe) -> None:
    ring = make_recipe(parallel={"cp": 2, "cp_exchange": "ring"})
    assert Strategy.parse("cp4").apply(ring, 4).parallel.cp_exchange == "ring"
    quantized = make_recipe(parallel={"zero_stage": 3, "quantized_weights": True})
    assert Strategy.parse("dp4-z3").apply(quantized, 4).parallel.quantized_weights


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
    path.write_text(dump_recipe(make_recipe(parallel=given)))
    recipe = load_recipe(path)
    assert load_recipe(path, overrides_between(recipe, strategy.apply(recipe, 2))) == strategy.apply(recipe, 2)


def test_overrides_leave_out_what_the_recipe_says_already(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe(parallel={"dp": 2, "zero_stage": 3})
    assert overrides_between(recipe, Strategy.parse("z3").apply(recipe, 2)) == []


@pytest.mark.parametrize(
    ("precision", "strategies", "baseline"),
    [
        ("fp32", "z1,z0,ddp,fsdp,tp2,reference", "reference"),
        ("bf16", "z1,z3-offload,tp2-sp,pp2,tp2-pp2-dp2-z1,u2-z2", "dp1-z1"),
        ("bf16", "z0,ddp,u2-z0", "dp1-z0"),
        ("bf16", "fsdp,fsdp-dp4", "fsdp-dp1"),
        ("fp16", "z2,tp2,pp2", "dp1-z1"),
        ("fp16", "z0", "dp1-z0"),
    ],
)
def test_a_strategy_is_compared_with_one_rank_that_rounds_alike(
    make_recipe: MakeRecipe, precision: Any, strategies: str, baseline: str
) -> None:
    found = {strategy.baseline(precision) for strategy in Strategy.parse_list(strategies)}
    assert found == {baseline}
    assert recipe_problems(Strategy.parse(baseline).apply(make_recipe(precision=precision), 1), 1) == []


def test_a_strategy_changes_nothing_of_the_mathematics(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    own = Strategy.parse("tp2-pp2-m1").apply(recipe, 4)
    for section in ("model", "data", "optimizer", "schedule"):
        assert getattr(own, section) == getattr(recipe, section)
    assert own.batch.global_batch_size == recipe.batch.global_batch_size


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "dp", "expected"), [(16, 4, 4, 4), (16, 4, 8, 2), (12, 4, 2, 3)]
)
def test_micro_batches_shrink_to_what_a_replica_has(
    make_recipe: MakeRecipe, global_batch_size: int, micro_batch_size: int, dp: int, expected: int
) -> None:
    recipe = make_recipe(batch__global_batch_size=global_batch_size, batch__micro_batch_size=micro_batch_size)
    assert Strategy.parse(f"dp{dp}").apply(recipe, 1).batch.micro_batch_size == expected


def test_a_micro_batch_that_was_asked_for_is_kept_though_it_does_not_divide(make_recipe: MakeRecipe) -> None:
    own = Strategy.parse("dp8-m4").apply(make_recipe(), 1)
    (problem,) = recipe_problems(own, 8)
    assert problem.startswith("batch.global_batch_size=16 with micro_batch_size=4 and parallel.dp=8")


@pytest.mark.parametrize(
    ("text", "optimizer", "params"),
    [("z1", "none", "none"), ("z1-offload", "cpu", "none"), ("z3-offload", "cpu", "cpu")],
)
def test_offload_takes_what_the_stage_shards(make_recipe: MakeRecipe, text: str, optimizer: str, params: str) -> None:
    section = Strategy.parse(text).apply(make_recipe(), 2).parallel
    assert (section.offload_optimizer, section.offload_params) == (optimizer, params)
