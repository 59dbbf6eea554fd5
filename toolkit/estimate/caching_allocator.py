"""CachingAllocator: what PyTorch reserves of a GPU for a sequence of allocations, on one stream, by default settings.

The rules of `DeviceCachingAllocator` in c10/cuda/CUDACachingAllocator.cpp (torch 2.13); constants have its names, and
those of c10/core/AllocatorConfig.h:

- `round_size`: sizes are multiples of kMinBlockSize.
- `get_pool`, `get_allocation_size`: up to kSmallSize, blocks are in the small pool, in segments of kSmallBuffer; below
  kMinLargeAlloc in segments of `large_segment_size`; from there on in segments of their own, multiples of kRoundLarge.
- `get_free_block`: the smallest free block of the pool that is large enough; of equals the one at the lowest address.
- `should_split`: the rest stays free if it has at least kMinBlockSize; in the large pool, more than kSmallSize.
- `free_block`: free neighbors in a segment become one block.
- `release_cached_blocks`: where the GPU has no room, segments without a tensor are given back, and it is tried again.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

_MIB = 2**20
K_MIN_BLOCK_SIZE = 512
K_SMALL_SIZE = _MIB
K_SMALL_BUFFER = 2 * _MIB
K_MIN_LARGE_ALLOC = 10 * _MIB
K_ROUND_LARGE = 2 * _MIB
LARGE_SEGMENT_SIZE = 20 * _MIB


class OutOfMemoryError(Exception):
    """The GPU has no room for an allocation, not even without the cache."""


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A piece of a segment, with its neighbors there."""

    start: int
    size: int
    is_small: bool
    before: "MemoryBlock | None" = None
    after: "MemoryBlock | None" = None
    is_free: bool = False


class CachingAllocator:
    """`capacity`: bytes that it may take from the GPU; None for any number."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.peak_needed = 0
        """The most that was in segments with a tensor: what is reserved less what could have been given back."""
        self._releasable = self._address = 0
        self._small: list[tuple[int, int, MemoryBlock]] = []
        self._large: list[tuple[int, int, MemoryBlock]] = []

    def allocate(self, size: int) -> MemoryBlock:
        """A block of at least `size` bytes. Raises OutOfMemoryError."""
        size = -(-max(size, 1) // K_MIN_BLOCK_SIZE) * K_MIN_BLOCK_SIZE
        is_small = size <= K_SMALL_SIZE
        free = self._small if is_small else self._large
        at = bisect_left(free, (size, -1))
        block = self._segment(size, is_small) if at == len(free) else self._take(free, at)
        rest = block.size - size
        if rest >= K_MIN_BLOCK_SIZE if is_small else rest > K_SMALL_SIZE:
            after = MemoryBlock(block.start + size, rest, is_small, block, block.after)
            if block.after is not None:
                block.after.before = after
            block.after = after
            block.size = size
            self._keep(after)
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        if self.reserved - self._releasable > self.peak_needed:
            self.peak_needed = self.reserved - self._releasable
        return block

    def free(self, block: MemoryBlock) -> None:
        """Give a block back to the cache."""
        self.allocated -= block.size
        free = self._small if block.is_small else self._large
        before = block.before
        after = block.after
        if after is not None and after.is_free:
            self._take(free, bisect_left(free, (after.size, after.start)))
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        if before is not None and before.is_free:
            self._take(free, bisect_left(free, (before.size, before.start)))
            block.start = before.start
            block.size += before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        self._keep(block)

    def release_cached(self) -> None:
        """Give segments without a tensor back to the GPU."""
        for free in (self._small, self._large):
            free[:] = [entry for entry in free if not _is_whole(entry[2])]
        self.reserved -= self._releasable
        self._releasable = 0

    def _keep(self, block: MemoryBlock) -> None:
        block.is_free = True
        insort(self._small if block.is_small else self._large, (block.size, block.start, block))
        if _is_whole(block):
            self._releasable += block.size

    def _take(self, free: list[tuple[int, int, MemoryBlock]], at: int) -> MemoryBlock:
        block = free.pop(at)[2]
        block.is_free = False
        if _is_whole(block):
            self._releasable -= block.size
        return block

    def _segment(self, size: int, is_small: bool) -> MemoryBlock:
        if is_small:
            whole = K_SMALL_BUFFER
        else:
            whole = LARGE_SEGMENT_SIZE if size < K_MIN_LARGE_ALLOC else -(-size // K_ROUND_LARGE) * K_ROUND_LARGE
        if self.capacity is not None and self.reserved + whole > self.capacity:
            self.release_cached()
            if self.reserved + whole > self.capacity:
                raise OutOfMemoryError
        self.reserved += whole
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = MemoryBlock(self._address, whole, is_small)
        self._address += whole + 1  # segments are not neighbors
        return block


def _is_whole(block: MemoryBlock) -> bool:
    """Whether the block is a segment."""
    return block.before is None and block.after is None
