"""Operations that share their operand's storage, and copies if they cannot."""

from collections.abc import Sequence

from toolkit.estimate.sizes.tape import Gradients, Kept, Shape, Tensor, contiguous


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
    return x.tape.record(y, [x], [], lambda g, kept: [view(g, *old).alias()])


def clone(x: Tensor, strides: Shape | None = None) -> Tensor:
    """A copy, contiguous or with `strides`."""
    return x.tape.record(x.tape.new(x.shape, x.itemsize, strides), [x], [], lambda g, kept: [g.alias()])


def make_contiguous(x: Tensor) -> Tensor:
    """x itself if it is contiguous, else a copy."""
    return x if is_contiguous(x) else clone(x)


def is_contiguous(x: Tensor) -> bool:
    """Whether it is contiguous."""
    step = 1
    for size, stride in zip(reversed(x.shape), reversed(x.strides), strict=True):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def transpose(x: Tensor, a: int, b: int) -> Tensor:
    """Swap two dims."""
    order = list(range(len(x.shape)))
    order[a], order[b] = order[b], order[a]
    return permute(x, *order)


def permute(x: Tensor, *order: int) -> Tensor:
    """Reorder dims."""
    y = x.alias(tuple(x.shape[i] for i in order), tuple(x.strides[i] for i in order))
    back = sorted(range(len(order)), key=order.__getitem__)
    return x.tape.record(y, [x], [], lambda g, kept: [permute(g, *back)])


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """A dim of size 1 in front of `dim`."""
    return view(x, *x.shape[:dim], 1, *x.shape[dim:])


def expand(x: Tensor, *shape: int) -> Tensor:
    """Repeat dims of size 1 without memory."""
    strides = tuple(0 if a != b else s for a, b, s in zip(x.shape, shape, x.strides, strict=True))
    y = x.alias(shape, strides)
    # The tape itself sums the gradient of what was broadcast.
    return x.tape.record(y, [x], [], lambda g, kept: [g.alias()])


def _slice(x: Tensor, shape: Shape, strides: Shape) -> Tensor:
    """A view of some elements. Backward: zeros of the whole, into which the gradient goes."""
    whole, itemsize = x.shape, x.itemsize
    return x.tape.record(x.alias(shape, strides), [x], [], lambda g, kept: [g.tape.new(whole, itemsize)])


def narrow(x: Tensor, dim: int, size: int) -> Tensor:
    """`x[.., :size]` or any other slice of that size."""
    dim %= len(x.shape)
    return _slice(x, (*x.shape[:dim], size, *x.shape[dim + 1 :]), x.strides)


def every_second(x: Tensor) -> Tensor:
    """`x[..., ::2]`."""
    return _slice(x, (*x.shape[:-1], x.shape[-1] // 2), (*x.strides[:-1], 2 * x.strides[-1]))


def select(x: Tensor, dim: int) -> Tensor:
    """`x[.., 0, ..]`."""
    dim %= len(x.shape)
    return _slice(x, x.shape[:dim] + x.shape[dim + 1 :], x.strides[:dim] + x.strides[dim + 1 :])


def split(x: Tensor, sizes: Sequence[int], dim: int = -1) -> list[Tensor]:
    """Slices that make up the whole, in one node: backward concatenates their gradients."""
    dim %= len(x.shape)
    parts = [x.alias((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.strides) for size in sizes]
    tape, whole, itemsize = x.tape, x.shape, x.itemsize
    shapes = [part.shape for part in parts]

    def backward(g: Gradients, kept: Kept) -> Gradients:
        zeros = [tape.new(shape, itemsize) for shape, own in zip(shapes, g, strict=True) if own is None]
        result = tape.new(whole, itemsize)
        del zeros
        return [result]

    tape.record_outputs(parts, [x], [], backward)
    return parts


def cat(parts: Sequence[Tensor], dim: int = -1) -> Tensor:
    """Concatenate into a new tensor, in the widest of their dtypes."""
    first = parts[0]
    dim %= len(first.shape)
    sizes = [part.shape[dim] for part in parts]
    shape = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])
    itemsizes = [part.itemsize for part in parts]
    y = first.tape.new(shape, max(itemsizes))

    def backward(g: Tensor, kept: Kept) -> Gradients:
        slices = [narrow(g, dim, size) for size in sizes]
        return [
            part if part.itemsize == itemsize else part.tape.new(part.shape, itemsize)
            for part, itemsize in zip(slices, itemsizes, strict=True)
        ]

    return first.tape.record(y, parts, [], backward)


def _resolved(x: Tensor, shape: Sequence[int]) -> Shape:
    known = 1
    for size in shape:
        known *= size if size != -1 else 1
    return tuple(size if size != -1 else x.elements // known for size in shape)


def _view_strides(x: Tensor, shape: Shape) -> Shape | None:
    """Strides of a view, or None if dims must be merged that are not adjacent in memory.

    As PyTorch's computeStride: walk the old dims from the last, merge those that are contiguous, and split each such
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
