"""Attention: projections, rotary embedding, scores, in the forms that the families have.

Dims: b samples, s positions, a query heads of this rank, k key-value heads, d features of a head; of latent attention r
rotary features, n the others of a query or key head.
"""

from collections.abc import Sequence

from toolkit.estimate.decoder.context import Context
from toolkit.estimate.decoder.mlp import leave_row, norm
from toolkit.estimate.decoder.rotary import Tables, rotate, rotate_latent
from toolkit.estimate.decoder.scores import attend
from toolkit.estimate.sizes.operations import add, bounded, clamp_, linear, mul, times
from toolkit.estimate.sizes.tape import Gradients, Kept, Tensor
from toolkit.estimate.sizes.views import cat, clone, expand, narrow, permute, select, split, transpose, view
from toolkit.models.families.layer_rules import LayerKind

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
    # Falcon's code has a variable for the fused projection, and so keeps it until attention returns.
    fused = heads[0].alias() if c.style.projection == "interleaved_groups" else None
    rotated = _rotated(c, *heads, tables, kind)
    del heads
    y = (_differential if c.style.rules.differential else attend)(c, *rotated, tables, kind)
    del rotated, fused
    if c.style.rules.inner_norms:
        y = norm(c, y)
    if c.gathers_attention:
        y = c.scatter(y, -1)
    return leave_row(c, y, bias=c.style.rules.output_bias)


def _differential(c: Context, q: Tensor, k: Tensor, v: Tensor, tables: Tables, kind: LayerKind) -> Tensor:
    """DiffLlama: attention to the first half of the values, minus a learned share of attention to the second."""
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
    if c.style.rules.head_norm_behind:
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
        case "interleaved_heads":
            return _interleaved(c, x)
        case "interleaved_groups":
            return _falcon(c, x)
        case "narrowed":
            return _narrowed(c, x)
        case "chunks":
            return _chunks(c, x)
        case "multi_query":
            sizes = [c.heads * c.shape.head_dim, c.shape.head_dim, c.shape.head_dim]
            whole = view(_shared_columns(c, x, sizes), c.b, 1, c.s, sum(sizes))
            q, k, v = split(whole, sizes)
            return _by_head(c, q), k, v
        case "latent":
            raise AssertionError("its heads are rotated between the projections")


