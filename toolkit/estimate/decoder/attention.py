"""Attention: projections, rotary embedding, scores, in the forms that the families have."""

from toolkit.estimate.decoder.context import Context
from toolkit.estimate.decoder.latent import latent_heads
from toolkit.estimate.decoder.mlp import leave_row
from toolkit.estimate.decoder.norm import norm
from toolkit.estimate.decoder.rotary import Tables, rotate
from toolkit.estimate.decoder.scores import attend
from toolkit.estimate.family_rules import LayerKind
from toolkit.estimate.sizes.operations import add, linear, mul, times
from toolkit.estimate.sizes.selection import bounded, clamp_
from toolkit.estimate.sizes.tape import Tensor
from toolkit.estimate.sizes.views import cat, clone, expand, narrow, permute, select, split, transpose, view

Heads = tuple[Tensor, Tensor, Tensor]
"""Query, key and value [b, a or k, s, d]."""


def attention(c: Context, x: Tensor, tables: Tables, kind: LayerKind) -> Tensor:
    """x [b, s, h] -> [b, s, h]."""
    if c.style.projection == "latent":
        q, k, v = latent_heads(c, c.enter(x), tables)
        y = attend(c, q, k, v, tables, kind)
        del q, k, v
        return leave_row(c, y, bias=False)
    heads = _project(c, c.enter(x))
    # Falcon's code has a name for the fused projection, and so holds it until attention returns.
    fused = heads[0].alias() if c.style.family == "falcon" else None
    rotated = _rotated(c, *heads, tables, kind)
    del heads
    y = (_differential if c.style.family == "diffllama" else attend)(c, *rotated, tables, kind)
    del rotated, fused
    if c.style.inner_norms:
        y = norm(c, y)
    if c.gathers_attention:
        y = c.scatter_columns(y)
    return leave_row(c, y, bias=c.style.family == "gpt2")


