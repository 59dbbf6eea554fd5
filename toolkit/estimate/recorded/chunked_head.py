"""The head and the loss of a recorded pass, changed from full logits to the loss in chunks.

Recordings have full logits, as other programs make them. What this toolkit's own loss allocates instead is a handful of
storages (toolkit/parallel/chunked_loss.py), which take the place of the recorded logits.

Dims: n tokens, c tokens of a chunk, h hidden, v rows of the vocabulary on a rank.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from toolkit.estimate.recorded.recording import ZERO, Events, PassSection, Polynomial, Recording
from toolkit.models.chunked_head import Chunks

_HEAD = ("head", "loss", "head_backward")
_WIDTHS = (1, 2, 4, 8)
"""Bytes of an element."""


@dataclass(eq=False)
class _Storage:
    size: Polynomial
    is_cast: bool = False


_Event = tuple[bool, _Storage | str]
"""Whether a storage is allocated, or freed; one of another section by the name that the event has."""
_Sections = Mapping[str, list[_Event]]


def in_chunks(found: Recording, chunks: Chunks, *, tp: int) -> Recording:
    """The recording with the loss in chunks; itself where it has no head."""
    sections = _resolved(found.events)
    change = _Change(sections, chunks, rows=-(-chunks.vocabulary // tp), unit=found.unit)
    if change.first is None:
        return found
    changed = {"head": change.head(), "loss": change.loss(), "head_backward": change.backward()}
    return replace(
        found,
        events=_named(found.events, sections, changed),
        head=_section(changed["head"], sections),
        loss=_section(changed["loss"], sections),
        head_backward=_section(changed["head_backward"], sections),
    )


class _Change:
    def __init__(self, sections: _Sections, chunks: Chunks, *, rows: int, unit: int) -> None:
        self.sections, self.chunks, self.unit = sections, chunks, unit
        logits = {width * rows * unit: width for width in _WIDTHS}
        made = {name: [one for is_made, one in sections.get(name, ()) if is_made] for name in _HEAD}

        def is_logits(one: _Storage | str) -> bool:
            return isinstance(one, _Storage) and one.size[0] == 0 and max(one.size) in logits

        of_head = [one for one in made["head"] if is_logits(one)]
        self.first = of_head[0] if of_head else None
        """What the head's product is written to."""
        if self.first is None:
            return
        assert isinstance(self.first, _Storage)
        largest = max(self.first.size)
        self.width, self._column = logits[largest], self.first.size.index(largest)
        self.has_cap = len(of_head) > 2  # divided, through tanh, and multiplied
        weight = rows * chunks.hidden * unit
        gradients = [one for one in made["head_backward"] if self._is_constant(one, (2 * weight, 4 * weight))]
        behind = made["head_backward"]
        hidden = self._per_token(self.width * chunks.hidden)
        start = next((at for at, one in enumerate(behind) if is_logits(one)), len(behind))
        self.of_hidden = next((one for one in behind[start:] if _size(one) == hidden), None)
        self.of_weight = gradients[-1] if gradients else None
        self.dropped = {one for name in _HEAD for one in made[name] if is_logits(one)} | {*gradients[:-1]}
        exact = weight * (self.width if chunks.is_one else 4)
        self.gradients = [
            *([_Storage(hidden)] if self.of_hidden is not None else ()),
            *([_Storage(_constant(exact))] if self.of_weight is not None else ()),
        ]
        # The head keeps its input for the product's backward pass, which is over when the function returns.
        freed_behind = {one for is_made, one in sections["head_backward"] if not is_made}
        inputs = [one for one in made["head"][: made["head"].index(self.first)] if _size(one) == hidden]
        self.input = inputs[-1] if inputs and inputs[-1] in freed_behind else None
        self._rows, self._weight = rows, weight

    def head(self) -> list[_Event]:
        """What the forward pass of one chunk allocates, which stands for all, in the place of the product."""
        events: list[_Event] = []
        for is_made, one in self.sections["head"]:
            if is_made and one is self.first:
                events += self._chunk()
            elif one not in self.dropped:
                events.append((is_made, one))
        over = [self.input, *(one for is_made, one in self.sections["head"] if is_made and self._is_copy(one))]
        return [*events, *((False, one) for one in over if one is not None)]

    def _chunk(self) -> Iterator[_Event]:
        of_weight = self.gradients[-1] if self.of_weight is not None else None
        losses = _Storage(self._per_token(4))
        yield from ((True, one) for one in self.gradients if not (self.chunks.is_one and one is of_weight))
        yield True, losses
        products, exact, slopes = (self._of_chunk(width) for width in (self.width, 4, self.width))
        rounds = self.width < 4
        cap = [self._of_chunk(4)] if self.has_cap and self.gradients else []
        yield True, products
        yield from ((True, exact), (False, products)) if rounds else ()
        yield from ((True, one) for one in cap)
        if rounds and self.gradients:
            yield True, slopes
        yield from ((False, one) for one in [*([exact] if rounds else ()), *cap])
        if not rounds and not self.gradients:
            yield False, products
        if of_weight is not None and self.chunks.is_one:
            yield True, of_weight
        elif of_weight is not None and rounds:
            newest = _Storage(_constant(self._weight * self.width))
            yield from ((True, newest), (False, newest))
        if self.gradients:
            yield False, slopes if rounds else products
        yield False, losses

    def loss(self) -> list[_Event]:
        """Nothing is left of it but numbers, and what it frees of others."""
        mine = {
            one for is_made, one in self.sections["loss"] if is_made and isinstance(one, _Storage) and any(one.size[1:])
        }
        self.dropped |= mine
        return [event for event in self.sections["loss"] if event[1] not in self.dropped]

    def backward(self) -> list[_Event]:
        """The gradients of the forward pass become those that the recorded backward pass makes."""
        events: list[_Event] = []
        mine = dict(
            zip((one for one in (self.of_hidden, self.of_weight) if one is not None), self.gradients, strict=True)
        )
        for is_made, one in self.sections["head_backward"]:
            if one in self.dropped or one is self.input or self._is_copy(one):
                continue
            own = mine.pop(one, None) if is_made and isinstance(one, _Storage) else None
            if own is None:
                events.append((is_made, one))
            elif _size(own) == _size(one):
                events += [(False, own), (is_made, one)]  # in place
            else:
                events += [(is_made, one), (False, own)]
        return events

    def _is_copy(self, one: _Storage | str) -> bool:
        """Whether it is autocast's copy of the head's weight, which goes when the function returns."""
        return isinstance(one, _Storage) and one.is_cast and one.size == _constant(2 * self._weight)

    def _is_constant(self, one: _Storage | str, sizes: Iterable[int]) -> bool:
        return isinstance(one, _Storage) and not any(one.size[1:]) and one.size[0] in sizes

    def _per_token(self, width: int) -> Polynomial:
        return tuple(width * self.unit if at == self._column else 0 for at in range(len(ZERO)))

    def _of_chunk(self, width: int) -> _Storage:
        return _Storage(_constant(self.chunks.tokens * self._rows * width * self.unit))