def _columns(c: Context, x: Tensor, features: int) -> Tensor:
    """A column-parallel layer's outputs on this rank; all outputs if attention gathers its columns."""
    if not c.gathers_attention:
        return linear(x, features, bias=False)
    return c.gather(linear(x, features // c.tp, bias=False), -1)


def _shared_columns(c: Context, x: Tensor, sizes: list[int]) -> Tensor:
    """Query heads that are sharded and a key and a value head that are replicated: two layers under tp, else one."""
    if c.tp == 1:
        return linear(x, sum(sizes), bias=False)
    return cat([linear(x, sizes[0], bias=False), linear(x, sum(sizes[1:]), bias=False)])


def _by_head(c: Context, x: Tensor) -> Tensor:
    """[.., heads * d] -> [b, heads, s, d], a view."""
    return transpose(view(x, c.b, c.s, -1, c.shape.head_dim), 1, 2)


def _separate(c: Context, x: Tensor) -> Heads:
    d, kind, form = (
        c.shape.head_dim,
        None if c.style.rules.head_norm_behind else c.style.head_norm,
        c.style.rules.head_norm_form,
    )
    q = _columns(c, x, c.heads * d)
    if "projected_queries" in c.style.scales:
        q = times(q)
    if kind and form == "all_heads":
        q, k = norm(c, q, kind), norm(c, _columns(c, x, c.kv_heads * d), kind)
        return _by_head(c, q), _by_head(c, k), _by_head(c, _columns(c, x, c.kv_heads * d))
    k, v = _columns(c, x, c.kv_heads * d), _columns(c, x, c.kv_heads * d)
    if "clipped" in c.style.scales:
        q, k, v = clamp_(q), clamp_(k), clamp_(v)
    if c.style.rotary == "interleaved":  # rotated before its heads change places
        return view(q, c.b, c.s, -1, d), view(k, c.b, c.s, -1, d), _by_head(c, v)
    if kind and form in ("before_transpose", "weight_per_head"):
        weights = ((c.heads, d), (c.kv_heads, d)) if form == "weight_per_head" else ((d,), (d,))
        q = norm(c, view(q, c.b, c.s, -1, d), kind, weights[0])
        k = norm(c, view(k, c.b, c.s, -1, d), kind, weights[1])
        return transpose(q, 1, 2), transpose(k, 1, 2), _by_head(c, v)
    q, k, v = _by_head(c, q), _by_head(c, k), _by_head(c, v)
    if kind and form == "module_per_head":
        return _each_head(c, q), _each_head(c, k), v
    if kind:
        return norm(c, q, kind), norm(c, k, kind), v
    return q, k, v


def _each_head(c: Context, x: Tensor) -> Tensor:
    """StableLM: every head has its own norm module."""
    return cat([norm(c, head, "layer") for head in split(x, [1] * x.shape[1], dim=1)], dim=1)


def _interleaved(c: Context, x: Tensor) -> Heads:
    """Query, key and value of each head side by side."""
    d, a = c.shape.head_dim, c.heads
    whole = view(linear(x, 3 * a * d, bias=False), c.b, c.s, a, 3, d)
    q, k, v = select(whole, 3), select(whole, 3), select(whole, 3)
    del whole
    if c.style.head_norm:
        q, k = norm(c, q, c.style.head_norm), norm(c, k, c.style.head_norm)
    q, k, v = transpose(q, 1, 2), transpose(k, 1, 2), transpose(v, 1, 2)
    if c.style.scores == "bloom":
        return view(q, c.b * a, c.s, d), view(k, c.b * a, c.s, d), view(v, c.b * a, c.s, d)
    return q, k, v


def _falcon(c: Context, x: Tensor) -> Heads:
    """Query heads in groups, each with its key and value head; or one key and one value head behind all of them."""
    d, a, groups = c.shape.head_dim, c.heads, c.kv_heads
    if c.shape.kv_heads != 1 and groups == a:
        return _interleaved(c, x)
    if c.shape.kv_heads == 1:
        whole = view(_shared_columns(c, x, [a * d, d, d]), c.b, c.s, a + 2, d)
        q, k, v = narrow(whole, 2, a), _picked(whole, 2), _picked(whole, 2)
    else:
        whole = view(linear(x, (a + 2 * groups) * d, bias=False), c.b, c.s, groups, a // groups + 2, d)
        q = view(narrow(whole, 3, a // groups), c.b, c.s, a, d)
        full = (c.b, c.s, groups, a // groups, d)
        k, v = (view(expand(_picked(whole, 3), *full), c.b, c.s, a, d) for _ in range(2))
    del whole
    return transpose(q, 1, 2), transpose(k, 1, 2), transpose(v, 1, 2)


def _picked(x: Tensor, dim: int) -> Tensor:
    """`x[.., [-2], ..]`: an index by a list copies."""
    return clone(narrow(x, dim, 1))


def _narrowed(c: Context, x: Tensor) -> Heads:
    d = c.shape.head_dim
    whole = _columns(c, x, (c.heads + 2 * c.kv_heads) * d)
    q, k, v = narrow(whole, -1, c.heads * d), narrow(whole, -1, c.kv_heads * d), narrow(whole, -1, c.kv_heads * d)
    return _by_head(c, q), _by_head(c, k), _by_head(c, v)


def _chunks(c: Context, x: Tensor) -> Heads:
    """Four chunks, each with queries, values and keys; a split over chunks copies when its heads are put in a row."""
    d, chunks = c.shape.head_dim, 4
    each = c.heads * d // chunks
    parts = split(view(linear(x, 3 * c.heads * d, bias=False), c.b, c.s, chunks, 3 * each), [each] * 3)
    q, v, k = (view(part, c.b, c.s, c.heads, d) for part in parts)
    return q, k, permute(v, 0, 2, 1, 3)


def latent_heads(c: Context, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key [b, a, s, n + r] and value [b, a, s, v] of x [b, s, h]."""
    latent = c.shape.latent
    assert latent is not None
    q = x if latent.query_rank is None else norm(c, linear(x, latent.query_rank, bias=False), "rms")
    q = linear(q, c.heads * latent.head_dim, bias=False)
    q = transpose(view(q, c.b, c.s, c.heads, latent.head_dim), 1, 2)
    q_plain, q_rotary = split(q, [latent.plain_dim, latent.rotary_dim])
    both = linear(x, latent.key_value_rank + latent.rotary_dim, bias=False)
    kv, k_rotary = split(both, [latent.key_value_rank, latent.rotary_dim])
    del both, q
    kv = view(norm(c, kv, "rms"), c.b, 1, c.s, latent.key_value_rank)
    k_rotary = view(k_rotary, c.b, 1, c.s, latent.rotary_dim)
    q_rotary, k_rotary = rotate_latent(c, q_rotary, k_rotary, tables)
    query = cat([q_plain, q_rotary])
    del q_plain, q_rotary
    width = latent.plain_dim + latent.value_dim
    kv = transpose(view(linear(kv, c.heads * width, bias=False), c.b, c.s, c.heads, width), 1, 2)
    k_plain, value = split(kv, [latent.plain_dim, latent.value_dim])
    return query, _written([k_plain, expand(k_rotary, c.b, c.heads, c.s, latent.rotary_dim)]), value


def _written(parts: Sequence[Tensor]) -> Tensor:
    """An empty tensor into which the parts are copied side by side. Each copy's backward pass copies the whole."""
    shape = (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
    sizes = [part.shape[-1] for part in parts]
    y = parts[0].tape.new(shape, parts[0].itemsize)

    def backward(g: Tensor, kept: Kept) -> Gradients:
        found: list[Tensor | None] = []
        for size in sizes:
            whole = clone(g)
            found.append(clone(narrow(whole, -1, size)))
            del whole
        return found

    return y.tape.record(y, parts, [], backward)
