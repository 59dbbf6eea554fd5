"""The sections of a model on a tape: what each keeps for its backward pass, and its peaks.

In front of the layers are embedding and tables; behind them final norm, LM head and loss. Layouts that do not differ in
a section share its walk.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from toolkit.estimate.decoder.context import Context, WalkSettings
from toolkit.estimate.decoder.layer import layer
from toolkit.estimate.decoder.mlp import norm
from toolkit.estimate.decoder.rotary import Tables
from toolkit.estimate.sizes import operations as op
from toolkit.estimate.sizes.tape import Tape, Tensor
from toolkit.estimate.sizes.views import clone, view
from toolkit.models.families.layer_rules import LayerKind

Loss = Literal["toolkit", "stock"]
_INT64 = 8


def make_tables(c: Context) -> Tables:
    """Make rotary tables and masks, once per micro-batch for all layers."""
    style, d = c.style, c.style.rotated_features
    itemsize = 4 if style.rotary in ("fp32_tables", "pairs_fp32_tables") else c.itemsize
    # A rotary table for each kind of layer, all of them made.
    kinds = len(set(style.kinds)) if style.rules.rotary_per_kind else 1
    has_tables = style.rotary not in ("none", "interleaved") or style.scores == "falcon_alibi"
    samples = c.b if c.isolates_documents else 1  # whose positions differ
    cos, sin = (c.shared((kinds * samples, c.s, d), itemsize) if has_tables else None for _ in range(2))
    mask, sliding = _masks(c)
    # OPT makes a mask of ones and position ids for each sample.
    if style.rules.positions == "alibi":  # in fp32, for as many positions as the config names
        positions = c.shared((c.shape.heads, c.shape.positions or c.s), 4)
    else:
        rows = {"mask": 2 * c.b - 1, "none": 0, "shared": samples}[style.rules.positions]
        positions = c.shared((rows, c.s), _INT64)
    return Tables(positions=positions, cos=cos, sin=sin, mask=mask, sliding_mask=sliding)


def _masks(c: Context) -> tuple[Tensor | None, Tensor | None]:
    """Make the causal mask and the one with a window, if needed; flash attention needs none.

    Eager attention and ALiBi op.add a mask of numbers, each sample's own. A fused kernel gets one of booleans: with a
    window, with separate documents in a sample, and in Falcon always.
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
    whole = c.shared(shape, 1) if c.isolates_documents or style.scores == "falcon" else None
    sliding = c.shared(shape, 1) if "sliding" in style.kinds and (slides or c.isolates_documents) else None
    return whole, sliding


def embed(c: Context) -> Tensor:
    """Token ids [b, s] -> hidden state [b, s, h], this rank's positions if sequence parallelism is on."""
    style = c.style
    x = _looked_up(c, c.tape.new((c.b, c.s), _INT64))
    if "embedding" in style.scales:
        x = op.times(x)
    if c.shape.embed_dim != c.shape.hidden:
        x = op.linear(x, c.shape.hidden, bias=False)
    if c.shape.learned_positions:
        x = op.add(x, _positions(c))
    if style.rules.sinusoidal_positions:
        x = op.add(x, c.tape.new((1, c.s, c.shape.hidden), c.itemsize))
    if style.rules.embedding_norm:
        x = norm(c, x)
    x = op.dropout(x, style.embedding_dropout)
    return c.scatter(x, 1) if c.sequence_parallel else x


def _positions(c: Context) -> Tensor:
    """Look up one row of the table for each position, the same for all samples."""
    rows = (c.shape.positions or c.s, c.shape.hidden)
    found = c.tape.new((1, c.s, c.shape.hidden), c.itemsize)
    c.tape.record(
        found, [c.parameter(*rows)], [c.tape.new((1, c.s), _INT64)], lambda g, kept: [c.tape.new(rows, c.itemsize)]
    )
    return found


