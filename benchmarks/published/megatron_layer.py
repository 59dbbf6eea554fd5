"""One decoder layer of Megatron-Core, operation by operation: what each keeps for backward and what backward allocates.

Where it can be read:
- norm and projection in one module keep the norm's input, its output and two fp32 numbers a row; with sequence
  parallelism the gathered output is made again in backward (TransformerEngine, pytorch/module/layernorm_linear.py;
  Megatron's own layers: megatron/core/tensor_parallel/layers.py and apex's FusedLayerNorm keep the same);
- unfused attention keeps query, key and value as views of one tensor, the softmax in 16 bits (fused kernel), dropout's
  mask and result; the product of query and key is freed (attention/dot_product_attention/backends.py,
  UnfusedDotProductAttention; megatron/core/transformer/dot_product_attention.py);
- flash attention copies query, key and value to [b, s, a, d], and its result back to [s, b, h]: both results stay
  (backends.py, FlashAttention; the same with context parallelism, context_parallel.py, AttnFuncWithCPAndKVP2P).
  cuDNN's kernel works in place: neither copy (FusedAttention);
- rotary embedding and norms make query and key anew, grouped heads the query: the others are copied then, so that the
  three have one layout (attention/dot_product_attention/utils.py, get_qkv_layout);
- bias, dropout and sum are one compiled kernel that keeps dropout's mask (megatron/core/fusions/fused_bias_dropout.py),
  bias and GELU one that keeps its input (fused_bias_gelu.py, fused_bias_swiglu.py).
"""

from collections.abc import Sequence

from published.megatron_setup import Setup
from toolkit.estimate.sizes.operations import (
    Gradients,
    Kept,
    bmm,
    dropout,
    elementwise,
    fused_attention,
    layer_norm,
    softmax,
    times,
    to,
)
from toolkit.estimate.sizes.tape import Tensor
from toolkit.estimate.sizes.views import make_contiguous, permute, split, transpose, view


def layer(c: Setup, x: Tensor) -> Tensor:
    """x [s, b, h] -> [s, b, h], cut along s with sequence parallelism."""
    y = _attention_block(c, x)
    x = bias_dropout_add(y, x, c.dropout)
    del y
    y = _mlp(c, x)
    return bias_dropout_add(y, x, c.dropout)


