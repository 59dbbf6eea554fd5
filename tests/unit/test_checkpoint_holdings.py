"""Who holds what decides the routes: every element arrives exactly once, and nothing moves that need not."""

import math
import random

import pytest
import torch

from toolkit.checkpoint.header import TensorSpec
from toolkit.checkpoint.holdings import Held, Leg, Round, local_shape, plan_rounds
from toolkit.checkpoint.plan import PlannedFile, plan_files
from toolkit.parallel.shard import Block, Shard, pieces_of

KIND = "model"


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=torch.float32)


def cut_flat(specs: list[TensorSpec], world_size: int, chance: random.Random) -> list[list[Held]]:
    """As ZeRO 1 does: all tensors in one line, each rank a run of it, however uneven."""
    total = sum(math.prod(one.shape) for one in specs)
    bounds = [0, *sorted(chance.randint(0, total) for _ in range(world_size - 1)), total]
    held: list[list[Held]] = [[] for _ in range(world_size)]
    start = 0
    for one in specs:
        count = math.prod(one.shape)
        for rank in range(world_size):
            first, last = max(bounds[rank], start), min(bounds[rank + 1], start + count)
            if first < last:
                shard = Shard(name=one.name, shape=one.shape)
                held[rank].append(Held(shard=shard, start=first - start, length=last - first))
        start += count
    return held


def rounds_of(
    specs: list[TensorSpec], held: list[list[Held]], bucket_bytes: int = 100
) -> tuple[list[PlannedFile], list[list[Round]]]:
    files = plan_files([(KIND, specs)], len(held), min_file_bytes=1)
    planned = [
        plan_rounds(files, {KIND: specs}, {KIND: held}, rank=rank, bucket_bytes=bucket_bytes)
        for rank in range(len(held))
    ]
    return files, planned


def arriving(planned: list[list[Round]]) -> dict[str, list[Leg]]:
    found: dict[str, list[Leg]] = {}
    for arrival in (arrival for rounds in planned for one in rounds for arrival in one.arrivals):
        found.setdefault(arrival.spec.name, []).extend(arrival.legs)
    return found


@pytest.mark.parametrize("seed", range(10))
def test_every_element_arrives_once_at_the_rank_that_writes_it(seed: int) -> None:
    chance = random.Random(seed)
    specs = [spec(f"t{i}", chance.choice((0, 1, 5, 40)), chance.choice((1, 3))) for i in range(20)]
    held = cut_flat(specs, chance.randint(1, 5), chance)
    files, planned = rounds_of(specs, held)
    writers = {one.name: file.rank for file in files for one in file.specs}
    found = arriving(planned)
    assert found.keys() == writers.keys()
    for one in specs:
        legs = found[one.name]
        ends = [0, *(leg.start + leg.length for leg in legs)]
        assert [leg.start for leg in legs] == ends[:-1]
        assert ends[-1] == math.prod(one.shape)
        for leg in legs:
            source = held[leg.source][leg.index]
            assert source.shard.name == one.name
            assert source.start + leg.offset == leg.start
            assert leg.offset + leg.length <= source.length
            assert leg.target == writers[one.name]


@pytest.mark.parametrize("seed", range(10))
def test_what_a_rank_gives_another_takes_in_the_same_order(seed: int) -> None:
    chance = random.Random(seed)
    specs = [spec(f"t{i}", chance.choice((1, 5, 40))) for i in range(20)]
    _, planned = rounds_of(specs, cut_flat(specs, 4, chance))
    for giver in range(4):
        for taker in range(4):
            given = [leg for one in planned[giver] for leg in one.gives.get(taker, [])]
            taken = [leg for one in planned[taker] for leg in one.takes.get(giver, [])]
            assert given == taken
            assert giver != taker or not given


def test_no_more_than_a_bucket_comes_together_at_once() -> None:
    specs = [spec(f"t{i}", count) for i, count in enumerate((3, 10, 100, 2, 5, 5, 9, 1))]
    _, planned = rounds_of(specs, cut_flat(specs, 3, random.Random(1)), bucket_bytes=60)
    sizes = [
        sum(leg.nbytes for arrival in one.arrivals for leg in arrival.legs) for rounds in planned for one in rounds
    ]
    assert max(sizes) == 60
    assert sum(sizes) == sum(one.nbytes for one in specs)


def test_copies_that_the_writer_has_do_not_move() -> None:
    specs = [spec(f"t{i}", 10) for i in range(12)]
    whole = [Held(shard=Shard(name=one.name, shape=one.shape), start=0, length=10) for one in specs]
    _, planned = rounds_of(specs, [whole] * 4)
    assert not [leg for rounds in planned for one in rounds for legs in one.gives.values() for leg in legs]


def test_ranks_with_the_same_copies_give_alike() -> None:
    """Ranks 2 and 3 have everything, 0 and 1 nothing."""
    specs = [spec(f"t{i}", 10) for i in range(16)]
    whole = [Held(shard=Shard(name=one.name, shape=one.shape), start=0, length=10) for one in specs]
    _, planned = rounds_of(specs, [[], [], whole, whole])
    given = [sum(leg.nbytes for one in rounds for legs in one.gives.values() for leg in legs) for rounds in planned]
    assert given[:2] == [0, 0]
    assert given[2] == given[3] > 0


def test_parts_of_a_tensor_parallel_cut_come_in_with_their_places() -> None:
    blocks = [Block(units=4, width=2), Block(units=4)]  # fused, so each rank has two pieces
    shards = [Shard(name="w", shape=(12, 3), dim=0, pieces=pieces_of(blocks, rank, 2)) for rank in range(2)]
    held = [[Held(shard=shard, start=0, length=math.prod(local_shape(shard)))] for shard in shards]
    _, planned = rounds_of([spec("w", 12, 3)], held)
    legs = arriving(planned)["w"]
    assert [leg.shard for leg in legs] == shards
    whole, wanted = torch.empty(12, 3), torch.randn(12, 3)
    for leg in legs:
        leg.shard.put(leg.shard.take(wanted), whole)
    assert torch.equal(whole, wanted)


def test_of_tied_copies_the_first_stage_gives() -> None:
    shard = Shard(name="w", shape=(10,))
    held = [[Held(shard=shard, start=0, length=10, rank_of_copies=stage)] for stage in (1, 0, 1)]
    _, planned = rounds_of([spec("w", 10)], held)
    assert [leg.source for leg in arriving(planned)["w"]] == [1]


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([], "no rank holds"),
        ([Held(shard=Shard(name="w", shape=(10,)), start=0, length=9)], "element 9"),
        ([Held(shard=Shard(name="w", shape=(11,)), start=0, length=11)], r"held as \[11\]"),
        ([Held(shard=Shard(name="w", shape=(10,), dim=0, pieces=((0, 5),)), start=0, length=5)], "all of w"),
    ],
)
def test_what_nobody_holds_is_no_checkpoint(held: list[Held], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rounds_of([spec("w", 10)], [held])
