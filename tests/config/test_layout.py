"""Layouts: their rules, their one written form, and DeepSpeed's rank order."""

from typing import Any

import pytest

from toolkit.config.layout import Coordinate, Layout
from toolkit.config.pipeline_schedules import SPLITTING
from toolkit.config.strategy import Strategy
from toolkit.errors import LayoutError

# also sizes that are no powers of two
SHAPES = [(dp, tp, pp) for dp in (1, 2, 3, 4) for tp in (1, 2, 3, 8) for pp in (1, 2, 3, 5)]


@pytest.mark.parametrize(("dp", "tp", "pp"), SHAPES)
def test_rank_order_is_that_of_deepspeeds_topology(dp: int, tp: int, pp: int) -> None:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    layout = Layout(dp=dp, tp=tp, pp=pp)
    topology = PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)
    theirs = [topology.get_coord(rank) for rank in range(topology.world_size())]
    assert [layout.coordinate(rank) for rank in range(layout.world_size)] == [
        Coordinate(pipe=place.pipe, data=place.data, model=place.model) for place in theirs
    ]


@pytest.mark.parametrize(("dp", "tp", "pp"), SHAPES)
def test_rank_inverts_coordinate(dp: int, tp: int, pp: int) -> None:
    layout = Layout(dp=dp, tp=tp, pp=pp, ulysses=2)
    ranks = range(layout.world_size)
    assert [layout.rank(**layout.coordinate(rank)._asdict()) for rank in ranks] == list(ranks)


