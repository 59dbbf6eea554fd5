"""Blocks, pieces and shards: where a local parameter lies in the whole one."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from toolkit.errors import LayoutError
from toolkit.parallel.shard import RUN, Block, Shard, is_marked, mark, pieces_of, set_source, shard_of, source_of


def shards_of(shape: tuple[int, ...], dim: int, blocks: Sequence[Block], size: int) -> list[Shard]:
    """The shards of all ranks of a parameter that is split along `dim`."""
    return [Shard(name="weight", shape=shape, dim=dim, pieces=pieces_of(blocks, rank, size)) for rank in range(size)]


def put_together(shards: Sequence[Shard], whole: torch.Tensor) -> torch.Tensor:
    """What is left of `whole` after each rank took its part and put it back."""
    found = torch.full_like(whole, -1.0)
    for shard in shards:
        shard.put(shard.take(whole), found)
    return found


@pytest.mark.parametrize(
    ("units", "width", "size", "shares"),
    [
        (4, 1, 2, [(0, 2), (2, 2)]),
        (4, 3, 4, [(0, 3), (3, 3), (6, 3), (9, 3)]),
        (6, 5, 3, [(0, 10), (10, 10), (20, 10)]),
        (5, 7, 1, [(0, 35)]),
    ],
)
def test_ranks_take_whole_units_one_after_the_other(
    units: int, width: int, size: int, shares: list[tuple[int, int]]
) -> None:
    block = Block(units=units, width=width)
    assert [block.share(rank, size) for rank in range(size)] == shares


@pytest.mark.parametrize(
    ("units", "size", "units_of_ranks"),
    [(1, 2, [0, 0]), (1, 3, [0, 0, 0]), (2, 4, [0, 0, 1, 1]), (3, 6, [0, 0, 1, 1, 2, 2])],
)
def test_neighbours_share_a_unit_where_there_are_fewer_than_ranks(
    units: int, size: int, units_of_ranks: list[int]
) -> None:
    block = Block(units=units, width=8)
    assert [block.share(rank, size) for rank in range(size)] == [(8 * unit, 8) for unit in units_of_ranks]


@pytest.mark.parametrize(("units", "size", "shared"), [(1, 1, False), (1, 2, True), (2, 2, False), (2, 4, True)])
def test_units_are_shared_only_where_they_are_too_few(units: int, size: int, shared: bool) -> None:
    assert Block(units=units).is_shared(size) is shared


@pytest.mark.parametrize(("units", "size"), [(3, 2), (2, 3), (4, 6), (6, 4)])
def test_units_that_do_not_divide_are_refused(units: int, size: int) -> None:
    with pytest.raises(LayoutError) as caught:
        Block(units=units, width=4).share(0, size)
    assert caught.value.refusal.settings == (("tp", size),)
    assert caught.value.refusal.remedy == (("tp", f"a divisor of {units}"),)


def test_every_block_of_a_fused_parameter_is_split_by_itself() -> None:
    query, key = Block(units=4, width=3), Block(units=2, width=3)
    assert [pieces_of([query, key, key], rank, 2) for rank in range(2)] == [
        ((0, 6), (12, 3), (18, 3)),
        ((6, 6), (15, 3), (21, 3)),
    ]


def test_a_shared_block_lies_behind_the_split_ones_before_it() -> None:
    query, key = Block(units=4, width=3), Block(units=1, width=3)
    assert [pieces_of([query, key], rank, 2) for rank in range(2)] == [((0, 6), (12, 3)), ((6, 6), (12, 3))]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "blocks",
    [[Block(units=8)], [Block(units=4, width=3), Block(units=2, width=3), Block(units=1, width=3)]],
    ids=["plain", "fused"],
)
def test_the_parts_of_all_ranks_make_the_whole_again(dim: int, size: int, blocks: list[Block]) -> None:
    features = sum(block.features for block in blocks)
    shape = (features, 5) if dim == 0 else (5, features)
    whole = torch.arange(float(5 * features)).reshape(shape)
    assert torch.equal(put_together(shards_of(shape, dim, blocks, size), whole), whole)


def test_a_parameter_of_many_runs_is_taken_like_one_of_a_few_rows() -> None:
    shape = (3 * RUN + 3,)
    whole = torch.arange(float(shape[0]))
    blocks = [Block(units=2 * RUN + 1), Block(units=1, width=RUN + 2)]
    for rank, shard in enumerate(shards_of(shape, 0, blocks, 2 * RUN + 1)[:2]):
        assert shard.take(whole).tolist() == [rank, *range(2 * RUN + 1, 3 * RUN + 3)]
    assert torch.equal(put_together(shards_of(shape, 0, [Block(units=3, width=RUN + 1)], 3), whole), whole)


def test_the_parts_of_the_ranks_do_not_overlap() -> None:
    shards = shards_of((12,), 0, [Block(units=4, width=2), Block(units=4)], 4)
    found = torch.cat([shard.take(torch.arange(12)) for shard in shards])
    assert sorted(found.tolist()) == list(range(12))


def test_a_local_parameter_holds_its_pieces_in_their_order() -> None:
    shard = Shard(name="weight", shape=(6,), dim=0, pieces=((4, 2), (1, 1)))
    assert shard.take(torch.arange(6)).tolist() == [4, 5, 1]


def test_padding_comes_last_and_is_zero() -> None:
    shard = Shard(name="weight", shape=(5, 2), dim=0, pieces=((3, 2),), padding=1)
    assert shard.take(torch.ones(5, 2)).tolist() == [[1, 1], [1, 1], [0, 0]]


def test_padding_is_not_put_back() -> None:
    shard = Shard(name="weight", shape=(5,), dim=0, pieces=((3, 2),), padding=1)
    whole = torch.zeros(5)
    shard.put(torch.tensor([1.0, 2.0, 9.0]), whole)
    assert whole.tolist() == [0, 0, 0, 1, 2]


def test_a_rank_without_real_rows_holds_padding_alone() -> None:
    shard = Shard(name="weight", shape=(3, 2), dim=0, padding=2)
    assert shard.take(torch.ones(3, 2)).tolist() == [[0, 0], [0, 0]]


def test_padding_has_the_dtype_of_the_whole() -> None:
    shard = Shard(name="weight", shape=(3, 2), dim=0, padding=2)
    assert shard.take(torch.ones(3, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "shard",
    [Shard(name="bias", shape=(4,)), Shard(name="bias", shape=(4,), dim=0, pieces=((0, 4),))],
    ids=["whole", "split"],
)
def test_what_was_taken_shares_no_memory_with_the_whole(shard: Shard) -> None:
    whole = torch.zeros(4)
    shard.take(whole).fill_(1.0)
    assert whole.tolist() == [0, 0, 0, 0]


def test_a_transposed_whole_is_taken_contiguous() -> None:
    whole = torch.arange(6.0).reshape(2, 3).t()
    assert Shard(name="weight", shape=(3, 2)).take(whole).is_contiguous()


def test_an_unsplit_parameter_is_put_as_it_is() -> None:
    whole = torch.zeros(2, 2)
    Shard(name="norm", shape=(2, 2)).put(torch.eye(2), whole)
    assert torch.equal(whole, torch.eye(2))


@pytest.mark.parametrize(
    ("dim", "owner", "counted"), [(0, True, True), (0, False, False), (None, True, False)], ids=str
)
def test_deepspeed_counts_a_split_parameter_on_its_owner(dim: int | None, owner: bool, counted: bool) -> None:
    shard = Shard(name="weight", shape=(2,), dim=dim, pieces=((0, 2),), owner=owner)
    parameter = mark(nn.Parameter(torch.zeros(2)), shard)
    assert (parameter.model_parallel, parameter.tensor_model_parallel) == (counted, counted)  # type: ignore[attr-defined]


def test_a_marked_parameter_has_its_shard() -> None:
    shard = Shard(name="weight", shape=(2,))
    parameter = nn.Parameter(torch.zeros(2))
    assert not is_marked(parameter)
    assert shard_of(mark(parameter, shard)) is shard


def test_a_parameter_is_its_own_source() -> None:
    parameter = nn.Parameter(torch.arange(3.0))
    assert source_of(parameter).clone().tolist() == [0, 1, 2]  # type: ignore[attr-defined]


def test_a_meta_parameter_takes_its_values_from_the_source_it_was_given() -> None:
    parameter = nn.Parameter(torch.empty(4, device="meta"))
    set_source(parameter, torch.arange(4.0))
    shard = Shard(name="weight", shape=(4,), dim=0, pieces=((2, 2),))
    assert shard.take(source_of(parameter)).tolist() == [2, 3]
