"""Schedules as tables: the order that DeepSpeed's engine executes, PyTorch's tables, and what ranks hold in memory."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest

from toolkit.config.pipeline_schedules import KINDS, SPLITTING, Kind, Operation, Schedule, schedule_of
from toolkit.config.simulate_schedule import ScheduleCosts, simulate
from toolkit.errors import LayoutError
from toolkit.planner.blocking_transfers import instructions

SIZES = [(1, 3), (2, 1), (2, 4), (3, 2), (3, 7), (4, 8), (5, 5), (8, 3), (8, 32)]
"""Ranks and micro-batches: more and fewer micro-batches than ranks, odd and even."""
CHUNKS: list[tuple[Kind, int]] = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2),
]  # fmt: skip


def schedules() -> Iterator[Schedule]:
    for kind, chunks in CHUNKS:
        for pp, micro_batches in SIZES:
            yield schedule_of(kind, pp=pp, micro_batches=micro_batches, virtual_stages=chunks)


def deepspeed_stream(pp: int, micro_batches: int, stage: int) -> list[tuple[str, int]]:
    """The passes and transfers that our engine has DeepSpeed execute; buffers tell which micro-batch is meant."""
    from toolkit.parallel.pipeline.pipeline_module import StepWithoutUpdate

    names = {
        "RecvActivation": "receive activation", "ForwardPass": "F", "SendActivation": "send activation",
        "RecvGrad": "receive gradient", "BackwardPass": "D", "SendGrad": "send gradient",
    }  # fmt: skip
    stream: list[tuple[str, int]] = []
    held: dict[int, int] = {}
    begun = 0
    for tick in StepWithoutUpdate(micro_batches=micro_batches, stages=pp, stage_id=stage).steps():
        for instruction in tick:
            name = names.get(type(instruction).__name__)
            if name == ("receive activation" if stage else "F"):
                held[instruction.buffer_id] = begun
                begun += 1
            if name is not None:
                stream.append((name, held[instruction.buffer_id]))
    return stream


@pytest.mark.parametrize(("pp", "micro_batches"), SIZES)
def test_1f1b_is_the_instruction_stream_that_deepspeed_executes_on_every_stage(pp: int, micro_batches: int) -> None:
    ours = schedule_of("1f1b", pp=pp, micro_batches=micro_batches)
    for stage in range(pp):
        theirs = deepspeed_stream(pp, micro_batches, stage)
        assert list(instructions(ours, stage)) == theirs
        assert list(ours.orders[stage]) == [(name, stage, each) for name, each in theirs if name in ("F", "D")]


def torch_orders(name: str, pp: int, micro_batches: int, chunks: int) -> list[list[Operation]]:
    """A table of torch.distributed.pipelining in our letters."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    letters = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "D"}
    rows = get_schedule_ops(name, pp, micro_batches, num_stages_per_rank=chunks)
    passes = [[one for action in row if action for one in (action.sub_actions or [action])] for row in rows]
    return [
        [
            (letters[name], one.stage_index, one.microbatch_index)
            for one in row
            if (name := one.computation_type.name) in letters
        ]
        for row in passes
    ]


@pytest.mark.parametrize(
    ("name", "kind", "chunks"),
    [
        ("GPipe", "gpipe", 1),
        ("1F1B", "1f1b", 1),
        ("Interleaved1F1B", "interleaved", 2),
        ("Interleaved1F1B", "interleaved", 3),
        ("ZBVZeroBubble", "zb-v", 2),
    ],
)
@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 4), (4, 8), (4, 12), (8, 16)])
def test_pytorch_has_the_same_table(name: str, kind: Kind, chunks: int, pp: int, micro_batches: int) -> None:
    ours = schedule_of(kind, pp=pp, micro_batches=micro_batches, virtual_stages=chunks).orders
    theirs = torch_orders(name, pp, micro_batches, chunks)
    if name == "1F1B":  # torch 2.13 numbers the forward passes of the last rank from 1 in this table
        theirs[-1] = [(kind, stage, each - (kind == "F")) for kind, stage, each in theirs[-1]]
    assert [list(order) for order in ours] == theirs


