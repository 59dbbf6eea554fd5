"""Process groups: who talks with whom, and what DeepSpeed is told about it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from toolkit.config.layout import Layout
from toolkit.parallel.groups import ModelParallelUnit, ParallelGroups

Ranks = Callable[..., list[Any]]


def members(layout: Layout) -> dict[str, list[int]]:
    groups = ParallelGroups.create(layout)
    return {
        axis: dist.get_process_group_ranks(group)
        for axis in ("tensor", "data", "pipe", "expert", "expert_data")
        for group in [getattr(groups, axis)]
    }


def test_eight_ranks_of_three_axes_talk_with_their_neighbours_on_each(ranks: Ranks) -> None:
    found = ranks(members, 8, Layout.parse("dp2-tp2-pp2"))
    # Pipe, data, model, with model fastest: rank = 4 pipe + 2 data + model.
    assert [one["tensor"] for one in found] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert [one["data"] for one in found] == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert [one["pipe"] for one in found] == [[0, 4], [1, 5], [2, 6], [3, 7], [0, 4], [1, 5], [2, 6], [3, 7]]


def test_neighboring_replicas_share_out_the_experts(ranks: Ranks) -> None:
    found = ranks(members, 8, Layout.parse("dp4-ep2-tp2"))
    # Rank = 2 data + model: replicas 0 and 1 have the experts that replicas 2 and 3 have.
    assert [one["expert"] for one in found] == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert [one["expert_data"] for one in found] == [[0, 4], [1, 5], [2, 6], [3, 7], [0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("layout", ["dp1-tp4-pp2", "dp4-tp1-pp2", "dp2-tp4-pp1", "dp1-tp1-pp8"])
def test_groups_have_the_members_of_deepspeeds_topology(ranks: Ranks, layout: str) -> None:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    shape = Layout.parse(layout)
    topology = PipeModelDataParallelTopology(num_pp=shape.pp, num_mp=shape.tp, num_dp=shape.dp)
    found = ranks(members, 8, shape)
    for axis, name in (("tensor", "model"), ("data", "data"), ("pipe", "pipe")):
        lists = topology.get_axis_comm_lists(name) or [[rank] for rank in range(8)]
        assert [one[axis] for one in found] == [next(x for x in lists if rank in x) for rank in range(8)]


def test_one_rank_of_each_tensor_group_speaks_for_it(ranks: Ranks) -> None:
    def speaks() -> bool:
        return ParallelGroups.create(Layout.parse("dp2-tp4")).is_first_of_tensor

    assert [rank for rank, first in enumerate(ranks(speaks, 8)) if first] == [0, 4]


def test_deepspeed_is_told_this_ranks_place_on_both_axes(ranks: Ranks) -> None:
    def told() -> dict[str, Any]:
        unit = ModelParallelUnit(ParallelGroups.create(Layout.parse("dp2-tp4")))
        asked = [name for name in dir(unit) if name.startswith("get_")]
        answers = {name.removeprefix("get_"): getattr(unit, name)() for name in asked}
        return {
            name: dist.get_process_group_ranks(answer) if name.endswith("group") else answer
            for name, answer in answers.items()
        }

    model = {"parallel_group": [4, 5, 6, 7], "parallel_rank": 2, "parallel_world_size": 4}
    assert ranks(told, 8)[6] == {
        **{f"model_{name}": answer for name, answer in model.items()},
        **{f"tensor_model_{name}": answer for name, answer in model.items()},
        "data_parallel_group": [2, 6],
        "data_parallel_rank": 1,
        "data_parallel_world_size": 2,
    }
