"""The picture of a search: memory against throughput of all candidates, with the frontier, as inline SVG."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from toolkit.hardware import Gpu
from toolkit.report.chart import Axis, Tick, linear_axis

_FOOT, _HEAD, _RIGHT = 38, 44, 14
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
        self.width, self.height, self._gpu = width, height, gpu.name
        self.kind = "wide" if width >= 480 else "narrow"
        self._limit = limit = gpu.memory_bytes / 2**30
        self.drawn = [point for point in points if point.gib <= _BEYOND * limit]
        self._frontier = [point for point in self.drawn if point.is_frontier]
        self.y = linear_axis((point.speed for point in self.drawn), numbers="count", from_zero=True)
        self.x = memory_axis([limit, *(point.gib for point in self.drawn)], most=width // 45)
        self.left = 12 + _LETTER * max(len(tick.label) for tick in self.y.ticks)
        self.top, self.right, self.bottom = _HEAD, width - _RIGHT, height - _FOOT

    def markup(self) -> Markup:
        """The content of an <svg>."""
        return Markup("\n").join([*self._grid(), *self._points(), *self._front()])

    def place(self, gib: float, speed: float) -> tuple[float, float]:
        """Pixels of a candidate."""
        across, up = self.x.fraction(gib), self.y.fraction(speed)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def _grid(self) -> Iterator[Markup]:
        edge, _ = self.place(self._limit, 0)
        size = f'width="{self.right - edge:.1f}" height="{self.bottom - self.top}"'
        yield Markup(f'<rect x="{edge:.1f}" y="{self.top}" {size} class="beyond-gpu"/>')
        for tick in self.y.ticks:
            _, y = self.place(self._limit, tick.value)
            yield Markup(
                f'<path d="M{self.left:.1f} {y:.1f}H{self.right}" class="{"base" if tick.value == 0 else ""}"/>'
            )
            yield _text(self.left - 6, y + 4, tick.label, "end")
        for tick in self.x.ticks:
            x, _ = self.place(tick.value, 0)
            yield Markup(f'<path d="M{x:.1f} {self.bottom}v4" class="base"/>')
            yield _text(x, self.bottom + 17, tick.label, "middle")
        yield _text(self.right, self.bottom + 34, "GiB per GPU, logarithmic", "end")
        yield _text(2, self.top - 13, "tokens/s per GPU", "start")
        yield Markup(f'<path d="M{edge:.1f} {self.top - 24}V{self.bottom}" class="limit"/>')
        yield _text(edge, self.top - 28, f"{self._gpu}: {self._limit:.1f} GiB", "end" if edge > 150 else "start")

    def _points(self) -> Iterator[Markup]:
        """Those that fit last, so that nothing covers them."""
        for point in sorted(self.drawn, key=lambda point: _ORDER[point.outcome]):
            if not point.is_frontier:
                yield self._point(point)

    def _point(self, point: Point) -> Markup:
        x, y = self.place(point.gib, point.speed)
        kind = point.outcome.replace(" ", "-") + " frontier" * point.is_frontier
        element = '<circle cx="{:.1f}" cy="{:.1f}" r="{}" class="{}" data-k="{}"><title>{}</title></circle>'
        said = f"{point.label}: {point.gib:.1f} GiB, {point.speed:,.0f} tokens/s per GPU, {point.outcome}"
        return Markup(element).format(x, y, 4.5 if point.is_frontier else 3, kind, point.key, said)

    def _front(self) -> Iterator[Markup]:
        """The most throughput within any memory, as stairs; labels stand to the upper left, where nothing can be."""
        if not self._frontier:
            return
        fastest = self._frontier[0]
        end, _ = self.place(max(self._limit, fastest.gib), 0)
        path, before = f"M{end:.1f}", float("nan")
        for index, point in enumerate(self._frontier):
            x, y = self.place(point.gib, point.speed)
            path += f" {y:.1f}H{x:.1f}" if index == 0 else f"V{y:.1f}H{x:.1f}"
        yield Markup(f'<path d="{path}" class="front"/>')
        for point in self._frontier:
            yield self._point(point)
            x, y = self.place(point.gib, point.speed)
            has_room = x - 8 - _LETTER * len(point.label) > self.left
            if has_room and not y - before < _LABEL_ROW:
                before = y
                yield _text(x - 8, y - 9, point.label, "end", "bound first" if point is fastest else "bound")


def memory_axis(values: Sequence[float], *, most: int) -> Axis:
    """A logarithmic axis around positive values with round ticks, at most `most` where that leaves three."""
    low, high = 0.9 * min(values), 1.12 * max(values)
    found: list[float] = []
    for factors in _STEPS:
        each = (factor * 10.0**power for power in range(-6, 7) for factor in factors)
        found = [value for value in each if low <= value <= high]
        if len(found) >= 3:
            break
    ticks = found[:: max(1, -(-len(found) // max(3, most)))]
    return Axis(low=low, high=high, ticks=tuple(Tick(value, f"{value:g}") for value in ticks), log=True)


def _text(x: float, y: float, text: str, anchor: str, classes: str = "") -> Markup:
    element = '<text x="{:.1f}" y="{:.1f}" text-anchor="{}" class="{}">{}</text>'
    return Markup(element).format(x, y, anchor, classes, text)