def test_every_rank_runs_each_pass_of_its_stages_once_and_in_their_order() -> None:
    for schedule in schedules():
        for rank, order in enumerate(schedule.orders):
            passes = "FBW" if schedule.splits_backward else "FD"
            own = [stage for stage, place in enumerate(schedule.rank_of) if place == rank]
            expected = [(kind, s, each) for kind in passes for s in own for each in range(schedule.micro_batches)]
            assert Counter(order) == Counter(expected)
            place = {operation: n for n, operation in enumerate(order)}
            for _, stage, each in expected:
                assert all(place[a, stage, each] < place[b, stage, each] for a, b in pairwise(passes))


@pytest.mark.parametrize("kind", SPLITTING)
@pytest.mark.parametrize(("pp", "micro_batches"), SIZES)
def test_a_bound_on_pending_weights_holds_and_changes_nothing_else(kind: Kind, pp: int, micro_batches: int) -> None:
    free = schedule_of(kind, pp=pp, micro_batches=micro_batches)
    bubbles = []
    for most in (1, 2, 3, 2 * micro_batches + 1):
        bounded = schedule_of(kind, pp=pp, micro_batches=micro_batches, max_pending_weights=most)
        for order, without in zip(bounded.orders, free.orders, strict=True):
            waiting: set[tuple[int, int]] = set()
            for name, stage, micro_batch in order:
                if name == "B":
                    waiting.add((stage, micro_batch))
                elif name == "W":
                    waiting.remove((stage, micro_batch))  # after its B
                assert len(waiting) <= most
            assert Counter(order) == Counter(without)
            assert [each for each in order if each[0] != "W"] == [each for each in without if each[0] != "W"]
        bubbles.append(simulate(bounded, ScheduleCosts.relative(bounded)).bubble)
    assert bounded.orders == free.orders
    assert bubbles[-1] == min(bubbles)


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 2), (2, 4), (4, 8), (4, 16), (8, 16)])
def test_ranks_hold_as_many_micro_batches_as_the_formulas_say(pp: int, micro_batches: int) -> None:
    def in_flight(kind: Kind, chunks: int) -> list[float]:
        made = schedule_of(kind, pp=pp, micro_batches=micro_batches, virtual_stages=chunks)
        return list(made.in_flight)

    assert in_flight("gpipe", 1) == [micro_batches] * pp
    assert in_flight("1f1b", 1) == [pp - rank for rank in range(pp)]
    for chunks in (2, 3):
        held = [min(2 * (pp - rank - 1) + (chunks - 1) * pp + 1, chunks * micro_batches) for rank in range(pp)]
        assert in_flight("interleaved", chunks) == pytest.approx([each / chunks for each in held])
    assert in_flight("zb-v", 2) == [pp] * pp
    held = schedule_of("zb-h1", pp=pp, micro_batches=micro_batches).held(0.6)
    assert held == [(pp - rank, rank) for rank in range(pp)]


@pytest.mark.parametrize(
    ("kind", "chunks", "remedy"),
    [
        ("interleaved", 1, (("virtual_stages", 2), ("kind", "1f1b"))),
        ("1f1b", 2, (("virtual_stages", 1), ("kind", "interleaved"))),
        ("zb-h1", 2, (("virtual_stages", 1), ("kind", "interleaved"))),
        ("zb-v", 3, (("virtual_stages", 2), ("kind", "interleaved"))),
    ],
)
def test_what_no_schedule_has_is_refused(kind: Kind, chunks: int, remedy: object) -> None:
    with pytest.raises(LayoutError) as caught:
        schedule_of(kind, pp=4, micro_batches=8, virtual_stages=chunks)
    assert caught.value.refusal is not None
    assert caught.value.refusal.remedy == remedy
    assert {kind for kind, _ in CHUNKS} == set(KINDS)
