"""A pipeline stage of Aleph Alpha's `scaling` as a list of allocations: forward and backward of a micro-batch.

Operations of its first release (August 2024; the runs are a year older), in their order:
transformer/model/layers/layer.py, core/nn/attention/attention.py, core/nn/rotary.py, core/nn/mlp.py
(ParallelSwiGLUMLP), core/nn/norm/rms_norm.py, core/nn/masked_softmax, transformer/model/layers/lm_head.py,
transformer/model/model.py (loss_function). Tensor parallelism without sequence parallelism: hidden states are whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

from published.fused_kernels import Gradients, flash_attention, rms_norm
from published.llama_stage import LlamaStage
from published.replay import Passes
from published.traced import TracedTape, communicate
from toolkit.estimate.sizes.operations import (
    add,
    bmm,
    linear,
    mean,
    mul,
    of_input,
    of_result,
    plus,
    power,
    softmax,
    times,
    to,
)
from toolkit.estimate.sizes.tape import Tensor
from toolkit.estimate.sizes.views import cat, narrow, permute, split, transpose, view

Kernel = Literal["flash", "torch", "fused"]
"""Of attention; "fused" is Megatron's masked softmax, which 2023's runs still had."""


_Part = Callable[["Stage", Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Stage(LlamaStage):
    """What a rank runs."""

    norm: bool
    """Has the last norm."""
    kernel: Kernel
    norm_kernel: bool
    recomputes: bool

    @property
    def logits_bytes(self) -> int:
        """The whole vocabulary's, in bf16."""
        return 2 * self.samples * self.seq_len * self.vocab


@lru_cache(maxsize=1024)
def passes(c: Stage) -> Passes:
    """Gradients of weights are there already, so new ones are added and freed."""
    tape = TracedTape(keeps_gradients=False)
    x = _embed(tape, c) if c.first else tape.leaf((c.samples, c.seq_len, c.hidden), 2)
    run = partial(_recomputed, c) if c.recomputes else partial(_plain, c)
    for _ in range(c.layers):
        x = run(_layer, x)
    if c.norm:
        x = run(_norm, x)
    if c.last:
        x = run(_logits, x)
    # The pipeline's buffer holds the stage's output until its slot is used again (parallel_module/buffers.py).
    held = x
    output = [_loss(x)] if c.last else [x]
    del x
    forward, tape.events = tape.events, []
    tape.backward(output)
    del held
    return Passes(forward=tuple(forward), backward=tuple(tape.events))


def _plain(c: Stage, run: _Part, x: Tensor) -> Tensor:
    return run(c, x)


def _recomputed(c: Stage, run: _Part, x: Tensor) -> Tensor:
    """activation_checkpointing.py, every layer: keeps the input only."""
    tape = x.tape
    with tape.no_grad():
        y = run(c, x)

    def backward(g: Gradients, kept: Sequence[Tensor]) -> list[Tensor | None]:
        assert g[0] is not None
        return tape.replay(lambda inner: run(c, inner), [kept[0]], g[0])

    tape.record([y], [x], [x], backward)
    return y


