"""Charts: curves over steps, their axes, and the colors of pages and plots. `drawing` draws them.

Colors are in templates/palette.json, for light and dark mode. Text has a contrast of 4.5 and lines of 3 against the
background (WCAG AA). Passing results are cool, failing ones warm: blue and orange are distinct for every kind of color
blindness, and color is never the only sign of anything.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

from toolkit.units import format_count, scientific

_PALETTE: dict[str, tuple[str, str]] = json.loads((Path(__file__).parent / "templates" / "palette.json").read_text())

LIGHT = {name: light for name, (light, _) in _PALETTE.items()}
DARK = {name: dark for name, (_, dark) in _PALETTE.items()}
COOL = ("cool0", "cool1", "cool2", "cool3", "cool4")
WARM = ("warm0", "warm1", "warm2", "warm3")
_LARGEST = 1e300
"""Ends of an axis stay below this, so that its length is a finite number."""
_MANY_DIGITS = 1e6
"""Distance of ticks from which on their labels have an exponent."""
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 3), (2, 2.5), (9, 3, 2, 3))
"""Dash patterns that tell curves apart where colors repeat."""


def style_sheet() -> str:
    """Return the colors as CSS variables: light by default and in print, dark on screens that prefer it."""
    light, dark = ("".join(f"--{name}:{color};" for name, color in colors.items()) for colors in (LIGHT, DARK))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"


Numbers = Literal["decimal", "scientific", "count"]

_ZERO_SHARE = 0.09
"""Fraction of a logarithmic axis below its lowest decade, reserved for zero."""
_MOST_DECADES = 14
_STRIPE = 7.0


class Tick(NamedTuple):
    """A value on an axis and its label ('' for a line without one)."""

    value: float
    label: str


# Not Matplotlib's axes: its import alone takes half as long as `dstk report` does without it.
@dataclass(frozen=True, kw_only=True)
class Axis:
    """Maps values to positions between the two ends of an axis."""

    low: float
    high: float
    ticks: tuple[Tick, ...]
    log: bool = False
    zero: bool = False
    """Logarithmic, with zero below the lowest decade."""

    def fraction(self, value: float) -> float:
        """Return 0 at the low end and 1 at the high end; values beyond an end are clamped."""
        if not self.log:
            return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        floor = _ZERO_SHARE if self.zero else 0.0
        if value <= 0:
            return 0.0
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return min(1.0, floor + (1 - floor) * max(0.0, share))


def step_axis(first: int, last: int, *, most: int) -> Axis:
    """Build an axis of whole steps with at most `most` ticks; the first step is one of them."""
    last = max(last, first + 1)
    size = max(1, int(_nice((last - first) / most)))
    ticks = [step for step in range(size * math.ceil(first / size), last + 1, size) if step >= first]
    if ticks and ticks[0] - first <= 0.6 * size:
        ticks[0] = first
    else:
        ticks = [first, *ticks]
    labels = (str(step) if step < 10_000 else format_count(step) for step in ticks)
    return Axis(low=first, high=last, ticks=tuple(map(Tick, ticks, labels)))


def linear_axis(values: Iterable[float], *, numbers: Numbers, most: int = 5, from_zero: bool = False) -> Axis:
    """Build an axis from the lowest (or zero) to the highest of `values`, with margins and round ticks."""
    all_values = list(values) or [0.0, 1.0]
    low = min(all_values)
    high = max(all_values)
    if from_zero:
        low = min(0.0, low)
        high = max(0.0, high)
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        spread = abs(high) * 0.1 or 1.0
        low = low - (0 if from_zero else spread)
        high = high + spread
    low = max(low, -_LARGEST)
    high = min(high, _LARGEST)
    margin = 0.06 * (high - low)
    low = low if from_zero and low == 0 else low - margin
    high = high + margin
    size = _nice((high - low) / most)
    first = math.ceil(low / size - 1e-9)
    last = math.floor(high / size + 1e-9)
    ticks = [index * size for index in range(first, last + 1)]
    return Axis(low=low, high=high, ticks=tuple(map(Tick, ticks, _labels(ticks, size, numbers))))


def log_axis(values: Iterable[float], *, most: int = 7) -> Axis:
    """Build an axis of whole decades around the positive values, at least three; zero gets a position below them."""
    all_values = list(values)
    positive = [value for value in all_values if value > 0] or [1e-8, 1e-6]
    top = math.ceil(math.log10(max(positive)) + 0.05)
    bottom = max(math.floor(math.log10(min(positive))), top - _MOST_DECADES)
    bottom = min(bottom, top - 3)
    every = math.ceil((top - bottom) / most)
    ticks = [
        Tick(10.0**power, scientific(10.0**power) if (top - power) % every == 0 else "")
        for power in range(bottom, top + 1)
    ]
    zero = any(value == 0 for value in all_values)
    if zero:
        ticks.insert(0, Tick(0.0, "0"))
    return Axis(low=10.0**bottom, high=10.0**top, ticks=tuple(ticks), log=True, zero=zero)


def _nice(size: float) -> float:
    """Round up to 1, 2, 5 or 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(size)) if size > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size * (1 - 1e-9))


