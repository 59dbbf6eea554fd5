"""Operations that take each element from one tensor or another."""

from toolkit.estimate.sizes.operations import Gradients, Kept, elementwise
from toolkit.estimate.sizes.tape import Tensor, like


def clamp_(x: Tensor) -> Tensor:
    """x clamped in its own memory: keeps a copy of what it was, to know where it was cut."""
    before = x.tape.new(x.shape, x.itemsize, like(x))
    y = x.alias()
    y.tape.record([y], [x], [before], lambda g, kept: [None if g[0] is None else elementwise(g[0])])
    return y


def where(x: Tensor, mask: Tensor) -> Tensor:
    """x where the mask says so, else a number: keeps the mask."""
    y = elementwise(x, itemsize=x.itemsize)

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        return [elementwise(g[0])]

    y.tape.record([y], [x], [mask], backward)
    return y


def choose(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a where the mask says so, else b: keeps the mask."""
    y = elementwise(a, b)

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        return [elementwise(g[0]), elementwise(g[0])]

    y.tape.record([y], [a, b], [mask], backward)
    return y


def bounded(x: Tensor) -> Tensor:
    """The smaller, or the larger, of x and a number in a tensor: keeps x."""
    y = elementwise(x)

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        equal, half = elementwise(kept[0], itemsize=1), elementwise(g[0])
        result = elementwise(g[0], kept[0])
        del equal, half
        return [result]

    y.tape.record([y], [x], [x], backward)
    return y
