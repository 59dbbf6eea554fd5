"""Axis: from values to places, and the ticks between. Linear, or logarithmic with a place of its own for zero."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from toolkit.report.numerals import scientific
from toolkit.units import format_count

Numbers = Literal["decimal", "scientific", "count"]

_ZERO_SHARE = 0.09
"""Of a logarithmic axis, below its lowest decade, where zero has its place."""
_MOST_DECADES = 14


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A value on an axis, and what is printed beside it ('' for a line without a label)."""

    value: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Where values lie between the two ends of an axis."""

    low: float
    high: float
    ticks: tuple[Tick, ...]
    log: bool = False
    zero: bool = False
    """Logarithmic, with zero below the lowest decade."""

    def fraction(self, value: float) -> float:
        """0 at the low end and 1 at the high one; what lies beyond an end is put on it."""
        if not self.log:
            return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        floor = _ZERO_SHARE if self.zero else 0.0
        if value <= 0:
            return 0.0
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return min(1.0, floor + (1 - floor) * max(0.0, share))


def step_axis(first: int, last: int, *, most: int) -> Axis:
    """Whole steps from `first` to `last`, with at most `most` ticks; the first step is one of them."""
    last = max(last, first + 1)
    size = max(1, int(_nice((last - first) / most)))
    ticks = [step for step in range(size * math.ceil(first / size), last + 1, size) if step >= first]
    if not ticks or ticks[0] - first > 0.6 * size:
        ticks = [first, *ticks]
    elif ticks[0] != first:
        ticks[0] = first
    return Axis(low=first, high=last, ticks=tuple(Tick(value=step, label=_step(step)) for step in ticks))


def linear_axis(values: Iterable[float], *, numbers: Numbers, most: int = 5, from_zero: bool = False) -> Axis:
    """From the lowest to the highest of `values` (or from zero), with air above and below, and round ticks."""
    found = list(values) or [0.0, 1.0]
    low, high = min(found), max(found)
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        spread = abs(high) * 0.1 or 1.0
        low, high = low - (0 if from_zero else spread), high + spread
    air = 0.06 * (high - low)
    low, high = (low if from_zero and low == 0 else low - air), high + air
    size = _nice((high - low) / most)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    ticks = [index * size for index in range(first, last + 1)]
    labels = _labels(ticks, size, numbers)
    return Axis(
        low=low, high=high, ticks=tuple(Tick(value=v, label=label) for v, label in zip(ticks, labels, strict=True))
    )


def log_axis(values: Iterable[float], *, most: int = 7) -> Axis:
    """Whole decades around the positive of `values`, at least three; zero gets a place below them if it occurs."""
    found = list(values)
    positive = [value for value in found if value > 0] or [1e-8, 1e-6]
    top = math.ceil(math.log10(max(positive)) + 0.05)
    bottom = max(math.floor(math.log10(min(positive))), top - _MOST_DECADES)
    bottom = min(bottom, top - 3)
    every = math.ceil((top - bottom) / most)
    ticks = [
        Tick(value=10.0**power, label=scientific(10.0**power) if (top - power) % every == 0 else "")
        for power in range(bottom, top + 1)
    ]
    zero = any(value == 0 for value in found)
    if zero:
        ticks.insert(0, Tick(value=0.0, label="0"))
    return Axis(low=10.0**bottom, high=10.0**top, ticks=tuple(ticks), log=True, zero=zero)


def _nice(size: float) -> float:
    """The next of 1, 2, 5, 10, … times a power of ten."""
    power = 10.0 ** math.floor(math.log10(size)) if size > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size * (1 - 1e-9))


def _step(step: int) -> str:
    return str(step) if step < 10_000 else format_count(step)


def _labels(ticks: Sequence[float], size: float, numbers: Numbers) -> list[str]:
    if numbers == "count":
        return [format_count(round(tick, 9)) for tick in ticks]
    if numbers == "scientific":
        return [scientific(tick, 2) if abs(tick) > size / 2 else "0" for tick in ticks]
    digits = max(0, -math.floor(math.log10(size) + 1e-9))
    return [f"{tick:.{digits}f}" if abs(tick) > size / 2 else f"{0:.{digits}f}" for tick in ticks]
