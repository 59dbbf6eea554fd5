"""Attention between its projections: scores, softmax, dropout and the weighted sum of values."""

from collections.abc import Callable

from toolkit.estimate.decoder.context import Context
from toolkit.estimate.decoder.rotary import Tables
from toolkit.estimate.family_rules import LayerKind
from toolkit.estimate.sizes.operations import (
    Gradients,
    Kept,
    add,
    bmm,
    dropout,
    fused_attention,
    lowered,
    matmul,
    of_result,
    softmax,
    times,
    times_,
    to,
)
from toolkit.estimate.sizes.selection import bounded, where
from toolkit.estimate.sizes.tape import Tensor
from toolkit.estimate.sizes.views import expand, make_contiguous, permute, transpose, unsqueeze, view


def attend(c: Context, q: Tensor, k: Tensor, v: Tensor, tables: Tables, kind: LayerKind) -> Tensor:
    """q, k, v [b, heads, s, d] -> [b, s, heads * d]."""
    if not c.recomputes_scores:
        return _attend(c, q, k, v, tables, kind)
    mask = tables.sliding_mask if kind == "sliding" else tables.mask
    return _recomputed(c, lambda q, k, v: _attend(c, q, k, v, tables, kind), [q, k, v], [] if mask is None else [mask])


def _recomputed(c: Context, run: Callable[..., Tensor], inputs: list[Tensor], beside: list[Tensor]) -> Tensor:
    """What `run` makes of the inputs: they are kept, with what it needs beside them, and backward runs it again."""
    tape, count = c.tape, len(inputs)
    with tape.no_grad():
        y = run(*inputs)

    def again(*inputs: Tensor) -> Tensor:
        y = run(*inputs)
        c.returned.clear()
        return y

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        return tape.replay(again, kept[:count], g[0])

    tape.record([y], inputs, [*inputs, *beside], backward)
    return y


def _attend(c: Context, q: Tensor, k: Tensor, v: Tensor, tables: Tables, kind: LayerKind) -> Tensor:
    if c.attention == "eager":
        mask = tables.sliding_mask if kind == "sliding" else tables.mask
        match c.style.scores:
            case "bloom":
                return _bloom(c, q, k, v, mask)
            case "falcon" | "falcon_alibi":
                return _falcon(c, q, k, v, mask)
            case "xglm":
                return _xglm(c, q, k, v, mask)
            case "mpt":
                y = _mpt(c, q, k, v, mask)
            case "openai":
                y = _openai(c, q, k, v)
            case "fp32":
                y = _fp32(c, q, k, v, mask)
            case _:
                y = _eager(c, q, k, v, mask)
    else:
        y = _fused(c, q, k, v, tables, kind)
    return view(make_contiguous(transpose(y, 1, 2)), c.b, c.s, -1)


def _fused(c: Context, q: Tensor, k: Tensor, v: Tensor, tables: Tables, kind: LayerKind) -> Tensor:
    if c.attention == "flash":
        return fused_attention(q, k, v)
    mask = tables.sliding_mask if kind == "sliding" else tables.mask
    uneven = c.style.family == "falcon" and k.shape[1] != c.heads  # it does not ask for grouped queries
    # A CPU's kernels drop nothing, and want values as wide as keys.
    if uneven or (c.tape.on_cpu and (_dropped(c) or q.shape[-1] != v.shape[-1])):
        with c.tape.without_autocast():
            return _math(c, lowered(q), lowered(k), lowered(v), mask)
    if mask is None:
        return fused_attention(q, k, v)
    # Kernels with a mask know no groups, and want the mask as numbers: a copy in each layer.
    k, v = _repeated(c, k), _repeated(c, v)
    q, k, v = lowered(q), lowered(k), lowered(v)
    numbers = mask if mask.itemsize == q.itemsize else c.tape.new((c.b, *mask.shape[1:]), q.itemsize)
    return fused_attention(q, k, v, mask=numbers)


def _dropped(c: Context) -> float:
    return 0.0 if c.style.scores == "falcon" else c.style.attention_dropout


