"""The transfer plan: every element arrives exactly once, and nothing moves without need."""

import math
import random

import pytest
import torch

from toolkit.checkpoint.safetensors_header import TensorSpec
from toolkit.checkpoint.save_plan import (
    LocalShard,
    PlannedFile,
    Transfer,
    TransferRound,
    local_shape,
    plan_files,
    plan_rounds,
)
from toolkit.parallel.shard import Block, Shard, pieces_of

KIND = "model"


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=torch.float32)


def partition_flat(specs: list[TensorSpec], world_size: int, chance: random.Random) -> list[list[LocalShard]]:
    """As ZeRO 1 does: all tensors in one flat vector, of which each rank has a run, however uneven."""
    total = sum(math.prod(one.shape) for one in specs)
    bounds = [0, *sorted(chance.randint(0, total) for _ in range(world_size - 1)), total]
    local: list[list[LocalShard]] = [[] for _ in range(world_size)]
    start = 0
    for one in specs:
        count = math.prod(one.shape)
        for rank in range(world_size):
            first, last = max(bounds[rank], start), min(bounds[rank + 1], start + count)
            if first < last:
                shard = Shard(name=one.name, shape=one.shape)
                local[rank].append(LocalShard(shard=shard, start=first - start, length=last - first))
        start += count
    return local


def rounds_of(
    specs: list[TensorSpec], local: list[list[LocalShard]], bucket_bytes: int = 100
) -> tuple[list[PlannedFile], list[list[TransferRound]]]:
    files = plan_files([(KIND, specs)], len(local), min_file_bytes=1)
    planned = [
        plan_rounds(files, {KIND: specs}, {KIND: local}, rank=rank, bucket_bytes=bucket_bytes)
        for rank in range(len(local))
    ]
    return files, planned


def arriving(planned: list[list[TransferRound]]) -> dict[str, list[Transfer]]:
    found: dict[str, list[Transfer]] = {}
    for incoming in (incoming for rounds in planned for one in rounds for incoming in one.incoming):
        found.setdefault(incoming.spec.name, []).extend(incoming.transfers)
    return found


@pytest.mark.parametrize("seed", range(10))
def test_every_element_arrives_once_at_the_rank_that_writes_it(seed: int) -> None:
    chance = random.Random(seed)
    specs = [spec(f"t{i}", chance.choice((0, 1, 5, 40)), chance.choice((1, 3))) for i in range(20)]
    local = partition_flat(specs, chance.randint(1, 5), chance)
    files, planned = rounds_of(specs, local)
    writers = {one.name: file.rank for file in files for one in file.specs}
    found = arriving(planned)
    assert found.keys() == writers.keys()
    for one in specs:
        transfers = found[one.name]
        ends = [0, *(transfer.start + transfer.length for transfer in transfers)]
        assert [transfer.start for transfer in transfers] == ends[:-1]
        assert ends[-1] == math.prod(one.shape)
        for transfer in transfers:
            source = local[transfer.source][transfer.index]
            assert source.shard.name == one.name
            assert source.start + transfer.offset == transfer.start
            assert transfer.offset + transfer.length <= source.length
            assert transfer.target == writers[one.name]


@pytest.mark.parametrize("seed", range(10))
def test_what_a_rank_sends_another_receives_in_the_same_order(seed: int) -> None:
    chance = random.Random(seed)
    specs = [spec(f"t{i}", chance.choice((1, 5, 40))) for i in range(20)]
    _, planned = rounds_of(specs, partition_flat(specs, 4, chance))
    for sender in range(4):
        for receiver in range(4):
            sent = [transfer for one in planned[sender] for transfer in one.sends.get(receiver, [])]
            received = [transfer for one in planned[receiver] for transfer in one.receives.get(sender, [])]
            assert sent == received
            assert sender != receiver or not sent


def test_no_more_than_a_bucket_is_received_at_once() -> None:
    specs = [spec(f"t{i}", count) for i, count in enumerate((3, 10, 100, 2, 5, 5, 9, 1))]
    _, planned = rounds_of(specs, partition_flat(specs, 3, random.Random(1)), bucket_bytes=60)
    sizes = [
        sum(transfer.nbytes for incoming in one.incoming for transfer in incoming.transfers)
        for rounds in planned
        for one in rounds
    ]
    assert max(sizes) == 60
    assert sum(sizes) == sum(one.nbytes for one in specs)


def test_replicas_on_the_writing_rank_do_not_move() -> None:
    specs = [spec(f"t{i}", 10) for i in range(12)]
    full = [LocalShard(shard=Shard(name=one.name, shape=one.shape), start=0, length=10) for one in specs]
    _, planned = rounds_of(specs, [full] * 4)
    assert not [
        transfer for rounds in planned for one in rounds for transfers in one.sends.values() for transfer in transfers
    ]


def test_ranks_with_the_same_replicas_send_equally() -> None:
    """Ranks 2 and 3 have everything, 0 and 1 nothing."""
    specs = [spec(f"t{i}", 10) for i in range(16)]
    full = [LocalShard(shard=Shard(name=one.name, shape=one.shape), start=0, length=10) for one in specs]
    _, planned = rounds_of(specs, [[], [], full, full])
    sent = [
        sum(transfer.nbytes for one in rounds for transfers in one.sends.values() for transfer in transfers)
        for rounds in planned
    ]
    assert sent[:2] == [0, 0]
    assert sent[2] == sent[3] > 0


def test_tensor_parallel_shards_arrive_with_their_offsets() -> None:
    blocks = [Block(units=4, width=2), Block(units=4)]  # fused, so each rank has two pieces
    shards = [Shard(name="w", shape=(12, 3), dim=0, pieces=pieces_of(blocks, rank, 2)) for rank in range(2)]
    local = [[LocalShard(shard=shard, start=0, length=math.prod(local_shape(shard)))] for shard in shards]
    _, planned = rounds_of([spec("w", 12, 3)], local)
    transfers = arriving(planned)["w"]
    assert [transfer.shard for transfer in transfers] == shards
    full, wanted = torch.empty(12, 3), torch.randn(12, 3)
    for transfer in transfers:
        transfer.shard.put(transfer.shard.take(wanted), full)
    assert torch.equal(full, wanted)


def test_of_tied_replicas_the_first_stage_sends() -> None:
    shard = Shard(name="w", shape=(10,))
    local = [[LocalShard(shard=shard, start=0, length=10, pipeline_stage=stage)] for stage in (1, 0, 1)]
    _, planned = rounds_of([spec("w", 10)], local)
    assert [transfer.source for transfer in arriving(planned)["w"]] == [1]


@pytest.mark.parametrize(
    ("local", "said"),
    [
        ([], "do not cover"),
        ([LocalShard(shard=Shard(name="w", shape=(10,)), start=0, length=9)], "element 9"),
        ([LocalShard(shard=Shard(name="w", shape=(11,)), start=0, length=11)], r"shape of w is \[11\]"),
        (
            [LocalShard(shard=Shard(name="w", shape=(10,), dim=0, pieces=((0, 5),)), start=0, length=5)],
            "do not cover w",
        ),
    ],
)
def test_an_element_that_no_rank_has_is_an_error(local: list[LocalShard], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rounds_of([spec("w", 10)], [local])
