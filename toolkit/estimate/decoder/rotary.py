"""Rotary position embedding: products with tables of cosines and sines, which are kept once for all layers."""

from dataclasses import dataclass

from toolkit.estimate.decoder.context import Context
from toolkit.estimate.sizes.operations import add, mul, times, to
from toolkit.estimate.sizes.tape import Tensor
from toolkit.estimate.sizes.views import cat, every_second, narrow, permute, split, unsqueeze, view


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Tables that layers share. cos and sin [1 or b, s, d]; masks [1 or b, 1, s, s]; positions, or ALiBi's numbers."""

    positions: Tensor
    cos: Tensor | None
    sin: Tensor | None
    mask: Tensor | None
    sliding_mask: Tensor | None


def rotate(c: Context, q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [b, heads, s, d]."""
    if c.style.rotary == "interleaved":
        return _gptj(c, q, k)
    cos, sin = (unsqueeze(table, 1) for table in _own_tables(c, tables))
    match c.style.rotary:
        case "partial":
            size = c.style.rotated_features
            rest = c.shape.head_dim - size
            parts = [(narrow(x, -1, size), narrow(x, -1, rest)) for x in (q, k)]
            first, second = (cat([_half(x, cos, sin), passed]) for x, passed in parts)
            return first, second
        case "pairs" | "pairs_partial" | "pairs_fp32_tables":
            return _repeated_pairs(c, q, k, _doubled(cos), _doubled(sin))
        case "fp32":
            itemsize = q.itemsize
            q, k = to(q, 4), to(k, 4)
            return to(_pairs(q, cos, sin), itemsize), to(_pairs(k, cos, sin), itemsize)
        case "fp32_tables":
            return to(_half(q, cos, sin), q.itemsize), to(_half(k, cos, sin), k.itemsize)
        case _:
            return _half(q, cos, sin), _half(k, cos, sin)


def rotate_latent(c: Context, q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """The rotary parts of queries [b, heads, s, r] and of the key that all heads share [b, 1, s, r]."""
    cos, sin = _own_tables(c, tables)
    if c.style.rotary == "half":
        cos, sin = unsqueeze(cos, 1), unsqueeze(sin, 1)
        return _half(q, cos, sin), _half(k, cos, sin)
    cos, sin = (unsqueeze(narrow(table, -1, q.shape[-1] // 2), 1) for table in (cos, sin))
    return _sorted_pairs(q, cos, sin), _sorted_pairs(k, cos, sin)


def _own_tables(c: Context, tables: Tables) -> tuple[Tensor, Tensor]:
    """The rows of cos and sin for one kind of layer, [1 or b, s, d]."""
    assert tables.cos is not None
    assert tables.sin is not None
    samples = c.b if c.isolates_documents else 1
    return narrow(tables.cos, 0, samples), narrow(tables.sin, 0, samples)


def _sorted_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighboring features; the result has the first of all pairs in front of the second of all."""
    first, second = every_second(x), every_second(x)
    return cat([add(mul(first, cos), mul(second, sin)), add(mul(second, cos), mul(first, sin))])


def _half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + rotate_half(x) sin."""
    return add(mul(x, cos), mul(_rotate_half(x), sin))


def _rotate_half(x: Tensor) -> Tensor:
    """One half negated, and both halves swapped."""
    half = x.shape[-1] // 2
    return cat([times(narrow(x, -1, half)), narrow(x, -1, half)])


def _pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighboring features."""
    return add(mul(x, cos), mul(_rotate_pairs(x), sin))


def _repeated_pairs(c: Context, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs of neighboring features, with tables that every layer makes from the shared ones."""
    match c.style.rotary:
        case "pairs_partial":
            size, rest = c.style.rotated_features, c.shape.head_dim - c.style.rotated_features
            (q, q_passed), (k, k_passed) = ((narrow(x, -1, size), narrow(x, -1, rest)) for x in (q, k))
            q, k = _pairs(q, cos, sin), _pairs(k, cos, sin)
            return cat([q, q_passed]), cat([k, k_passed])
        case "pairs_fp32_tables":
            itemsize = q.itemsize
            q = add(mul(to(q, 4), cos), mul(to(_rotate_pairs(q), 4), sin))
            k = add(mul(to(k, 4), cos), mul(to(_rotate_pairs(k), 4), sin))
            return to(q, itemsize), to(k, itemsize)
        case _:
            return _pairs(q, cos, sin), _pairs(k, cos, sin)


def _doubled(table: Tensor) -> Tensor:
    """Half of the table's features, each repeated."""
    return table.tape.new(table.shape, table.itemsize)


def _rotate_pairs(x: Tensor) -> Tensor:
    """Stacked, then flattened."""
    rank = len(x.shape)
    return view(cat([unsqueeze(times(every_second(x)), rank), unsqueeze(every_second(x), rank)]), *x.shape)


def _gptj(c: Context, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """GPT-J and CodeGen (in fp32) look up sines in every layer and repeat them. x [b, s, heads, d]."""
    size = c.style.rotated_features
    table = c.tape.new((1, c.s, size), 4 if c.style.projection == "chunks" else k.itemsize)
    results = []
    for x in (k, q):
        halves = split(table, [size // 2, size // 2])
        sin, cos = (_twice(half) for half in halves)
        rotated = _pairs(narrow(x, -1, size), cos, sin)
        rest = narrow(x, -1, c.shape.head_dim - size)
        results.append(
            cat([to(rotated, max(rotated.itemsize, x.itemsize)), to(rest, max(rotated.itemsize, x.itemsize))])
        )
    key, query = results
    return permute(query, 0, 2, 1, 3), permute(key, 0, 2, 1, 3)


def _twice(half: Tensor) -> Tensor:
    """[1, s, n] -> [1, s, 1, 2n], what repeat_interleave returns."""
    return half.tape.new((*half.shape[:2], 1, 2 * half.shape[2]), half.itemsize)
