"""GpuTape: a pass on paper whose tensors take blocks of a CachingAllocator, which many passes share."""

from typing import Any

from published.caching_allocator import CachingAllocator
from toolkit.estimate.sizes.tape import Shape, Storage, Tape, Tensor, contiguous


class GpuStorage(Storage):
    """A storage that holds a block as long as a tensor names it."""

    __slots__ = ("block",)

    def __init__(self, tape: "GpuTape", size: int) -> None:
        super().__init__(tape, size)
        self.block = tape.allocator.allocate(size)

    def __del__(self) -> None:
        self.tape.allocator.free(self.block)  # type: ignore[attr-defined]


class _Forgetful(dict[Any, str]):
    """The tape's kinds, which nobody asks here, and which would keep storages alive."""

    def setdefault(self, key: Any, default: str = "", /) -> str:
        return default


class GpuTape(Tape):
    """One micro-batch's pass through one model chunk."""

    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__()
        self.allocator = allocator
        self.kinds = _Forgetful()

    def new(self, shape: Shape, itemsize: int, strides: Shape | None = None) -> Tensor:
        """Allocate a tensor; contiguous without `strides`."""
        size = itemsize
        for dim in shape:
            size *= dim
        return Tensor(GpuStorage(self, size), shape, strides or contiguous(shape), itemsize)

    def without_memory(self, x: Tensor) -> Tensor:
        """x as a node of the graph alone."""
        return Tensor(self._free, x.shape, x.strides, x.itemsize, x.node, x.output)
