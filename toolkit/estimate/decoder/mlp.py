"""The norms and the MLP, as transformers writes them for each family.

Megatron's and apex's fused norms keep their input alone. Hugging Face's RMSNorm is eager Python in fp32, and keeps the
input in fp32, the normalized state in fp32, and in the model's dtype once more for the weight's gradient.
"""

from toolkit.estimate.decoder.context import Context
from toolkit.estimate.sizes import operations as op
from toolkit.estimate.sizes.tape import Gradients, Kept, Tensor, like
from toolkit.estimate.sizes.views import split, view
from toolkit.models.families.layer_rules import Norm

_FP32 = 4


def norm(c: Context, x: Tensor, kind: Norm | None = None, weight: tuple[int, ...] | None = None) -> Tensor:
    """The normalized x [.., n]. `kind`: the layer's own unless given; `weight`: its shape, [n] unless given."""
    kind = kind or c.style.rules.norm
    scale = c.parameter(*(weight or x.shape[-1:]))
    match kind:
        case "layer":
            return op.layer_norm(x, [scale, c.parameter(*scale.shape)])
        case "layer_bare":
            return op.layer_norm(x, [scale])
        case "layer_1p":
            return op.layer_norm(x, [op.plus(scale), c.parameter(*scale.shape)])
        case "layer_fp32":
            return op.to(op.layer_norm(op.to(x, _FP32), []), x.itemsize)
        case "rms":
            return op.mul(scale, op.to(_normalized(op.to(x, _FP32)), x.itemsize))
        case "rms_bare":
            return op.to(_normalized(op.to(x, _FP32)), x.itemsize)
        case "rms_torch":
            # torch's own, without a weight: one kernel on a GPU, on a CPU the same steps as Llama's.
            return op.layer_norm(x, []) if not x.tape.on_cpu else op.to(_normalized(op.to(x, _FP32)), c.itemsize)
        case "rms_helium":
            return op.to(op.mul(op.to(scale, _FP32), _normalized(op.to(x, _FP32))), x.itemsize)
        case "rms_fp32_weight":
            return op.to(op.mul(_normalized(op.to(x, _FP32)), op.plus(op.to(scale, _FP32))), x.itemsize)
        case "rms_olmo2":
            return op.to(op.mul(scale, _normalized(op.to(x, _FP32))), x.itemsize)
        case "cohere":
            return op.to(_cohere(op.to(x, _FP32), scale), x.itemsize)


def _normalized(x: Tensor) -> Tensor:
    variance = op.mean(op.power(x))
    return op.mul(x, op.of_result(op.plus(variance), temporaries=2))


def _cohere(x: Tensor, scale: Tensor) -> Tensor:
    centre = op.mean(x)
    variance = op.mean(op.power(op.add(x, centre)))
    x = op.mul(op.add(x, centre), op.of_result(op.plus(variance), temporaries=2))
    return op.mul(op.to(scale, _FP32), x)


def mlp(c: Context, x: Tensor) -> Tensor:
    """x [b, s, h] -> [b, s, h]."""
    shape = x.shape
    if c.style.rules.flattens_mlp:
        x = view(x, -1, shape[-1])
    x = c.enter(x)
    wide = c.shape.ffn // c.tp
    if not c.shape.gated:
        x = _activated(c, op.linear(x, wide, bias=c.style.mlp_bias))
    elif c.style.rules.fused_gate:
        both = op.linear(x, 2 * wide, bias=False)
        if c.gathers_mlp:
            both = c.gather(both, -1)
        gate, up = split(both, [c.ffn, c.ffn])
        del both
        x = op.mul(up, _activated(c, gate))
        del gate, up
        if c.gathers_mlp:
            x = c.scatter(x, -1)
    else:
        x = op.mul(_activated(c, _columns(c, x)), _columns(c, x))
    if c.style.rules.inner_norms:
        x = norm(c, x)
        x = c.scatter(x, -1) if c.gathers_mlp else x
    x = op.dropout(x, c.style.activation_dropout)
    x = leave_row(c, x, bias=c.style.mlp_bias)
    return view(x, *shape[:1], -1, shape[-1]) if c.style.rules.flattens_mlp else x


def _columns(c: Context, x: Tensor) -> Tensor:
    """A column-parallel layer's outputs on this rank; all of them where the block gathers its columns."""
    x = op.linear(x, c.shape.ffn // c.tp, bias=False)
    return c.gather(x, -1) if c.gathers_mlp else x


def leave_row(c: Context, x: Tensor, *, bias: bool) -> Tensor:
    """The row-parallel layer behind a block: without tensor parallelism a op.linear layer."""
    if c.tp == 1:
        return op.linear(x, c.shape.hidden, bias=bias)
    x = c.leave(op.linear(x, c.shape.hidden, bias=False))
    return op.add(x, c.parameter(c.shape.hidden)) if bias else x


def _activated(c: Context, x: Tensor) -> Tensor:
    match c.style.activation:
        case "kernel":
            return op.of_input(x)
        case "relu":
            return op.of_result(x)
        case "relu2":
            return op.power(op.of_result(x))
        case "xielu":
            return _xielu(c, x)
        case "gelu_new":
            # 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
            return op.mul(op.times(x), op.plus(op.of_result(op.times(op.add(x, op.times(op.power(x)))))))
        case "gelu_fast":
            # 0.5 * x * (1 + tanh(x * 0.798 * (1 + 0.044715 * x * x)))
            return op.mul(op.times(x), op.plus(op.of_result(op.mul(op.times(x), op.plus(op.mul(op.times(x), x))))))
        case "quick_gelu":
            return op.mul(x, op.of_result(op.times(x)))
        case "bloom":
            return _bloom_gelu(x)


def _xielu(c: Context, x: Tensor) -> Tensor:
    """where(x > 0, a x x + x / 2, (expm1(min(x, -1e-6)) - x) c + x / 2), with learned a and c."""
    slopes = c.parameter(1), c.parameter(1)
    positive = c.tape.new(x.shape, 1, like(x))
    rising = op.add(op.mul(op.mul(slopes[0], x), x), op.times(x))
    falling = op.add(op.mul(op.add(op.of_result(op.raised(op.bounded(x)), temporaries=1), x), slopes[1]), op.times(x))
    return op.choose(positive, rising, falling)


def _bloom_gelu(x: Tensor) -> Tensor:
    """A function of its own that keeps its input and computes everything again in the backward pass."""
    with x.tape.no_grad():
        # x * 0.5 * (1 + tanh(0.798 * x * (1 + 0.044715 * x * x)))
        half = op.times(x)
        y = op.mul(half, op.plus(op.of_result(op.mul(op.times(x), op.plus(op.mul(op.times(x), x))))))
        del half

    def backward(g: Tensor, kept: Kept) -> Gradients:
        state = kept[0]
        tanh = op.of_result(op.mul(op.times(state), op.plus(op.mul(op.times(state), state))))
        slope = op.mul(op.times(state), op.mul(op.plus(op.mul(tanh, tanh)), op.plus(op.mul(op.times(state), state))))
        slope = op.add(slope, op.times(op.plus(tanh)))
        return [op.elementwise(slope, g)]

    return x.tape.record(y, [x], [x], backward)