def _constant(size: int) -> Polynomial:
    return (size, *ZERO[1:])


def _size(one: _Storage | str | None) -> Polynomial | None:
    return one.size if isinstance(one, _Storage) else None


def _resolved(events: Events) -> _Sections:
    """The events of all sections. What the head's three allocate is known in every section by the storage itself."""
    found: dict[str, list[_Event]] = {}
    for name in (*_HEAD, *(name for name in events.sections if name not in _HEAD)):
        own: list[_Storage] = []
        found[name] = []
        for event in events.sections.get(name, ()):
            if isinstance(event, str):
                section, _, at = event.partition(":")
                is_known = section in _HEAD and section in found
                found[name].append((False, _outliving(found[section])[int(at)] if is_known else event))
            elif event >= 0:
                own.append(_Storage(events.sizes[event], event in events.casts))
                found[name].append((True, own[-1]))
            else:
                found[name].append((False, own[~event]))
    return found


def _outliving(section: Iterable[_Event]) -> list[_Storage]:
    """What a section allocates and does not free, the latest first."""
    events = list(section)
    freed = {one for is_made, one in events if not is_made}
    return [one for is_made, one in reversed(events) if is_made and isinstance(one, _Storage) and one not in freed]


def _section(section: Iterable[_Event], sections: _Sections) -> PassSection:
    """Its end and its worst moments. Copies of weights are counted beside recordings, except where they are freed."""

    def signed() -> Iterator[Polynomial]:
        for is_made, one in section:
            if isinstance(one, str):
                name, _, at = one.partition(":")
                one = _outliving(sections[name])[int(at)]
            if not (is_made and one.is_cast):
                yield one.size if is_made else tuple(-each for each in one.size)

    return PassSection.of(signed())


def _named(events: Events, sections: _Sections, changed: _Sections) -> Events:
    """The events with those of the head changed, and names of what these allocate."""
    sizes = {(size, at in events.casts): at for at, size in enumerate(events.sizes)}
    places = {one: f"{name}:{at}" for name in _HEAD for at, one in enumerate(_outliving(changed.get(name, ())))}

    def encoded(section: list[_Event]) -> Iterator[int | str]:
        own: dict[_Storage, int] = {}
        for is_made, one in section:
            if isinstance(one, str):
                yield one
            elif is_made:
                own[one] = len(own)
                yield sizes.setdefault((one.size, one.is_cast), len(sizes))
            elif one in own:
                yield -1 - own[one]
            elif one in places:
                yield places[one]

    written = {name: tuple(encoded(changed.get(name, sections[name]))) for name in events.sections}
    return replace(events, sizes=tuple(size for size, _ in sizes), sections=written)