def _differential(c: Context, q: Tensor, k: Tensor, v: Tensor, tables: Tables, kind: LayerKind) -> Tensor:
    """DiffLlama: attention to the first half of the values, less a learned share of attention to the second."""
    a, d = c.heads, c.shape.head_dim
    values = [cat([half, half], dim=1) for half in split(v, [v.shape[1] // 2] * 2, dim=1)]
    both = [view(attend(c, q, k, value, tables, kind), c.b, c.s, a, d) for value in values]
    first, second = split(cat(both), [a // 2] * 2, dim=2)
    del both, values
    x = norm(c, add(first, mul(second, c.parameter(1))), "rms_torch")
    return view(times(x), c.b, c.s, -1)


def _rotated(c: Context, q: Tensor, k: Tensor, v: Tensor, tables: Tables, kind: LayerKind) -> Heads:
    if c.style.rotary == "none" or kind == "no_rotary":
        return q, k, v
    q, k = rotate(c, q, k, tables)
    if c.style.head_norm_behind:
        q, k = norm(c, q, c.style.head_norm), norm(c, k, c.style.head_norm)
    if "queries" in c.style.scales:
        samples = c.b if c.isolates_documents else 1
        q = mul(q, c.tape.new((samples, 1, c.s, 1), c.itemsize))
    return q, k, v


def _project(c: Context, x: Tensor) -> Heads:
    match c.style.projection:
        case "separate":
            return _separate(c, x)
        case "split":
            whole = _columns(c, x, 3 * c.heads * c.shape.head_dim)
            whole = bounded(whole) if "clipped" in c.style.scales else whole
            parts = split(whole, [c.heads * c.shape.head_dim] * 3)
            del whole
            q, k, v = (_by_head(c, part) for part in parts)
            return q, k, v
        case "heads":
            whole = _columns(c, x, 3 * c.heads * c.shape.head_dim)
            by_head = transpose(view(whole, c.b, c.s, c.heads, 3 * c.shape.head_dim), 1, 2)
            q, k, v = split(by_head, [c.shape.head_dim] * 3)
            return q, k, v
        case "grouped":
            return _grouped(c, x)
        case "phi3":
            return _phi3(c, x)
        case "codegen":
            return _codegen(c, x)
        case "multi_query":
            sizes = [c.heads * c.shape.head_dim, c.shape.head_dim, c.shape.head_dim]
            whole = view(_shared_columns(c, x, sizes), c.b, 1, c.s, sum(sizes))
            q, k, v = split(whole, sizes)
            return _by_head(c, q), k, v
        case "latent":
            raise AssertionError("its heads turn between the projections")


def _columns(c: Context, x: Tensor, features: int) -> Tensor:
    """A column-parallel layer's outputs on this rank; all of them where attention gathers its columns."""
    if not c.gathers_attention:
        return linear(x, features, bias=False)
    return c.gather_columns(linear(x, features // c.tp, bias=False))


def _shared_columns(c: Context, x: Tensor, sizes: list[int]) -> Tensor:
    """Query heads that are split and a key and a value head that are not: two layers on a rank, one without a cut."""
    if c.tp == 1:
        return linear(x, sum(sizes), bias=False)
    return cat([linear(x, sizes[0], bias=False), linear(x, sum(sizes[1:]), bias=False)])


def _by_head(c: Context, x: Tensor) -> Tensor:
    """[.., heads * d] -> [b, heads, s, d], a view."""
    return transpose(view(x, c.b, c.s, -1, c.shape.head_dim), 1, 2)


def _separate(c: Context, x: Tensor) -> Heads:
    d, family, heads = c.shape.head_dim, c.style.family, None if c.style.head_norm_behind else c.style.head_norm
    q = _columns(c, x, c.heads * d)
    if family in ("opt", "xglm"):
        q = times(q)
    if heads == "rms_olmo2":
        q, k = norm(c, q, heads), norm(c, _columns(c, x, c.kv_heads * d), heads)
        return _by_head(c, q), _by_head(c, k), _by_head(c, _columns(c, x, c.kv_heads * d))
    k, v = _columns(c, x, c.kv_heads * d), _columns(c, x, c.kv_heads * d)
    if "clipped" in c.style.scales:
        q, k, v = clamp_(q), clamp_(k), clamp_(v)
    if family == "gptj":  # rotated before its heads change places
        return view(q, c.b, c.s, -1, d), view(k, c.b, c.s, -1, d), _by_head(c, v)
    if family in ("qwen3", "cohere") and heads:
        weights = ((c.heads, d), (c.kv_heads, d)) if family == "cohere" else ((d,), (d,))
        q = norm(c, view(q, c.b, c.s, -1, d), heads, weights[0])
        k = norm(c, view(k, c.b, c.s, -1, d), heads, weights[1])
        return transpose(q, 1, 2), transpose(k, 1, 2), _by_head(c, v)
    q, k, v = _by_head(c, q), _by_head(c, k), _by_head(c, v)
    if family == "stablelm" and heads:
        return _each_head(c, q), _each_head(c, k), v
    if heads:
        return norm(c, q, heads), norm(c, k, heads), v
    return q, k, v


def _each_head(c: Context, x: Tensor) -> Tensor:
    """StableLM: a norm of its own for every head."""
    return cat([norm(c, head, "layer") for head in split(x, [1] * x.shape[1], dim=1)], dim=1)


def _grouped(c: Context, x: Tensor) -> Heads:
    """BLOOM and Falcon: heads interleaved with their keys and values."""
    d, a = c.shape.head_dim, c.heads
    if c.style.family == "falcon" and c.shape.kv_heads == 1:
        sizes = [a * d, d, d]
        whole = view(_shared_columns(c, x, sizes), c.b, c.s, a + 2, d)
        q, k, v = narrow(whole, 2, a), _picked(whole, 2), _picked(whole, 2)
    elif c.style.family == "falcon" and c.kv_heads != a:
        groups = c.kv_heads
        whole = view(linear(x, (a + 2 * groups) * d, bias=False), c.b, c.s, groups, a // groups + 2, d)
        q = view(narrow(whole, 3, a // groups), c.b, c.s, a, d)
        full = (c.b, c.s, groups, a // groups, d)
        k, v = (view(expand(_picked(whole, 3), *full), c.b, c.s, a, d) for _ in range(2))
    else:
        whole = view(linear(x, 3 * a * d, bias=False), c.b, c.s, a, 3, d)
        q, k, v = select(whole, 3), select(whole, 3), select(whole, 3)
    del whole
    if c.style.family == "persimmon" and c.style.head_norm:
        q, k = norm(c, q, c.style.head_norm), norm(c, k, c.style.head_norm)
    q, k, v = transpose(q, 1, 2), transpose(k, 1, 2), transpose(v, 1, 2)
    if c.style.family == "bloom":
        return view(q, c.b * a, c.s, d), view(k, c.b * a, c.s, d), view(v, c.b * a, c.s, d)
    return q, k, v


def _picked(x: Tensor, dim: int) -> Tensor:
    """`x[.., [-2], ..]`: an index by a list copies."""
    return clone(narrow(x, dim, 1))


def _phi3(c: Context, x: Tensor) -> Heads:
    d = c.shape.head_dim
    whole = _columns(c, x, (c.heads + 2 * c.kv_heads) * d)
    q, k, v = narrow(whole, -1, c.heads * d), narrow(whole, -1, c.kv_heads * d), narrow(whole, -1, c.kv_heads * d)
    return _by_head(c, q), _by_head(c, k), _by_head(c, v)


def _codegen(c: Context, x: Tensor) -> Heads:
    """Four chunks, each with queries, values and keys; a split over chunks copies when its heads are put in a row."""
    d, chunks = c.shape.head_dim, 4
    each = c.heads * d // chunks
    parts = split(view(linear(x, 3 * c.heads * d, bias=False), c.b, c.s, chunks, 3 * each), [each] * 3)
    q, v, k = (view(part, c.b, c.s, c.heads, d) for part in parts)
    return q, k, permute(v, 0, 2, 1, 3)