def test_ranks_along_an_axis_differ_in_it_alone() -> None:
    layout = Layout(dp=2, tp=2, pp=2)
    assert layout.ranks_along("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.ranks_along("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.ranks_along("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(("dp", "tp", "pp"), SHAPES)
@pytest.mark.parametrize(
    "rest",
    [
        {},
        {"ulysses": 2},
        {"zero_stage": 1},
        {"ep": -1},
        {"cp": 4},
        {"cp": 4, "cp_ulysses": 2},
        {"cp": 3, "cp_ulysses": 3},
    ],
)
def test_a_layout_reads_back_from_its_written_form(dp: int, tp: int, pp: int, rest: dict[str, Any]) -> None:
    layout = Layout(dp=dp, tp=tp, pp=pp, **{key: dp if key == "ep" else value for key, value in rest.items()})
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("z3", Layout(zero_stage=3)),
        ("tp2-pp2-z1", Layout(tp=2, pp=2, zero_stage=1)),
        ("dp4", Layout(dp=4)),
        ("z2-dp4", Layout(dp=4, zero_stage=2)),
        ("u2", Layout(ulysses=2)),
        ("u2-cp2", Layout(cp=4, cp_ulysses=2)),
        ("cp2-u4-tp2", Layout(cp=8, cp_ulysses=4, tp=2)),
        ("u4-cp1", Layout(cp=4, cp_ulysses=4)),
        ("u1-cp2", Layout(cp=2)),
        ("u2-cp2-ep4", Layout(cp=4, cp_ulysses=2, ep=4)),
        ("ep2", Layout(dp=2, ep=2)),
        ("dp8-ep4-tp2-pp2-z1", Layout(dp=8, ep=4, tp=2, pp=2, zero_stage=1)),
        ("pp4-zbvw3", Layout(pp=4, schedule="zb-v", chunks=2, max_pending_weights=3)),
    ],
)
def test_what_a_written_layout_leaves_out_is_1(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout


def test_a_schedule_and_what_may_wait_read_back_from_their_written_form() -> None:
    for schedule in SPLITTING:
        layout = Layout(pp=4, schedule=schedule, chunks=2 if schedule == "zb-v" else 1, max_pending_weights=2)
        assert Layout.parse(str(layout)) == layout
        assert Strategy.parse(layout.pipeline_text).sections(1)["parallel"]["max_pending_weights"] == 2


def test_dp_is_what_the_world_size_leaves() -> None:
    assert Layout.parse("tp2-pp2-z1", world_size=16).dp == 4


def test_ulysses_shows_only_where_it_is_on() -> None:
    assert [str(Layout()), str(Layout(ulysses=2))] == ["dp1-tp1-pp1-z0", "dp1-tp1-pp1-u2-z0"]


def test_ranks_that_exchange_heads_show_as_a_factor_of_cp() -> None:
    layouts = (Layout(cp=8, cp_ulysses=2), Layout(cp=4, cp_ulysses=4))
    assert [str(layout) for layout in layouts] == ["dp1-cp4-tp1-pp1-u2-z0", "dp1-cp1-tp1-pp1-u4-z0"]
    assert [layout.world_size for layout in layouts] == [8, 4]


def test_the_world_size_is_the_product_of_all_axes() -> None:
    assert Layout(dp=2, tp=3, pp=5, ulysses=7).world_size == 210


@pytest.mark.parametrize("text", ["dp2147483648", "tp2-dp" + "9" * 5000, "dp65536-tp65536"])
def test_more_ranks_than_are_counted_are_refused_on_a_short_line(text: str) -> None:
    for read in (Layout.parse, Strategy.parse):
        with pytest.raises(LayoutError, match=r"out of range; .*2147483647") as caught:
            read(text)
        assert len(str(caught.value)) < 200
    assert Layout.parse("dp2147483647").world_size == 2147483647


@pytest.mark.parametrize("text", ["", "zp3", "dp", "dp-1", "dp2 ", "DP2", "dp2--tp2", "z1-", "dp2,tp2"])
def test_a_part_that_is_unknown_is_refused(text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert caught.value.refusal.settings == (("layout", text),)
    assert caught.value.refusal.reason.endswith("is not a part of a layout")


def test_a_part_given_twice_is_refused() -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse("z1-z2")
    assert (caught.value.refusal.settings, caught.value.refusal.reason) == (
        (("layout", "z1-z2"),),
        "'z2' is given twice",
    )


@pytest.mark.parametrize(
    ("fields", "given", "remedy"),
    [
        ({"dp": 0}, ["dp"], [("dp", "1 or more")]),
        ({"tp": -1}, ["tp"], [("tp", "1 or more")]),
        ({"pp": 0}, ["pp"], [("pp", "1 or more")]),
        ({"ulysses": 0}, ["ulysses"], [("ulysses", "1 or more")]),
        (
            {"cp": 4, "cp_ulysses": 3},
            ["cp_ulysses", "cp"],
            [("cp_ulysses", "a divisor of 4"), ("cp", "a multiple of 3")],
        ),
        ({"cp_ulysses": 2}, ["cp_ulysses", "cp"], [("cp_ulysses", "a divisor of 1"), ("cp", "a multiple of 2")]),
        ({"cp": 2, "ulysses": 2}, ["cp", "ulysses"], [("ulysses", 1), ("cp", 1)]),
        ({"dp": 4, "ep": 0}, ["ep"], [("ep", "1 or more")]),
        ({"dp": 4, "ep": 3}, ["ep", "dp"], [("ep", "a divisor of 4"), "choose another dp"]),
        ({"dp": 2, "ep": 2, "ulysses": 2}, ["ep", "ulysses"], [("ep", 1), ("ulysses", 1)]),
        ({"experts": "inner"}, ["experts", "tp"], [("tp", "2 or more"), ("experts", "whole")]),
        ({"experts": "inner", "dp": 2, "ep": 2, "tp": 2}, ["experts", "ep"], [("experts", "whole"), ("ep", 1)]),
        ({"zero_stage": 4}, ["zero_stage"], ["choose one of them"]),
        ({"zero_stage": 2, "pp": 2}, ["zero_stage", "pp"], [("zero_stage", "0 or 1"), ("pp", 1)]),
        (
            {"sequence_parallel": True},
            ["sequence_parallel", "tp"],
            [("tp", "2 or more"), ("sequence_parallel", False)],
        ),
        (
            {"offload_optimizer": "cpu"},
            ["offload_optimizer", "zero_stage"],
            [("zero_stage", "1, 2 or 3"), ("offload_optimizer", "none")],
        ),
        (
            {"offload_optimizer": "cpu", "zero_stage": 1, "pp": 2},
            ["offload_optimizer", "pp"],
            [("offload_optimizer", "none"), ("pp", 1)],
        ),
        (
            {"offload_params": "cpu", "zero_stage": 2},
            ["offload_params", "zero_stage"],
            [("zero_stage", 3), ("offload_params", "none")],
        ),
    ],
)
def test_what_deepspeed_cannot_run_is_refused(fields: dict[str, Any], given: list[str], remedy: list[Any]) -> None:
    """With the fields that contradict each other, each with its value or its default."""
    with pytest.raises(LayoutError) as caught:
        Layout(**fields)
    refusal, defaults = caught.value.refusal, vars(Layout())
    assert (refusal.field, refusal.remedy) == (given[0], tuple(remedy))
    assert refusal.settings == tuple((name, fields.get(name, defaults[name])) for name in given)


@pytest.mark.parametrize(
    ("world_size", "fields", "given", "remedy"),
    [
        (6, {"tp": 2, "pp": 2}, {"tp": 2, "pp": 2}, ("launch 4 or 8 ranks", "lower tp or pp")),
        (1, {"tp": 2}, {"tp": 2, "pp": 1}, ("launch 2 ranks", "lower tp")),
        (3, {"ulysses": 2}, {"tp": 1, "pp": 1, "ulysses": 2}, ("launch 2 or 4 ranks", "lower ulysses")),
        (
            2,
            {"dp": 4},
            {"dp": 4, "tp": 1, "pp": 1},
            ("launch 4 ranks (for instance `deepspeed --num_gpus 4 …`)", ("dp", 2)),
        ),
        (
            3,
            {"dp": 2, "tp": 2},
            {"dp": 2, "tp": 2, "pp": 1},
            ("launch 4 ranks (for instance `deepspeed --num_gpus 4 …`)",),
        ),
    ],
)
def test_a_world_size_that_does_not_fit_says_which_would(
    world_size: int, fields: dict[str, Any], given: dict[str, int], remedy: tuple[Any, ...]
) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.resolve(world_size, **fields)
    assert dict(caught.value.refusal.settings) == {"world_size": world_size} | given
    assert caught.value.refusal.remedy == remedy


@pytest.mark.parametrize("dp", [0, -3])
def test_resolve_refuses_a_dp_that_is_no_count(dp: int) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.resolve(4, dp=dp)
    assert caught.value.refusal.settings == (("dp", dp),)