def _looked_up(c: Context, ids: Tensor) -> Tensor:
    """Look up rows of the token embedding, zeros for those of other ranks; the table's gradient is dense."""
    rows = (-(-c.shape.vocab // c.tp), c.shape.embed_dim)
    own = ids if c.tp == 1 else c.tape.new((c.b, c.s), _INT64)
    found = c.tape.new((c.b, c.s, c.shape.embed_dim), c.itemsize)
    c.tape.record(found, [c.parameter(*rows)], [own], lambda g, kept: [c.tape.new(rows, c.itemsize)])
    if c.tp == 1:
        return found
    masked, elsewhere = op.elementwise(found), c.tape.new((c.b, c.s, 1), 1)
    c.tape.record(masked, [found], [elsewhere], lambda g, kept: [op.elementwise(g)])
    del found
    return c.summed(masked)


def head(c: Context, x: Tensor) -> Tensor:
    """Hidden state -> this rank's logits [b, s, v/t]."""
    style = c.style
    if c.sequence_parallel:
        x = c.gather(x, 1)
    if style.is_final_norm:
        with c.tape.part("norm"):
            x = norm(c, x)
    with c.tape.part("logits"):
        if "head_input" in style.scales:
            x = op.times(x)
        if c.shape.embed_dim != c.shape.hidden:
            x = op.linear(x, c.shape.embed_dim, bias=False)
        y = op.linear(c.copied(x), -(-c.shape.vocab // c.tp), bias=False)
        del x
        if "logits" in style.scales:
            y = op.times(y)
        if "logits_softcap" in style.scales:
            y = op.times(op.of_result(op.times(y)))
        return y


def summed_losses(c: Context, logits: Tensor) -> Tensor:
    """The sum of token losses, a scalar; from fp32 logits, as Hugging Face's loss and the toolkit's own."""
    with c.tape.part("logits"):
        flat = view(logits, -1, logits.shape[-1])
        del logits
        return _split_loss(c, flat) if c.tp > 1 else _whole_loss(c, op.to(flat, 4))


def _whole_loss(c: Context, scores: Tensor) -> Tensor:
    """log_softmax keeps its result, and the negative log-likelihood keeps the same and the labels."""
    tape, n = c.tape, scores.shape[0]
    logs = op.elementwise(scores)
    tape.record(logs, [scores], [logs], lambda g, kept: [op.elementwise(kept[0])])
    del scores
    labels = tape.new((n,), _INT64)
    result = tape.new((), 4)
    return tape.record(result, [logs], [logs, labels], lambda g, kept: [tape.new(kept[0].shape, 4)])


def _split_loss(c: Context, flat: Tensor) -> Tensor:
    """The vocabulary-parallel loss: keeps the softmax of this rank's columns in fp32 and four vectors."""
    tape, n, itemsize = c.tape, flat.shape[0], flat.itemsize
    rows = flat.shape[1]
    with tape.no_grad():
        scores = op.to(flat, 4)
        pads = rows * c.tp != c.shape.vocab
        if pads and scores is flat:
            scores = clone(scores)
        softmax = op.elementwise(scores)
        here = [tape.new((n // c.tp,), _INT64) for _ in range(2)]  # of the targets that are this rank's, on average
        counted = tape.new((n,), 1)
        del scores
    result = tape.new((), 4)
    return tape.record(result, [flat], [softmax, *here, counted], lambda g, kept: [op.to(clone(kept[0]), itemsize)])


_KINDS = ("input", "norm", "attention", "mlp", "residual")


@dataclass(frozen=True, kw_only=True)
class SectionMemory:
    """One section of the model: what it keeps for backward by kind, and its peaks while it runs."""

    kinds: Mapping[str, int]
    shared: Mapping[str, int] = field(default_factory=dict)
    """Bytes of tables that all layers share, by name."""
    recomputation_peak: int = 0
    """Peak of the forward pass up op.to the last operation that keeps something."""
    outputs: int = 0
    """Of the head: what is live when the logits exist."""
    forward_peak: int
    backward_peak: int

    @property
    def kept(self) -> int:
        return sum(self.kinds.values())


def _context(settings: WalkSettings) -> Context:
    tape = Tape(on_cpu=settings.on_cpu, autocast=settings.itemsize if settings.autocast else 0)
    return Context(tape=tape, **vars(settings))


@lru_cache(maxsize=4096)
def walk_layer(settings: WalkSettings, kind: LayerKind) -> SectionMemory:
    """Walk a decoder layer, forward and backward."""
    c = _context(settings)
    tape = c.tape
    tables = make_tables(c)
    x = tape.leaf((c.b, c.local_s, c.shape.hidden), c.itemsize)
    tape.kinds[x.storage] = "input"
    outside = tape.live - x.storage.bytes
    tape.peak = 0
    output = [layer(c, x, tables, kind)]
    del x
    kinds, kept = tape.kept_bytes(), tape.kept_storages()
    kinds = {kind: kinds[kind] for kind in _KINDS if kind in kinds}
    shared = {name: table.storage.bytes for name, table in vars(tables).items() if table and table.storage in kept}
    forward_peak, recomputation_peak = tape.peak - outside, tape.peak_until_kept - outside
    tape.peak = 0
    tape.backward(output)
    return SectionMemory(
        kinds=kinds,
        shared=shared,
        forward_peak=forward_peak,
        recomputation_peak=recomputation_peak,
        backward_peak=tape.peak - outside,
    )


@lru_cache(maxsize=4096)
def walk_without_keeping(settings: WalkSettings, kind: LayerKind) -> int:
    """Return the peak of a layer that keeps nothing for backward."""
    c = _context(settings)
    tape = c.tape
    tables = make_tables(c)
    x = tape.leaf((c.b, c.local_s, c.shape.hidden), c.itemsize)
    outside = tape.live - x.storage.bytes
    tape.peak = 0
    with tape.no_grad():
        layer(c, x, tables, kind)
    return tape.peak - outside


@lru_cache(maxsize=4096)
def walk_embedding(settings: WalkSettings) -> SectionMemory:
    """Walk from token ids op.to the first hidden state."""
    c = _context(settings)
    tape = c.tape
    with tape.part("embedding"):
        output = [embed(c)]
    kinds, forward_peak = tape.kept_bytes(), tape.peak
    tape.peak = 0
    tape.backward(output)
    return SectionMemory(kinds=kinds, forward_peak=forward_peak, backward_peak=tape.peak)


@lru_cache(maxsize=4096)
def walk_head(settings: WalkSettings, loss: Loss) -> SectionMemory:
    """Walk final norm, LM head and loss."""
    c = _context(settings)
    tape = c.tape
    x = tape.leaf((c.b, c.local_s, c.shape.hidden), c.itemsize)
    tape.kinds[x.storage] = "norm"
    logits = head(c, x)
    outputs = tape.live - x.storage.bytes
    del x
    output = [summed_losses(c, logits)]
    output_object = logits if loss == "stock" else None  # Hugging Face's, which the caller keeps
    del logits
    kinds, forward_peak = tape.kept_bytes(), tape.peak
    tape.peak = 0
    tape.backward(output)
    del output_object
    return SectionMemory(kinds=kinds, outputs=outputs, forward_peak=forward_peak, backward_peak=tape.peak)


@lru_cache(maxsize=4096)
def table_bytes(settings: WalkSettings) -> int:
    """Bytes of all rotary tables and masks: a recomputed layer needs them again."""
    c = _context(settings)
    tables = make_tables(c)
    found = c.tape.live
    del tables
    return found
