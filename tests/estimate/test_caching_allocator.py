"""PyTorch's caching allocator: segments worked out by hand, and what holds for any sequence of allocations."""

import itertools
import random

import pytest

from toolkit.estimate.caching_allocator import CachingAllocator, MemoryBlock, OutOfMemoryError

MIB = 2**20


def allocated(*mib: float) -> tuple[CachingAllocator, list[MemoryBlock]]:
    allocator = CachingAllocator()
    return allocator, [allocator.allocate(int(each * MIB)) for each in mib]


@pytest.mark.parametrize(
    ("sizes", "of_blocks", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([513], 1024, 2 * MIB),
        ([MIB, MIB], 2 * MIB, 2 * MIB),
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([9 * MIB, 9 * MIB], 18 * MIB, 20 * MIB),
        ([9 * MIB, 9 * MIB, 3 * MIB], 21 * MIB, 40 * MIB),
        # What would be left, 1 MiB, is not more than kSmallSize: the block keeps it.
        ([9 * MIB, 10 * MIB - 1], 20 * MIB, 20 * MIB),
        ([10 * MIB], 10 * MIB, 10 * MIB),
        ([10 * MIB + 1], 10 * MIB + 512, 12 * MIB),
        ([11 * MIB, 11 * MIB], 24 * MIB, 24 * MIB),
    ],
)
def test_segments_are_as_large_as_by_hand(sizes: list[int], of_blocks: int, reserved: int) -> None:
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size)
    assert (allocator.allocated, allocator.reserved) == (of_blocks, reserved)


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    allocator, (large, small, _) = allocated(30, 14, 40)
    allocator.free(large)
    allocator.free(small)
    start = small.start
    assert allocator.allocate(12 * MIB).start == start
    # 2 MiB of that segment are left, too little; 30 are split.
    assert allocator.allocate(20 * MIB).start == large.start
    assert allocator.reserved == 84 * MIB


def test_of_equal_blocks_the_one_at_the_lowest_address_is_taken() -> None:
    allocator, (first, second) = allocated(12, 12)
    allocator.free(second)
    allocator.free(first)
    assert allocator.allocate(12 * MIB).start == first.start


def test_free_neighbors_become_one_block() -> None:
    allocator, blocks = allocated(5, 5, 5)
    for block in (blocks[0], blocks[2], blocks[1]):  # the rest of the segment joins too
        allocator.free(block)
    allocator.allocate(9 * MIB + 512)
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 20 * MIB


def test_blocks_of_the_small_pool_serve_no_large_allocation() -> None:
    allocator, blocks = allocated(1, 1)
    for block in blocks:
        allocator.free(block)
    allocator.allocate(2 * MIB)
    assert allocator.reserved == 22 * MIB


def test_without_room_segments_without_a_tensor_are_given_back() -> None:
    allocator = CachingAllocator(40 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(36 * MIB)
    assert (allocator.reserved, allocator.peak_reserved, allocator.peak_needed) == (36 * MIB, 36 * MIB, 36 * MIB)


def test_a_segment_with_a_tensor_is_not_given_back() -> None:
    allocator = CachingAllocator(40 * MIB)
    first = allocator.allocate(30 * MIB)
    allocator.free(first)
    allocator.allocate(2 * MIB)  # in the segment of 30 MiB
    with pytest.raises(OutOfMemoryError):
        allocator.allocate(36 * MIB)


def test_what_is_needed_is_what_cannot_be_given_back() -> None:
    allocator, (large, _) = allocated(30, 12)
    allocator.free(large)
    allocator.allocate(40 * MIB)
    # 30 MiB were in the cache while 12 and 40 had tensors.
    assert (allocator.peak_reserved, allocator.peak_needed, allocator.peak_allocated) == (82 * MIB, 52 * MIB, 52 * MIB)


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_keeps_blocks_apart_and_leaves_only_whole_segments(seed: int) -> None:
    chance, allocator = random.Random(seed), CachingAllocator()
    live: dict[MemoryBlock, int] = {}
    for _ in range(2000):
        if live and chance.random() < 0.5:
            block = chance.choice([*live])
            del live[block]
            allocator.free(block)
        else:
            size = int(2 ** chance.uniform(0, 26))
            live[allocator.allocate(size)] = size
        assert sum(block.size for block in live) == allocator.allocated <= allocator.reserved
    spans = sorted((block.start, block.start + block.size) for block in live)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert all(block.size >= size and block.size % 512 == 0 for block, size in live.items())
    assert allocator.peak_allocated <= allocator.peak_needed <= allocator.peak_reserved
    for block in live:
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def test_a_repeated_step_reserves_nothing_more() -> None:
    sizes, allocator = [int(2 ** random.Random(5).uniform(9, 28)) for _ in range(50)], CachingAllocator()
    reserved = []
    for _ in range(3):
        for block in [allocator.allocate(size) for size in sizes]:
            allocator.free(block)
        reserved.append(allocator.reserved)
    assert reserved[0] == reserved[1] == reserved[2]
