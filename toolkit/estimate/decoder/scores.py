"""Attention between its projections: scores, softmax, dropout and the weighted sum of values."""

from collections.abc import Callable

from toolkit.estimate.decoder.context import Context
from toolkit.estimate.decoder.rotary import Tables
from toolkit.estimate.sizes import operations as op
from toolkit.estimate.sizes.tape import Gradients, Kept, Tensor
from toolkit.estimate.sizes.views import expand, make_contiguous, permute, transpose, unsqueeze, view
from toolkit.models.families.layer_rules import LayerKind


def attend(c: Context, q: Tensor, k: Tensor, v: Tensor, tables: Tables, kind: LayerKind) -> Tensor:
    """q, k, v [b, heads, s, d] -> [b, s, heads * d]."""
    if not c.recomputes_scores:
        return _attend(c, q, k, v, tables, kind)
    mask = tables.sliding_mask if kind == "sliding" else tables.mask
    return _recomputed(c, lambda q, k, v: _attend(c, q, k, v, tables, kind), [q, k, v], [] if mask is None else [mask])


def _recomputed(c: Context, run: Callable[..., Tensor], inputs: list[Tensor], beside: list[Tensor]) -> Tensor:
    """Checkpoint `run`: keep its inputs and what it needs beside them; backward runs it again."""
    tape, count = c.tape, len(inputs)
    with tape.no_grad():
        y = run(*inputs)

    def again(*inputs: Tensor) -> Tensor:
        y = run(*inputs)
        c.returned.clear()
        return y

    def backward(g: Tensor, kept: Kept) -> Gradients:
        return tape.replay(again, kept[:count], g)

    return tape.record(y, inputs, [*inputs, *beside], backward)


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
            case "fp32" | "fp32_causal_table":
                y = _fp32(c, q, k, v, mask)
            case _:
                y = _eager(c, q, k, v, mask)
    else:
        y = _fused(c, q, k, v, tables, kind)
    return view(make_contiguous(transpose(y, 1, 2)), c.b, c.s, -1)


def _fused(c: Context, q: Tensor, k: Tensor, v: Tensor, tables: Tables, kind: LayerKind) -> Tensor:
    if c.attention == "flash":
        return op.fused_attention(q, k, v)
    mask = tables.sliding_mask if kind == "sliding" else tables.mask
    has_single_kv_head = (
        c.style.scores in ("falcon", "falcon_alibi") and k.shape[1] != c.heads
    )  # Falcon does not enable grouped queries
    # A CPU's kernels have no op.dropout, and need values as wide as keys.
    if has_single_kv_head or (c.tape.on_cpu and (_dropped(c) or q.shape[-1] != v.shape[-1])):
        with c.tape.without_autocast():
            return _math(c, op.lowered(q), op.lowered(k), op.lowered(v), mask)
    if mask is None:
        return op.fused_attention(q, k, v)
    # Kernels with a mask do not support groups, and need the mask as numbers: a copy in each layer.
    k, v = _repeated(c, k), _repeated(c, v)
    q, k, v = op.lowered(q), op.lowered(k), op.lowered(v)
    numbers = mask if mask.itemsize == q.itemsize else c.tape.new((c.b, *mask.shape[1:]), q.itemsize)
    return op.fused_attention(q, k, v, mask=numbers)


def _dropped(c: Context) -> float:
    return 0.0 if c.style.scores == "falcon" else c.style.attention_dropout


