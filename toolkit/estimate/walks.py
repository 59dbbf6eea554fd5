"""Walks over the stretches of a model on a tape: what each keeps for its backward pass, and its worst moments.

Each is walked once for all layouts that do not differ in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from toolkit.estimate.decoder import ends
from toolkit.estimate.decoder.context import Attention, Context
from toolkit.estimate.decoder.ends import Loss
from toolkit.estimate.decoder.layer import layer
from toolkit.estimate.family_rules import LayerKind
from toolkit.estimate.sizes.tape import Tape
from toolkit.estimate.style import LayerStyle
from toolkit.shape import ModelShape

_KINDS = ("input", "norm", "attention", "mlp", "residual")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One stretch of the model: kept for backward by kind, and the most that is live beyond it while it runs."""

    kinds: Mapping[str, int]
    shared: Mapping[str, int] = field(default_factory=dict)
    """Of tables that other layers keep too, by name."""
    recomputation_peak: int = 0
    """The most in forward, up to the last operation that keeps something."""
    outputs: int = 0
    """Of the head: live when the logits are there."""
    forward_peak: int
    backward_peak: int

    @property
    def kept(self) -> int:
        """Their sum."""
        return sum(self.kinds.values())


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a walk depends on. Layouts that differ in nothing of it share the walk."""

    shape: ModelShape
    style: LayerStyle
    samples: int
    seq_len: int
    itemsize: int
    autocast: bool
    attention: Attention
    tp: int
    sequence_parallel: bool
    isolates_documents: bool
    recomputes_scores: bool
    on_cpu: bool

    def context(self) -> Context:
        """For one walk."""
        return Context(
            tape=Tape(on_cpu=self.on_cpu, autocast=self.itemsize if self.autocast else 0),
            shape=self.shape,
            style=self.style,
            b=self.samples,
            s=self.seq_len,
            itemsize=self.itemsize,
            attention=self.attention,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            isolates_documents=self.isolates_documents,
            recomputes_scores=self.recomputes_scores,
        )


@lru_cache(maxsize=4096)
def walk_layer(setting: Setting, kind: LayerKind) -> Part:
    """A decoder layer, forward and backward."""
    c = setting.context()
    tape = c.tape
    tables = ends.tables(c)
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
    return Part(
        kinds=kinds,
        shared=shared,
        forward_peak=forward_peak,
        recomputation_peak=recomputation_peak,
        backward_peak=tape.peak - outside,
    )


@lru_cache(maxsize=4096)
def walk_without_keeping(setting: Setting, kind: LayerKind) -> int:
    """The most that lives while a layer runs and keeps nothing."""
    c = setting.context()
    tape = c.tape
    tables = ends.tables(c)
    x = tape.leaf((c.b, c.local_s, c.shape.hidden), c.itemsize)
    outside = tape.live - x.storage.bytes
    tape.peak = 0
    with tape.no_grad():
        layer(c, x, tables, kind)
    return tape.peak - outside


@lru_cache(maxsize=4096)
def walk_embedding(setting: Setting) -> Part:
    """From tokens to the first hidden state."""
    c = setting.context()
    tape = c.tape
    with tape.part("embedding"):
        output = [ends.embed(c)]
    kinds, forward_peak = tape.kept_bytes(), tape.peak
    tape.peak = 0
    tape.backward(output)
    return Part(kinds=kinds, forward_peak=forward_peak, backward_peak=tape.peak)


@lru_cache(maxsize=4096)
def walk_head(setting: Setting, loss: Loss) -> Part:
    """Final norm, LM head and loss."""
    c = setting.context()
    tape = c.tape
    x = tape.leaf((c.b, c.local_s, c.shape.hidden), c.itemsize)
    tape.kinds[x.storage] = "norm"
    logits = ends.head(c, x)
    outputs = tape.live - x.storage.bytes
    del x
    output = [ends.loss(c, logits)]
    held = logits if loss == "stock" else None  # Hugging Face's output object, which the caller holds
    del logits
    kinds, forward_peak = tape.kept_bytes(), tape.peak
    tape.peak = 0
    tape.backward(output)
    del held
    return Part(kinds=kinds, outputs=outputs, forward_peak=forward_peak, backward_peak=tape.peak)


@lru_cache(maxsize=4096)
def table_bytes(setting: Setting) -> int:
    """All of them: a recomputed layer needs them again."""
    c = setting.context()
    tables = ends.tables(c)
    found = c.tape.live
    del tables
    return found
