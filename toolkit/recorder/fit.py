"""Fits traces of a few sizes to a Recording: each event's bytes as a polynomial, each kind of layer once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any, Self

from toolkit.estimate.recorded.recording import (
    MONOMIALS,
    PassSection,
    Polynomial,
    Recording,
    monomial_values,
    total,
    value_of,
)
from toolkit.recorder.events import LayerRoles, events_of
from toolkit.recorder.trace import ATTENTION, TracedSection

Size = tuple[int, int]
"""Number of samples, and of positions of each."""


def has_same_events(trace: Sequence[TracedSection], other: Sequence[TracedSection]) -> bool:
    """Whether two traces allocate and free the same storages in the same order, whatever their sizes."""
    return [_shape(section) for section in trace] == [_shape(section) for section in other]


def _shape(section: TracedSection) -> Any:
    return section.name, [(number, size > 0) for number, size in section.events]


def fits(polynomials: Sequence[Polynomial], sizes: Sequence[int], at: Size) -> bool:
    """Whether polynomials give these sizes."""
    monomials = monomial_values(*at)
    return all(value_of(polynomial, monomials) == size for polynomial, size in zip(polynomials, sizes, strict=True))


def solve(points: Sequence[Size], values: Sequence[int]) -> Polynomial | None:
    """The polynomial with integer coefficients through these values, of one term, of two, or of all; None if none is.

    One or two terms are accepted only if they meet all values, which are more.
    """
    every = range(len(MONOMIALS))
    candidates: list[tuple[int, ...]] = []
    if len(points) > 2:
        candidates += combinations(every, 1)
        candidates += combinations(every, 2)
    has_one_batch_size = len({b for b, _ in points}) == 1
    # With one batch size, what grows with b cannot be told from what does not.
    full = tuple(term for term in every if MONOMIALS[term][0] == 0 or not has_one_batch_size)
    if len(full) <= len(points):
        candidates.append(full)
    monomials_at = [monomial_values(b, s) for b, s in points]
    for terms in candidates:
        polynomial = _through(monomials_at, values, terms)
        if polynomial is not None:
            return polynomial
    return None


def _through(monomials_at: Sequence[Sequence[int]], values: Sequence[int], terms: Sequence[int]) -> Polynomial | None:
    """Return the polynomial with integer coefficients of these terms alone through all values; None if none is.

    `monomials_at`: the values of all monomials at each point.
    """
    if len(terms) == 1:  # as most sizes have; by division, which takes less time
        only_term = terms[0]
        powers = [monomials[only_term] for monomials in monomials_at]
        factor, remainder = divmod(values[0], powers[0])
        if remainder or any(factor * power != value for power, value in zip(powers, values, strict=True)):
            return None
        return tuple(factor if term == only_term else 0 for term in range(len(MONOMIALS)))
    rows = []
    for monomials, value in zip(monomials_at, values, strict=True):
        rows.append([Fraction(monomials[term]) for term in terms] + [Fraction(value)])
    solved = _eliminated(rows, len(terms))
    if solved is None or any(coefficient.denominator != 1 for coefficient in solved):
        return None
    coefficients = dict(zip(terms, solved, strict=True))
    return tuple(int(coefficients.get(term, 0)) for term in range(len(MONOMIALS)))


def _eliminated(rows: list[list[Fraction]], unknowns: int) -> list[Fraction] | None:
    """Gauss-Jordan elimination; None where the rows contradict or do not determine the unknowns."""
    for column in range(unknowns):
        pivot = next((at for at in range(column, len(rows)) if rows[at][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [entry / rows[column][column] for entry in rows[column]]
        for at in range(len(rows)):
            if at != column and rows[at][column]:
                rows[at] = [a - rows[at][column] * b for a, b in zip(rows[at], rows[column], strict=True)]
    if any(row[unknowns] for row in rows[unknowns:]):
        return None
    return [row[unknowns] for row in rows[:unknowns]]


def allocated(trace: Iterable[TracedSection], unit: int) -> list[int]:
    """The size of every storage in parts of a byte, in the order of allocation."""
    return [unit * size for section in trace for _, size in section.events if size > 0]


def assemble(
    trace: Sequence[TracedSection],
    sizes: Sequence[Polynomial],
    *,
    layers: Sequence[int],
    pattern: Sequence[int],
    positions: tuple[int, int | None],
    unit: int,
) -> Recording:
    """Make a Recording of one trace, with the polynomials of its storages in the order of `allocated`.

    `layers`: those that ran; `pattern`: the kind of every layer of the model. `positions` and `unit` are fields of the
    Recording.
    """
    allocations = [number for section in trace for number, size in section.events if size > 0]
    fitted = _FittedTrace(trace, size_of=dict(zip(allocations, sizes, strict=True)))
    chosen = _ChosenLayers.of(layers, pattern)
    first = layers[0]
    last = layers[-1]
    first_beyond = _bytes_beyond_inner(fitted, chosen, first)
    last_beyond = _bytes_beyond_inner(fitted, chosen, last)
    ends = (chosen.kind_number(first), chosen.kind_number(last))
    return Recording(
        positions=positions,
        unit=unit,
        pattern=tuple(chosen.kind_number(index) for index in range(len(pattern))),
        embedding=fitted.section("embedding"),
        head=fitted.section("head"),
        loss=fitted.section("loss"),
        head_backward=fitted.section("head_backward"),
        # The first layer's backward pass also frees what all layers share, for instance masks.
        embedding_backward=fitted.section("embedding_backward", first_beyond["backward"]),
        forward=tuple(fitted.section(f"forward {index}") for index in chosen.inner),
        backward=tuple(fitted.section(f"backward {index}") for index in chosen.inner),
        kinds=tuple(fitted.kept_by_part(f"forward {index}") for index in chosen.inner),
        end_layers=(first_beyond["forward"], last_beyond["forward"], last_beyond["backward"]),
        events=events_of(trace, fitted.size_of, LayerRoles(ran=layers, inner=chosen.inner, ends=ends)),
    )


@dataclass(frozen=True, kw_only=True)
class _ChosenLayers:
    """The layers of a trace that stand for all of their kind."""

    ran: Sequence[int]
    pattern: Sequence[int]
    """The kind of every layer of the model."""
    inner: list[int]
    """A layer of each kind that ran, in the order of the kinds: an inner one, if there is one."""

    @classmethod
    def of(cls, ran: Sequence[int], pattern: Sequence[int]) -> Self:
        """Choose a layer of each kind."""
        inner = []
        for kind in dict.fromkeys(pattern):
            index = _inner(kind, ran, pattern)
            if index is not None:
                inner.append(index)
        return cls(ran=ran, pattern=pattern, inner=inner)

    def kind_number(self, layer: int) -> int:
        """Return the number of a layer's kind in the recording: the place of its kind in `inner`.

        Kinds of layers that did not run, because another stage has them, stand under number 0.
        """
        for number, index in enumerate(self.inner):
            if self.pattern[index] == self.pattern[layer]:
                return number
        return 0


def _bytes_beyond_inner(fitted: "_FittedTrace", chosen: _ChosenLayers, layer: int) -> dict[str, Polynomial]:
    """Return what the first or the last layer leaves live beyond an inner one of its kind, in each direction."""
    directions = ("forward", "backward")
    if len(chosen.ran) < 2:
        return {direction: total(()) for direction in directions}
    usual = chosen.inner[chosen.kind_number(layer)]
    beyond: dict[str, Polynomial] = {}
    for direction in directions:
        end_bytes = fitted.section(f"{direction} {layer}").delta
        inner_bytes = fitted.section(f"{direction} {usual}").delta
        beyond[direction] = tuple(map(int.__sub__, end_bytes, inner_bytes))
    return beyond


class _FittedTrace:
    """The sections of a trace, with the polynomial of each storage."""

    def __init__(self, trace: Sequence[TracedSection], *, size_of: Mapping[int, Polynomial]) -> None:
        self.size_of = size_of
        self._sections = {section.name: section for section in trace}
        self._casts = set[int]().union(*(section.casts for section in trace))

    def section(self, name: str, *earlier: Polynomial) -> PassSection:
        """Return a section of that name, empty where there is none, behind `earlier` events.

        Copies of weights count at the moments of the part of the forward pass that makes them, and nowhere else.
        """
        section = self._sections.get(name, TracedSection(name))
        counted_casts = section.casts if name.startswith(("forward", "head")) else set[int]()
        without_casts = list(earlier)
        with_casts = list(earlier)
        at_attention: list[Polynomial] = []
        for number, size in section.events:
            if (number, size) == ATTENTION:
                at_attention.append(total(with_casts))
                continue
            change = self._change(number, size)
            if number not in self._casts:
                without_casts.append(change)
                with_casts.append(change)
            elif number in counted_casts:
                with_casts.append(change)
        return PassSection(
            delta=total(without_casts),
            peaks=PassSection.of(with_casts).peaks,
            at_attention=tuple(dict.fromkeys(at_attention)),
        )

    def kept_by_part(self, name: str) -> dict[str, Polynomial]:
        """Return the bytes that a layer's section of that name keeps, by the part of the layer that allocates them.

        Bytes that it frees of the layer before are its residual stream.
        """
        section = self._sections[name]
        changes: dict[str, list[Polynomial]] = {}
        for number, size in section.events:
            if (number, size) != ATTENTION and number not in self._casts:
                part = section.kinds.get(number) or "residual"
                changes.setdefault(part, []).append(self._change(number, size))
        sums = {part: total(sizes) for part, sizes in changes.items()}
        return {part: size for part, size in sums.items() if any(size)}

    def _change(self, number: int, size: int) -> Polynomial:
        """Return by how much an event changes what is live; its `size` in bytes is negative where it frees."""
        polynomial = self.size_of[number]
        return polynomial if size > 0 else tuple(-coefficient for coefficient in polynomial)


def _inner(kind: int, layers: Sequence[int], pattern: Sequence[int]) -> int | None:
    """Return the layer of a kind that stands for all: between two others that ran, if possible; None without any."""
    alike = [index for index in layers if pattern[index] == kind]
    for index in alike:
        if index - 1 in layers and index + 1 in layers:
            return index
    return alike[0] if alike else None
