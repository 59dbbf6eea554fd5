"""The head and the loss of a recorded pass, changed from full logits to the loss in chunks.

Recordings have full logits, as other programs make them. What this toolkit's own loss allocates instead is a handful of
storages (toolkit/parallel/chunked_loss.py), which take the place of the recorded logits.

The chunked loss is not recorded itself: its chunks depend on tokens, vocabulary and tp, so its bytes are no polynomial
of the tokens, and every model would need a second recording for each size of a chunk.

Dims: n tokens, c tokens of a chunk, h hidden, v rows of the vocabulary on a rank.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from toolkit.estimate.recorded.recording import ZERO, Events, PassSection, Polynomial, Recording
from toolkit.models.chunked_head import Chunks

_HEAD = ("head", "loss", "head_backward")
_WIDTHS = (1, 2, 4, 8)
"""Bytes of an element that logits may have."""
_HIDDEN_WIDTHS = (1, 2, 4)
"""Bytes of an element of a hidden state: of a mask, in 16 bits, in fp32."""


@dataclass(eq=False)
class _Storage:
    """A storage that the head's sections allocate. Compared by identity: two of one size are two."""

    size: Polynomial
    is_cast: bool = False
    """Whether it is autocast's copy of a weight."""


_Event = tuple[bool, _Storage | str]
"""(whether the storage is allocated, or freed; the storage, or the name that it has as one of another section)."""
_Sections = Mapping[str, list[_Event]]


def has_hidden_size(rows: int, hidden: int) -> bool:
    """Whether logits of so many rows of the vocabulary may have as many bytes as a hidden state."""
    hidden_sizes = [hidden * width for width in _HIDDEN_WIDTHS]
    return any(rows * width in hidden_sizes for width in _WIDTHS)


