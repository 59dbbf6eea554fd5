"""The events of a traced pass, with storages named by where they were allocated, so that layers can be repeated."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from toolkit.estimate.recorded.recording import AT_ATTENTION, Events, Polynomial
from toolkit.recorder.trace import ATTENTION, TracedSection


@dataclass(frozen=True, kw_only=True)
class _SectionName:
    """The name of a section of a trace: `embedding`, or of a decoder layer `forward 3`."""

    name: str
    direction: str
    """`forward` or `backward` of a decoder layer; the name of any other section."""
    layer: int | None
    """The decoder layer; None for any other section."""

    @classmethod
    def of(cls, name: str) -> Self:
        direction, _, layer = name.partition(" ")
        return cls(name=name, direction=direction, layer=int(layer) if layer else None)


@dataclass(frozen=True, kw_only=True)
class _Allocation:
    """The allocation of a storage that outlives its section."""

    section: _SectionName
    place: int
    """The number of the storage among those that outlive the section, the latest first."""


@dataclass(frozen=True, kw_only=True)
class LayerRoles:
    """Which of the layers that ran stand for others."""

    ran: Sequence[int]
    """The layers that ran, in order."""
    inner: Sequence[int]
    """The layers that stand for all of their kind, by the number of the kind."""
    ends: tuple[int, int]
    """The kinds of the first and the last layer."""

    def of(self, layer: int) -> list[str]:
        """Return the roles of a layer: the number of its kind, `first`, `last`; maybe none."""
        roles = []
        if layer in self.inner:
            roles.append(str(self.inner.index(layer)))
        if layer == self.ran[0]:
            roles.append("first")
        if layer == self.ran[-1]:
            roles.append("last")
        return roles

    def distance(self, layer: int, other: int) -> int:
        """Return by how many layers that ran the other one is further on."""
        return self.ran.index(other) - self.ran.index(layer)


def events_of(trace: Sequence[TracedSection], size_of: Mapping[int, Polynomial], roles: LayerRoles) -> Events:
    """Return the events of the ends, and of the layers that stand for others. `size_of`: by a storage's number."""
    return _EventWriter(trace, size_of, roles).events()


class _EventWriter:
    """Writes the events of a trace, with a table of the sizes that occur in them."""

    def __init__(self, trace: Sequence[TracedSection], size_of: Mapping[int, Polynomial], roles: LayerRoles) -> None:
        self._trace = trace
        self._size_of = size_of
        self._roles = roles
        self._casts = set[int]().union(*(section.casts for section in trace))
        self._table: dict[tuple[Polynomial, bool], int] = {}
        """Number of each size, and whether it is that of autocast's copy of a weight."""
        self._allocations = _allocations(trace)

    def events(self) -> Events:
        """Return the events of all sections that have a name."""
        sections: dict[str, tuple[int | str, ...]] = {}
        for section in self._trace:
            name = _SectionName.of(section.name)
            for written_name in self._names(name):
                sections[written_name] = tuple(self._section(section, name))
        return Events(
            sizes=tuple(size for size, _ in self._table),
            casts=tuple(number for (_, is_cast), number in self._table.items() if is_cast),
            ends=self._roles.ends,
            sections=sections,
        )

    def _names(self, section: _SectionName) -> list[str]:
        """Return the names under which a section is written: of a layer one for each of its roles."""
        if section.layer is not None:
            return [f"{section.direction} {role}" for role in self._roles.of(section.layer)]
        return [section.name] if section.name else []

    def _section(self, section: TracedSection, name: _SectionName) -> Iterator[int | str]:
        """Yield the events of a section, as `Events` describes them."""
        allocated: dict[int, int] = {}
        for number, size in section.events:
            if (number, size) == ATTENTION:
                yield AT_ATTENTION
            elif size > 0:
                allocated[number] = len(allocated)
                entry = (self._size_of[number], number in self._casts)
                yield self._table.setdefault(entry, len(self._table))
            elif number in allocated:
                yield -1 - allocated[number]
            elif number in self._allocations:
                reference = self._reference(name, self._allocations[number])
                if reference is not None:
                    yield reference

    def _reference(self, here: _SectionName, allocation: _Allocation) -> str | None:
        """Return the name of a storage that another section allocated; None where that section is not written."""
        there = allocation.section
        if there.layer is None:
            return f"{there.name}:{allocation.place}" if there.name else None
        if here.layer is not None:
            distance = self._roles.distance(here.layer, there.layer)
            return f"{there.direction} {distance:+d}:{allocation.place}"
        roles = self._roles.of(there.layer)
        return f"{there.direction} {roles[-1]}:{allocation.place}" if roles else None


def _allocations(trace: Sequence[TracedSection]) -> dict[int, _Allocation]:
    """Return where each storage was allocated that outlives its section, by its number."""
    allocations: dict[int, _Allocation] = {}
    for section in trace:
        name = _SectionName.of(section.name)
        freed = {number for number, size in section.events if size < 0}
        outliving = [number for number, size in section.events if size > 0 and number not in freed]
        for place, number in enumerate(reversed(outliving)):
            allocations[number] = _Allocation(section=name, place=place)
    return allocations
