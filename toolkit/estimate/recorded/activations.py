"""Activations: what one micro-batch of some size takes on one rank, section by section, as a recording has it.

A stage runs its layers one after the other; sums over them, and the moment at which most is live, are counted here.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from typing import NamedTuple


class UnrecordedInLayer(NamedTuple):
    """Bytes in the backward pass of a layer that its recording lacks."""

    in_attention: int = 0
    """Bytes while the toolkit's attention runs, beside its results."""
    before_attention: int = 0
    """Bytes until then, for instance of a tile of the MLP."""

    @property
    def largest(self) -> int:
        """The larger of both."""
        return max(self)


ALL_RECORDED = UnrecordedInLayer()


@dataclass(frozen=True, kw_only=True)
class SectionBytes:
    """A section in bytes, beyond what is live when it begins: at its end, and at its worst moment."""

    delta: int
    peak: int
    at_attention: int | None = None
    """Bytes when the backward pass of the toolkit's attention runs, with its results; None for another attention."""

    def peak_with(self, unrecorded: UnrecordedInLayer) -> int:
        """Return the most that is live with what the recording of a layer's backward pass lacks.

        Known error: a tile, and where another attention was recorded, as for the search of a plan, what the toolkit's
        takes, is added to the layer's peak, which may be another moment.
        """
        if self.at_attention is None:
            return self.peak + unrecorded.largest
        return max(self.peak + unrecorded.before_attention, self.at_attention + unrecorded.in_attention)


class Moment(NamedTuple):
    """What is live at one moment of a micro-batch's pass, in bytes."""

    activations: int
    gradients: int = 0
    """Gradients of weights that this pass has allocated so far."""

    @property
    def total(self) -> int:
        """All bytes that are live."""
        return self.activations + self.gradients


