"""From traces of a few sizes to a Recording: each event's bytes as a polynomial, each kind of layer once."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from recorder.recording import MONOMIALS, WHERE, Polynomial, Recording, Section, total
from recorder.trace import Section as Traced

Size = tuple[int, int]
"""Samples and positions."""


def has_same_events(one: Sequence[Traced], other: Sequence[Traced]) -> bool:
    """Whether two traces allocate and free the same storages in the same order, whatever their sizes."""
    return [_shape(section) for section in one] == [_shape(section) for section in other]


def _shape(section: Traced) -> Any:
    return section.name, [(number, size > 0) for number, size in section.events]


def fits(polynomials: Sequence[Polynomial], sizes: Sequence[int], at: Size) -> bool:
    """Whether polynomials give these sizes."""
    return all(value(one, at) == size for one, size in zip(polynomials, sizes, strict=True))


def value(polynomial: Polynomial, at: Size) -> int:
    """A polynomial's value."""
    return sum(factor * at[0] ** i * at[1] ** j for factor, (i, j) in zip(polynomial, MONOMIALS, strict=True))


def solve(points: Sequence[Size], values: Sequence[int]) -> Polynomial | None:
    """The polynomial with integer coefficients through these values; a single term if there is one. None if none is."""
    for index, (i, j) in enumerate(MONOMIALS):
        factor = Fraction(values[0], points[0][0] ** i * points[0][1] ** j)
        if factor.denominator == 1 and all(
            factor * b**i * s**j == found for (b, s), found in zip(points, values, strict=True)
        ):
            return tuple(int(factor) if at == index else 0 for at in range(len(MONOMIALS)))
    used = [at for at, (i, j) in enumerate(MONOMIALS) if not i or len({b for b, _ in points}) > 1]
    if len(points) < len(used):
        return None
    rows = [
        [Fraction(b ** MONOMIALS[at][0] * s ** MONOMIALS[at][1]) for at in used] + [Fraction(found)]
        for (b, s), found in zip(points, values, strict=True)
    ]
    solved = _eliminated(rows, len(used))
    if solved is None or any(each.denominator != 1 for each in solved):
        return None
    found = dict(zip(used, solved, strict=True))
    return tuple(int(found.get(at, 0)) for at in range(len(MONOMIALS)))


def _eliminated(rows: list[list[Fraction]], unknowns: int) -> list[Fraction] | None:
    """Gauss-Jordan elimination; None where the rows contradict or do not determine the unknowns."""
    for column in range(unknowns):
        pivot = next((at for at in range(column, len(rows)) if rows[at][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [each / rows[column][column] for each in rows[column]]
        for at in range(len(rows)):
            if at != column and rows[at][column]:
                rows[at] = [a - rows[at][column] * b for a, b in zip(rows[at], rows[column], strict=True)]
    if any(row[unknowns] for row in rows[unknowns:]):
        return None
    return [row[unknowns] for row in rows[:unknowns]]


def allocated(trace: Iterable[Traced], unit: int) -> list[int]:
    """The size of every storage in parts of a byte, in the order of allocation."""
    return [unit * size for section in trace for _, size in section.events if size > 0]


def assemble(
    trace: Sequence[Traced],
    sizes: Sequence[Polynomial],
    kept: Sequence[int],
    pattern: Sequence[int],
    positions: tuple[int, int | None],
    unit: int,
) -> Recording:
    """A Recording of one trace, with the polynomials of its storages in the order of `allocated`."""
    size_of: dict[int, Polynomial] = {}
    place: dict[int, tuple[str, int]] = {}
    remaining = iter(sizes)
    for section in trace:
        count = 0
        for number, size in section.events:
            if size > 0:
                size_of[number], place[number] = next(remaining), (section.name, count)
                count += 1
    named = {section.name: section for section in trace}

    def made(name: str) -> Section:
        section = named.get(name, Traced(name))
        return Section(
            events=tuple(
                (size_of[number], 0 if size > 0 else _freed(name, *place[number], kept))
                for number, size in section.events
            )
        )

    representatives = (_inner(kind, kept, pattern) for kind in dict.fromkeys(pattern))
    inner = [index for index in representatives if index is not None]
    numbers = {pattern[index]: number for number, index in enumerate(inner)}
    forward = [made(f"forward {index}") for index in inner]
    backward = [made(f"backward {index}") for index in inner]

    def beyond(direction: str, index: int, usual: Sequence[Section]) -> Polynomial:
        if len(inner) == 0:
            return total(())
        own, other = made(f"{direction} {index}").delta, usual[numbers[pattern[index]]].delta
        return tuple(map(int.__sub__, own, other))

    ends = (kept[0], kept[-1]) if kept else None
    none = total(())
    return Recording(
        positions=positions,
        unit=unit,
        pattern=tuple(numbers.get(kind, 0) for kind in pattern),
        **{name: made(name) for name in ("before", "head", "loss", "turn", "after")},
        forward=tuple(forward),
        backward=tuple(backward),
        kinds=tuple(_kinds(named[f"forward {index}"], size_of, place) for index in inner),
        edges=(
            (
                beyond("forward", ends[0], forward),
                beyond("forward", ends[1], forward),
                beyond("backward", ends[1], backward),
            )
            if ends and len(kept) > 1
            else (none, none, none)
        ),
    )


def _inner(kind: int, kept: Sequence[int], pattern: Sequence[int]) -> int | None:
    """The layer of a kind that stands for all: between two others that were kept, if there is one."""
    alike = [index for index in kept if pattern[index] == kind]
    inside = [index for index in alike if index - 1 in kept and index + 1 in kept]
    return next(iter([*inside, *alike]), None)


def _freed(name: str, owner: str, number: int, kept: Sequence[int]) -> int:
    """What a section frees, as Section.events has it."""
    where = WHERE[0] if owner == name else owner
    if owner != name and " " in owner:
        direction, index = owner.split()
        where = "own forward" if name == f"backward {index}" else f"previous {direction}"
    return 1 + 8 * number + WHERE.index(where)


def _kinds(section: Traced, size_of: dict[int, Polynomial], place: dict[int, tuple[str, int]]) -> dict[str, Polynomial]:
    """What a layer keeps, by the part that allocates it. What it frees of the layer before is its residual stream."""
    found: dict[str, list[Polynomial]] = {}
    for number, size in section.events:
        own = place[number][0] == section.name
        kind = section.kinds.get(number) if own else "residual"
        found.setdefault(kind or "residual", []).append(
            size_of[number] if size > 0 else tuple(-each for each in size_of[number])
        )
    return {kind: summed for kind, each in found.items() if any(summed := total(each))}
