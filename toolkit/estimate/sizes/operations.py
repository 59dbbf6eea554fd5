"""Operations with results of their own: what each keeps for backward, and what its backward pass allocates.

The formulas are those of PyTorch's derivatives.yaml.
"""

from collections.abc import Sequence
from itertools import zip_longest
from math import prod

from toolkit.estimate.sizes.tape import Shape, Tape, Tensor, like, of_order
from toolkit.estimate.sizes.views import make_contiguous, transpose, view

Gradients = Sequence[Tensor | None]
Kept = Sequence[Tensor]
_LOW, _FP32 = 2, 4


def to(x: Tensor, itemsize: int) -> Tensor:
    """x in another dtype, told by its size; x itself where it has that."""
    if x.itemsize == itemsize:
        return x
    y = x.tape.new(x.shape, itemsize, like(x))
    before = x.itemsize
    x.tape.record([y], [x], [], lambda g, kept: [None if g[0] is None else to(g[0], before)])
    return y


def lowered(x: Tensor) -> Tensor:
    """x as autocast hands it to a product: in 16 bits, a copy for each product that it goes into."""
    return to(x, _LOW) if x.tape.autocast else x


def raised(x: Tensor) -> Tensor:
    """x as autocast on a GPU hands it to softmax, LayerNorm, powers and the like: in fp32. On a CPU these stay."""
    return to(x, _FP32) if x.tape.autocast and not x.tape.on_cpu else x


def elementwise(*operands: Tensor, itemsize: int | None = None) -> Tensor:
    """The result of an elementwise operation; nothing is recorded."""
    shape = _broadcast([x.shape for x in operands])
    if len(operands) == 1:
        strides = like(operands[0])
    else:
        strides = of_order(shape, [x.strides for x in operands], [x.shape for x in operands])
    return operands[0].tape.new(shape, itemsize or max(x.itemsize for x in operands), strides)


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, and a - b: keeps nothing, and both get the same gradient."""
    y = elementwise(a, b)
    sizes = a.itemsize, b.itemsize

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        return [to(g[0], size).alias() for size in sizes]

    y.tape.record([y], [a, b], [], backward)
    return y


def add_(a: Tensor, b: Tensor) -> Tensor:
    """a += b: the same, in a's memory."""
    y = a.alias()
    a.tape.record([y], [a, b], [], lambda g, kept: [None if g[0] is None else g[0].alias()] * 2)
    return y


def mul(a: Tensor, b: Tensor) -> Tensor:
    """a * b: keeps a for b's gradient and b for a's."""
    y = elementwise(a, b)
    wants_a, wants_b = a.node is not None, b.node is not None
    kept = [*([b] if wants_a else []), *([a] if wants_b else [])]
    sizes = a.itemsize, b.itemsize

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        others = iter(kept)
        return [
            to(elementwise(g[0], next(others)), size) if wanted else None
            for wanted, size in zip((wants_a, wants_b), sizes, strict=True)
        ]

    y.tape.record([y], [a, b], kept, backward)
    return y


def times(x: Tensor) -> Tensor:
    """x times, or divided by, a number."""
    y = elementwise(x)
    y.tape.record([y], [x], [], lambda g, kept: [None if g[0] is None else elementwise(g[0])])
    return y


def times_(x: Tensor) -> Tensor:
    """The same in x's memory."""
    y = x.alias()
    y.tape.record([y], [x], [], lambda g, kept: [None if g[0] is None else elementwise(g[0])])
    return y


def plus(x: Tensor) -> Tensor:
    """x plus a number."""
    y = elementwise(x)
    y.tape.record([y], [x], [], lambda g, kept: [None if g[0] is None else g[0].alias()])
    return y


def power(x: Tensor) -> Tensor:
    """x to a number: keeps x; backward is g * (n * x^(n-1))."""
    x = raised(x)
    y = elementwise(x)

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        lower = elementwise(kept[0])
        scaled = elementwise(lower)  # `lower` lives on: both are parts of one C++ expression
        return [elementwise(g[0], scaled)]

    y.tape.record([y], [x], [x], backward)
    return y


def mean(x: Tensor) -> Tensor:
    """Mean over the last dim, which stays with size 1."""
    y = x.tape.new((*x.shape[:-1], 1), x.itemsize)
    shape = x.shape

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        return [g[0].tape.new(shape, g[0].itemsize)]

    y.tape.record([y], [x], [], backward)
    return y


def of_result(x: Tensor, temporaries: int = 0) -> Tensor:
    """tanh, rsqrt, sigmoid: keeps its result. `temporaries` of the result's size while backward runs."""
    y = elementwise(x)

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        held = [elementwise(kept[0]) for _ in range(temporaries)]
        result = elementwise(g[0], kept[0])
        del held
        return [result]

    y.tape.record([y], [x], [y], backward)
    return y


def of_input(x: Tensor) -> Tensor:
    """gelu, silu: keeps its input; one kernel backward."""
    y = elementwise(x)

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        return [elementwise(g[0], kept[0])]

    y.tape.record([y], [x], [x], backward)
    return y


