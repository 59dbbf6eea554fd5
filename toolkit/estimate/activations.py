"""Activations: what a micro-batch keeps in memory for its backward pass, and the worst moment of that pass.

The operations of a decoder layer are run on a tape of paper tensors (`toolkit.estimate.sizes`), so bytes follow from
what each operation keeps; nothing is fitted. docs/memory.md has the formulas and the measured errors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

from toolkit.errors import LayoutError, ModelError
from toolkit.estimate.decoder.context import Attention
from toolkit.estimate.decoder.ends import Loss
from toolkit.estimate.family_rules import LayerKind
from toolkit.estimate.style import LayerStyle
from toolkit.estimate.walks import (
    Part,
    Setting,
    table_bytes,
    walk_embedding,
    walk_head,
    walk_layer,
    walk_without_keeping,
)
from toolkit.shape import ModelShape

Recomputation = Literal["none", "selective", "full"]
Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class ActivationBreakdown:
    """Bytes of one micro-batch on one rank."""

    layer_kinds: Mapping[str, int]
    """What the most demanding layer keeps: input, norm, attention, mlp, residual."""
    layer: int
    """Their sum."""
    pattern: tuple[int, ...] = field(repr=False)
    """What each kind of layer keeps, in the order in which they repeat."""
    embedding: int
    shared: int
    """Rotary tables and masks, once for all layers."""
    head: int
    """Final norm, logits, loss."""
    outputs: int
    """Of the head, when the model returns its logits and the loss has not begun."""
    logits: int
    """The part of `head` and `head_extra` that is logits and loss."""
    boundary: int
    """The hidden state between two layers, and between two stages."""
    logits_output: int
    """The logits as the model returns them, in its dtype: a pipeline's last stage holds on to them."""
    tied_gradient: int
    """The embedding's gradient if the LM head is tied to it: the head's share of it waits for the embedding's."""
    pattern_extra: tuple[tuple[int, int], ...] = field(repr=False)
    """The most that lives beyond that in a layer of each kind, in its forward and its backward pass."""
    head_extra: int
    embedding_extra: int

    def kept(self, *, layers: int | range, first: bool = True, last: bool = True) -> int:
        """Bytes that one micro-batch keeps on a stage with these layers."""
        indices = _range(layers)
        if len(self.pattern) == 1:
            inside = len(indices) * self.pattern[0]
        else:
            inside = sum(self.pattern[i % len(self.pattern)] for i in indices)
        return inside + self.shared + (self.embedding if first else self.boundary) + (self.head if last else 0)

    def forward_peak(self, *, layers: int | range, first: bool = True, last: bool = True) -> int:
        """The most that is live before the loss, of one micro-batch."""
        trunk = self.kept(layers=layers, first=first, last=False)
        return trunk + max(*(forward for forward, _ in self.pattern_extra), self.outputs if last else 0)

    def peak(
        self,
        *,
        layers: int | range,
        first: bool = True,
        last: bool = True,
        in_flight: int = 1,
        gradients_kept: int = 0,
    ) -> int:
        """The most that is live at once on a stage.

        `in_flight`: micro-batches whose activations wait. `gradients_kept`: bytes of one layer's gradients, if they
        only come to exist during this backward pass.
        """
        return self.worst_moment(
            layers=layers, first=first, last=last, in_flight=in_flight, gradients_kept=gradients_kept
        )[0]

    def worst_moment(
        self, *, layers: int | range, first: bool, last: bool, in_flight: int, gradients_kept: int
    ) -> tuple[int, int]:
        """The same, and the part of it that is gradients of weights (`gradients_kept` for each layer that is done)."""
        indices = _range(layers)
        count = len(indices)
        trunk = self.kept(layers=layers, first=first, last=False)
        whole = trunk + (self.head if last else 0)
        # autograd hands a tied weight's gradients over together: the head's is there until the embedding's has come.
        waiting = self.tied_gradient if first and last else 0
        moments = [(trunk + extra, 0) for extra in self._extras(indices, waiting)]
        if last:
            moments.append((whole + self.head_extra, 0))
        if count:
            lowest = self.kept(layers=indices[:1], first=first, last=False) + waiting
            lowest += self.pattern_extra[indices[0] % len(self.pattern)][1]
            moments.append((lowest, (count - 1) * gradients_kept))
        if first:
            # The head's gradient, the embedding's and their sum, of which embedding_extra has one already.
            moments.append((self.embedding + self.embedding_extra + 2 * waiting, count * gradients_kept))
        live, gradients = max(moments, key=sum)
        return (in_flight - 1) * whole + live + gradients, gradients

    def _extras(self, layers: range, waiting: int) -> list[int]:
        """What lives beyond the kept of all layers, in the last layer of each kind: layers behind it keep nothing."""
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


class _Inside(NamedTuple):
    """What the decoder layers keep, in the order of the style's kinds, and what lives beyond it."""

    kinds: Mapping[str, int]
    """Of the most demanding layer."""
    pattern: tuple[int, ...]
    shared: int
    extras: tuple[tuple[int, int], ...]


