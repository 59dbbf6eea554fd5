"""A tape that writes down its allocations: what a pass allocates and frees, and in which order."""

from math import prod

from toolkit.estimate.sizes.tape import Shape, Storage, Tape, Tensor, contiguous

Event = tuple[int, int]
"""(number of the allocation, bytes), (number, FREED), or (number, FREED_LATER) where NCCL had used it."""

FREED, FREED_LATER = -1, -2


class _TracedStorage(Storage):
    """Tells when its last tensor is gone."""

    __slots__ = ("_count", "_tape", "communicated", "number")

    def __init__(self, tape: "TracedTape", size: int) -> None:
        self._count, self._tape, self.number = 0, tape, tape.numbers
        self.communicated = False
        tape.numbers += 1
        tape.events.append((self.number, size))
        super().__init__(tape, size)

    @property
    def users(self) -> int:
        """Tensors that name it."""
        return self._count

    @users.setter
    def users(self, count: int) -> None:
        if self._count and not count:
            self._tape.events.append((self.number, FREED_LATER if self.communicated else FREED))
        self._count = count


def communicate(*tensors: Tensor) -> None:
    """NCCL uses them on its own stream (record_stream): they return to the cache when the GPU has done with them."""
    for tensor in tensors:
        if isinstance(tensor.storage, _TracedStorage):
            tensor.storage.communicated = True


def allocate_once(tape: Tape, number: int, size: int) -> None:
    """What stays for good from its first use on; `number` is below zero."""
    assert isinstance(tape, TracedTape)
    tape.events.append((number, size))


def number_of(tensor: Tensor) -> int:
    """The allocation that a tensor lies in."""
    assert isinstance(tensor.storage, _TracedStorage)
    return tensor.storage.number


class TracedTape(Tape):
    """`events`: allocations and frees, in their order."""

    def __init__(self, *, keeps_gradients: bool) -> None:
        self.events: list[Event] = []
        self.numbers = 0
        super().__init__(keeps_gradients=keeps_gradients)

    def new(self, shape: Shape, itemsize: int, strides: Shape | None = None) -> Tensor:
        """Allocate a tensor; contiguous without `strides`."""
        storage = _TracedStorage(self, prod(shape) * itemsize)
        return Tensor(storage, shape, strides or contiguous(shape), itemsize)
