"""The events of a traced pass, with storages named by where they were allocated, so that layers can be repeated."""

from collections.abc import Iterator, Mapping, Sequence

from toolkit.estimate.recorded.recording import Events, Polynomial
from toolkit.recorder.trace import TracedSection

_LAYER = ("forward ", "backward ")


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
    places: dict[int, tuple[str, int]] = {}
    for section in trace:
        freed = {number for number, size in section.events if size < 0}
        outlive = [number for number, size in section.events if size > 0 and number not in freed]
        places |= {number: (section.name, at) for at, number in enumerate(reversed(outlive))}

    def named(index: int) -> list[str]:
        """Return the roles that the layer stands for: the number of its kind, `first`, `last`; maybe none."""
        roles = [str(inner.index(index))] if index in inner else []
        return roles + [role for role, at in (("first", ran[0]), ("last", ran[-1])) if at == index]

    def reference(name: str, number: int) -> str | None:
        """Return the name of a storage that another section allocated; None where no section has it."""
        place, at = places.get(number, ("", 0))
        if not place.startswith(_LAYER):
            return f"{place}:{at}" if place else None
        direction, layer = place.split()
        if name.startswith(_LAYER):
            return f"{direction} {ran.index(int(layer)) - ran.index(int(name.split()[1])):+d}:{at}"
        role = named(int(layer))
        return f"{direction} {role[-1]}:{at}" if role else None

    def events(section: TracedSection) -> Iterator[int | str]:
        allocated: dict[int, int] = {}
        for number, size in section.events:
            if size > 0:
                allocated[number] = len(allocated)
                yield table.setdefault((size_of[number], number in casts), len(table))
            elif number in allocated:
                yield -1 - allocated[number]
            elif (name := reference(section.name, number)) is not None:
                yield name

    sections = {}
    for section in trace:
        direction, _, layer = section.name.partition(" ")
        roles = [f"{direction} {role}" for role in named(int(layer))] if layer else [section.name]
        for role in roles if section.name else ():
            sections[role] = tuple(events(section))
    copies = tuple(index for (_, is_cast), index in table.items() if is_cast)
    return Events(sizes=tuple(size for size, _ in table), casts=copies, ends=ends, sections=sections)
