"""What lies around the layers: embedding and tables in front; final norm, LM head and loss behind."""

from typing import Literal

from toolkit.estimate.decoder.context import Context
from toolkit.estimate.decoder.norm import norm
from toolkit.estimate.decoder.rotary import Tables, rotated_features
from toolkit.estimate.sizes.operations import (
    Gradients,
    Kept,
    add,
    dropout,
    elementwise,
    linear,
    of_result,
    times,
    to,
)
from toolkit.estimate.sizes.tape import Tensor
from toolkit.estimate.sizes.views import clone, view

Loss = Literal["toolkit", "stock"]
_INT64 = 8


def tables(c: Context) -> Tables:
    """Rotary tables and masks: made once a micro-batch, whatever the number of layers."""
    style, d = c.style, rotated_features(c)
    itemsize = 4 if style.rotary in ("fp32_tables", "pairs_fp32_tables") else c.itemsize
    # A rotary table for each kind of layer, all of them made.
    kinds = len(set(style.kinds)) if style.family in ("gemma3_text", "olmo3") else 1
    has_tables = style.rotary not in ("none", "interleaved") or style.family == "falcon"
    samples = c.b if c.isolates_documents else 1  # whose positions differ
    cos, sin = (c.shared((kinds * samples, c.s, d), itemsize) if has_tables else None for _ in range(2))
    mask, sliding = _masks(c)
    # A learned table keeps the positions itself; OPT makes a mask of ones and positions for each sample.
    none = style.family in ("mpt", "xglm") or (c.shape.learned_positions and style.family != "biogpt")
    rows = 2 * c.b - 1 if style.family == "opt" else 0 if none else samples
    if style.family == "mpt":  # in fp32, for as many positions as the config names
        positions = c.shared((c.shape.heads, c.shape.positions or c.s), 4)
    else:
        positions = c.shared((rows, c.s), _INT64)
    return Tables(positions=positions, cos=cos, sin=sin, mask=mask, sliding_mask=sliding)


def _masks(c: Context) -> tuple[Tensor | None, Tensor | None]:
    """The causal mask and the one with a window, where they are made; flash attention needs none.

    Eager attention and ALiBi add a mask of numbers, each sample's own. A fused kernel gets one of booleans: with a
    window, with documents that do not see each other, and in Falcon always.
    """
    style = c.style
    if c.attention == "flash" or style.scores == "openai":
        return None, None
    if style.scores == "mpt":
        return c.shared((c.b, 1, c.s, c.s), 1), None
    if c.attention == "eager" or style.scores == "falcon_alibi":
        shape = c.b, (c.shape.heads if style.scores == "falcon_alibi" else 1), c.s, c.s
        whole = None if set(style.kinds) == {"sliding"} else c.shared(shape)
        return whole, c.shared(shape) if "sliding" in style.kinds else None
    shape = (c.b if c.isolates_documents else 1), 1, c.s, c.s
    slides = style.window is not None and c.s >= style.window
    whole = c.shared(shape, 1) if c.isolates_documents or style.family == "falcon" else None
    sliding = c.shared(shape, 1) if "sliding" in style.kinds and (slides or c.isolates_documents) else None
    return whole, sliding


def embed(c: Context) -> Tensor:
    """Token ids [b, s] -> hidden state [b, s, h], cut along the positions where sequence parallelism is on."""
    style = c.style
    x = _looked_up(c, c.tape.new((c.b, c.s), _INT64))
    if "embedding" in style.scales:
        x = times(x)
    if c.shape.embed_dim != c.shape.hidden:
        x = linear(x, c.shape.hidden, bias=False)
    if c.shape.learned_positions:
        x = add(x, _positions(c))
    if style.family == "xglm":
        x = add(x, c.tape.new((1, c.s, c.shape.hidden), c.itemsize))
    if style.embedding_norm:
        x = norm(c, x)
    x = dropout(x, style.embedding_dropout)
    return c.scatter_positions(x) if c.sequence_parallel else x


