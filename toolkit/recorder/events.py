"""The events of a traced pass, with storages named by where they were allocated, so that layers can be repeated."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from toolkit.estimate.recorded.recording import Events, Polynomial
from toolkit.recorder.trace import TracedSection


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


def events_of(
    trace: Sequence[TracedSection],
    size_of: Mapping[int, Polynomial],
    ran: Sequence[int],
    inner: Sequence[int],
    ends: tuple[int, int],
) -> Events:
    """Events of the ends and of the layers that stand for others: `inner`, one of each kind, the first and the last.

    `size_of`: of a storage, by its number. `ran`: the layers that ran. `ends`: kinds of the first and the last.
    """
    casts = set[int]().union(*(section.casts for section in trace))
    table: dict[tuple[Polynomial, bool], int] = {}
    allocated_in: dict[int, tuple[_SectionName, int]] = {}
    for section in trace:
        place = _SectionName.of(section.name)
        freed = {number for number, size in section.events if size < 0}
        outlive = [number for number, size in section.events if size > 0 and number not in freed]
        allocated_in |= {number: (place, at) for at, number in enumerate(reversed(outlive))}

    def roles_of(layer: int) -> list[str]:
        """Return the roles that the layer stands for: the number of its kind, `first`, `last`; maybe none."""
        roles = [str(inner.index(layer))] if layer in inner else []
        return roles + [role for role, at in (("first", ran[0]), ("last", ran[-1])) if at == layer]

    def reference(here: _SectionName, number: int) -> str | None:
        """Return the name of a storage that another section allocated; None where no section has it."""
        if number not in allocated_in:
            return None
        there, at = allocated_in[number]
        if there.layer is None:
            return f"{there.name}:{at}" if there.name else None
        if here.layer is not None:
            return f"{there.direction} {ran.index(there.layer) - ran.index(here.layer):+d}:{at}"
        roles = roles_of(there.layer)
        return f"{there.direction} {roles[-1]}:{at}" if roles else None

    def events(section: TracedSection, here: _SectionName) -> Iterator[int | str]:
        allocated: dict[int, int] = {}
        for number, size in section.events:
            if size > 0:
                allocated[number] = len(allocated)
                yield table.setdefault((size_of[number], number in casts), len(table))
            elif number in allocated:
                yield -1 - allocated[number]
            elif (name := reference(here, number)) is not None:
                yield name

    sections = {}
    for section in trace:
        place = _SectionName.of(section.name)
        roles = [place.name] if place.name else []
        if place.layer is not None:
            roles = [f"{place.direction} {role}" for role in roles_of(place.layer)]
        for role in roles:
            sections[role] = tuple(events(section, place))
    copies = tuple(index for (_, is_cast), index in table.items() if is_cast)
    return Events(sizes=tuple(size for size, _ in table), casts=copies, ends=ends, sections=sections)
