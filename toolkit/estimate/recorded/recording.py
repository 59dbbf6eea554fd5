"""Recording: the activation memory of one model as its own code allocated it, as polynomials in samples and positions.

`toolkit.recorder` runs a model forward and backward on fake tensors and sees every storage that is allocated or freed.
What is read here needs no torch. Decoder layers that are alike are recorded once and repeated.

Dims: b samples, s positions of a rank's micro-batch.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from typing import Any, Literal, NamedTuple, Self

from toolkit.config.layout import Layout, Recompute
from toolkit.estimate.computation import Computation
from toolkit.models.chunked_head import Chunks

Precision = Literal["fp32", "bf16", "autocast"]
"""Precision of the operations of a pass. `bf16`: any 16 bits; `autocast`: fp32 weights and products in 16 bits."""
StagePart = Literal["whole", "first", "middle", "last"]
"""The whole model, or the first, an inner or the last stage of a pipeline."""
SplitBackward = Literal["no", "layers", "all"]
"""Which linear layers leave their weights' gradients to a later pass: none, those of decoder layers, the head too."""
SAMPLES: tuple[Literal["one", "many"], ...] = ("one", "many")
Polynomial = tuple[int, ...]
"""Coefficients of 1, b, s, bs, s^2, bs^2, in bytes over the recording's unit."""
MONOMIALS: tuple[tuple[int, int], ...] = ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))
"""Exponents of b and s."""
ZERO: Polynomial = (0,) * len(MONOMIALS)


@dataclass(frozen=True, kw_only=True)
class RankPass:
    """The pass over a micro-batch on a rank of a pipeline stage: everything that a recording depends on.

    It is the part of a TrainingSetup that decides what a rank allocates. Setups whose passes are alike have equal ones.
    """

    config: str
    """config.json, as text with sorted keys: `config_text`."""
    layout: Layout = field(default_factory=Layout)
    """The axes that shard a layer (tp, ep with as many replicas), and what is recomputed. All else has its default."""
    computation: Computation = field(default_factory=Computation)
    precision: Precision = "bf16"
    part: StagePart = "whole"
    splits: SplitBackward = "no"
    samples: Literal["one", "many"] = "many"
    """A single sample's tensors may be contiguous where those of several are not."""
    chunks: Chunks | None = None
    """Chunks of this toolkit's own loss; None without it. Recordings have full logits, and are changed when they are
    read."""

    @property
    def description(self) -> str:
        """The pass in words, without the model: "whole model, tp2, bf16, sdpa attention"."""
        part = "whole model" if self.part == "whole" else f"{self.part} pipeline stage"
        return f"{part}, tp{self.layout.tp}, {self.precision}, {self.computation.attention} attention"

    @property
    def key(self) -> str:
        """Name of the pass in the cache, without the model."""
        layout = self.layout
        computation = self.computation
        words = [
            self.part,
            f"tp{layout.tp}",
            self.precision,
            computation.attention,
            layout.recompute,
            computation.device,
            self.samples,
        ]
        if self.splits != "no":
            words.append(f"split-{self.splits}")
        if layout.sequence_parallel:
            words.append("sp")
        if computation.documents:
            words.append("documents")
        if computation.trainable:
            words.append(f"trainable-{_hash(computation.trainable)}")
        if computation.loss_chunk > 0:
            words.append(f"chunk{computation.loss_chunk}")
        if layout.ep > 1:
            words.append(f"ep{layout.ep}")
        if layout.experts == "inner":
            words.append("inner")
        if computation.imbalance != 1:
            words.append(f"imbalance{computation.imbalance:g}")
        return "-".join(words)

    def recomputing(self, recompute: Recompute) -> Self:
        """The pass with other layers recomputed."""
        return replace(self, layout=replace(self.layout, recompute=recompute))

    @classmethod
    def decoded(cls, content: Mapping[str, Any]) -> Self:
        """Read what `dataclasses.asdict` made of a pass without chunks; what is left out has its default."""
        layout = Layout(**content.get("layout", {}))
        computation = Computation(**content.get("computation", {}))
        return cls(**{**content, "layout": layout, "computation": computation})


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_UNREAD = ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Fields of a config.json without which the same model is built."""


def config_text(config: Mapping[str, Any]) -> str:
    """A config as the text that a RankPass has."""
    return json.dumps({name: value for name, value in config.items() if name not in _UNREAD}, sort_keys=True)


def model_key(config: str) -> str:
    """Hash of a config's text: the name under which its recordings are kept."""
    return _hash(config)