def _positions(c: Context) -> Tensor:
    """One row of the table for each position, the same for all samples."""
    rows = (c.shape.positions or c.s, c.shape.hidden)
    found = c.tape.new((1, c.s, c.shape.hidden), c.itemsize)
    c.tape.record(
        [found],
        [c.parameter(*rows)],
        [c.tape.new((1, c.s), _INT64)],
        lambda g, kept: [c.tape.new(rows, c.itemsize)],
    )
    return found


def _looked_up(c: Context, ids: Tensor) -> Tensor:
    """Rows of the token embedding, zeros for those of other ranks; the gradient of the table is dense."""
    rows = (-(-c.shape.vocab // c.tp), c.shape.embed_dim)
    own = ids if c.tp == 1 else c.tape.new((c.b, c.s), _INT64)
    found = c.tape.new((c.b, c.s, c.shape.embed_dim), c.itemsize)
    c.tape.record([found], [c.parameter(*rows)], [own], lambda g, kept: [c.tape.new(rows, c.itemsize)])
    if c.tp == 1:
        return found
    masked, elsewhere = elementwise(found), c.tape.new((c.b, c.s, 1), 1)
    c.tape.record([masked], [found], [elsewhere], lambda g, kept: [None if g[0] is None else elementwise(g[0])])
    del found
    return c.summed(masked)


def head(c: Context, x: Tensor) -> Tensor:
    """Hidden state -> this rank's logits [b, s, v/t]."""
    style = c.style
    if c.sequence_parallel:
        x = c.gather_positions(x)
    if style.is_final_norm:
        with c.tape.part("norm"):
            x = norm(c, x)
    with c.tape.part("logits"):
        if "head_input" in style.scales:
            x = times(x)
        if c.shape.embed_dim != c.shape.hidden:
            x = linear(x, c.shape.embed_dim, bias=False)
        y = linear(c.copied(x), -(-c.shape.vocab // c.tp), bias=False)
        del x
        if "logits" in style.scales:
            y = times(y)
        if "logits_softcap" in style.scales:
            y = times(of_result(times(y)))
        return y


def loss(c: Context, logits: Tensor) -> Tensor:
    """The sum of token losses, a scalar; from fp32 logits, as Hugging Face's loss and the toolkit's own."""
    with c.tape.part("logits"):
        flat = view(logits, -1, logits.shape[-1])
        del logits
        return _split_loss(c, flat) if c.tp > 1 else _whole_loss(c, to(flat, 4))


def _whole_loss(c: Context, scores: Tensor) -> Tensor:
    """log_softmax keeps its result, and the negative log-likelihood keeps the same and the labels."""
    tape, n = c.tape, scores.shape[0]
    logs = elementwise(scores)

    def log_softmax(g: Gradients, kept: Kept) -> list[Tensor | None]:
        assert g[0] is not None
        return [elementwise(kept[0])]

    tape.record([logs], [scores], [logs], log_softmax)
    del scores
    labels = tape.new((n,), _INT64)
    result = tape.new((), 4)

    def nll(g: Gradients, kept: Kept) -> list[Tensor | None]:
        return [tape.new(kept[0].shape, 4)]

    tape.record([result], [logs], [logs, labels], nll)
    return result


def _split_loss(c: Context, flat: Tensor) -> Tensor:
    """The vocabulary-parallel loss: keeps the softmax of this rank's columns in fp32 and four vectors."""
    tape, n, itemsize = c.tape, flat.shape[0], flat.itemsize
    rows = flat.shape[1]
    with tape.no_grad():
        scores = to(flat, 4)
        pads = rows * c.tp != c.shape.vocab
        if pads and scores is flat:
            scores = clone(scores)
        softmax = elementwise(scores)
        here = [tape.new((n // c.tp,), _INT64) for _ in range(2)]  # of the targets that are this rank's, on average
        counted = tape.new((n,), 1)
        del scores
    result = tape.new((), 4)

    def backward(g: Gradients, kept: Kept) -> list[Tensor | None]:
        gradient = clone(kept[0])
        return [to(gradient, itemsize)]

    tape.record([result], [flat], [softmax, *here, counted], backward)
    return result