def _math(c: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """scaled_dot_product_attention without a fused kernel: unfused, in fp32.

    Its variables live until it returns, and it returns the weights too, in the model's dtype.
    """
    itemsize = q.itemsize
    numbers = None if mask is None else c.tape.new((c.b, 1, c.s, c.s), itemsize)
    queries, keys, values = op.to(q, 4), op.to(k, 4), op.to(v, 4)
    scaled = op.times(queries)
    scores = op.matmul(scaled, transpose(_broadcast(c, op.times(keys)), 2, 3))
    weights = op.dropout(op.softmax(scores), _dropped(c))
    del scores
    product = op.matmul(weights, _broadcast(c, values))
    result = op.to(product, itemsize)
    with c.tape.no_grad():
        returned = op.to(weights, itemsize)
    del numbers, returned, product, queries, keys, values, scaled
    return result


def _repeated(c: Context, x: Tensor) -> Tensor:
    """Repeat every key-value head for each of its query heads."""
    groups = c.heads // x.shape[1]
    if groups == 1:
        return x
    b, heads, s, d = x.shape
    return view(expand(unsqueeze(x, 2), b, heads, groups, s, d), b, heads * groups, s, d)


def _eager(c: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    k, v = _repeated(c, k), _repeated(c, v)
    scores = op.times(op.matmul(q, transpose(k, 2, 3)))
    if "scores_softcap" in c.style.scales:
        scores = op.times(op.of_result(op.times(scores)))
    if mask is not None:
        scores = op.add(scores, mask)
    same = c.style.scores in ("same_dtype", "softmax_dtype")
    weights = op.softmax(scores, None if same else 4)
    if c.style.scores != "softmax_dtype":  # which keeps the op.softmax's dtype under autocast too
        weights = op.to(weights, (v if same else q).itemsize)
    del scores
    weights = op.dropout(weights, c.style.attention_dropout)
    c.returned.append(weights)
    return op.matmul(weights, v)


def _fp32(c: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """GPT-J, CodeGen, GPT-Neo: queries, keys and scores in fp32."""
    scores = op.matmul(op.to(q, 4), transpose(op.to(k, 4), 2, 3))
    if c.style.scores == "fp32_causal_table":
        # The layer's own causal table is a buffer of the model, beside the mask that all layers share.
        scores = op.where(scores, c.tape.new((0,), 1))
    else:
        scores = op.times(scores)
    if mask is not None:
        scores = op.add(scores, mask)
    weights = op.to(op.softmax(scores), v.itemsize)
    del scores
    return op.matmul(op.dropout(weights, c.style.attention_dropout), v)


def _falcon(c: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """One key-value head is broadcast op.to all query heads by the product itself."""
    k, v = _broadcast(c, k), _broadcast(c, v)
    scores = op.matmul(q, transpose(k, 2, 3))
    if c.style.scores == "falcon_alibi":
        scores = op.times_(op.add(op.to(scores, 4), c.tape.new((c.b, c.heads, 1, c.s), c.itemsize)))
    else:
        scores = op.times_(scores)
    if mask is not None:
        scores = op.add(scores, mask)
    weights = op.softmax(op.to(scores, c.itemsize))
    del scores
    if c.style.scores == "falcon_alibi":
        weights = op.dropout(weights, c.style.attention_dropout)
    y = permute(op.matmul(weights, v), 0, 2, 1, 3)
    return view(y, c.b, c.s, -1)


def _broadcast(c: Context, x: Tensor) -> Tensor:
    return x if x.shape[1] == c.heads else expand(x, x.shape[0], c.heads, *x.shape[2:])


def _bloom(c: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """baddbmm on top of ALiBi; [b * heads, s, d]."""
    scores = view(op.bmm(q, transpose(k, 1, 2)), c.b, c.heads, c.s, c.s)
    if mask is not None:
        scores = op.add(scores, mask)
    weights = op.to(op.softmax(scores, 4), q.itemsize)
    del scores
    weights = op.dropout(weights, c.style.attention_dropout)
    y = op.bmm(view(weights, c.b * c.heads, c.s, c.s), v)
    y = permute(view(y, c.b, c.heads, c.s, -1), 0, 2, 1, 3)
    return view(y, c.b, c.s, -1)


def _mpt(c: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """ALiBi in fp32 on top of the scores, which a variable keeps until it returns."""
    assert mask is not None
    scores = op.where(op.add(op.times(op.matmul(q, transpose(k, 2, 3))), c.tape.new((1,), 4)), mask)
    weights = op.dropout(op.to(op.softmax(scores), v.itemsize), c.style.attention_dropout)
    y = op.matmul(weights, v)
    del scores
    return y


def _xglm(c: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """[b * heads, s, d]; scores are clamped op.to the lowest number."""
    assert mask is not None
    q, k, v = (view(x, c.b * c.heads, c.s, c.shape.head_dim) for x in (q, k, v))
    scores = op.bounded(op.add(view(op.bmm(q, transpose(k, 1, 2)), c.b, c.heads, c.s, c.s), mask))
    weights = op.dropout(op.softmax(view(scores, c.b * c.heads, c.s, c.s)), c.style.attention_dropout)
    del scores
    y = transpose(view(op.bmm(weights, v), c.b, c.heads, c.s, c.shape.head_dim), 1, 2)
    return view(y, c.b, c.s, -1)


def _openai(c: Context, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores op.times a causal table (a buffer of the layer), plus a large negative number outside it."""
    scores = op.times(op.times(op.matmul(q, transpose(k, 2, 3))))
    scores = op.add(scores, c.tape.new((1, 1, c.s, c.s), c.itemsize))
    return op.matmul(op.dropout(op.softmax(scores), c.style.attention_dropout), v)