def _attention_block(c: Setup, x: Tensor) -> Tensor:
    group = (c.heads // c.kv_heads + 2) * c.d
    mixed = norm_linear(c, x, c.kv_heads * group, bias=c.biases)
    mixed = view(mixed, c.s, c.b, c.kv_heads, group)
    q, k, v = split(mixed, (group - 2 * c.d, c.d, c.d))
    del mixed
    q = view(q, c.s, c.b, c.heads, c.d)
    if c.qk_norm:
        q, k = norm(c, q), norm(c, k)
    if not c.positions:
        q, k = rotated(q), rotated(k)
    if c.qk_norm or not c.positions or c.heads != c.kv_heads:
        q, k, v = (make_contiguous(x) for x in (q, k, v))
    # Attention.forward holds query, key and value while it projects the result.
    return row_linear(c, _attention(c, q, k, v))


def _attention(c: Setup, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[s, b, a, d] -> [s, b, a d]."""
    if c.attention == "unfused":
        return _unfused(c, q, k, v)
    if c.attention == "fused":
        y = _in_kernel(c, *(transpose(x, 0, 1) for x in (q, k, v)))
        return view(transpose(y, 0, 1), c.s, c.b, -1)
    q, k, v = (make_contiguous(transpose(x, 0, 1)) for x in (q, k, v))
    y = _in_kernel(c, q, k, v)
    del q, k, v
    return make_contiguous(transpose(view(y, c.b, c.s, -1), 0, 1))


def _in_kernel(c: Setup, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return transpose(fused_attention(*(transpose(x, 1, 2) for x in (q, k, v))), 1, 2)


def _unfused(c: Setup, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = c.b * c.heads
    if c.kv_heads != c.heads:
        k, v = (_repeated(x, c.heads // c.kv_heads) for x in (k, v))
    q, k, v = (transpose(view(x, c.s, rows, c.d), 0, 1) for x in (q, k, v))
    scores = bmm(q, transpose(k, 1, 2))
    del q, k
    probabilities = _scale_mask_softmax(scores) if c.softmax_kernel else _softmax_in_fp32(scores)
    del scores
    probabilities = dropout(probabilities, c.dropout)
    y = bmm(probabilities, v)
    del probabilities, v
    y = make_contiguous(permute(view(y, c.b, c.heads, c.s, c.d), 2, 0, 1, 3))
    return view(y, c.s, c.b, -1)


def _scale_mask_softmax(x: Tensor) -> Tensor:
    """The fused kernel: 16 bits in, 16 bits out. Its backward writes into the gradient that it is given."""
    y = elementwise(x)
    x.tape.record([y], [x], [y], lambda g, kept: [None if g[0] is None else g[0].alias()])
    return y


def _softmax_in_fp32(x: Tensor) -> Tensor:
    """megatron/core/fusions/fused_softmax.py, forward_torch_softmax: fp32 scores, scaled, masked in place."""
    x = times(to(x, 4))
    return to(softmax(x), 2)


def _repeated(x: Tensor, times: int) -> Tensor:
    tape, (s, b, heads, d) = x.tape, x.shape
    y = tape.new((s, b, heads * times, d), 2)
    tape.record([y], [x], [], lambda g, kept: [tape.new((s, b, heads, d), 2)])
    return y


def _mlp(c: Setup, x: Tensor) -> Tensor:
    wide = norm_linear(c, x, c.ffn * (2 if c.gated else 1), bias=False)
    narrow = activation(wide, c.ffn)
    del wide
    return row_linear(c, narrow)


def norm(c: Setup, x: Tensor) -> Tensor:
    """LayerNorm or RMSNorm: the second keeps no mean, which is 4 bytes a row."""
    gains = [x.tape.parameter((x.shape[-1],), 2) for _ in range(2 if c.norm_biases else 1)]
    return layer_norm(x, gains)


def norm_linear(c: Setup, x: Tensor, outputs: int, *, bias: bool) -> Tensor:
    """Norm, gather of positions with sequence parallelism, column-parallel projection."""
    return column_linear(c, norm(c, x), outputs, bias=bias)


def column_linear(c: Setup, x: Tensor, outputs: int, *, bias: bool, weight: Tensor | None = None) -> Tensor:
    """x [s, b, i] -> [s, b, o]. Keeps this rank's positions of x and gathers them again in backward."""
    tape, inputs, shape = x.tape, x.shape[-1], x.shape
    whole = (shape[0] * (c.tp if c.sp else 1), *shape[1:])
    weight = tape.parameter((outputs, inputs), 2) if weight is None else weight
    parameters = [weight, tape.parameter((outputs,), 2)] if bias else [weight]
    gathered = tape.new(whole, 2) if c.sp else None
    y = tape.new((*whole[:-1], outputs), 2)
    del gathered
    fused = c.fused_accumulation

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        again = tape.new(whole, 2) if c.sp else None
        gradient = tape.new(whole, 2)
        own = tape.new(shape, 2) if c.sp else gradient
        del gradient
        weights: list[Tensor | None] = [None if fused else tape.new((outputs, inputs), 2)]
        del again
        return [own, *weights, *([tape.new((outputs,), 2)] if bias else [])]

    tape.record([y], [x, *parameters], [x], backward)
    return y


def row_linear(c: Setup, x: Tensor) -> Tensor:
    """x [s, b, i/t] -> [s, b, h], summed over ranks, cut along s with sequence parallelism."""
    tape, whole = x.tape, (*x.shape[:-1], c.h)
    weight = tape.parameter((c.h, x.shape[-1]), 2)
    result = tape.new(whole, 2)
    y = tape.new((whole[0] // c.tp, *whole[1:]), 2) if c.sp else result
    del result
    fused, shape = c.fused_accumulation, x.shape

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        gathered = tape.new(whole, 2) if c.sp else None
        gradient = tape.new(shape, 2)
        weights = None if fused else tape.new((c.h, shape[-1]), 2)
        del gathered
        return [gradient, weights]

    tape.record([y], [x, weight], [x], backward)
    return y


def bias_dropout_add(x: Tensor, residual: Tensor, probability: float) -> Tensor:
    """One kernel; keeps dropout's mask, one byte an element."""
    tape = x.tape
    kept = [tape.new(x.shape, 1)] if probability else []
    y = elementwise(x)

    def backward(g: Gradients, kept: Kept) -> Sequence[Tensor | None]:
        assert g[0] is not None
        return [elementwise(g[0]) if probability else g[0].alias(), g[0].alias()]

    tape.record([y], [x, residual], kept, backward)
    return y


def activation(x: Tensor, outputs: int) -> Tensor:
    """One kernel each way; keeps its input."""
    tape, shape = x.tape, x.shape
    y = tape.new((*shape[:-1], outputs), 2)
    tape.record([y], [x], [x], lambda g, kept: [tape.new(shape, 2)])
    return y


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding in one kernel: a new tensor, and the tables, which all layers share."""
    tape, shape = x.tape, x.shape
    y = tape.new(shape, 2)
    tape.record([y], [x], [], lambda g, kept: [tape.new(shape, 2)])
    return y
