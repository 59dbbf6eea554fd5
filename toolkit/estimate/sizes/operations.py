"""Operations that allocate their results: what each keeps for backward, and what its backward pass allocates.

The formulas are those of PyTorch's derivatives.yaml.
"""

from collections.abc import Sequence
from itertools import zip_longest
from math import prod

from toolkit.estimate.sizes.tape import Gradients, Kept, Shape, Tape, Tensor, like, of_order
from toolkit.estimate.sizes.views import make_contiguous, transpose, view

_LOW, _FP32 = 2, 4


def to(x: Tensor, itemsize: int) -> Tensor:
    """Convert x to a dtype of this size; x itself if it has that."""
    if x.itemsize == itemsize:
        return x
    y = x.tape.new(x.shape, itemsize, like(x))
    before = x.itemsize
    return x.tape.record(y, [x], [], lambda g, kept: [to(g, before)])


def lowered(x: Tensor) -> Tensor:
    """Convert x as autocast does for a product: to 16 bits, a copy for each product."""
    return to(x, _LOW) if x.tape.autocast else x


def raised(x: Tensor) -> Tensor:
    """Convert x as autocast does on a GPU for softmax, LayerNorm, powers and the like: to fp32. A CPU does not."""
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
    return y.tape.record(y, [a, b], [], lambda g, kept: [to(g, size).alias() for size in sizes])


def add_(a: Tensor, b: Tensor) -> Tensor:
    """a += b: the same, in a's memory."""
    return a.tape.record(a.alias(), [a, b], [], lambda g, kept: [g.alias()] * 2)


def mul(a: Tensor, b: Tensor) -> Tensor:
    """a * b: keeps a for b's gradient and b for a's."""
    y = elementwise(a, b)
    wants_a, wants_b = a.node is not None, b.node is not None
    kept = [*([b] if wants_a else []), *([a] if wants_b else [])]
    sizes = a.itemsize, b.itemsize

    def backward(g: Tensor, kept: Kept) -> Gradients:
        others = iter(kept)
        return [
            to(elementwise(g, next(others)), size) if wanted else None
            for wanted, size in zip((wants_a, wants_b), sizes, strict=True)
        ]

    return y.tape.record(y, [a, b], kept, backward)


def times(x: Tensor) -> Tensor:
    """x times, or divided by, a number."""
    return x.tape.record(elementwise(x), [x], [], lambda g, kept: [elementwise(g)])


def times_(x: Tensor) -> Tensor:
    """The same in x's memory."""
    return x.tape.record(x.alias(), [x], [], lambda g, kept: [elementwise(g)])


def plus(x: Tensor) -> Tensor:
    """x plus a number."""
    return x.tape.record(elementwise(x), [x], [], lambda g, kept: [g.alias()])


def power(x: Tensor) -> Tensor:
    """x to a number: keeps x; backward is g * (n * x^(n-1))."""
    x = raised(x)
    y = elementwise(x)

    def backward(g: Tensor, kept: Kept) -> Gradients:
        lower = elementwise(kept[0])
        scaled = elementwise(lower)  # `lower` stays live: both are parts of one C++ expression
        return [elementwise(g, scaled)]

    return y.tape.record(y, [x], [x], backward)


def mean(x: Tensor) -> Tensor:
    """Mean over the last dim, which stays with size 1."""
    y = x.tape.new((*x.shape[:-1], 1), x.itemsize)
    shape = x.shape
    return y.tape.record(y, [x], [], lambda g, kept: [g.tape.new(shape, g.itemsize)])


def of_result(x: Tensor, temporaries: int = 0) -> Tensor:
    """tanh, rsqrt, sigmoid: keeps its result. `temporaries` of the result's size while backward runs."""
    y = elementwise(x)

    def backward(g: Tensor, kept: Kept) -> Gradients:
        live = [elementwise(kept[0]) for _ in range(temporaries)]
        result = elementwise(g, kept[0])
        del live
        return [result]

    return y.tape.record(y, [x], [y], backward)


def of_input(x: Tensor) -> Tensor:
    """gelu, silu: keeps its input; one kernel backward."""
    return x.tape.record(elementwise(x), [x], [x], lambda g, kept: [elementwise(g, kept[0])])


