"""The MLP: plain or gated, with the activation functions as transformers writes them."""

from toolkit.estimate.decoder.context import Context
from toolkit.estimate.decoder.norm import norm
from toolkit.estimate.sizes.operations import (
    Gradients,
    Kept,
    add,
    dropout,
    elementwise,
    linear,
    mul,
    of_input,
    of_result,
    plus,
    power,
    raised,
    times,
)
from toolkit.estimate.sizes.selection import bounded, choose
from toolkit.estimate.sizes.tape import Tensor, like
from toolkit.estimate.sizes.views import split, view


def mlp(c: Context, x: Tensor) -> Tensor:
    """x [b, s, h] -> [b, s, h]."""
    shape = x.shape
    if c.style.family == "opt":
        x = view(x, -1, shape[-1])
    x = c.enter(x)
    wide = c.shape.ffn // c.tp
    if not c.shape.gated:
        x = _activated(c, linear(x, wide, bias=c.style.mlp_bias))
    elif c.style.fused_gate:
        both = linear(x, 2 * wide, bias=False)
        if c.gathers_mlp:
            both = c.gather_columns(both)
        gate, up = split(both, [c.ffn, c.ffn])
        del both
        x = mul(up, _activated(c, gate))
        del gate, up
        if c.gathers_mlp:
            x = c.scatter_columns(x)
    else:
        x = mul(_activated(c, _columns(c, x)), _columns(c, x))
    if c.style.inner_norms:
        x = norm(c, x)
        x = c.scatter_columns(x) if c.gathers_mlp else x
    x = dropout(x, c.style.activation_dropout)
    x = leave_row(c, x, bias=c.style.mlp_bias)
    return view(x, *shape[:1], -1, shape[-1]) if c.style.family == "opt" else x


def _columns(c: Context, x: Tensor) -> Tensor:
    """A column-parallel layer's outputs on this rank; all of them where the block gathers its columns."""
    x = linear(x, c.shape.ffn // c.tp, bias=False)
    return c.gather_columns(x) if c.gathers_mlp else x


def leave_row(c: Context, x: Tensor, *, bias: bool) -> Tensor:
    """The row-parallel layer behind a block: without tensor parallelism a linear layer."""
    if c.tp == 1:
        return linear(x, c.shape.hidden, bias=bias)
    x = c.leave(linear(x, c.shape.hidden, bias=False))
    return add(x, c.parameter(c.shape.hidden)) if bias else x


def _activated(c: Context, x: Tensor) -> Tensor:
    match c.style.activation:
        case "kernel":
            return of_input(x)
        case "relu":
            return of_result(x)
        case "relu2":
            return power(of_result(x))
        case "xielu":
            return _xielu(c, x)
        case "gelu_new":
            # 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
            return mul(times(x), plus(of_result(times(add(x, times(power(x)))))))
        case "gelu_fast":
            # 0.5 * x * (1 + tanh(x * 0.798 * (1 + 0.044715 * x * x)))
            return mul(times(x), plus(of_result(mul(times(x), plus(mul(times(x), x))))))
        case "quick_gelu":
            return mul(x, of_result(times(x)))
        case "bloom":
            return _bloom_gelu(x)


def _xielu(c: Context, x: Tensor) -> Tensor:
    """where(x > 0, a x x + x / 2, (expm1(min(x, -1e-6)) - x) c + x / 2), with learned a and c."""
    slopes = c.parameter(1), c.parameter(1)
    positive = c.tape.new(x.shape, 1, like(x))
    rising = add(mul(mul(slopes[0], x), x), times(x))
    falling = add(mul(add(of_result(raised(bounded(x)), temporaries=1), x), slopes[1]), times(x))
    return choose(positive, rising, falling)


def _bloom_gelu(x: Tensor) -> Tensor:
    """A function of its own that keeps its input and computes everything again in the backward pass."""
    with x.tape.no_grad():
        # x * 0.5 * (1 + tanh(0.798 * x * (1 + 0.044715 * x * x)))
        half = times(x)
        y = mul(half, plus(of_result(mul(times(x), plus(mul(times(x), x))))))
        del half

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        state = kept[0]
        tanh = of_result(mul(times(state), plus(mul(times(state), state))))
        slope = mul(times(state), mul(plus(mul(tanh, tanh)), plus(mul(times(state), state))))
        slope = add(slope, times(plus(tanh)))
        return [elementwise(slope, g[0])]

    x.tape.record([y], [x], [x], backward)
    return y
