"""PyTorch's caching allocator on a GPU, replayed: what it reserves for a list of allocations.

The rules are those of c10/cuda/CUDACachingAllocator.cpp: sizes are rounded to 512 bytes; up to 1 MiB they come from
segments of 2 MiB, up to 10 MiB from segments of 20 MiB, beyond that from a segment of their own, rounded to 2 MiB.
The smallest free block that is large enough is taken, and split where more than 1 MiB (512 bytes in small segments)
would be left. Neighbours that are free are joined. Where the GPU has nothing left, segments without a tensor are given
back and the allocation is tried again. One stream.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

_MIB = 2**20
_SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT = _MIB, 2 * _MIB, 20 * _MIB, 10 * _MIB


class OutOfMemoryError(Exception):
    """The GPU has no room for an allocation, not even without the cache."""


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment."""

    start: int
    size: int
    small: bool
    before: "Block | None" = None
    after: "Block | None" = None
    free: bool = False


class CachingAllocator:
    """`capacity`: bytes that it may take from the GPU."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.allocated = self.reserved = self.peak_allocated = 0
        self._next = 0
        self._waiting: list[Block] = []
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, size: int) -> Block:
        """A block of `size` bytes. Raises OutOfMemoryError."""
        size = max(512, -(-size // 512) * 512)
        small = size <= _SMALL
        block = self._cached(size, small) or self._segment(size, small)
        left = block.size - size
        if left >= 512 if small else left > _SMALL:
            rest = Block(block.start + size, left, small, before=block, after=block.after, free=True)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            insort(self._free[small], (rest.size, rest.start, rest))
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to the cache."""
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._take(neighbour)
                block.size += neighbour.size
                if neighbour is block.before:
                    block.start, block.before = neighbour.start, neighbour.before
                    if block.before is not None:
                        block.before.after = block
                else:
                    block.after = neighbour.after
                    if block.after is not None:
                        block.after.before = block
        block.free = True
        insort(self._free[block.small], (block.size, block.start, block))

    def free_later(self, block: Block) -> None:
        """Give a block back when the CPU next waits for the GPU: at `synchronize`, or where there is no room."""
        self._waiting.append(block)

    def synchronize(self) -> None:
        """The GPU has caught up."""
        waiting, self._waiting = self._waiting, []
        for block in waiting:
            self.free(block)

    def empty_cache(self) -> None:
        """Give segments without a tensor back to the GPU."""
        for blocks in self._free.values():
            kept = []
            for entry in blocks:
                if entry[2].before is None and entry[2].after is None:
                    self.reserved -= entry[0]
                else:
                    kept.append(entry)
            blocks[:] = kept

    def _cached(self, size: int, small: bool) -> Block | None:
        blocks = self._free[small]
        at = bisect_left(blocks, (size, -1))
        if at == len(blocks):
            return None
        block = blocks.pop(at)[2]
        block.free = False
        return block

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            whole = _SMALL_SEGMENT
        else:
            whole = _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        if self.capacity is not None and self.reserved + whole > self.capacity:
            self.synchronize()
            self.empty_cache()
            if self.reserved + whole > self.capacity:
                raise OutOfMemoryError
        self.reserved += whole
        block = Block(self._next, whole, small)
        self._next += whole + 1
        return block

    def _take(self, block: Block) -> None:
        blocks = self._free[block.small]
        del blocks[bisect_left(blocks, (block.size, block.start))]
