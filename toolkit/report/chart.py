"""Chart: what a plot shows, before it is drawn. `svg` draws it into a page and `images` into files."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.report.scale import Axis, Numbers, linear_axis, log_axis, step_axis

Point = tuple[int, float | None]
"""A step and its value; None where it was not finite."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve. Steps ascend; a value that is None interrupts the curve."""

    label: str
    points: tuple[Point, ...]
    tone: str
    """A name of the palette."""
    key: str = ""
    """Curves of one strategy or run share it: they light up together."""
    width: float = 1.6
    dash: tuple[float, ...] = ()
    offset: float = 0.0
    """Where in the dash pattern the curve starts."""
    labelled: bool = False
    """Its label stands at its end, where there is room."""
    dots: bool = False
    in_legend: bool = True

    def runs(self) -> Iterator[list[tuple[int, float]]]:
        """The stretches without a gap."""
        stretch: list[tuple[int, float]] = []
        for step, value in self.points:
            if value is not None:
                stretch.append((step, value))
            elif stretch:
                yield stretch
                stretch = []
        if stretch:
            yield stretch


@dataclass(frozen=True, kw_only=True)
class Band:
    """A bound: everything below it is allowed."""

    label: str
    points: tuple[tuple[int, float], ...]
    filled: bool = True


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A ring around a point of a curve."""

    step: int
    value: float
    tone: str
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened at a step: a tick on the step axis."""

    step: int
    kind: str
    """A name of the palette."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over steps. `name` is that of its files; `unit` stands above the value axis."""

    name: str
    title: str
    unit: str
    caption: str
    description: str
    """What one would say to somebody who cannot see it."""
    lines: tuple[Line, ...]
    bands: tuple[Band, ...] = ()
    marks: tuple[Mark, ...] = ()
    events: tuple[Event, ...] = ()
    log: bool = False
    numbers: Numbers = "decimal"
    from_zero: bool = False

    def values(self) -> Iterator[float]:
        """All that is drawn."""
        for line in self.lines:
            yield from (value for _, value in line.points if value is not None)
        for band in self.bands:
            yield from (value for _, value in band.points)

    def steps(self) -> tuple[int, int]:
        """The first step and the last."""
        found = [step for line in self.lines for step, _ in line.points]
        return (min(found), max(found)) if found else (1, 2)

    def x_axis(self, most: int) -> Axis:
        """Steps."""
        return step_axis(*self.steps(), most=most)

    def y_axis(self, most: int = 5) -> Axis:
        """Values."""
        if self.log:
            return log_axis(self.values(), most=most + 2)
        return linear_axis(self.values(), numbers=self.numbers, most=most, from_zero=self.from_zero)

    def gaps(self) -> Iterator[tuple[Line, int]]:
        """Where a value was not finite."""
        for line in self.lines:
            for step, value in line.points:
                if value is None:
                    yield line, step


def line_points(values: Sequence[float | None], first: int = 1) -> tuple[Point, ...]:
    """Values of the steps `first`, `first` + 1, …; what is not finite becomes a gap."""
    return tuple(
        (step, value if value is not None and math.isfinite(value) else None)
        for step, value in enumerate(values, start=first)
    )


def thin(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most about `most` points that look the same when drawn: of each bucket of steps the lowest and the highest."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept = [points[0]]
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        kept += {min(bucket, key=lambda p: p[1]): None, max(bucket, key=lambda p: p[1]): None}
    return sorted({*kept, points[-1]})


def readout(chart: Chart) -> Mapping[str, Any]:
    """The values of a chart for the script that shows them under the pointer."""
    lines = []
    for line in chart.lines:
        known = [(step, value) for run in line.runs() for step, value in thin(run, 400)]
        if known and line.in_legend:
            lines.append(
                {
                    "label": line.label,
                    "key": line.key,
                    "tone": line.tone,
                    # Steps without a hole are known from the first of them.
                    "x": known[0][0] if len(known) == known[-1][0] - known[0][0] + 1 else [step for step, _ in known],
                    "y": [float(f"{value:.5g}") for _, value in known],
                }
            )
    return {"numbers": chart.numbers if not chart.log else "scientific", "lines": lines}
