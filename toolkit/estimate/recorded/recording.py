"""Recording: the activation memory of one model as its own code allocated it, as polynomials in samples and positions.

`toolkit.recorder` runs a model forward and backward on fake tensors and sees every storage that is allocated or freed.
What is read here needs no torch. Decoder layers that are alike are recorded once and repeated.

Dims: b samples, s positions of a rank's micro-batch.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, Self

from toolkit.config.layout import Layout, Recompute
from toolkit.estimate.computation import Computation
from toolkit.estimate.recorded.activations import Activations, SectionBytes
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
AT_ATTENTION = "attention"
"""The event of a backward pass at which the toolkit's attention (`blocks`) runs. It allocates nothing."""


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
    at_attention: tuple[Polynomial, ...] = ()
    """Bytes that are live where the toolkit's attention runs in a backward pass, with its results."""

    @classmethod
    def of(cls, events: Iterable[Polynomial]) -> Self:
        """Make a section of sizes in order: positive where bytes are allocated, negative where they are freed."""
        levels = list(accumulate(events, _add, initial=ZERO))
        moments = dict.fromkeys(levels)
        peaks = tuple(moment for moment in moments if not _is_exceeded(moment, moments))
        return cls(delta=levels[-1], peaks=peaks)

    @classmethod
    def decoded(cls, numbers: Sequence[int], table: Sequence[Polynomial], at_attention: Iterable[int] = ()) -> Self:
        """Read a section of a JSON recording, whose polynomials are numbered in `table`."""
        delta, *peaks = (table[number] for number in numbers)
        return cls(delta=delta, peaks=tuple(peaks), at_attention=tuple(table[number] for number in at_attention))


@dataclass(frozen=True, kw_only=True)
class Events:
    """Allocations and frees of a pass, in order, section by section.

    Layers have the sections `forward k` and `backward k` of kind k, and of the `first` and the `last` layer. An event
    is the index of a size that is allocated; or -1 - n, which frees what the same section allocated as its nth; or
    names what another section allocated: `forward -1:0` is, of the storages that outlived the forward pass of the layer
    before, the last. The ends name layers by kind, which stands for all of that kind, or as `first` and `last`.
    AT_ATTENTION is not about a storage.
    """

    sizes: tuple[Polynomial, ...]
    casts: tuple[int, ...]
    """Sizes of autocast's copies of weights."""
    ends: tuple[int, int]
    """The kinds of the first and the last layer."""
    sections: Mapping[str, tuple[int | str, ...]]

    @classmethod
    def decoded(cls, content: Mapping[str, Any]) -> Self:
        """Read the events of a JSON recording."""
        return cls(
            sizes=tuple(tuple(size) for size in content["sizes"]),
            casts=tuple(content["casts"]),
            ends=tuple(content["ends"]),
            sections={name: tuple(events) for name, events in content["sections"].items()},
        )

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

    def at(self, b: int, s: int) -> Activations:
        """The recording for micro-batches of b samples of s positions."""
        size = _MicroBatchSize(monomials=monomial_values(b, s), unit=self.unit)
        return Activations(
            pattern=self.pattern,
            embedding=size.section_bytes(self.embedding),
            forward=tuple(size.section_bytes(section) for section in self.forward),
            backward=tuple(size.section_bytes(section) for section in self.backward),
            head=size.section_bytes(self.head),
            loss=size.section_bytes(self.loss),
            head_backward=size.section_bytes(self.head_backward),
            embedding_backward=size.section_bytes(self.embedding_backward),
            kinds=tuple(
                {part: size.bytes_of(polynomial) for part, polynomial in polynomials.items()}
                for polynomials in self.kinds
            ),
            end_layers=tuple(size.bytes_of(polynomial) for polynomial in self.end_layers),
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
        table = _PolynomialTable()
        return {
            "positions": self.positions,
            "unit": self.unit,
            "pattern": "".join(chr(ord("0") + kind) for kind in self.pattern),
            **{name: table.numbers_of(getattr(self, name)) for name in _ONCE},
            "forward": [table.numbers_of(section) for section in self.forward],
            "backward": [table.numbers_of(section) for section in self.backward],
            "at_attention": [[table.number(level) for level in section.at_attention] for section in self.backward],
            "kinds": [{part: table.number(size) for part, size in sizes.items()} for sizes in self.kinds],
            "end_layers": [table.number(size) for size in self.end_layers],
            "sizes": table.polynomials,
            "events": vars(self.events),
        }

    @classmethod
    def decoded(cls, content: Mapping[str, Any]) -> Self:
        """Read what `encoded` returns."""
        table = [tuple(size) for size in content["sizes"]]
        first, last, last_backward = (table[number] for number in content["end_layers"])
        least, most = content["positions"]
        at_attention = content.get("at_attention", [()] * len(content["backward"]))
        return cls(
            positions=(least, most),
            unit=content["unit"],
            pattern=tuple(ord(kind) - ord("0") for kind in content["pattern"]),
            **{name: PassSection.decoded(content[name], table) for name in _ONCE},
            forward=tuple(PassSection.decoded(numbers, table) for numbers in content["forward"]),
            backward=tuple(
                PassSection.decoded(numbers, table, at_attention=levels)
                for numbers, levels in zip(content["backward"], at_attention, strict=True)
            ),
            kinds=tuple({part: table[number] for part, number in numbers.items()} for numbers in content["kinds"]),
            end_layers=(first, last, last_backward),
            events=Events.decoded(content["events"]),
        )


_ONCE = ("embedding", "head", "loss", "head_backward", "embedding_backward")
"""Fields of a Recording with a section that a pass has once."""


class _PolynomialTable:
    """The different polynomials of a recording in the order in which they are numbered."""

    def __init__(self) -> None:
        self._numbers: dict[Polynomial, int] = {}

    def number(self, polynomial: Polynomial) -> int:
        """Return the number of a polynomial, a new one for a new polynomial."""
        return self._numbers.setdefault(polynomial, len(self._numbers))

    def numbers_of(self, section: PassSection) -> list[int]:
        """Return the numbers of a section: of what is live at its end, and at its worst moments."""
        return [self.number(section.delta), *(self.number(peak) for peak in section.peaks)]

    @property
    def polynomials(self) -> list[list[int]]:
        """The coefficients of each."""
        return [list(polynomial) for polynomial in self._numbers]


@dataclass(frozen=True, kw_only=True)
class _MicroBatchSize:
    """A size of micro-batches at which polynomials are evaluated."""

    monomials: tuple[int, ...]
    """Values of 1, b, s, bs, s^2, bs^2."""
    unit: int
    """Parts of a byte that polynomials count."""

    def bytes_of(self, polynomial: Polynomial) -> int:
        """Return the bytes that a polynomial stands for."""
        return value_of(polynomial, self.monomials) // self.unit

    def section_bytes(self, section: PassSection) -> SectionBytes:
        """Return the bytes of a section."""
        return SectionBytes(
            delta=self.bytes_of(section.delta),
            peak=max(self.bytes_of(peak) for peak in section.peaks),
            at_attention=max((self.bytes_of(level) for level in section.at_attention), default=None),
        )


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


def _is_exceeded(polynomial: Polynomial, others: Iterable[Polynomial]) -> bool:
    """Whether another polynomial is at least this one for all b and s."""
    return any(other != polynomial and _exceeds(other, polynomial) for other in others)


def _exceeds(a: Polynomial, b: Polynomial) -> bool:
    """Whether a is at least b for all b and s."""
    return all(map(int.__ge__, a, b))
