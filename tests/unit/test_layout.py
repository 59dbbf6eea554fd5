"""Layouts: their rules, their one written form, and DeepSpeed's rank order."""

from typing import Any

import pytest

from toolkit.errors import LayoutError
from toolkit.layout import Coordinate, Layout

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


@pytest.mark.parametrize(("dp", "tp", "pp"), SHAPES)
@pytest.mark.parametrize("rest", [{}, {"ulysses": 2}, {"zero_stage": 1}])
def test_a_layout_reads_back_from_its_written_form(dp: int, tp: int, pp: int, rest: dict[str, Any]) -> None:
    layout = Layout(dp=dp, tp=tp, pp=pp, **rest)
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("z3", Layout(zero_stage=3)),
        ("tp2-pp2-z1", Layout(tp=2, pp=2, zero_stage=1)),
        ("dp4", Layout(dp=4)),
        ("z2-dp4", Layout(dp=4, zero_stage=2)),
        ("u2", Layout(ulysses=2)),
    ],
)
def test_what_a_written_layout_leaves_out_is_1(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout


def test_dp_is_what_the_world_size_leaves() -> None:
    assert Layout.parse("tp2-pp2-z1", world_size=16).dp == 4


def test_ulysses_shows_only_where_it_is_on() -> None:
    assert [str(Layout()), str(Layout(ulysses=2))] == ["dp1-tp1-pp1-z0", "dp1-tp1-pp1-u2-z0"]


def test_the_world_size_is_the_product_of_all_axes() -> None:
    assert Layout(dp=2, tp=3, pp=5, ulysses=7).world_size == 210


@pytest.mark.parametrize("text", ["", "zp3", "dp", "dp-1", "dp2 ", "DP2", "dp2--tp2", "z1-", "dp2,tp2", "dp12345678"])
def test_a_part_that_is_unknown_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match=r"is not a part of a layout\. Write parts such as dp4-tp2-pp1-z2"):
        Layout.parse(text)


def test_a_part_given_twice_is_refused() -> None:
    with pytest.raises(LayoutError, match="layout 'z1-z2': 'z2' is given twice"):
        Layout.parse("z1-z2")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dp": 0}, "dp=0: an axis has at least one rank. Set dp=1 or more."),
        ({"tp": -1}, "tp=-1: an axis has at least one rank. Set tp=1 or more."),
        ({"pp": 0}, "pp=0: an axis has at least one rank. Set pp=1 or more."),
        ({"ulysses": 0}, "ulysses=0: an axis has at least one rank. Set ulysses=1 or more."),
        ({"zero_stage": 4}, "zero_stage=4: ZeRO has the stages 0, 1, 2 and 3. Choose one of them."),
        (
            {"zero_stage": 2, "pp": 2},
            "zero_stage=2 with pp=2: a DeepSpeed pipeline allows zero_stage 0 or 1. Lower zero_stage, or set pp=1.",
        ),
        (
            {"sequence_parallel": True},
            (
                "sequence_parallel=true with tp=1: sequence parallelism splits what tp replicates. "
                "Set tp=2 or more, or sequence_parallel=false."
            ),
        ),
        (
            {"offload_optimizer": "cpu"},
            (
                "offload_optimizer=cpu with zero_stage=0: only a sharded optimizer can be offloaded. "
                "Set zero_stage=1, 2 or 3, or offload_optimizer=none."
            ),
        ),
        (
            {"offload_optimizer": "cpu", "zero_stage": 1, "pp": 2},
            (
                "offload_optimizer=cpu with pp=2: a pipeline's optimizer stays on its device in this version. "
                "Set offload_optimizer=none, or pp=1."
            ),
        ),
        (
            {"offload_params": "cpu", "zero_stage": 2},
            (
                "offload_params=cpu with zero_stage=2: only ZeRO-3 shards parameters. "
                "Set zero_stage=3, or offload_params=none."
            ),
        ),
    ],
)
def test_what_deepspeed_cannot_run_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("world_size", "fields", "message"),
    [
        (
            6,
            {"tp": 2, "pp": 2},
            (
                "6 ranks with tp=2 pp=2: the world size must be a multiple of tp x pp = 4. "
                "Launch 4 or 8 ranks, or lower tp or pp."
            ),
        ),
        (
            1,
            {"tp": 2},
            "1 rank with tp=2 pp=1: the world size must be a multiple of tp x pp = 2. Launch 2 ranks, or lower tp.",
        ),
        (
            3,
            {"ulysses": 2},
            (
                "3 ranks with tp=1 pp=1 ulysses=2: the world size must be a multiple of tp x pp x ulysses = 2. "
                "Launch 2 or 4 ranks, or lower ulysses."
            ),
        ),
        (
            2,
            {"dp": 4},
            (
                "2 ranks with dp=4 tp=1 pp=1: this layout needs 4 ranks. Launch 4 ranks (for instance "
                "`deepspeed --num_gpus 4 …`), or set parallel.dp=2."
            ),
        ),
        (
            3,
            {"dp": 2, "tp": 2},
            (
                "3 ranks with dp=2 tp=2 pp=1: this layout needs 4 ranks. Launch 4 ranks (for instance "
                "`deepspeed --num_gpus 4 …`)."
            ),
        ),
    ],
)
def test_a_world_size_that_does_not_fit_says_which_would(world_size: int, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.resolve(world_size, **fields)
    assert str(caught.value) == message


@pytest.mark.parametrize("dp", [0, -3])
def test_resolve_refuses_a_dp_that_is_no_count(dp: int) -> None:
    with pytest.raises(LayoutError, match=f"dp={dp}: an axis has at least one rank"):
        Layout.resolve(4, dp=dp)