def layer_norm(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Keeps its input, and mean and 1/deviation of each position. Its kernels want the input in order."""
    x = raised(x)
    tape = x.tape
    with tape.no_grad():
        ordered = make_contiguous(x)
    y = tape.new(x.shape, x.itemsize)
    # On a GPU in fp32; on a CPU in the parameters' dtype.
    own = parameters[0].itemsize if parameters else x.itemsize
    statistics_itemsize = own if tape.on_cpu else 4
    statistics = [tape.new((*x.shape[:-1], 1), statistics_itemsize) for _ in range(2)]
    del ordered

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        held, ordered = make_contiguous(g[0]), make_contiguous(kept[0])
        weights = [held.tape.new(p.shape, p.itemsize) for p in kept[3:]]
        return [held.tape.new(ordered.shape, ordered.itemsize), *weights]

    tape.record([y], [x, *parameters], [x, *statistics, *parameters], backward)
    return y


def dropout(x: Tensor, probability: float) -> Tensor:
    """On a GPU keeps a mask of one byte an element, on a CPU noise in x's dtype; without probability it is no op."""
    if not probability:
        return x
    tape = x.tape
    noise = tape.new(x.shape, x.itemsize if tape.on_cpu else 1, like(x))
    y = elementwise(x)

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        return [elementwise(g[0], kept[0], itemsize=g[0].itemsize)]

    tape.record([y], [x], [noise], backward)
    return y


def softmax(x: Tensor, itemsize: int | None = None) -> Tensor:
    """Keeps its result. With `itemsize` x is converted first."""
    x = to(x, itemsize) if itemsize else raised(x)
    x = make_contiguous(x)
    y = x.tape.new(x.shape, x.itemsize)

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        # A GPU's kernel wants the product of gradient and result as a tensor (ATen/native/cuda/SoftMax.cu).
        product = None if kept[0].tape.on_cpu else elementwise(kept[0])
        result = elementwise(kept[0])
        del product
        return [result]

    x.tape.record([y], [x], [y], backward)
    return y


def linear(x: Tensor, outputs: int, *, bias: bool) -> Tensor:
    """x [.., i] -> [.., o]: keeps x. Backward makes the gradients of x, weight and bias together."""
    x = lowered(x)
    rows = view(x, -1, x.shape[-1])  # [n, i], a copy where x does not lie in order
    tape, itemsize = x.tape, x.itemsize
    parameters = [_weight(tape, (outputs, x.shape[-1]), itemsize)]
    if bias:
        parameters.append(_weight(tape, (outputs,), itemsize))
    y = tape.new((rows.shape[0], outputs), itemsize)
    wants_input = rows.node is not None
    inputs = rows.shape

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        return [
            tape.new(inputs, itemsize) if wants_input else None,
            *(tape.new(parameter, itemsize) for parameter in shapes),
        ]

    shapes = [parameter.shape for parameter in parameters]
    tape.record([y], [rows, *parameters], [rows], backward)
    return view(y, *x.shape[:-1], outputs)


def _weight(tape: Tape, shape: Shape, itemsize: int) -> Tensor:
    """A parameter, or autocast's copy of it, which is made once a forward pass and counted with the model states."""
    own = tape.autocast or itemsize
    parameter = tape.parameter(shape, own)
    if own == itemsize:
        return parameter
    copy = Tensor(parameter.storage, shape, parameter.strides, itemsize)
    tape.record([copy], [parameter], [], lambda g, kept: [None if g[0] is None else to(g[0], own)])
    return copy


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Batched [.., n, k] x [.., k, m]: keeps both as [batch, .., ..], copies where they do not lie so."""
    batch = a.shape[:-2]
    a, b = lowered(a), lowered(b)
    left, right = view(a, -1, *a.shape[-2:]), view(b, -1, *b.shape[-2:])
    return view(bmm(left, right), *batch, a.shape[-2], b.shape[-1])


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """[batch, n, k] x [batch, k, m]: keeps both."""
    a, b = lowered(a), lowered(b)
    y = a.tape.new((a.shape[0], a.shape[1], b.shape[2]), a.itemsize)
    wants = a.node is not None, b.node is not None

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        return [g[0].tape.new(x.shape, x.itemsize) if wanted else None for x, wanted in zip(kept, wants, strict=True)]

    y.tape.record([y], [a, b], [a, b], backward)
    return y


def fused_attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Flash attention: keeps query, key, value, its result and the log-sum-exp of each row in fp32.

    q [b, a, s, d], k and v [b, k, s, d] -> [b, a, s, d], whose dims lie in memory as those of q.
    """
    tape = q.tape
    q, k, v = lowered(q), lowered(k), lowered(v)
    b, a, s, d = q.shape
    y = tape.new((b, a, s, v.shape[-1]), q.itemsize, like(q) if v.shape[-1] == d else None)
    rows = tape.new((b, a, s), 4)
    masks = [] if mask is None else [mask]
    grouped, q_itemsize = k.shape[1] != a, q.itemsize

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        if tape.on_cpu:
            return [transpose(tape.new((x.shape[0], s, x.shape[1], d), x.itemsize), 1, 2) for x in kept[:3]]
        own: list[Tensor | None] = [tape.new(x.shape, x.itemsize, like(x)) for x in kept[:3]]
        # A GPU's kernel gives every query head its own gradient of key and value, and sums them at the end.
        each = [tape.new((b, s, a, d), q_itemsize) for _ in range(2)] if grouped else []
        del each
        return own

    tape.record([y], [q, k, v], [q, k, v, y, rows, *masks], backward)
    return y


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    if len(shapes) == 1:
        return shapes[0]
    sizes = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(reversed([max(dim) if prod(dim) else 0 for dim in sizes]))
