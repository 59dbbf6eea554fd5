"""A pipeline stage of nanotron's Llama as a list of allocations: one forward and one backward pass of a micro-batch.

The operations are those of nanotron's code of late 2024, walked in its order, with its local variables:
models/llama.py (layer, embedding, head, loss), parallel/tensor_parallel/functional.py (column and row linear with
tp_mode REDUCE_SCATTER and asynchronous communication, sharded cross entropy), nn/layer_norm.py, which is flash-attn's
kernel, and flash-attn's rotary embedding, which works in place (flash_attn/layers/rotary.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from published.fused_kernels import Gradients, flash_attention, rms_norm
from published.llama_stage import LlamaStage
from published.replay import Passes
from published.traced import FREED, FREED_LATER, TracedTape, allocate_once, communicate, number_of
from toolkit.estimate.overhead import CUBLAS_BYTES
from toolkit.estimate.sizes.operations import add, mul, of_input, to
from toolkit.estimate.sizes.tape import Tensor
from toolkit.estimate.sizes.views import cat, make_contiguous, permute, split, transpose, view

_WORKSPACE_BYTES = CUBLAS_BYTES["hopper"]
_FORWARD_WORKSPACE, _BACKWARD_WORKSPACE, _GATHER_BUFFER, _SUM_BUFFER = -1, -2, -3, -4
"""cuBLAS has a workspace for each thread that calls it, and autograd a thread of its own. MemoryBuffer of
parallel/utils.py has one buffer for gathering hidden states and one for their gradients."""


@dataclass(frozen=True, kw_only=True)
class Stage(LlamaStage):
    """What a rank runs. `tp` ranks share every sequence between blocks, and heads, MLP and vocabulary inside."""

    @property
    def whole_hidden_bytes(self) -> int:
        """A hidden state of all ranks' positions."""
        return 2 * self.seq_len * self.samples * self.hidden


@lru_cache(maxsize=1024)
def passes(stage: Stage) -> Passes:
    """The forward pass leaves what backward needs, the backward pass frees that, and its gradients last of all."""
    tape = TracedTape(keeps_gradients=True)
    x = _embed(tape, stage) if stage.first else tape.leaf(_local(stage), 2)
    for _ in range(stage.layers):
        x = _layer(stage, x)
    output = [_loss(_head(stage, x))] if stage.last else [x]
    sent = None if stage.last else number_of(x)
    del x
    forward, tape.events = tape.events, []
    tape.backward(output)
    tape.gradients.reverse()  # gradient_accumulator.py, backward: in the order of the parameters
    while tape.gradients:
        tape.gradients.pop()
    backward = tuple(event for event in tape.events if event not in ((sent, FREED), (sent, FREED_LATER)))
    return Passes(forward=tuple(forward), backward=backward, sent=sent)


def _local(stage: Stage) -> tuple[int, int, int]:
    return stage.seq_len // stage.tp, stage.samples, stage.hidden


