"""Training steps replayed on a model of PyTorch's allocator: micro-batches in the order of a 1F1B schedule."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from published.caching_allocator import Block, CachingAllocator
from published.traced import FREED_LATER, Event

_MICRO_BATCHES = 3
"""After the warm-up of a pipeline: more of them find the blocks of those before, and change nothing."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Allocations of a micro-batch. Numbers below zero are allocated once, when they first occur, and stay."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    sent: int | None = None
    """The hidden state for the next stage, which is freed when the next gradient has come."""


@dataclass(kw_only=True)
class Replay:
    """One rank."""

    allocator: CachingAllocator
    passes: Passes
    ahead: int
    """Forward passes before the first backward pass: the stages behind this one."""
    runs_ahead: bool = False
    """Whether the CPU is so far ahead of the GPU that what NCCL used returns at the end of a step only, or when there
    is no room. Otherwise it returns at once."""
    _once: set[int] = field(default_factory=set)
    _waiting: deque[dict[int, Block]] = field(default_factory=deque)
    _sent: Block | None = None

    def steps(self, count: int, micro_batches: int, update: Callable[[int], None]) -> None:
        """`update` runs at the end of each step, and is told its number. Raises OutOfMemoryError."""
        warm_up = min(self.ahead, micro_batches)
        for step in range(count):
            for _ in range(warm_up):
                self._forward()
                self._release_sent()
            for _ in range(min(micro_batches - warm_up, _MICRO_BATCHES)):
                self._forward()
                self._backward()
            while self._waiting:
                self._backward()
            self.allocator.synchronize()
            update(step)

    def _forward(self) -> None:
        held: dict[int, Block] = {}
        self._run(self.passes.forward, held)
        if self.passes.sent is not None:
            self._sent = held.pop(self.passes.sent)
        self._waiting.append(held)

    def _backward(self) -> None:
        held = self._waiting.popleft()
        self._run(self.passes.backward[:1], held)
        self._release_sent()
        self._run(self.passes.backward[1:], held)

    def _release_sent(self) -> None:
        if self._sent is not None:
            self.allocator.free(self._sent)
            self._sent = None

    def _run(self, events: tuple[Event, ...], held: dict[int, Block]) -> None:
        for number, size in events:
            if size == FREED_LATER and self.runs_ahead:
                self.allocator.free_later(held.pop(number))
            elif size < 0:
                self.allocator.free(held.pop(number))
            elif number >= 0:
                held[number] = self.allocator.allocate(size)
            elif number not in self._once:
                self._once.add(number)
                self.allocator.allocate(size)