@dataclass(frozen=True, kw_only=True)
class PassSection:
    """A part of a pass, in bytes beyond what is live when it begins."""

    delta: Polynomial
    """Bytes that are live at the end."""
    peaks: tuple[Polynomial, ...]
    """Bytes that are live at the moments that may be the worst for some b and s."""

    @classmethod
    def of(cls, events: Iterable[Polynomial]) -> Self:
        """Make a section of sizes in order: positive where bytes are allocated, negative where they are freed."""
        levels = list(accumulate(events, _add, initial=ZERO))
        moments = dict.fromkeys(levels)
        peaks = (
            moment for moment in moments if not any(moment != other and _exceeds(other, moment) for other in moments)
        )
        return cls(delta=levels[-1], peaks=tuple(peaks))


@dataclass(frozen=True, kw_only=True)
class Events:
    """Allocations and frees of a pass, in order, section by section.

    Layers have the sections `forward k` and `backward k` of kind k, and of the `first` and the `last` layer. An event
    is the index of a size that is allocated; or -1 - n, which frees what the same section allocated as its nth; or
    names what another section allocated: `forward -1:0` is, of the storages that outlived the forward pass of the layer
    before, the last. The ends name layers by kind, which stands for all of that kind, or as `first` and `last`.
    """

    sizes: tuple[Polynomial, ...]
    casts: tuple[int, ...]
    """Sizes of autocast's copies of weights."""
    ends: tuple[int, int]
    """The kinds of the first and the last layer."""
    sections: Mapping[str, tuple[int | str, ...]]

    def joined(self, other: "Events", *, kinds: int, other_has_last: bool) -> "Events":
        """Return these events with those of the `other` recording's layers, of which one is the first layer.

        `kinds`: kinds of layers that there are here; those of the other are numbered behind them. `other_has_last`:
        whether the last layer is of the other recording too.
        """
        size_offset = len(self.sizes)
        sections = dict(self.sections)
        for name, events in other.sections.items():
            direction, _, role = name.partition(" ")
            if role.isdigit():
                new_name = f"{direction} {kinds + int(role)}"
            elif role == "first" or (role == "last" and other_has_last):
                new_name = name
            else:
                continue
            sections[new_name] = tuple(
                event + size_offset if isinstance(event, int) and event >= 0 else event for event in events
            )
        last_kind = kinds + other.ends[1] if other_has_last else self.ends[1]
        return Events(
            sizes=self.sizes + other.sizes,
            casts=(*self.casts, *(index + size_offset for index in other.casts)),
            ends=(kinds + other.ends[0], last_kind),
            sections=sections,
        )