def _embed(tape: TracedTape, c: Stage) -> Tensor:
    """TensorParallelEmbedding: the whole sequence, other ranks' rows set to zero, then scattered."""
    table = tape.parameter((c.vocab // c.tp, c.hidden), 2)
    ids = tape.new((c.seq_len, c.samples), 8)
    out = tape.new((c.seq_len, c.samples, c.hidden), 2)
    rows = table.shape
    tape.record([out], [table], [ids], lambda g, kept: [tape.new(rows, 2)])
    if c.tp == 1:
        return out
    out = mul(out, tape.new((c.seq_len, c.samples, 1), 1))
    return _scattered(out, c)


def _scattered(whole: Tensor, c: Stage) -> Tensor:
    """differentiable_reduce_scatter_sum: backward gathers."""
    if c.tp == 1:
        return whole
    tape, shape = whole.tape, whole.shape
    y = tape.new((shape[0] // c.tp, *shape[1:]), 2)
    communicate(whole, y)

    def backward(g: Gradients, kept: Sequence[Tensor]) -> list[Tensor | None]:
        assert g[0] is not None
        gathered = tape.new(shape, 2)
        communicate(g[0], gathered)
        return [gathered]

    tape.record([y], [whole], [], backward)
    return y


def _layer(c: Stage, x: Tensor) -> Tensor:
    hidden = rms_norm(x)
    hidden = _attention(c, hidden)
    hidden = add(hidden, x)
    x = hidden
    hidden = rms_norm(hidden)
    merged = _column(c, hidden, 2 * c.ffn)
    gate, up = split(merged, [c.ffn // c.tp] * 2)
    product = mul(of_input(gate), up)
    del gate, up
    hidden = _row(c, product)
    del merged, product
    return add(hidden, x)


def _column(c: Stage, x: Tensor, outputs: int) -> Tensor:
    """Keeps its own positions only; all of them are gathered into a buffer that all layers share, again in backward."""
    tape = x.tape
    weight = tape.parameter((outputs // c.tp, x.shape[-1]), 2)
    if c.tp > 1:
        allocate_once(tape, _GATHER_BUFFER, c.whole_hidden_bytes)
        communicate(x)
    y = tape.new((c.seq_len, c.samples, outputs // c.tp), 2)
    allocate_once(tape, _FORWARD_WORKSPACE, _WORKSPACE_BYTES)

    def backward(g: Gradients, kept: Sequence[Tensor]) -> list[Tensor | None]:
        assert g[0] is not None
        whole = tape.new((c.seq_len, c.samples, kept[0].shape[-1]), 2)
        allocate_once(tape, _BACKWARD_WORKSPACE, _WORKSPACE_BYTES)
        given = make_contiguous(g[0])
        own = whole if c.tp == 1 else tape.new(kept[0].shape, 2)
        if c.tp > 1:
            communicate(whole, own)
        dw = tape.new(weight_shape, 2)
        del given
        return [own, dw]

    weight_shape = weight.shape
    tape.record([y], [x, weight], [x], backward)
    return y


def _row(c: Stage, x: Tensor) -> Tensor:
    """Keeps its input. What it sums lies in a tensor of all positions, and its gradient in a buffer of all layers."""
    tape = x.tape
    weight = tape.parameter((c.hidden, x.shape[-1]), 2)
    copied = make_contiguous(x.alias())
    whole = tape.new((c.seq_len, c.samples, c.hidden), 2)
    del copied
    y = whole if c.tp == 1 else tape.new(_local(c), 2)
    if c.tp > 1:
        communicate(whole, y)
    del whole

    def backward(g: Gradients, kept: Sequence[Tensor]) -> list[Tensor | None]:
        if c.tp > 1:
            assert g[0] is not None
            communicate(g[0])
            allocate_once(tape, _SUM_BUFFER, c.whole_hidden_bytes)
        dx = tape.new(kept[0].shape, 2)
        allocate_once(tape, _BACKWARD_WORKSPACE, _WORKSPACE_BYTES)
        copied = make_contiguous(kept[0].alias())
        dw = tape.new(weight_shape, 2)
        del copied
        return [dx, dw]

    weight_shape = weight.shape
    tape.record([y], [x, weight], [x], backward)
    return y


def _attention(c: Stage, hidden: Tensor) -> Tensor:
    heads, width = c.heads // c.tp, c.hidden // c.heads
    qkv = _column(c, hidden, 3 * c.hidden)
    apart = make_contiguous(permute(view(qkv, c.seq_len, c.samples, 3, heads, width), 2, 1, 0, 3, 4))
    q, k, v = split(apart, [1, 1, 1], 0)
    keys_values = cat([k, v], 0)
    keys_values = make_contiguous(permute(keys_values, 1, 2, 0, 3, 4))
    # The rotary embedding turns q, and k inside keys_values, where they are.
    k, v = split(keys_values, [1, 1], 2)
    rows = c.samples * c.seq_len
    q, k, v = (view(x, rows, heads, width) for x in (q, k, v))
    out = flash_attention(q, k, v, samples=c.samples)
    out = transpose(view(out, c.samples, c.seq_len, heads * width), 0, 1)
    return _row(c, out)


def _head(c: Stage, x: Tensor) -> Tensor:
    hidden = rms_norm(x)
    logits = _column(c, hidden, c.vocab)
    return to(logits, 4)


def _loss(logits: Tensor) -> Tensor:
    """_ShardedCrossEntropy: the exponentials in memory of their own; backward turns them into the gradient."""
    tape = logits.tape
    exponentials = tape.new(logits.shape, 4)
    loss = tape.new(logits.shape[:2], 4)
    tape.record([loss], [logits], [exponentials], lambda g, kept: [kept[0].alias()])
    return loss
