"""What PyTorch's allocator reserves on the first stage of a Megatron-DeepSpeed pipeline with ZeRO-1, by replay.

Two steps are replayed, allocation by allocation: initialisation, forward and backward passes of 1F1B, and the update,
whose flat tensors do not fit between what the layers left. Sources: DeepSpeed 0.5 to 0.6, runtime/pipe/engine.py,
runtime/utils.py (PartitionedTensor), runtime/zero/stage_1_and_2.py (initialize_optimizer_states, reduce_gradients,
step); layers as in `megatron_2021_layer`.
"""

from functools import lru_cache
from itertools import count

from published.caching_allocator import CachingAllocator
from published.megatron_2021_layer import LayerWidths, run_layer
from published.megatron_stage import GptStage
from published.replay import Passes, Replay
from published.traced import FREED, Event, TracedTape, number_of

_ITEM = 2
_BUCKET_ELEMENTS = 500_000_000
"""`reduce_bucket_size`, as DeepSpeed sets it where the config says nothing."""
_STEPS = 2


def replayed(stage: GptStage, ranks: int, static: int, room: int | None = None) -> CachingAllocator:
    """The allocator of the first stage after two steps. Raises OutOfMemoryError where `room` is not enough.

    `ranks` share masters and moments; `static` is what lies there between two steps.
    """
    elements = stage.held.numel
    part = -(-elements // ranks)
    allocator = CachingAllocator(room)
    allocator.allocate(2 * elements)
    allocator.allocate(4 * part)
    gradient = allocator.allocate(4 * part)
    for _ in range(2):
        allocator.allocate(4 * part)
    allocator.free(gradient)
    allocator.allocate(max(512, static - 2 * elements - 12 * part))

    def update(step: int) -> None:
        for sizes in ((_ITEM * _BUCKET_ELEMENTS,), (2 * part, 4 * part)):
            for block in [allocator.allocate(size) for size in sizes]:
                allocator.free(block)

    passes = _Recorder(stage).passes()
    Replay(allocator=allocator, passes=passes, ahead=stage.ahead).steps(_STEPS, stage.micro_batches, update)
    return allocator


class _Recorder:
    """Writes down one micro-batch of the first stage."""

    def __init__(self, stage: GptStage) -> None:
        self.stage, self.u = stage, stage.boundary
        self.numbers = count()
        self.once = count(-1, -1)
        self.events: list[Event] = []

    def passes(self) -> Passes:
        """Forward, and backward from the last layer to the embedding."""
        inputs = self._embedding()
        for _ in range(self.stage.layers):
            inputs.append(self._forward(inputs[-1]))
        part = self._new(self.u // self.stage.row.tp)
        self._free(inputs.pop())
        forward, self.events = tuple(self.events), []
        restored, gradient = self._put_together(), self._put_together()
        self._free(part)
        received = gradient
        for hidden in reversed(inputs[1:]):
            below = self._backward(hidden, gradient)
            if gradient != received:
                self._free(gradient)
            gradient = below
            self._free(hidden)
        if gradient != received:
            self._free(gradient)
        for number in (received, restored, inputs[0]):
            self._free(number)
        self._once(_ITEM * self.stage.row.vocab * self.stage.row.hidden // self.stage.row.tp)
        return Passes(forward=forward, backward=tuple(self.events))

    def _new(self, size: int) -> int:
        number = next(self.numbers)
        self.events.append((number, size))
        return number

    def _free(self, number: int) -> None:
        self.events.append((number, FREED))

    def _once(self, size: int) -> None:
        """A gradient that stays, and the one that is added to it."""
        self.events.append((next(self.once), size))
        self._free(self._new(size))

    def _put_together(self) -> int:
        """Parts gathered in a flat tensor, which is cloned."""
        flat = self._new(self.u)
        whole = self._new(self.u)
        self._free(flat)
        return whole

    def _embedding(self) -> list[int]:
        """[the dropout's mask, the first layer's input]."""
        words, added, mask, dropped = (self._new(size) for size in (self.u, self.u, self.u // 2, self.u))
        self._free(words)
        self._free(added)
        first = self._new(self.u)
        self._free(dropped)
        return [mask, first]

    def _forward(self, hidden: int) -> int:
        events, ends = _walk(self.stage.widths, False)
        return self._replayed(events, {ends[0]: hidden})[ends[1]]

    def _backward(self, hidden: int, gradient: int) -> int:
        events, ends = _walk(self.stage.widths, True)
        return self._replayed(events, {ends[0]: hidden, ends[2]: gradient})[ends[1]]

    def _replayed(self, events: tuple[Event, ...], known: dict[int, int]) -> dict[int, int]:
        """The events under numbers of their own; gradients of weights have numbers below zero."""
        for number, size in events:
            if number < 0:
                self._once(size)
            elif size < 0:
                self._free(known[number])
            else:
                known[number] = self._new(size)
        return known


@lru_cache
def _walk(widths: LayerWidths, is_backward: bool) -> tuple[tuple[Event, ...], tuple[int, int, int]]:
    """One layer's events, and the numbers of its input, of its result, and of the gradient that it is given."""
    tape = TracedTape(keeps_gradients=True)
    shape = widths.seq_len, widths.samples, widths.hidden
    x, incoming = tape.leaf(shape, _ITEM), tape.new(shape, _ITEM)
    own, given = number_of(x), number_of(incoming)
    outside = len(tape.events)
    if is_backward:
        output = run_layer(widths, x)
        held = output.alias()
        outputs, gradients = [output], [incoming.alias()]
        del output
        tape.backward(outputs, gradients)
        del held
        assert x.node is not None
        result = x.node.gradients[0]
        assert result is not None
    else:
        with tape.no_grad():
            result = run_layer(widths, x)
    kept = {number_of(gradient) for gradient in tape.gradients}
    events = [(-1, size) if number in kept else (number, size) for number, size in tape.events[outside:]]
    return tuple(events), (own, number_of(result), given)