@dataclass(frozen=True, kw_only=True)
class Recording:
    """All sections of a pass.

    `head` ends with the logits, `loss` with the forward pass, `head_backward` with the gradient of the last
    layer's output; `embedding` is what runs before the first layer, and `embedding_backward` its backward pass.
    """

    positions: tuple[int, int | None]
    """Sequence lengths [first, second) for which it is valid: at a sliding window masks appear."""
    unit: int
    """Parts of a byte that polynomials count: with sequence parallelism a rank has s/t positions."""
    pattern: tuple[int, ...]
    """The kind of every decoder layer of the model."""
    embedding: PassSection
    forward: tuple[PassSection, ...]
    """The forward pass of a layer of each kind."""
    backward: tuple[PassSection, ...]
    head: PassSection
    loss: PassSection
    head_backward: PassSection
    embedding_backward: PassSection
    kinds: tuple[Mapping[str, Polynomial], ...]
    """Bytes that a layer of each kind keeps, by the part of the layer that allocates it."""
    end_layers: tuple[Polynomial, Polynomial, Polynomial]
    """Bytes that the forward pass of a stage's first layer leaves beyond that of an inner one, and of its last layer;
    and the backward pass of the last layer."""
    events: Events = field(repr=False)

    def at(self, b: int, s: int) -> "Activations":
        """The recording for micro-batches of b samples of s positions."""
        monomials = monomial_values(b, s)

        def bytes_of(polynomial: Polynomial) -> int:
            return value_of(polynomial, monomials) // self.unit

        def section_bytes(section: PassSection) -> SectionBytes:
            return SectionBytes(delta=bytes_of(section.delta), peak=max(map(bytes_of, section.peaks)))

        return Activations(
            pattern=self.pattern,
            embedding=section_bytes(self.embedding),
            forward=tuple(map(section_bytes, self.forward)),
            backward=tuple(map(section_bytes, self.backward)),
            head=section_bytes(self.head),
            loss=section_bytes(self.loss),
            head_backward=section_bytes(self.head_backward),
            embedding_backward=section_bytes(self.embedding_backward),
            kinds=tuple({part: bytes_of(size) for part, size in sizes.items()} for sizes in self.kinds),
            end_layers=tuple(map(bytes_of, self.end_layers)),
        )

    def mixed(self, other: "Self", period: int) -> Self:
        """The recording of a model whose layers are those of `other` where their index is a multiple of `period`."""
        own_kinds = len(self.forward)
        pattern = tuple(
            kind if index % period else own_kinds + other_kind
            for index, (kind, other_kind) in enumerate(zip(self.pattern, other.pattern, strict=True))
        )
        # The first layer, at index 0, is always of the other recording.
        other_has_last = pattern[-1] >= own_kinds
        last = other if other_has_last else self
        return replace(
            self,
            pattern=pattern,
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            kinds=self.kinds + other.kinds,
            end_layers=(other.end_layers[0], *last.end_layers[1:]),
            events=self.events.joined(other.events, kinds=own_kinds, other_has_last=other_has_last),
        )

    def encoded(self) -> dict[str, Any]:
        """Return the recording as JSON has it."""
        table: dict[Polynomial, int] = {}

        def number(polynomial: Polynomial) -> int:
            return table.setdefault(polynomial, len(table))

        def listed(section: PassSection) -> list[int]:
            return [number(section.delta), *map(number, section.peaks)]

        return {
            "positions": self.positions,
            "unit": self.unit,
            "pattern": "".join(map(chr, (ord("0") + kind for kind in self.pattern))),
            **{name: listed(getattr(self, name)) for name in _ONCE},
            "forward": [listed(section) for section in self.forward],
            "backward": [listed(section) for section in self.backward],
            "kinds": [{kind: number(size) for kind, size in sizes.items()} for sizes in self.kinds],
            "end_layers": [number(size) for size in self.end_layers],
            "sizes": [list(polynomial) for polynomial in table],
            "events": vars(self.events),
        }

    @classmethod
    def decoded(cls, content: Mapping[str, Any]) -> Self:
        """Read what `encoded` returns."""
        table = [tuple(size) for size in content["sizes"]]

        def section(numbers: Sequence[int]) -> PassSection:
            delta, *peaks = (table[number] for number in numbers)
            return PassSection(delta=delta, peaks=tuple(peaks))

        first, last, back = (table[number] for number in content["end_layers"])
        least, most = content["positions"]
        events = content["events"]
        return cls(
            positions=(least, most),
            unit=content["unit"],
            pattern=tuple(ord(kind) - ord("0") for kind in content["pattern"]),
            **{name: section(content[name]) for name in _ONCE},
            forward=tuple(map(section, content["forward"])),
            backward=tuple(map(section, content["backward"])),
            kinds=tuple({kind: table[number] for kind, number in numbers.items()} for numbers in content["kinds"]),
            end_layers=(first, last, back),
            events=Events(
                sizes=tuple(map(tuple, events["sizes"])),
                casts=tuple(events["casts"]),
                ends=tuple(events["ends"]),
                sections={name: tuple(section) for name, section in events["sections"].items()},
            ),
        )


_ONCE = ("embedding", "head", "loss", "head_backward", "embedding_backward")


@dataclass(frozen=True, kw_only=True)
class SectionBytes:
    """A section in bytes, beyond what is live when it begins: at its end, and at its worst moment."""

    delta: int
    peak: int


class Moment(NamedTuple):
    """What is live at one moment of a micro-batch's pass, in bytes."""

    activations: int
    gradients: int = 0
    """Gradients of weights that this pass has allocated so far."""

    @property
    def total(self) -> int:
        """All bytes that are live."""
        return self.activations + self.gradients