def _labels(ticks: Sequence[float], size: float, numbers: Numbers) -> list[str]:
    if numbers == "count":
        return [format_count(round(tick, 9)) for tick in ticks]
    if numbers == "scientific":
        return [scientific(tick, 2) if abs(tick) > size / 2 else "0" for tick in ticks]
    if size >= _MANY_DIGITS:
        return [scientific(tick, 2) if abs(tick) > size / 2 else "0" for tick in ticks]
    digits = max(0, -math.floor(math.log10(size) + 1e-9))
    return [f"{tick:.{digits}f}" if abs(tick) > size / 2 else f"{0:.{digits}f}" for tick in ticks]


Point = tuple[int, float | None]
"""A step and its value; None if not finite."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve. Steps ascend; None interrupts the curve."""

    label: str
    points: tuple[Point, ...]
    tone: str
    """A color of the palette."""
    key: str = ""
    """Curves of one strategy or run share a key and are highlighted together."""
    width: float = 1.6
    dash: tuple[float, ...] = ()
    offset: float = 0.0
    """Offset of the dash pattern."""
    labelled: bool = False
    """Draw the label at the end of the curve, if there is room."""
    dots: bool = False

    def runs(self) -> Iterator[list[tuple[int, float]]]:
        """Yield the segments without a gap."""
        segment: list[tuple[int, float]] = []
        for step, value in self.points:
            if value is not None:
                segment.append((step, value))
            elif segment:
                yield segment
                segment = []
        if segment:
            yield segment


@dataclass(frozen=True, kw_only=True)
class Band:
    """A bound: everything below it passes."""

    label: str
    points: tuple[tuple[int, float], ...]
    filled: bool = True


@dataclass(frozen=True, kw_only=True)
class RingMark:
    """A ring around a point of a curve."""

    step: int
    value: float
    tone: str
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event at a step: a tick on the step axis."""

    step: int
    kind: str
    """A name of the palette."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over steps. `name` is its file name; `unit` is the title of the value axis."""

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    caption: str = ""
    description: str = ""
    """Text alternative for screen readers."""
    bands: tuple[Band, ...] = ()
    marks: tuple[RingMark, ...] = ()
    events: tuple[Event, ...] = ()
    log: bool = False
    numbers: Numbers = "decimal"
    from_zero: bool = False

    def values(self) -> Iterator[float]:
        curves: tuple[Line | Band, ...] = (*self.lines, *self.bands)
        return (value for curve in curves for _, value in curve.points if value is not None)

    def steps(self) -> tuple[int, int]:
        steps = [step for line in self.lines for step, _ in line.points]
        return (min(steps), max(steps)) if steps else (1, 2)

    def x_axis(self, most: int) -> Axis:
        return step_axis(*self.steps(), most=most)

    def y_axis(self, most: int = 5) -> Axis:
        if self.log:
            return log_axis(self.values(), most=most + 2)
        return linear_axis(self.values(), numbers=self.numbers, most=most, from_zero=self.from_zero)


def stripe(place: int, among: int) -> dict[str, Any]:
    """The dashes of one of several curves that lie on each other: their colors alternate, so that each is visible."""
    return {"dash": (_STRIPE, _STRIPE * (among - 1)), "offset": -_STRIPE * place}


def line_points(values: Sequence[float | None], steps: Sequence[int] | None = None) -> tuple[Point, ...]:
    """Return points at `steps`, or at steps 1, 2, …; values that are not finite become gaps."""
    known = (value if value is not None and math.isfinite(value) else None for value in values)
    return tuple(zip(steps or count(1), known, strict=False))


def running_mean(points: Sequence[Point], window: int) -> tuple[Point, ...]:
    """Return the mean of the last `window` values at each step; a step without a value keeps none."""
    known: list[float] = []
    means: list[Point] = []
    for step, value in points:
        if value is None:
            means.append((step, None))
            continue
        known.append(value)
        recent = known[-window:]
        mean = sum(recent) / len(recent)
        means.append((step, mean if math.isfinite(mean) else None))
    return tuple(means)


def thin(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Reduce to about `most` points that look the same: the lowest and highest of each bucket of steps."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    extremes = {points[0], points[-1]}
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        extremes |= {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}
    return sorted(extremes)


def readout(chart: Chart) -> Mapping[str, Any]:
    """Return the values that page.js shows under the pointer."""
    lines = []
    for line in chart.lines:
        known = [(step, value) for run in line.runs() for step, value in thin(run, 400)]
        if known:
            # Consecutive steps need only the first.
            x = known[0][0] if len(known) == known[-1][0] - known[0][0] + 1 else [step for step, _ in known]
            y = [float(f"{value:.5g}") for _, value in known]
            lines.append({"label": line.label, "key": line.key, "tone": line.tone, "x": x, "y": y})
    return {"numbers": chart.numbers if not chart.log else "scientific", "lines": lines}
