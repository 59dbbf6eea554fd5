"""The picture of a search: memory against throughput of all candidates, with the frontier, as inline SVG."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from toolkit.hardware import Gpu
from toolkit.report.chart import Axis, Tick, linear_axis
from toolkit.report.drawing import BOUND, Area, Label, Shape, Stroke

_FOOT = 38
_HEAD = 44
_RIGHT = 14
_LETTER = 6.3
"""Pixels of a letter, at most."""
_LABEL_ROW = 15.0
_BEYOND = 4
"""Candidates that need more than the memory of so many GPUs are not drawn: they would press the others together."""
_STEPS = ((1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0), tuple(half / 2 for half in range(2, 20)))
_ORDER = {"does not fit": 0, "tight": 1, "fits": 2}


@dataclass(frozen=True, kw_only=True)
class Point:
    """A candidate. `key` is that of its row in the table."""

    key: str
    label: str
    gib: float
    speed: float
    """Tokens per second and GPU."""
    outcome: str
    is_frontier: bool


class PlanPicture:
    """The picture in one width; `points` is ordered: the first one on the frontier is the fastest that fits."""

    def __init__(self, points: Sequence[Point], gpu: Gpu, *, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self._gpu = gpu.name
        self.kind = "wide" if width >= 480 else "narrow"
        limit = gpu.memory_bytes / 2**30
        self._limit = limit
        self.drawn = [point for point in points if point.gib <= _BEYOND * limit]
        self._frontier = [point for point in self.drawn if point.is_frontier]
        self.y = linear_axis((point.speed for point in self.drawn), numbers="count", from_zero=True)
        self.x = memory_axis([limit, *(point.gib for point in self.drawn)], most=width // 45)
        self.left = 12 + _LETTER * max(len(tick.label) for tick in self.y.ticks)
        self.top = _HEAD
        self.right = width - _RIGHT
        self.bottom = height - _FOOT

    def markup(self) -> Markup:
        """The content of an <svg>."""
        shapes = (*self._grid(), *self._points(), *self._front())
        return Markup("\n").join(shape if isinstance(shape, Markup) else Markup(shape.markup()) for shape in shapes)

    def place(self, gib: float, speed: float) -> tuple[float, float]:
        """Pixels of a candidate."""
        across = self.x.fraction(gib)
        up = self.y.fraction(speed)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def _grid(self) -> Iterator[Shape]:
        edge, _ = self.place(self._limit, 0)
        corners = [(edge, self.top), (self.right, self.top), (self.right, self.bottom), (edge, self.bottom)]
        yield Area(corners, "panel")
        for tick in self.y.ticks:
            _, y = self.place(self._limit, tick.value)
            yield Stroke([(self.left, y), (self.right, y)], "muted" if tick.value == 0 else "rule")
            yield Label(self.left - 6, y + 4, tick.label, "muted", anchor="end")
        for tick in self.x.ticks:
            x, _ = self.place(tick.value, 0)
            yield Stroke([(x, self.bottom), (x, self.bottom + 4)], "muted")
            yield Label(x, self.bottom + 17, tick.label, "muted", anchor="middle")
        yield Label(self.right, self.bottom + 34, "GiB per GPU, logarithmic", "muted", anchor="end")
        yield Label(2, self.top - 13, "tokens/s per GPU", "muted")
        yield Stroke([(edge, self.top - 24), (edge, self.bottom)], "differs", width=1.2, dash=(5, 4))
        name = f"{self._gpu}: {self._limit:.1f} GiB"
        yield Label(edge, self.top - 28, name, "muted", anchor="end" if edge > 150 else "start")

    def _points(self) -> Iterator[Markup]:
        """Draw the points, those that fit last, so that nothing covers them."""
        for point in sorted(self.drawn, key=lambda point: _ORDER[point.outcome]):
            if not point.is_frontier:
                yield self._point(point)

    def _point(self, point: Point) -> Markup:
        x, y = self.place(point.gib, point.speed)
        kind = point.outcome.replace(" ", "-") + " frontier" * point.is_frontier
        element = '<circle cx="{:.1f}" cy="{:.1f}" r="{}" class="{}" data-k="{}"><title>{}</title></circle>'
        said = f"{point.label}: {point.gib:.1f} GiB, {point.speed:,.0f} tokens/s per GPU, {point.outcome}"
        return Markup(element).format(x, y, 4.5 if point.is_frontier else 3, kind, point.key, said)

    def _front(self) -> Iterator[Shape | Markup]:
        """The most throughput within any memory, as stairs; labels stand to the upper left, where nothing can be."""
        if not self._frontier:
            return
        fastest = self._frontier[0]
        corner, _ = self.place(max(self._limit, fastest.gib), 0)
        stairs = []
        for point in self._frontier:
            x, y = self.place(point.gib, point.speed)
            stairs += [(corner, y), (x, y)]
            corner = x
        yield Stroke(stairs, "warm0", width=2)
        labelled_y = math.nan
        for point in self._frontier:
            yield self._point(point)
            x, y = self.place(point.gib, point.speed)
            has_room = x - 8 - _LETTER * len(point.label) > self.left
            if has_room and not y - labelled_y < _LABEL_ROW:
                labelled_y = y
                weight: Literal["normal", "bold"] = "bold" if point is fastest else "normal"
                yield Label(x - 8, y - 9, point.label, "ink", BOUND, anchor="end", weight=weight)


def memory_axis(values: Sequence[float], *, most: int) -> Axis:
    """A logarithmic axis around positive values with round ticks, at most `most` where that leaves three."""
    low = 0.9 * min(values)
    high = 1.12 * max(values)
    in_range: list[float] = []
    for factors in _STEPS:
        each = (factor * 10.0**power for power in range(-6, 7) for factor in factors)
        in_range = [value for value in each if low <= value <= high]
        if len(in_range) >= 3:
            break
    ticks = in_range[:: max(1, -(-len(in_range) // max(3, most)))]
    return Axis(low=low, high=high, ticks=tuple(Tick(value, f"{value:g}") for value in ticks), log=True)