@dataclass(frozen=True, kw_only=True, eq=False)
class Activations:
    """Bytes of one micro-batch on one rank. Fields as of Recording."""

    _kept: dict[range, tuple[dict[str, int], int]] = field(default_factory=dict, init=False, repr=False)

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
        return self._of_layers(layers)[0]

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
        in_layer: int = 0,
    ) -> Moment:
        """Return the moment at which most is live on a stage with these layers.

        `in_flight`: micro-batches whose activations are kept. `gradients_kept`: bytes of each layer's gradients, if
        this backward pass allocates them; each finished layer adds its own. `casts_to_come`: bytes of autocast's copies
        of weights that are counted beside this and not made yet, at each moment before the head. `offloaded`: what
        layers keep goes to the host. `in_layer`: bytes in the backward pass of a layer, which the recording lacks.
        """
        moments = [
            Moment(activations=live - to_come)
            for live, to_come in zip_longest(self._forward_moments(layers), casts_to_come, fillvalue=0)
        ]
        moments.append(Moment(activations=self._at_loss(layers)))
        moments += self._backward_moments(layers, gradients_kept=gradients_kept or [0] * len(layers), in_layer=in_layer)
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

    def _backward_moments(self, layers: range, *, gradients_kept: Sequence[int], in_layer: int) -> Iterator[Moment]:
        """Yield the worst moment of the backward pass of the head, of each layer from the last one, and of what is
        before them. The arguments are as of `worst_moment`.
        """
        live = self.kept(layers)
        yield Moment(activations=live + self.head_backward.peak)
        live += self.head_backward.delta
        gradients = 0
        is_last = True
        for kind, layer_gradients in zip(reversed(self._kinds(layers)), reversed(gradients_kept), strict=True):
            section = self.backward[kind]
            yield Moment(activations=live + section.peak + in_layer, gradients=gradients)
            live += section.delta
            if is_last:
                live += self._last_backward_beyond
            is_last = False
            gradients += layer_gradients
        yield Moment(activations=live + self.embedding_backward.peak, gradients=gradients)

    def offloaded(self, layers: range) -> list[int]:
        """Bytes on the host at each moment: while a layer runs, what was kept by those before the one before it."""
        count = len(layers)
        sums = [0, *accumulate(self.forward[kind].delta for kind in self._kinds(layers))]
        running = [sums[max(0, layer - 1)] for layer in range(count)]
        return [0, *running, *[sums[max(0, count - 1)]] * 3, *reversed(running), 0]

    def peak_with_loss(self, layers: range) -> int:
        """Return the most that is live in the forward pass of a micro-batch, with its loss."""
        return max(*self._forward_moments(layers), self._at_loss(layers))

    def without_gradients(self, layers: range) -> int:
        """The most that is live behind the embedding in a forward pass that keeps nothing, the head aside.

        Of a recording in which every layer is recomputed, whose forward pass keeps nothing either.
        """
        peaks = [self.forward[kind].peak for kind in set(self._kinds(layers))]
        return max(self.embedding.peak, self.embedding.delta + max(peaks, default=0))

    def backward_peak(self, layers: range, *, in_layer: int = 0) -> int:
        """Return the most that is live in the backward pass of a micro-batch, without sums of gradients of weights.

        `in_layer`: bytes in the backward pass of a layer, which the recording lacks.
        """
        moments = self._backward_moments(layers, gradients_kept=[0] * len(layers), in_layer=in_layer)
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
        level = self.trunk(layers)
        loss = level + self.head.delta
        return max(level + self.head.peak, loss + self.loss.peak, loss + self.loss.delta + self.head_backward.peak)

    def _kinds(self, layers: range) -> list[int]:
        return [self.pattern[index] for index in layers]

    def trunk(self, layers: range) -> int:
        """Bytes that are live behind the layers, of one micro-batch."""
        return self.embedding.delta + self._of_layers(layers)[1]

    def _of_layers(self, layers: range) -> tuple[dict[str, int], int]:
        """Return the bytes that layers keep, by part, and those that their forward pass adds to what is live."""
        if layers not in self._kept:
            counts = Counter(self._kinds(layers))
            parts = dict.fromkeys(part for kind in counts for part in self.kinds[kind])
            by_part = {part: sum(self.kinds[kind].get(part, 0) * n for kind, n in counts.items()) for part in parts}
            live = sum(self.forward[kind].delta * n for kind, n in counts.items())
            if layers:
                live += self._first_forward_beyond + self._last_forward_beyond
            self._kept[layers] = by_part, live
        return self._kept[layers]

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


def monomial_values(b: int, s: int) -> tuple[int, ...]:
    """Return the values of 1, b, s, bs, s^2, bs^2."""
    return tuple(b**b_power * s**s_power for b_power, s_power in MONOMIALS)


def value_of(polynomial: Polynomial, monomials: Sequence[int]) -> int:
    """Return a polynomial's value, given the values of its monomials."""
    return sum(map(int.__mul__, polynomial, monomials))


def total(sizes: Iterable[Polynomial]) -> Polynomial:
    """The sum of polynomials."""
    return tuple(map(sum, zip(ZERO, *sizes, strict=True)))


def _add(a: Polynomial, b: Polynomial) -> Polynomial:
    return tuple(map(int.__add__, a, b))


def _exceeds(a: Polynomial, b: Polynomial) -> bool:
    """Whether a is at least b for all b and s."""
    return all(map(int.__ge__, a, b))