def _kept_of_layers(setting: Setting, parts: Mapping[LayerKind, Part]) -> _Inside:
    found = [parts[kind] for kind in setting.style.kinds]
    # A table counts once, and layers of several kinds keep different ones.
    tables = {name: size for part in parts.values() for name, size in part.shared.items()}
    return _Inside(
        kinds=max(parts.values(), key=lambda part: part.kept).kinds,
        pattern=tuple(part.kept for part in found),
        shared=sum(tables.values()),
        extras=tuple((part.forward_peak - part.kept, part.backward_peak - part.kept) for part in found),
    )


def _kept_of_input(setting: Setting, parts: Mapping[LayerKind, Part], boundary: int) -> _Inside:
    """Under full recomputation only the input stays.

    In the backward pass the layer is computed again, beside the gradient of its output: of the input that the
    recomputation's peak has in it there is one, and the gradient is as large.
    """
    extras = {
        kind: (
            walk_without_keeping(setting, kind) - boundary,
            max(part.backward_peak - part.kinds.get("input", 0), part.recomputation_peak),
        )
        for kind, part in parts.items()
    }
    kinds = setting.style.kinds
    return _Inside(
        kinds={"input": boundary},
        pattern=(boundary,) * len(kinds),
        shared=table_bytes(setting),
        extras=tuple(extras[kind] for kind in kinds),
    )


@lru_cache(maxsize=4096)
def activations(
    shape: ModelShape,
    style: LayerStyle,
    *,
    micro_batch_size: int,
    seq_len: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    attention: Attention = "sdpa",
    recompute: Recomputation = "none",
    dtype_bytes: int = 2,
    autocast: bool = False,
    loss: Loss = "toolkit",
    isolates_documents: bool = False,
    device: Device = "cuda",
) -> ActivationBreakdown:
    """Bytes of one micro-batch of `micro_batch_size` samples of `seq_len` tokens. Raises ModelError, LayoutError.

    `autocast`: of a model in `dtype_bytes` (4, as a rule) whose products run in 16 bits, under torch.autocast; what it
    casts of the weights is counted with the model states.
    `loss`: the toolkit's own, or "stock" where Hugging Face's output object holds the logits meanwhile.
    `isolates_documents`: documents in a sample do not see each other, so attention has a mask.
    """
    _check_attention(style, attention, in_16_bits=dtype_bytes == 2 or autocast)
    _check(shape, seq_len, tp, sequence_parallel)
    setting = Setting(
        shape=shape,
        style=style,
        samples=micro_batch_size,
        seq_len=seq_len,
        itemsize=dtype_bytes,
        autocast=autocast,
        attention=attention,
        tp=tp,
        sequence_parallel=sequence_parallel,
        isolates_documents=isolates_documents,
        recomputes_scores=recompute == "selective",
        on_cpu=device == "cpu",
    )
    # Around the layers nothing depends on how attention is computed.
    around = replace(setting, attention="flash", recomputes_scores=False)
    parts = {kind: walk_layer(setting, kind) for kind in dict.fromkeys(style.kinds)}
    embedding, head = walk_embedding(around), walk_head(around, loss)
    rows = -(-shape.vocab // tp)
    boundary = micro_batch_size * seq_len * shape.hidden * dtype_bytes // (tp if sequence_parallel else 1)
    inside = _kept_of_input(setting, parts, boundary) if recompute == "full" else _kept_of_layers(setting, parts)
    return ActivationBreakdown(
        layer_kinds=MappingProxyType(dict(inside.kinds)),
        layer=sum(inside.kinds.values()),
        pattern=inside.pattern,
        embedding=embedding.kept,
        shared=inside.shared,
        head=head.kept,
        outputs=head.outputs,
        logits=head.kinds.get("logits", 0) + head.backward_peak - head.kept,
        boundary=boundary,
        logits_output=micro_batch_size * seq_len * rows * (2 if autocast else dtype_bytes),
        tied_gradient=rows * shape.embed_dim * dtype_bytes if shape.tied else 0,
        pattern_extra=inside.extras,
        head_extra=max(head.backward_peak, head.forward_peak) - head.kept,
        embedding_extra=max(embedding.backward_peak, embedding.forward_peak) - embedding.kept,
    )


def _check_attention(style: LayerStyle, attention: Attention, *, in_16_bits: bool) -> None:
    others = "sdpa or eager" if style.sdpa else "eager"
    if attention == "sdpa" and not style.sdpa:
        others = "eager or flash" if style.flash and in_16_bits else "eager"
        raise ModelError(f"attention=sdpa: transformers has {_only(style)} for {style.family}. Choose {others}.")
    if attention == "flash" and not style.flash:
        raise ModelError(f"attention=flash: transformers has {_only(style)} for {style.family}. Choose {others}.")
    if attention == "flash" and not in_16_bits:
        raise ModelError(
            f"attention=flash: its kernels compute in 16 bits, and this model in fp32. Choose {others}, or bf16 for it."
        )


def _only(style: LayerStyle) -> str:
    allowed = ["eager", *(["sdpa"] if style.sdpa else ()), *(["flash"] if style.flash else ())]
    return f"only {' and '.join(allowed)} attention"


def _check(shape: ModelShape, seq_len: int, tp: int, sequence_parallel: bool) -> None:
    if shape.heads % tp:
        raise LayoutError(f"tp={tp}: {shape.heads} attention heads do not split. Choose a divisor.")
    if sequence_parallel and seq_len % tp:
        raise LayoutError(f"seq_len={seq_len} with tp={tp} and sequence_parallel: choose a multiple of {tp}.")
