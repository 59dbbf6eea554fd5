"""Megatron-LM's transformer layer of 2021 to 2022 on a tape: what its recomputation and backward pass take at worst.

Letters: s positions, b samples, h hidden size, a heads, d features of a head, f width of the MLP, t tensor-parallel
ranks. Read from Megatron-LM v2.4: megatron/model/transformer.py, fused_softmax.py, fused_bias_gelu.py,
fused_layer_norm.py, megatron/mpu/layers.py, mappings.py, random.py. What differs from a Hugging Face layer:

- the all-reduces of f and g work in place (`mappings.py`, `_reduce`);
- scores are computed into a tensor beside an empty one of their size (`torch.baddbmm`), and live until the attention
  block returns, for its function has a name for them; one kernel masks and normalises them in 16 bits, and its backward
  pass works in place;
- bias, dropout and residual sum are one kernel that keeps a mask of one byte; bias and GELU one that keeps its input;
- `CheckpointFunction.backward` holds the recomputed output and its gradient until the layer's backward pass is over.
"""

from dataclasses import dataclass

from toolkit.estimate.sizes.operations import (
    Gradients,
    Kept,
    add,
    bmm,
    dropout,
    elementwise,
    layer_norm,
    linear,
    of_input,
    softmax,
)
from toolkit.estimate.sizes.tape import Tape, Tensor
from toolkit.estimate.sizes.views import make_contiguous, permute, split, transpose, view

_ITEM = 2
"""Bytes of an fp16 or bf16 element."""
_DROPOUT = 0.1
"""Megatron's default, of attention and hidden states; any other but 0 takes the same memory."""


@dataclass(frozen=True, kw_only=True)
class LayerWidths:
    """What the layer's memory depends on."""

    seq_len: int
    samples: int
    hidden: int
    heads: int
    ffn: int
    tp: int
    fuses: bool = True
    """Whether mask and softmax, bias and GELU, and bias, dropout and residual sum are fused kernels."""

    @property
    def boundary(self) -> int:
        """Bytes of the hidden state between two layers."""
        return self.seq_len * self.samples * self.hidden * _ITEM


def recomputed_peak(widths: LayerWidths) -> int:
    """Bytes at the worst moment of recomputing one layer and running its backward pass.

    Beyond the layer's input and the gradient of its output, which others hold; with the recomputed output.
    """
    tape = Tape()
    shape = widths.seq_len, widths.samples, widths.hidden
    x = tape.leaf(shape, _ITEM)
    incoming = tape.new(shape, _ITEM)
    outside = tape.live
    tape.peak = 0
    output = run_layer(widths, x)
    held = output.alias()
    outputs, gradients = [output], [incoming.alias()]
    del output
    tape.backward(outputs, gradients)
    del held
    return tape.peak - outside


def run_layer(w: LayerWidths, x: Tensor) -> Tensor:
    """x [s, b, h] -> [s, b, h]. The layer's function has a name for what attention returned until it ends."""
    attended = _attention(w, _normed(x))
    x = _added(w, attended, x)
    y = _added(w, _mlp(w, _normed(x)), x)
    del attended
    return y


def _normed(x: Tensor) -> Tensor:
    weights = [x.tape.parameter(x.shape[-1:], _ITEM) for _ in range(2)]
    return layer_norm(x, weights)


def _attention(w: LayerWidths, x: Tensor) -> Tensor:
    own, d = w.heads // w.tp, w.hidden // w.heads
    mixed = view(linear(x, 3 * own * d, bias=True), w.seq_len, w.samples, own, 3 * d)
    q, k, v = (view(part, w.seq_len, w.samples * own, d) for part in split(mixed, [d, d, d]))
    del mixed
    empty = x.tape.new((w.samples * own, w.seq_len, w.seq_len), _ITEM)
    scores = bmm(transpose(q, 0, 1), permute(k, 1, 2, 0))  # [b * a/t, s, s]
    del empty
    probabilities = dropout(_softmax(w, scores), _DROPOUT)
    context = bmm(probabilities, transpose(v, 0, 1))  # [b * a/t, s, d]
    context = make_contiguous(permute(view(context, w.samples, own, w.seq_len, d), 2, 0, 1, 3))
    context = view(context, w.seq_len, w.samples, own * d)
    output = linear(context, w.hidden, bias=False)
    del scores
    return output


def _softmax(w: LayerWidths, scores: Tensor) -> Tensor:
    """Keeps its result. The fused kernel computes the gradient where that of the result lies."""
    if not w.fuses:
        return softmax(_masked(scores))
    y = elementwise(scores)
    scores.tape.record([y], [scores], [y], lambda g, kept: [None if g[0] is None else g[0].alias()])
    return y


def _masked(scores: Tensor) -> Tensor:
    """`masked_fill_`: in place, and its gradient is a copy."""
    y = scores.alias()
    scores.tape.record([y], [scores], [], lambda g, kept: [None if g[0] is None else elementwise(g[0])])
    return y


def _mlp(w: LayerWidths, x: Tensor) -> Tensor:
    wide = linear(x, w.ffn // w.tp, bias=False)
    if not w.fuses:
        wide = add(wide, x.tape.parameter(wide.shape[-1:], _ITEM))
    y = of_input(wide)
    del wide
    return linear(y, w.hidden, bias=False)


def _added(w: LayerWidths, branch: Tensor, residual: Tensor) -> Tensor:
    """residual + dropout(branch + bias).

    As one kernel it keeps a mask of one byte an element. Its backward pass is one kernel too, whose results are new
    tensors, the residual's gradient as well, which autograd alone would hand on as it is (PyTorch 1.8,
    torch/csrc/jit/passes/graph_fuser.cpp, trackSingleGradSumToSizeToOutputs).
    """
    tape = branch.tape
    if not w.fuses:
        return add(residual, dropout(add(branch, tape.parameter(branch.shape[-1:], _ITEM)), _DROPOUT))
    mask = tape.new(branch.shape, 1)
    y = elementwise(residual)

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        return [elementwise(g[0]), elementwise(g[0])]

    tape.record([y], [branch, residual], [mask], backward)
    return y
