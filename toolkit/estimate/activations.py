"""Activations: what a micro-batch keeps in memory for its backward pass, and the worst moment of that pass.

The operations of a decoder layer are run on tensors without values (`toolkit.estimate.sizes`), so bytes follow from
what each operation keeps; nothing is fitted. docs/memory.md has the formulas and the measured errors.

Of a pipeline stage also the micro-batches in flight, and the buffers of DeepSpeed's engine. The schedule is 1F1B
(Narayanan et al. 2019, "PipeDream"; without flushes inside a step, Narayanan et al. 2021, section 2.2): a stage runs as
many forward passes ahead as there are stages from it to the end, then one backward for each forward.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from toolkit.errors import LayoutError, ModelError
from toolkit.estimate.decoder import sections
from toolkit.estimate.decoder.context import WalkSettings
from toolkit.estimate.parameters import RankParameters
from toolkit.estimate.style import LayerStyle
from toolkit.models.families.layer_rules import LayerKind

Recomputation = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class ActivationBreakdown:
    """Bytes of one micro-batch on one rank."""

    layer_kinds: Mapping[str, int]
    """Kept by the layer that keeps most: input, norm, attention, mlp, residual."""
    pattern: tuple[int, ...] = field(repr=False)
    """Kept by each kind of layer, in the order in which they repeat."""
    embedding: int
    shared: int
    """Rotary tables and masks, which all layers share."""
    head: int
    """Final norm, logits, loss."""
    outputs: int
    """Live at the head when the model returns its logits and the loss has not begun."""
    logits: int
    """The part of `head` and `head_extra` that is logits and loss."""
    boundary: int
    """The hidden state between two layers, and between two stages."""
    logits_output: int
    """The logits as the model returns them, in its dtype: a pipeline's last stage keeps them."""
    tied_gradient: int
    """The embedding's gradient if the LM head is tied to it: the head's part of it waits for the embedding's."""
    pattern_extra: tuple[tuple[int, int], ...] = field(repr=False)
    """The most that is live beyond that in a layer of each kind, in its forward and its backward pass."""
    head_extra: int
    embedding_extra: int

    @property
    def layer(self) -> int:
        return sum(self.layer_kinds.values())

    def kept(self, *, layers: int | range, first: bool = True, last: bool = True) -> int:
        """Bytes that one micro-batch keeps on a stage with these layers."""
        indices = _range(layers)
        if len(self.pattern) == 1:
            inside = len(indices) * self.pattern[0]
        else:
            inside = sum(self.pattern[i % len(self.pattern)] for i in indices)
        return inside + self.shared + (self.embedding if first else self.boundary) + (self.head if last else 0)

    def forward_peak(self, *, layers: int | range, first: bool = True, last: bool = True) -> int:
        """The most of one micro-batch that is live before the loss."""
        trunk = self.kept(layers=layers, first=first, last=False)
        return trunk + max(*(forward for forward, _ in self.pattern_extra), self.outputs if last else 0)

    def worst_moment(
        self, *, layers: int | range, first: bool = True, last: bool = True, in_flight: int = 1, gradients_kept: int = 0
    ) -> tuple[int, int]:
        """The most that is live at once on a stage, and its part that is gradients of weights.

        `in_flight`: micro-batches whose activations are kept. `gradients_kept`: bytes of one layer's gradients, if
        this backward pass allocates them; each finished layer adds them.
        """
        indices = _range(layers)
        count = len(indices)
        trunk = self.kept(layers=layers, first=first, last=False)
        whole = trunk + (self.head if last else 0)
        # autograd accumulates a tied weight's gradients together: the head's is live until the embedding's exists.
        waiting = self.tied_gradient if first and last else 0
        moments = [(trunk + extra, 0) for extra in self._extras(indices, waiting)]
        if last:
            moments.append((whole + self.head_extra, 0))
        if count:
            lowest = self.kept(layers=indices[:1], first=first, last=False) + waiting
            lowest += self.pattern_extra[indices[0] % len(self.pattern)][1]
            moments.append((lowest, (count - 1) * gradients_kept))
        if first:
            # The head's gradient, the embedding's and their sum; embedding_extra contains one of them.
            moments.append((self.embedding + self.embedding_extra + 2 * waiting, count * gradients_kept))
        live, gradients = max(moments, key=sum)
        return (in_flight - 1) * whole + live + gradients, gradients

    def _extras(self, layers: range, waiting: int) -> list[int]:
        """What is live beyond all kept bytes, in the last layer of each kind: layers behind it keep nothing."""
        if len(self.pattern_extra) == 1:
            forward, backward = self.pattern_extra[0]
            return [max(forward, backward + waiting)]
        kinds = len(set(self.pattern_extra))
        found: list[int] = []
        seen: set[tuple[int, int]] = set()
        behind = 0
        for index in reversed(layers):
            kind = index % len(self.pattern)
            forward, backward = extra = self.pattern_extra[kind]
            if extra not in seen:
                seen.add(extra)
                found.append(max(forward, backward + waiting) - behind)
                if len(seen) == kinds:
                    break
            behind += self.pattern[kind]
        return found or [0]


