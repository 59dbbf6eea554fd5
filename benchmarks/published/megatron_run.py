"""A run of Megatron-Core on paper: three steps of one rank, on an allocator that works as PyTorch's.

- Order of passes: megatron/core/pipeline_parallel/schedules.py, forward_backward_no_pipelining,
  forward_backward_pipelining_without_interleaving, forward_backward_pipelining_with_interleaving. A chunk's result is
  given up once it is sent (deallocate_output_tensor); the gradient of its input stays until the next one is there.
- A chunk holds on to what it last received, with its gradient, between steps too (transformer_block.py,
  set_input_tensor). In the plain schedule the frame holds the last loss, and with its graph the input before that.
- cuBLAS makes a workspace for each handle at the first product (aten/src/ATen/cuda/CUDABlas.cpp); forward and backward
  run in two threads, with a handle each. TransformerEngine has one of its own (pytorch/module/base.py).
- Where weight gradients are added to the main ones by the product itself, autograd is given a tensor of the weight's
  shape that stays (get_dummy_wgrad in the same file).
- Megatron's own attention keeps the scores' memory from one layer to the next (megatron/core/utils.py,
  GlobalMemoryBuffer), and its sequence-parallel layers the gathered input.
"""

from dataclasses import dataclass

from published.caching_allocator import Block, CachingAllocator
from published.megatron_ends import embed, head, layers
from published.megatron_setup import Setup
from published.megatron_states import States
from published.megatron_tape import GpuTape
from toolkit.estimate.sizes.tape import Tensor

_INT64 = 8


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Bytes."""

    static: int
    peak: int


@dataclass
class _Pass:
    """A micro-batch in flight through one chunk."""

    tape: GpuTape
    received: Tensor | None
    output: list[Tensor]


class Run:
    """One rank."""

    def __init__(self, c: Setup) -> None:
        self.c = c
        self.memory = CachingAllocator()
        self.states = States(c, self.memory)
        self._persistent: list[Block] = []
        self._backward_ran = False
        self._sent: Tensor | None = None
        """The last gradient of an input, which the schedule's frame holds."""
        self._inputs: dict[int, list[Tensor | None]] = {}
        """What each chunk was last given (TransformerBlock.input_tensor), and its gradient."""
        self._deferred: list[Block] = []

    def outcome(self) -> Outcome:
        """Three steps: moments come to exist in the first, and the second is like all others."""
        self._start()
        for step in range(3):
            self.states.drop_gradients()
            self._step()
            self.states.copy_gradients()
            if step == 0:
                self.states.make_moments()
        return Outcome(static=self.memory.allocated, peak=self.memory.peak_allocated)

    def _start(self) -> None:
        c = self.c
        if c.engine_bytes:
            self._persist(c.engine_bytes)
        self._persist(c.cublas_bytes)
        if c.local:
            self._persist(2 * c.b * c.heads * c.s * c.s)
        if c.sp:
            self._persist(2 * c.b * c.s * c.h)

    def _persist(self, size: int) -> None:
        self._persistent.append(self.memory.allocate(size))

    def _step(self) -> None:
        c = self.c
        flying: dict[int, list[_Pass]] = {chunk: [] for chunk in range(c.chunks)}
        for forward, chunk in order(c):
            if forward:
                flying[chunk].append(self._forward(chunk))
            else:
                self._backward(flying[chunk].pop(0), chunk)
        for block in self._deferred:
            self.memory.free(block)
        self._deferred, self._sent = [], None

    def _forward(self, chunk: int) -> _Pass:
        c, tape = self.c, GpuTape(self.memory)
        starts = c.first and chunk == 0
        ends = c.last and chunk == c.chunks - 1
        batch = []
        if starts or ends:
            batch = [tape.new((c.b, c.s), size) for size in (_INT64, _INT64, 4, _INT64)]
            if c.masks:
                batch.append(tape.new((c.b, 1, c.s, c.s), 1))
        tied = None
        if c.tied and c.pp == 1:
            tied = tape.parameter((c.vocab, c.h), 2)
            assert tied.node is not None
            tied.node.is_parameter = False  # its gradient waits until the embedding's has come
        received = None
        if starts:
            x = embed(c, tape, tape.new((c.b, c.s), _INT64), tied)
        else:
            received = tape.leaf((c.s // (c.tp if c.sp else 1), c.b, c.h), 2)
            x = received
            if c.chunks > 1:
                self._inputs[chunk] = [received]
        x = layers(c, x, c.layers[chunk])
        # A result that was sent has no memory any more, only its place in the graph.
        output = [head(c, x, tied) if ends else tape.without_memory(x)]
        del x, tied
        if c.chunks == 1:
            # Only now the last micro-batch's result is let go, and with its graph what that one received.
            self._inputs[chunk] = [received]
        return _Pass(tape, received, output)

    def _backward(self, run: _Pass, chunk: int) -> None:
        c = self.c
        if not self._backward_ran:
            self._persist(c.cublas_bytes)
            for rows, columns in sorted(placeholder_shapes(c)):
                self._persist(2 * rows * columns)
            self._backward_ran = True
        node = run.received.node if run.received is not None else None
        run.tape.backward(run.output)
        if node is not None:
            held = self._inputs[chunk]
            if held[0] is run.received:
                held.append(node.gradients[0])
            self._sent, node.gradients[0] = node.gradients[0], None
        if c.deferred_head and c.last and chunk == c.chunks - 1 and len(self._deferred) < 2 * c.deferred_head:
            self._deferred += [self.memory.allocate(2 * c.b * c.s * size) for size in (c.vocab, c.h)]


def placeholder_shapes(c: Setup) -> set[tuple[int, int]]:
    """Shapes of the weights whose gradients are accumulated by the product itself, and which get a tensor instead."""
    if c.placeholders == "none":
        return set()
    width = c.heads * c.d
    shapes = {(width + 2 * c.kv_heads * c.d, c.h), (c.h, width), (c.ffn * (2 if c.gated else 1), c.h), (c.h, c.ffn)}
    if c.placeholders == "all" and c.last:
        shapes.add((c.vocab, c.h))
    return shapes


def order(c: Setup) -> list[tuple[bool, int]]:
    """(forward or backward, chunk) of one step on this rank."""
    if c.pp == 1:
        return [(forward, 0) for _ in range(c.micro_batches) for forward in (True, False)]
    total = c.micro_batches * c.chunks
    if c.chunks == 1:
        ahead = min(c.pp - c.stage - 1, total)
    else:
        ahead = min((c.pp - c.stage - 1) * 2 + (c.chunks - 1) * c.group_size, total)
    chunks = [
        chunk
        for start in range(0, c.micro_batches, c.group_size)
        for chunk in range(c.chunks)
        for _ in range(start, min(start + c.group_size, c.micro_batches))
    ]
    forwards = [(True, chunk) for chunk in chunks]
    backwards = [(False, c.chunks - 1 - chunk) for chunk in chunks]
    found = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        found += [forward, backward]
    return found + backwards[total - ahead :]