def _embed(tape: TracedTape, c: Stage) -> Tensor:
    table = tape.parameter((c.vocab // c.tp, c.hidden), 2)
    ids = tape.new((c.samples, c.seq_len), 8)
    y = tape.new((c.samples, c.seq_len, c.hidden), 2)
    rows = table.shape
    tape.record([y], [table], [ids], lambda g, kept: [tape.new(rows, 2)])
    if c.tp > 1:
        communicate(y)
    return y


def _summed(c: Stage, x: Tensor) -> Tensor:
    """all_reduce, in x's memory."""
    if c.tp > 1:
        communicate(x)
    return x


def _copied(c: Stage, x: Tensor) -> Tensor:
    """copy_to_tensor_model_parallel_region: nothing, but backward sums the gradient over ranks, in its memory."""
    if c.tp == 1:
        return x
    y = x.alias()

    def backward(g: Gradients, kept: Sequence[Tensor]) -> list[Tensor | None]:
        assert g[0] is not None
        communicate(g[0])
        return [g[0].alias()]

    x.tape.record([y], [x], [], backward)
    return y


def _norm(c: Stage, x: Tensor) -> Tensor:
    if c.norm_kernel:
        return rms_norm(x, "ampere")
    wide = to(x, 4)
    normed = to(mul(wide, of_result(plus(mean(power(wide))))), 2)
    return mul(normed, x.tape.parameter((c.hidden,), 2))


def _layer(c: Stage, x: Tensor) -> Tensor:
    x = add(_attention(c, _norm(c, x)), x)
    hidden = _norm(c, x)
    inner = linear(_copied(c, hidden), c.ffn // c.tp, bias=False)
    gate = linear(_copied(c, hidden), c.ffn // c.tp, bias=False)
    del hidden
    inner = mul(of_input(inner), gate)
    return add(_summed(c, linear(inner, c.hidden, bias=False)), x)


def _attention(c: Stage, x: Tensor) -> Tensor:
    b, s, heads, width = c.samples, c.seq_len, c.heads // c.tp, c.hidden // c.heads
    mixed = view(linear(_copied(c, x), 3 * heads * width, bias=False), b, s, heads, 3 * width)
    q, k, v = split(permute(mixed, 1, 0, 2, 3), [width] * 3)
    q, k = _rotated(q), _rotated(k)
    scores = _flash if c.kernel == "flash" else _scores
    return _summed(c, linear(scores(c, q, k, v), c.hidden, bias=False))


def _rotated(x: Tensor) -> Tensor:
    """Cosine and sine are gathered by position in each layer, once for queries and once for keys."""
    s, b, _, width = x.shape
    cosine, sine = (x.tape.new((s, b, 1, width), 2) for _ in range(2))
    turned = cat([times(narrow(x, -1, width // 2)), narrow(x, -1, width // 2)])
    return add(mul(x, cosine), mul(turned, sine))


def _flash(c: Stage, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s, b, heads, width = q.shape
    q, k, v = (view(permute(x, 1, 0, 2, 3), b * s, heads, width) for x in (q, k, v))
    out = flash_attention(q, k, v, samples=b)
    out = view(permute(view(out, b, s, heads, width), 0, 2, 1, 3), b * heads, s, width)
    return view(permute(view(out, b, heads, s, width), 0, 2, 1, 3), b, s, heads * width)


def _scores(c: Stage, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s, b, heads, width = q.shape
    q, k, v = (transpose(view(x, s, b * heads, width), 0, 1) for x in (q, k, v))
    scores = bmm(q, transpose(k, 1, 2))
    if c.kernel == "torch":
        mask = q.tape.new((b, 1, s, s), 1)
        scores.tape.record([scores], [scores], [mask], lambda g, kept: [_filled(g[0])])
    out = bmm(softmax(scores), v)
    return view(permute(view(out, b, heads, s, width), 0, 2, 1, 3), b, s, heads * width)


def _filled(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.tape.new(gradient.shape, gradient.itemsize)


def _logits(c: Stage, x: Tensor) -> Tensor:
    """Of the whole vocabulary on every rank: all_concat gathers parts, PyTorch in one tensor first, and joins them."""
    own = linear(_copied(c, x), c.vocab // c.tp, bias=False)
    if c.tp == 1:
        return own
    tape, shape = x.tape, own.shape
    parts = [tape.new(shape, 2) for _ in range(c.tp - 1)]
    together = tape.new((*shape[:-1], c.vocab), 2)
    communicate(own, together, *parts)
    del together
    y = tape.new((*shape[:-1], c.vocab), 2)
    del parts
    tape.record([y], [own], [], lambda g, kept: [tape.new(shape, 2)])
    return y


def _loss(logits: Tensor) -> Tensor:
    """PyTorch's cross entropy in fp32: its log-softmax is kept; backward makes its gradient and that of the logits."""
    wide = to(logits, 4)
    tape, shape = wide.tape, wide.shape
    log_softmax = tape.new(shape, 4)
    tape.record([log_softmax], [wide], [log_softmax], lambda g, kept: [tape.new(shape, 4)])
    loss = tape.new(shape[:-1], 4)
    tape.record([loss], [log_softmax], [log_softmax], lambda g, kept: [tape.new(shape, 4)])
    return loss