@dataclass(frozen=True, kw_only=True)
class _LayerBytes:
    """Sums over decoder layers, in bytes of one micro-batch."""

    by_part: Mapping[str, int]
    """Bytes that the layers keep, by the part of the layer that allocates them."""
    live: int
    """Bytes that their forward pass adds to what is live."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Activations:
    """Bytes of one micro-batch on one rank. Its fields are those of Recording."""

    pattern: tuple[int, ...]
    embedding: SectionBytes
    forward: tuple[SectionBytes, ...]
    backward: tuple[SectionBytes, ...]
    head: SectionBytes
    loss: SectionBytes
    head_backward: SectionBytes
    embedding_backward: SectionBytes
    kinds: tuple[Mapping[str, int], ...] = field(repr=False)
    end_layers: tuple[int, ...]
    _counted: dict[range, "_LayerBytes"] = field(default_factory=dict, init=False, repr=False)
    """Sums over layers that were asked for before."""

    @property
    def _first_forward_beyond(self) -> int:
        """Bytes that the forward pass of the first layer leaves beyond that of an inner one."""
        return self.end_layers[0]

    @property
    def _last_forward_beyond(self) -> int:
        """Bytes that the forward pass of the last layer leaves beyond that of an inner one."""
        return self.end_layers[1]

    @property
    def _last_backward_beyond(self) -> int:
        """Bytes that the backward pass of the last layer leaves beyond that of an inner one."""
        return self.end_layers[2]

    def kept(self, layers: range) -> int:
        """Bytes that are live when the forward pass ends: what its backward pass needs, and what is returned."""
        return self.trunk(layers) + self.head.delta + self.loss.delta

    def layer_kinds(self, layers: range) -> Mapping[str, int]:
        """Bytes that these layers keep, by part."""
        return self._of_layers(layers).by_part

    def forward_peak(self, layers: range, *, casts: Sequence[int], offloaded: bool = False) -> int:
        """Return the most that is live before the loss, with autocast's copies of each layer's weights, in bytes."""
        live = self._forward_moments(layers)
        copies = [0, *accumulate(casts, initial=0)]
        if not offloaded:
            return max(size + copied for size, copied in zip(live, copies, strict=True))
        on_host = self.offloaded(layers)[: len(copies)]
        return max(size + copied - away for size, copied, away in zip(live, copies, on_host, strict=True))

    def worst_moment(
        self,
        layers: range,
        *,
        in_flight: int = 1,
        gradients_kept: Sequence[int] = (),
        casts_to_come: Sequence[int] = (),
        offloaded: bool = False,
        unrecorded: UnrecordedInLayer = ALL_RECORDED,
    ) -> Moment:
        """Return the moment at which most is live on a stage with these layers.

        `in_flight`: micro-batches whose activations are kept. `gradients_kept`: bytes of each layer's gradients, if
        this backward pass allocates them; each finished layer adds its own. `casts_to_come`: bytes of autocast's copies
        of weights that are counted beside this and not made yet, at each moment before the head. `offloaded`: what
        layers keep goes to the host. `unrecorded`: what the recording of a layer's backward pass lacks.
        """
        moments = [
            Moment(activations=live - to_come)
            for live, to_come in zip_longest(self._forward_moments(layers), casts_to_come, fillvalue=0)
        ]
        moments.append(Moment(activations=self._at_loss(layers)))
        moments += self._backward_moments(
            layers, gradients_kept=gradients_kept or [0] * len(layers), unrecorded=unrecorded
        )
        others = (in_flight - 1) * self.kept(layers)
        if offloaded:
            on_host = self.offloaded(layers)
            moments = [
                Moment(activations=moment.activations - away, gradients=moment.gradients)
                for moment, away in zip(moments, on_host, strict=True)
            ]
            others -= (in_flight - 1) * max(on_host)
        worst = max(moments, key=lambda moment: moment.total)
        return Moment(activations=worst.activations + others, gradients=worst.gradients)

    def _at_loss(self, layers: range) -> int:
        """Return the most that is live while the loss is computed."""
        return self.trunk(layers) + self.head.delta + self.loss.peak

    def _backward_moments(
        self, layers: range, *, gradients_kept: Sequence[int], unrecorded: UnrecordedInLayer
    ) -> Iterator[Moment]:
        """Yield the worst moment of the backward pass of the head, of each layer from the last one, and of what is
        before them. The arguments are those of `worst_moment`.
        """
        live = self.kept(layers)
        yield Moment(activations=live + self.head_backward.peak)
        live += self.head_backward.delta
        gradients = 0
        is_last = True
        for kind, layer_gradients in zip(reversed(self._kinds(layers)), reversed(gradients_kept), strict=True):
            section = self.backward[kind]
            yield Moment(activations=live + section.peak_with(unrecorded), gradients=gradients)
            live += section.delta
            if is_last:
                live += self._last_backward_beyond
            is_last = False
            gradients += layer_gradients
        yield Moment(activations=live + self.embedding_backward.peak, gradients=gradients)

    def offloaded(self, layers: range) -> list[int]:
        """Bytes on the host at each moment: while a layer runs, what was kept by those before the one before it.

        The moments are those of `worst_moment`: before the layers, in each, at the head, in the loss, in the head's
        backward pass, in each layer's, and behind them.
        """
        count = len(layers)
        kept_before = [0, *accumulate(self.forward[kind].delta for kind in self._kinds(layers))]
        while_layer_runs = [kept_before[max(0, layer - 1)] for layer in range(count)]
        at_head = kept_before[max(0, count - 1)]
        return [0, *while_layer_runs, at_head, at_head, at_head, *reversed(while_layer_runs), 0]

    def peak_with_loss(self, layers: range) -> int:
        """Return the most that is live in the forward pass of a micro-batch, with its loss."""
        return max(*self._forward_moments(layers), self._at_loss(layers))

    def without_gradients(self, layers: range) -> int:
        """The most that is live behind the embedding in a forward pass that keeps nothing, the head aside.

        Of a recording in which every layer is recomputed, whose forward pass keeps nothing either.
        """
        peaks = [self.forward[kind].peak for kind in set(self._kinds(layers))]
        return max(self.embedding.peak, self.embedding.delta + max(peaks, default=0))

    def backward_peak(self, layers: range, *, unrecorded: UnrecordedInLayer = ALL_RECORDED) -> int:
        """Return the most that is live in the backward pass of a micro-batch, without sums of gradients of weights.

        `unrecorded`: what the recording of a layer's backward pass lacks.
        """
        moments = self._backward_moments(layers, gradients_kept=[0] * len(layers), unrecorded=unrecorded)
        return max(moment.activations for moment in moments)

    def left(self, layers: range) -> int:
        """Bytes that are live behind the backward pass, of which a split one leaves more than a whole one.

        Only the difference counts: a loss in chunks (`in_chunks`) does not change what is freed behind it.
        """
        level = self.kept(layers) + self.head_backward.delta + self.embedding_backward.delta
        level += sum(self.backward[kind].delta for kind in self._kinds(layers))
        return level + (self._last_backward_beyond if layers else 0)

    def at_head(self, layers: range) -> int:
        """The most that is live from the head's forward pass to the end of its backward pass."""
        behind_layers = self.trunk(layers)
        behind_head = behind_layers + self.head.delta
        behind_loss = behind_head + self.loss.delta
        return max(
            behind_layers + self.head.peak,
            behind_head + self.loss.peak,
            behind_loss + self.head_backward.peak,
        )

    def _kinds(self, layers: range) -> list[int]:
        """Return the kind of each of these layers."""
        return [self.pattern[index] for index in layers]

    def trunk(self, layers: range) -> int:
        """Bytes that are live behind the layers, of one micro-batch."""
        return self.embedding.delta + self._of_layers(layers).live

    def _of_layers(self, layers: range) -> "_LayerBytes":
        """Add up the bytes of these layers."""
        if layers not in self._counted:
            self._counted[layers] = self._sum_of_layers(layers)
        return self._counted[layers]

    def _sum_of_layers(self, layers: range) -> "_LayerBytes":
        count_of_kind = Counter(self._kinds(layers))
        by_part: dict[str, int] = {}
        live = 0
        for kind, count in count_of_kind.items():
            live += self.forward[kind].delta * count
            for part, size in self.kinds[kind].items():
                by_part[part] = by_part.get(part, 0) + size * count
        if layers:
            live += self._first_forward_beyond + self._last_forward_beyond
        return _LayerBytes(by_part=by_part, live=live)

    def _forward_moments(self, layers: range) -> list[int]:
        """Return the most that is live before the layers, in each of them, and in the head, in bytes."""
        moments = [self.embedding.peak]
        live = self.embedding.delta
        is_first = True
        for kind in self._kinds(layers):
            section = self.forward[kind]
            moments.append(live + section.peak)
            live += section.delta
            if is_first:
                live += self._first_forward_beyond
            is_first = False
        moments.append(self.trunk(layers) + self.head.peak)
        return moments
