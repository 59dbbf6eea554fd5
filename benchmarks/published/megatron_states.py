"""Parameters, main gradients and optimizer states of one rank of Megatron-Core, allocated in the order of its start.

- Parameters are tensors of their own, in the order of the modules. The distributed optimizer moves them into one buffer
  for each model chunk; main gradients always lie in one (megatron/core/distributed/param_and_grad_buffer.py,
  _ParamAndGradBuffer): fp32 for bf16 models, fp16 for fp16 ones (arguments.py sets accumulate_allreduce_grads_in_fp32).
  Buckets of the distributed optimizer are padded to lcm(ranks, 128) elements, parameters begin at multiples of 64.
- fp32 masters are made one by one (optimizer.py, Float16OptimizerWithFloat16Params), or of the parts of parameters that
  lie in this rank's share of each bucket (distrib_optimizer.py, _build_model_and_main_param_groups).
- Both moments are made in the first step (FusedAdam, in TransformerEngine or apex), parameter by parameter.
- fp16: the optimizer's gradients are fp32 copies of the main ones, from the step until the next one begins
  (_copy_model_grads_to_main_grads, zero_grad).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from published.caching_allocator import Block, CachingAllocator
from published.megatron_setup import Setup


@dataclass(frozen=True)
class Parameter:
    """A tensor of the model."""

    numel: int
    decays: bool
    shared: bool = False
    """A copy of the first stage's embedding, which has a bucket of its own."""


def parameters(c: Setup, chunk: int) -> list[Parameter]:
    """Of one model chunk, in the order of its modules."""
    found = []
    first, last = c.first and chunk == 0, c.last and chunk == c.chunks - 1
    if first:
        found.append(Parameter(c.vocab * c.h, True, shared=c.tied and c.pp > 1))
        if c.positions:
            found.append(Parameter(c.positions * c.h, True))
    for _ in range(c.layers[chunk]):
        found.extend(_layer(c))
    if last:
        found.extend(_norm(c, c.h))
        if not (c.tied and first):
            found.append(Parameter(c.vocab * c.h, True, shared=c.tied))
    return found


def _norm(c: Setup, size: int) -> list[Parameter]:
    return [Parameter(size, False)] * (2 if c.norm_biases else 1)


def _layer(c: Setup) -> Iterator[Parameter]:
    """In the order of TransformerLayer's modules: projection, then norm and matrices of queries, keys, values."""
    bias = 1 if c.biases else 0
    qkv = (c.heads + 2 * c.kv_heads) * c.d
    wide = c.ffn * (2 if c.gated else 1)
    yield Parameter(c.h * c.heads * c.d, True)
    yield from [Parameter(c.h, False)] * bias
    yield from _norm(c, c.h)
    yield Parameter(qkv * c.h, True)
    yield from [Parameter(qkv, False)] * bias
    if c.qk_norm:
        yield from _norm(c, c.d) * 2
    yield from _norm(c, c.h)
    yield Parameter(wide * c.h, True)
    yield from [Parameter(wide, False)] * bias
    yield Parameter(c.h * c.ffn, True)
    yield from [Parameter(c.h, False)] * bias


class States:
    """What stays. Blocks are held in lists, and given back where they are cleared."""

    def __init__(self, c: Setup, memory: CachingAllocator) -> None:
        """Model, buffers and masters, as setup_model_and_optimizer makes them."""
        self._c, self._memory = c, memory
        self._held: list[Block] = []
        self._gradients: list[Block] = []
        chunks = [parameters(c, chunk) for chunk in range(c.chunks)]
        own = [[memory.allocate(2 * p.numel) for p in chunk] for chunk in chunks]
        self.trained: list[int] = []
        """Elements of each tensor that the optimizer holds, in its order."""
        shards: list[list[tuple[int, bool]]] = []
        for chunk, blocks in zip(chunks, own, strict=True):
            numel, pieces = _buffer(c, chunk)
            shards.append(pieces)
            if c.distributed:
                self._hold(2 * numel)
                self._hold(self._gradient_bytes * numel)
                for block in blocks:
                    memory.free(block)
            else:
                self._hold(self._gradient_bytes * numel)
        for decays in (True, False):
            for pieces in shards:
                self.trained += [numel for numel, decayed in pieces if decayed == decays]
        for numel in self.trained:
            copy = memory.allocate(2 * numel)
            self._hold(4 * numel)
            memory.free(copy)

    @property
    def _gradient_bytes(self) -> int:
        return 2 if self._c.fp16 else 4

    def make_moments(self) -> None:
        """In the first step."""
        for numel in self.trained:
            self._hold(4 * numel)
            self._hold(4 * numel)

    def copy_gradients(self) -> None:
        """fp16: main gradients in fp32."""
        if self._c.fp16:
            self._gradients = [self._memory.allocate(4 * numel) for numel in self.trained]

    def drop_gradients(self) -> None:
        """When the next step begins."""
        for block in self._gradients:
            self._memory.free(block)
        self._gradients = []

    def _hold(self, size: int) -> None:
        self._held.append(self._memory.allocate(size))


def _buffer(c: Setup, chunk: list[Parameter]) -> tuple[int, list[tuple[int, bool]]]:
    """(elements of the chunk's buffer, (elements, whether it decays) of what the optimizer of this rank holds)."""
    if not c.distributed:
        return sum(p.numel for p in chunk), [(p.numel, p.decays) for p in chunk]
    align = lcm(c.dp, 128)
    start, end = 0, 0
    buckets: list[tuple[int, int, list[tuple[int, int, Parameter]]]] = []
    inside: list[tuple[int, int, Parameter]] = []

    def close() -> int:
        nonlocal start, inside
        stop = -(-end // align) * align
        buckets.append((start, stop, inside))
        start, inside = stop, []
        return stop

    for p in reversed(chunk):
        at = -(-end // 64) * 64
        if p.shared and inside:
            at = close()
        end = at + p.numel
        inside.append((at, end, p))
        if p.shared or (c.bucket_elements is not None and end - start >= c.bucket_elements):
            end = close()
    if inside:
        end = close()
    pieces = []
    for low, high, members in buckets:
        share = (high - low) // c.dp
        mine = high - share  # the last rank, which is the one that reports
        pieces += [(stop - max(at, mine), p.decays) for at, stop, p in members if stop > mine]
    return end, pieces