def _math(c: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """What scaled_dot_product_attention does where no fused kernel can: all of it in fp32, one step after the other.

    Its variables live until it returns, and it returns the weights too, in the model's dtype.
    """
    itemsize = q.itemsize
    numbers = None if mask is None else c.tape.new((c.b, 1, c.s, c.s), itemsize)
    queries, keys, values = to(q, 4), to(k, 4), to(v, 4)
    scaled = times(queries)
    scores = matmul(scaled, transpose(_broadcast(c, times(keys)), 2, 3))
    weights = dropout(softmax(scores), _dropped(c))
    del scores
    product = matmul(weights, _broadcast(c, values))
    result = to(product, itemsize)
    with c.tape.no_grad():
        returned = to(weights, itemsize)
    del numbers, returned, product, queries, keys, values, scaled
    return result


def _repeated(c: Context, x: Tensor) -> Tensor:
    """Every key-value head once for each of its query heads."""
    groups = c.heads // x.shape[1]
    if groups == 1:
        return x
    b, heads, s, d = x.shape
    return view(expand(unsqueeze(x, 2), b, heads, groups, s, d), b, heads * groups, s, d)


def _eager(c: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    k, v = _repeated(c, k), _repeated(c, v)
    scores = times(matmul(q, transpose(k, 2, 3)))
    if "scores_softcap" in c.style.scales:
        scores = times(of_result(times(scores)))
    if mask is not None:
        scores = add(scores, mask)
    same = c.style.scores == "same_dtype"
    weights = softmax(scores, None if same else 4)
    if c.style.family != "biogpt":  # which leaves them as softmax made them, whatever autocast did
        weights = to(weights, (v if same else q).itemsize)
    del scores
    weights = dropout(weights, c.style.attention_dropout)
    c.returned.append(weights)
    return matmul(weights, v)


def _fp32(c: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """GPT-J, CodeGen, GPT-Neo: queries, keys and scores in fp32."""
    scores = matmul(to(q, 4), transpose(to(k, 4), 2, 3))
    if c.style.family == "gpt_neo":
        # The layer's own causal table, a buffer of the model, beside the mask that all layers share.
        scores = where(scores, c.tape.new((0,), 1))
    else:
        scores = times(scores)
    if mask is not None:
        scores = add(scores, mask)
    weights = to(softmax(scores), v.itemsize)
    del scores
    return matmul(dropout(weights, c.style.attention_dropout), v)


def _falcon(c: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """One key-value head is broadcast to all query heads by the product itself."""
    k, v = _broadcast(c, k), _broadcast(c, v)
    scores = matmul(q, transpose(k, 2, 3))
    if c.style.scores == "falcon_alibi":
        scores = times_(add(to(scores, 4), c.tape.new((c.b, c.heads, 1, c.s), c.itemsize)))
    else:
        scores = times_(scores)
    if mask is not None:
        scores = add(scores, mask)
    weights = softmax(to(scores, c.itemsize))
    del scores
    if c.style.scores == "falcon_alibi":
        weights = dropout(weights, c.style.attention_dropout)
    y = permute(matmul(weights, v), 0, 2, 1, 3)
    return view(y, c.b, c.s, -1)


def _broadcast(c: Context, x: Tensor) -> Tensor:
    return x if x.shape[1] == c.heads else expand(x, x.shape[0], c.heads, *x.shape[2:])


def _bloom(c: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """baddbmm on top of ALiBi; [b * heads, s, d]."""
    scores = view(bmm(q, transpose(k, 1, 2)), c.b, c.heads, c.s, c.s)
    if mask is not None:
        scores = add(scores, mask)
    weights = to(softmax(scores, 4), q.itemsize)
    del scores
    weights = dropout(weights, c.style.attention_dropout)
    y = bmm(view(weights, c.b * c.heads, c.s, c.s), v)
    y = permute(view(y, c.b, c.heads, c.s, -1), 0, 2, 1, 3)
    return view(y, c.b, c.s, -1)


def _mpt(c: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """ALiBi in fp32 on top of the scores, which its code has a name for until it returns."""
    assert mask is not None
    scores = where(add(times(matmul(q, transpose(k, 2, 3))), c.tape.new((1,), 4)), mask)
    weights = dropout(to(softmax(scores), v.itemsize), c.style.attention_dropout)
    y = matmul(weights, v)
    del scores
    return y


def _xglm(c: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """[b * heads, s, d]; scores never below the least number."""
    assert mask is not None
    q, k, v = (view(x, c.b * c.heads, c.s, c.shape.head_dim) for x in (q, k, v))
    scores = bounded(add(view(bmm(q, transpose(k, 1, 2)), c.b, c.heads, c.s, c.s), mask))
    weights = dropout(softmax(view(scores, c.b * c.heads, c.s, c.s)), c.style.attention_dropout)
    del scores
    y = transpose(view(bmm(weights, v), c.b, c.heads, c.s, c.shape.head_dim), 1, 2)
    return view(y, c.b, c.s, -1)


def _openai(c: Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores times a causal table, a buffer of the layer, and a large number where it says none."""
    scores = times(times(matmul(q, transpose(k, 2, 3))))
    scores = add(scores, c.tape.new((1, 1, c.s, c.s), c.itemsize))
    return matmul(dropout(softmax(scores), c.style.attention_dropout), v)