def layer_norm(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Keeps its input, and mean and 1/deviation of each position. Its kernels need contiguous input."""
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

    def backward(g: Tensor, kept: Kept) -> Gradients:
        gradient, ordered = make_contiguous(g), make_contiguous(kept[0])
        weights = [gradient.tape.new(p.shape, p.itemsize) for p in kept[3:]]
        return [gradient.tape.new(ordered.shape, ordered.itemsize), *weights]

    return tape.record(y, [x, *parameters], [x, *statistics, *parameters], backward)


def dropout(x: Tensor, probability: float) -> Tensor:
    """On a GPU keeps a mask of one byte per element, on a CPU noise in x's dtype; a no-op with probability 0."""
    if not probability:
        return x
    tape = x.tape
    noise = tape.new(x.shape, x.itemsize if tape.on_cpu else 1, like(x))
    y = elementwise(x)
    return tape.record(y, [x], [noise], lambda g, kept: [elementwise(g, kept[0], itemsize=g.itemsize)])


def softmax(x: Tensor, itemsize: int | None = None) -> Tensor:
    """Keeps its result. With `itemsize` x is converted first."""
    x = to(x, itemsize) if itemsize else raised(x)
    x = make_contiguous(x)
    y = x.tape.new(x.shape, x.itemsize)

    def backward(g: Tensor, kept: Kept) -> Gradients:
        # A GPU's kernel needs the product of gradient and result as a tensor (ATen/native/cuda/SoftMax.cu).
        product = None if kept[0].tape.on_cpu else elementwise(kept[0])
        result = elementwise(kept[0])
        del product
        return [result]

    return x.tape.record(y, [x], [y], backward)


def linear(x: Tensor, outputs: int, *, bias: bool) -> Tensor:
    """x [.., i] -> [.., o]: keeps x. Backward makes the gradients of x, weight and bias together."""
    x = lowered(x)
    rows = view(x, -1, x.shape[-1])  # [n, i], a copy if x is not contiguous
    tape, itemsize = x.tape, x.itemsize
    parameters = [_weight(tape, (outputs, x.shape[-1]), itemsize)]
    if bias:
        parameters.append(_weight(tape, (outputs,), itemsize))
    y = tape.new((rows.shape[0], outputs), itemsize)
    shapes = [None if rows.node is None else rows.shape, *(parameter.shape for parameter in parameters)]

    def backward(g: Tensor, kept: Kept) -> Gradients:
        return [None if shape is None else tape.new(shape, itemsize) for shape in shapes]

    tape.record(y, [rows, *parameters], [rows], backward)
    return view(y, *x.shape[:-1], outputs)


def _weight(tape: Tape, shape: Shape, itemsize: int) -> Tensor:
    """A parameter, or autocast's copy of it, which is made once a forward pass and counted with the model states."""
    own = tape.autocast or itemsize
    parameter = tape.parameter(shape, own)
    if own == itemsize:
        return parameter
    copy = Tensor(parameter.storage, shape, parameter.strides, itemsize)
    return tape.record(copy, [parameter], [], lambda g, kept: [to(g, own)])


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Batched [.., n, k] x [.., k, m]: keeps both as [batch, .., ..], copied if their strides require it."""
    batch = a.shape[:-2]
    a, b = lowered(a), lowered(b)
    left, right = view(a, -1, *a.shape[-2:]), view(b, -1, *b.shape[-2:])
    return view(bmm(left, right), *batch, a.shape[-2], b.shape[-1])


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """[batch, n, k] x [batch, k, m]: keeps both."""
    a, b = lowered(a), lowered(b)
    y = a.tape.new((a.shape[0], a.shape[1], b.shape[2]), a.itemsize)
    wants = a.node is not None, b.node is not None

    def backward(g: Tensor, kept: Kept) -> Gradients:
        return [g.tape.new(x.shape, x.itemsize) if wanted else None for x, wanted in zip(kept, wants, strict=True)]

    return y.tape.record(y, [a, b], [a, b], backward)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Flash attention: keeps query, key, value, its result and the log-sum-exp of each row in fp32.

    q [b, a, s, d], k and v [b, k, s, d] -> [b, a, s, d], with the memory order of q.
    """
    tape = q.tape
    q, k, v = lowered(q), lowered(k), lowered(v)
    b, a, s, d = q.shape
    y = tape.new((b, a, s, v.shape[-1]), q.itemsize, like(q) if v.shape[-1] == d else None)
    rows = tape.new((b, a, s), 4)
    masks = [] if mask is None else [mask]
    grouped, q_itemsize = k.shape[1] != a, q.itemsize

    def backward(g: Tensor, kept: Kept) -> Gradients:
        if tape.on_cpu:
            return [transpose(tape.new((x.shape[0], s, x.shape[1], d), x.itemsize), 1, 2) for x in kept[:3]]
        own: list[Tensor | None] = [tape.new(x.shape, x.itemsize, like(x)) for x in kept[:3]]
        # A GPU's kernel gives every query head its own gradient of key and value, and sums them at the end.
        each = [tape.new((b, s, a, d), q_itemsize) for _ in range(2)] if grouped else []
        del each
        return own

    return tape.record(y, [q, k, v], [q, k, v, y, rows, *masks], backward)


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    if len(shapes) == 1:
        return shapes[0]
    sizes = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(reversed([max(dim) if prod(dim) else 0 for dim in sizes]))


def clamp_(x: Tensor) -> Tensor:
    """x clamped in its own memory: keeps a copy of what it was, to know where it was clamped."""
    before = x.tape.new(x.shape, x.itemsize, like(x))
    return x.tape.record(x.alias(), [x], [before], lambda g, kept: [elementwise(g)])


def where(x: Tensor, mask: Tensor) -> Tensor:
    """x where the mask is set, else a number: keeps the mask."""
    return x.tape.record(elementwise(x, itemsize=x.itemsize), [x], [mask], lambda g, kept: [elementwise(g)])


def choose(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a where the mask is set, else b: keeps the mask."""
    return a.tape.record(elementwise(a, b), [a, b], [mask], lambda g, kept: [elementwise(g), elementwise(g)])


def bounded(x: Tensor) -> Tensor:
    """The smaller, or the larger, of x and a number in a tensor: keeps x."""
    y = elementwise(x)

    def backward(g: Tensor, kept: Kept) -> Gradients:
        equal, half = elementwise(kept[0], itemsize=1), elementwise(g)
        result = elementwise(g, kept[0])
        del equal, half
        return [result]

    return y.tape.record(y, [x], [x], backward)