def _range(layers: int | range) -> range:
    return range(layers) if isinstance(layers, int) else layers


def _recomputed(
    found: ActivationBreakdown, settings: WalkSettings, parts: Mapping[LayerKind, sections.SectionMemory]
) -> ActivationBreakdown:
    """Return `found` under full recomputation, where a layer keeps only its input.

    The backward pass runs the layer again, beside the gradient of its output, which is as large as the input that the
    recomputation's peak includes.
    """
    extras = {
        kind: (
            sections.walk_without_keeping(settings, kind) - found.boundary,
            max(part.backward_peak - part.kinds.get("input", 0), part.recomputation_peak),
        )
        for kind, part in parts.items()
    }
    return replace(
        found,
        layer_kinds=MappingProxyType({"input": found.boundary}),
        pattern=(found.boundary,) * len(settings.style.kinds),
        shared=sections.table_bytes(settings),
        pattern_extra=tuple(extras[kind] for kind in settings.style.kinds),
    )


@lru_cache(maxsize=4096)
def activations(
    settings: WalkSettings, *, recompute: Recomputation = "none", loss: sections.Loss = "toolkit"
) -> ActivationBreakdown:
    """Return the bytes of a micro-batch. Raises ModelError or LayoutError for what cannot be computed.

    `loss`: the toolkit's own, or "stock", where Hugging Face's output object keeps the logits meanwhile.
    """
    _check(settings)
    settings = replace(settings, recomputes_scores=recompute == "selective")
    shape, style, tp = settings.shape, settings.style, settings.tp
    # Outside the layers nothing depends on how attention is computed.
    outside = replace(settings, attention="flash", recomputes_scores=False)
    parts = {kind: sections.walk_layer(settings, kind) for kind in dict.fromkeys(style.kinds)}
    embedding, head = sections.walk_embedding(outside), sections.walk_head(outside, loss)
    tokens, rows = settings.b * settings.s, -(-shape.vocab // tp)
    layers = [parts[kind] for kind in style.kinds]
    # A table counts once, and layers of several kinds keep different ones.
    tables = {name: size for part in parts.values() for name, size in part.shared.items()}
    found = ActivationBreakdown(
        layer_kinds=MappingProxyType(dict(max(layers, key=lambda part: part.kept).kinds)),
        pattern=tuple(part.kept for part in layers),
        embedding=embedding.kept,
        shared=sum(tables.values()),
        head=head.kept,
        outputs=head.outputs,
        logits=head.kinds.get("logits", 0) + head.backward_peak - head.kept,
        boundary=tokens * shape.hidden * settings.itemsize // (tp if settings.sequence_parallel else 1),
        logits_output=tokens * rows * (2 if settings.autocast else settings.itemsize),
        tied_gradient=rows * shape.embed_dim * settings.itemsize if shape.tied else 0,
        pattern_extra=tuple((part.forward_peak - part.kept, part.backward_peak - part.kept) for part in layers),
        head_extra=max(head.backward_peak, head.forward_peak) - head.kept,
        embedding_extra=max(embedding.backward_peak, embedding.forward_peak) - embedding.kept,
    )
    return _recomputed(found, settings, parts) if recompute == "full" else found


def _check(settings: WalkSettings) -> None:
    style, attention = settings.style, settings.attention
    in_16_bits = settings.itemsize == 2 or settings.autocast
    others = "sdpa or eager" if style.rules.sdpa else "eager"
    if attention == "sdpa" and not style.rules.sdpa:
        others = "eager or flash" if style.rules.flash and in_16_bits else "eager"
        raise ModelError(f"attention=sdpa: transformers has {_only(style)} for {style.family}. Choose {others}.")
    if attention == "flash" and not style.rules.flash:
        raise ModelError(f"attention=flash: transformers has {_only(style)} for {style.family}. Choose {others}.")
    if attention == "flash" and not in_16_bits:
        raise ModelError(
            f"attention=flash: its kernels compute in 16 bits, and this model in fp32. Choose {others}, or bf16 for it."
        )
    heads, tp = settings.shape.heads, settings.tp
    if heads % tp:
        raise LayoutError(f"tp={tp}: {heads} attention heads do not split. Choose a divisor.")
    if settings.sequence_parallel and settings.s % tp:
        raise LayoutError(f"seq_len={settings.s} with tp={tp} and sequence_parallel: choose a multiple of {tp}.")


def _only(style: LayerStyle) -> str:
    allowed = ["eager", *(["sdpa"] if style.rules.sdpa else ()), *(["flash"] if style.rules.flash else ())]
    return f"only {' and '.join(allowed)} attention"


_LOSSES = 3
"""fp32 scalars that every stage keeps: its loss, the sum over micro-batches, the mean over replicas."""


def in_flight_micro_batches(stages: int, stage: int, micro_batches: int) -> int:
    """Micro-batches whose activations are live at once on a stage: min(stages - stage, micro-batches).

    DeepSpeed keeps at least two slots for inputs and outputs (TrainSchedule.num_pipe_buffers of 0.19.8). A slot without
    a micro-batch in flight is empty, but for the logits of the last stage, which stay until the slot is used again.
    """
    return min(stages - stage, micro_batches)


def stage_buffers(activations: ActivationBreakdown, *, stage: int, stages: int, micro_batches: int) -> int:
    """What the engine's buffers add to a stage's worst moment, of `activations` with loss="stock".

    Beside what a micro-batch keeps for backward, DeepSpeed holds

    - its received hidden state (`ActivationBreakdown.kept` has that) and the one it sent, until its backward has run;
    - one buffer for what is received, hidden states and gradients alike, from the first use on;
    - on the last stage the logits in the model's dtype: of this micro-batch, as with loss="stock", and of the one
      before, whose graph also holds the hidden state that it received and its gradient.
    """
    if stage == stages - 1:
        before = activations.logits_output + 2 * activations.boundary if micro_batches > 1 else 0
        return activations.boundary + before
    return (in_flight_micro_batches(stages, stage, micro_batches) + 1) * activations.boundary


def channels_between(*, boundary: int, logits: int, last: bool, micro_batches: int) -> int:
    """Bytes of buffers between two steps; `boundary` of a hidden state between stages, `logits` of a micro-batch's.

    Every stage keeps one buffer, for the hidden state that comes or the gradient that comes back: both are the same
    (pipe/engine.py, `_allocate_or_extend_buffers`). The last stage has two slots, and a slot keeps its micro-batch's
    output, the logits, with the input that they came from and its gradient, until the next one takes its place.
    """
    if not last:
        return boundary
    return boundary + min(2, micro_batches) * (logits + 2 * boundary)


def pipeline_counters(params: RankParameters, *, weight_bytes: int, last: bool, micro_batches: int) -> int:
    """Scalars of the engine, and the numbers that stand for other stages' parameters."""
    totals = 16  # the toolkit's sums of losses and of target tokens, fp64
    own = 4 * _LOSSES + totals + weight_bytes * params.placeholders
    # The last stage also has the total, and each micro-batch's loss, of which the newest is counted above.
    return own + (4 + 4 * (micro_batches - 1) if last else 0)