def in_chunks(recording: Recording, chunks: Chunks, *, tp: int) -> Recording:
    """The recording with the loss in chunks; itself where it has no head.

    Logits are found by their size, so that hidden states must have another one (`has_hidden_size`).
    """
    sections = _resolved(recording.events)
    change = _Change(sections, chunks, rows=-(-chunks.vocabulary // tp), unit=recording.unit)
    if change.first is None:
        return recording
    changed = {"head": change.head(), "loss": change.loss(), "head_backward": change.backward()}
    return replace(
        recording,
        events=_named(recording.events, sections, changed),
        head=_section(changed["head"], sections),
        loss=_section(changed["loss"], sections),
        head_backward=_section(changed["head_backward"], sections),
    )


class _Change:
    """The storages of the head's sections that the loss in chunks leaves out, and those that it makes instead."""

    def __init__(self, sections: _Sections, chunks: Chunks, *, rows: int, unit: int) -> None:
        self.sections = sections
        self.chunks = chunks
        self.unit = unit
        self._rows = rows
        self._weight = rows * chunks.hidden * unit
        """Size of the head's weight for each byte of an element."""
        self._allocated = {
            name: [storage for is_allocated, storage in sections.get(name, ()) if is_allocated] for name in _HEAD
        }
        self.first = next((storage for storage in self._allocated["head"] if self._is_logits(storage)), None)
        """Storage that the head's product is written to; None where the pass has no head."""
        if self.first is None:
            return
        assert isinstance(self.first, _Storage)
        largest = max(self.first.size)
        self.width = largest // (rows * unit)
        """Bytes of an element of the product."""
        self._column = self.first.size.index(largest)
        """The monomial that counts tokens: bs, or s where there is one sample."""
        logits_in_head = [storage for storage in self._allocated["head"] if self._is_logits(storage)]
        self.has_cap = len(logits_in_head) > 2  # divided, through tanh, and multiplied
        weight_gradients = self._weight_gradients()
        self.of_hidden = self._gradient_of_hidden()
        """Recorded gradient of the hidden states; None where nothing before the head trains."""
        self.of_weight = weight_gradients[-1] if weight_gradients else None
        """Recorded gradient of the weight, as it stays; None where the head does not train."""
        self.dropped = {*weight_gradients[:-1]}
        for name in _HEAD:
            self.dropped.update(storage for storage in self._allocated[name] if self._is_logits(storage))
        self.gradients: list[_Storage] = []
        """Gradients that the forward pass makes instead: of the hidden states, of the weight."""
        if self.of_hidden is not None:
            self.gradients.append(_Storage(self._hidden_size))
        if self.of_weight is not None:
            self.gradients.append(_Storage(_constant(self._weight * (self.width if chunks.is_one else 4))))
        self.input = self._kept_input()

    @property
    def _hidden_size(self) -> Polynomial:
        """Size of hidden states, or of their gradient, in the dtype of the product."""
        return self._per_token(self.width * self.chunks.hidden)

    def _is_logits(self, storage: _Storage | str) -> bool:
        """Whether it has an element for each token and row of the vocabulary."""
        if not isinstance(storage, _Storage) or storage.size[0] != 0:
            return False
        return max(storage.size) in [width * self._rows * self.unit for width in _WIDTHS]

    def _weight_gradients(self) -> list[_Storage | str]:
        """Return the recorded gradients of the weight in order: as the product made them, and cast."""
        sizes = (2 * self._weight, 4 * self._weight)
        return [storage for storage in self._allocated["head_backward"] if self._is_constant(storage, sizes)]

    def _gradient_of_hidden(self) -> _Storage | str | None:
        """Return the recorded gradient of the hidden states: the first of their size behind that of the logits."""
        storages = self._allocated["head_backward"]
        start = next((place for place, storage in enumerate(storages) if self._is_logits(storage)), len(storages))
        return next((storage for storage in storages[start:] if _size(storage) == self._hidden_size), None)

    def _kept_input(self) -> _Storage | str | None:
        """Return the head's input, if the recording keeps it for the backward pass of the product.

        In chunks that is over when the function returns.
        """
        assert self.first is not None
        freed_in_backward = {storage for is_allocated, storage in self.sections["head_backward"] if not is_allocated}
        in_head = self._allocated["head"]
        before_logits = in_head[: in_head.index(self.first)]
        inputs = [storage for storage in before_logits if _size(storage) == self._hidden_size]
        return inputs[-1] if inputs and inputs[-1] in freed_in_backward else None

    def head(self) -> list[_Event]:
        """Return the head's events with one chunk's forward pass, which stands for all, in place of the product."""
        events: list[_Event] = []
        for is_made, storage in self.sections["head"]:
            if is_made and storage is self.first:
                events += self._chunk()
            elif storage not in self.dropped:
                events.append((is_made, storage))
        if self.input is not None:
            events.append((False, self.input))
        for is_made, storage in self.sections["head"]:
            if is_made and self._is_copy(storage):
                events.append((False, storage))
        return events

    def _chunk(self) -> Iterator[_Event]:
        """Yield the events of a chunk's forward pass, in which the gradients are made."""
        of_weight = self.gradients[-1] if self.of_weight is not None else None
        losses = _Storage(self._per_token(4))
        for gradient in self.gradients:
            if not (self.chunks.is_one and gradient is of_weight):
                yield True, gradient
        yield True, losses
        products = self._of_chunk(self.width)
        exact = self._of_chunk(4)
        slopes = self._of_chunk(self.width)
        cap = self._of_chunk(4)
        rounds = self.width < 4
        caps = self.has_cap and bool(self.gradients)
        yield True, products
        if rounds:
            yield True, exact
            yield False, products
        if caps:
            yield True, cap
        if rounds and self.gradients:
            yield True, slopes
        if rounds:
            yield False, exact
        if caps:
            yield False, cap
        if not rounds and not self.gradients:
            yield False, products
        if of_weight is not None and self.chunks.is_one:
            yield True, of_weight
        elif of_weight is not None and rounds:
            newest = _Storage(_constant(self._weight * self.width))
            yield True, newest
            yield False, newest
        if self.gradients:
            yield False, slopes if rounds else products
        yield False, losses

    def loss(self) -> list[_Event]:
        """Return the events of the loss that remain: its numbers, and what it frees of other sections."""
        for is_made, storage in self.sections["loss"]:
            if is_made and isinstance(storage, _Storage) and any(storage.size[1:]):
                self.dropped.add(storage)
        return [event for event in self.sections["loss"] if event[1] not in self.dropped]

    def backward(self) -> list[_Event]:
        """The gradients of the forward pass become those that the recorded backward pass makes."""
        events: list[_Event] = []
        recorded = [gradient for gradient in (self.of_hidden, self.of_weight) if gradient is not None]
        made_before = dict(zip(recorded, self.gradients, strict=True))
        for is_made, storage in self.sections["head_backward"]:
            if storage in self.dropped or storage is self.input or self._is_copy(storage):
                continue
            gradient = made_before.pop(storage, None) if is_made and isinstance(storage, _Storage) else None
            if gradient is None:
                events.append((is_made, storage))
            elif _size(gradient) == _size(storage):
                events += [(False, gradient), (is_made, storage)]  # in place
            else:
                events += [(is_made, storage), (False, gradient)]
        return events

    def _is_copy(self, storage: _Storage | str) -> bool:
        """Whether it is autocast's copy of the head's weight, which goes when the function returns."""
        return isinstance(storage, _Storage) and storage.is_cast and storage.size == _constant(2 * self._weight)

    def _is_constant(self, storage: _Storage | str, sizes: Iterable[int]) -> bool:
        return isinstance(storage, _Storage) and not any(storage.size[1:]) and storage.size[0] in sizes

    def _per_token(self, width: int) -> Polynomial:
        return tuple(width * self.unit if at == self._column else 0 for at in range(len(ZERO)))

    def _of_chunk(self, width: int) -> _Storage:
        return _Storage(_constant(self.chunks.tokens * self._rows * width * self.unit))


def _constant(size: int) -> Polynomial:
    return (size, *ZERO[1:])


def _size(storage: _Storage | str | None) -> Polynomial | None:
    return storage.size if isinstance(storage, _Storage) else None


def _resolved(events: Events) -> _Sections:
    """The events of all sections. What the head's three allocate is known in every section by the storage itself."""
    resolved: dict[str, list[_Event]] = {}
    others = [name for name in events.sections if name not in _HEAD]
    for name in (*_HEAD, *others):
        allocated: list[_Storage] = []
        resolved[name] = []
        for event in events.sections.get(name, ()):
            if isinstance(event, str):
                section, _, at = event.partition(":")
                is_known = section in _HEAD and section in resolved
                resolved[name].append((False, _outliving(resolved[section])[int(at)] if is_known else event))
            elif event >= 0:
                allocated.append(_Storage(events.sizes[event], event in events.casts))
                resolved[name].append((True, allocated[-1]))
            else:
                resolved[name].append((False, allocated[~event]))
    return resolved


def _outliving(section: Iterable[_Event]) -> list[_Storage]:
    """Return the storages that a section allocates and does not free, the latest first."""
    events = list(section)
    freed = {storage for is_made, storage in events if not is_made}
    made = [storage for is_made, storage in reversed(events) if is_made and isinstance(storage, _Storage)]
    return [storage for storage in made if storage not in freed]


def _section(section: Iterable[_Event], sections: _Sections) -> PassSection:
    """Return a section's end and worst moments. Copies of weights count beside recordings, except when freed."""

    def signed() -> Iterator[Polynomial]:
        for is_made, storage in section:
            if isinstance(storage, str):
                name, _, at = storage.partition(":")
                storage = _outliving(sections[name])[int(at)]
            if not (is_made and storage.is_cast):
                yield storage.size if is_made else tuple(-coefficient for coefficient in storage.size)

    return PassSection.of(signed())


def _named(events: Events, sections: _Sections, changed: _Sections) -> Events:
    """The events with those of the head changed, and names of what these allocate."""
    sizes = {(size, at in events.casts): at for at, size in enumerate(events.sizes)}
    places = {storage: f"{name}:{at}" for name in _HEAD for at, storage in enumerate(_outliving(changed.get(name, ())))}

    def encoded(section: list[_Event]) -> Iterator[int | str]:
        allocated: dict[_Storage, int] = {}
        for is_made, storage in section:
            if isinstance(storage, str):
                yield storage
            elif is_made:
                allocated[storage] = len(allocated)
                yield sizes.setdefault((storage.size, storage.is_cast), len(sizes))
            elif storage in allocated:
                yield -1 - allocated[storage]
            elif storage in places:
                yield places[storage]

    written = {name: tuple(encoded(changed.get(name, sections[name]))) for name in events.sections}
    return replace(events, sizes=tuple(size for size, _ in sizes), sections=written)
