"""Operations that share their operand's storage, and the copies where they cannot."""

from collections.abc import Sequence

from toolkit.estimate.sizes.tape import Shape, Tensor, contiguous


def view(x: Tensor, *shape: int) -> Tensor:
    """`reshape`: a view where the strides allow it, else a copy."""
    shape = _resolved(x, shape)
    if shape == x.shape:
        return x
    strides = _view_strides(x, shape)
    if strides is None:
        x = clone(x, contiguous(x.shape))
        strides = contiguous(shape)
    y = x.alias(shape, strides)
    old = x.shape
    x.tape.record([y], [x], [], lambda g, kept: [_view_gradient(g[0], old)])
    return y


def clone(x: Tensor, strides: Shape | None = None) -> Tensor:
    """A copy, contiguous or with `strides`."""
    y = x.tape.new(x.shape, x.itemsize, strides)
    x.tape.record([y], [x], [], lambda g, kept: [_passed(g[0])])
    return y


def make_contiguous(x: Tensor) -> Tensor:
    """x itself where its dims lie in order already."""
    return x if is_contiguous(x) else clone(x)


def is_contiguous(x: Tensor) -> bool:
    """Whether its dims lie in order, without gaps."""
    step = 1
    for size, stride in zip(reversed(x.shape), reversed(x.strides), strict=True):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def transpose(x: Tensor, a: int, b: int) -> Tensor:
    """Two dims exchanged."""
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return permute(x, *order)


def permute(x: Tensor, *order: int) -> Tensor:
    """Dims in another order."""
    y = x.alias(tuple(x.shape[i] for i in order), tuple(x.strides[i] for i in order))
    back = sorted(range(len(order)), key=order.__getitem__)
    x.tape.record([y], [x], [], lambda g, kept: [None if g[0] is None else permute(g[0], *back)])
    return y


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """A dim of size 1 in front of `dim`."""
    return view(x, *x.shape[:dim], 1, *x.shape[dim:])


def expand(x: Tensor, *shape: int) -> Tensor:
    """Dims of size 1 repeated without memory."""
    strides = tuple(0 if a != b else s for a, b, s in zip(x.shape, shape, x.strides, strict=True))
    y = x.alias(shape, strides)
    # The tape itself sums the gradient of what was broadcast.
    x.tape.record([y], [x], [], lambda g, kept: [_passed(g[0])])
    return y


def narrow(x: Tensor, dim: int, size: int) -> Tensor:
    """`x[.., :size]` or any other slice of that size. Backward: zeros of the whole, into which the gradient goes."""
    dim %= len(x.shape)
    y = x.alias((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.strides)
    whole, itemsize = x.shape, x.itemsize
    x.tape.record([y], [x], [], lambda g, kept: [None if g[0] is None else g[0].tape.new(whole, itemsize)])
    return y


def every_second(x: Tensor) -> Tensor:
    """`x[..., ::2]`."""
    y = x.alias((*x.shape[:-1], x.shape[-1] // 2), (*x.strides[:-1], 2 * x.strides[-1]))
    whole, itemsize = x.shape, x.itemsize
    x.tape.record([y], [x], [], lambda g, kept: [None if g[0] is None else g[0].tape.new(whole, itemsize)])
    return y


def select(x: Tensor, dim: int) -> Tensor:
    """`x[.., 0, ..]`."""
    dim %= len(x.shape)
    y = x.alias(x.shape[:dim] + x.shape[dim + 1 :], x.strides[:dim] + x.strides[dim + 1 :])
    whole, itemsize = x.shape, x.itemsize
    x.tape.record([y], [x], [], lambda g, kept: [None if g[0] is None else g[0].tape.new(whole, itemsize)])
    return y


def split(x: Tensor, sizes: Sequence[int], dim: int = -1) -> list[Tensor]:
    """Slices that make up the whole, in one node: backward concatenates their gradients."""
    dim %= len(x.shape)
    parts = [x.alias((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.strides) for size in sizes]
    tape, whole, itemsize = x.tape, x.shape, x.itemsize
    shapes = [part.shape for part in parts]

    def backward(g: Sequence[Tensor | None], kept: Sequence[Tensor]) -> list[Tensor | None]:
        zeros = [tape.new(shape, itemsize) for shape, own in zip(shapes, g, strict=True) if own is None]
        result = tape.new(whole, itemsize)
        del zeros
        return [result]

    tape.record(parts, [x], [], backward)
    return parts


def cat(parts: Sequence[Tensor], dim: int = -1) -> Tensor:
    """A new tensor of all of them, in the widest of their dtypes."""
    first = parts[0]
    dim %= len(first.shape)
    sizes = [part.shape[dim] for part in parts]
    shape = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])
    itemsizes = [part.itemsize for part in parts]
    y = first.tape.new(shape, max(itemsizes))

    def backward(g: Sequence[Tensor | None], kept: Sequence[Tensor]) -> list[Tensor | None]:
        assert g[0] is not None
        slices = [narrow(g[0], dim, size) for size in sizes]
        return [
            part if part.itemsize == itemsize else part.tape.new(part.shape, itemsize)
            for part, itemsize in zip(slices, itemsizes, strict=True)
        ]

    first.tape.record([y], parts, [], backward)
    return y


def _view_gradient(gradient: Tensor | None, shape: Shape) -> Tensor | None:
    if gradient is None:
        return None
    return view(gradient, *shape).alias()


def _passed(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.alias()


def _resolved(x: Tensor, shape: Sequence[int]) -> Shape:
    known = 1
    for size in shape:
        known *= size if size != -1 else 1
    return tuple(size if size != -1 else x.elements // known for size in shape)


def _view_strides(x: Tensor, shape: Shape) -> Shape | None:
    """Strides of a view, or None where dims must be merged that do not lie one behind the other.

    As PyTorch's computeStride: walk the old dims from the last, gather those that lie contiguously, and cut each such
    run into the new dims.
    """
    if is_contiguous(x):
        return contiguous(shape)
    new = [0] * len(shape)
    at = len(shape) - 1
    base = x.strides[-1]
    old_run, new_run = 1, 1
    for dim in range(len(x.shape) - 1, -1, -1):
        old_run *= x.shape[dim]
        ends = dim == 0 or (x.shape[dim - 1] != 1 and x.strides[dim - 1] != old_run * base)
        if not ends:
            continue
        while at >= 0 and (new_run < old_run or shape[at] == 1):
            new[at] = new_run * base
            new_run *= shape[at]
            at -= 1
        if new_run != old_run:
            return None
        if dim > 0:
            base = x.strides[dim - 1]
            old_run = new_run = 1
    return tuple(new) if at == -1 else None
