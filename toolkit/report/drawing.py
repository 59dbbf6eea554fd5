"""Draw a chart as lines, areas and labels, in pixels from the upper left corner: a page has them as SVG, a file from
Matplotlib (`images`).

Colors of a page are CSS variables, so one drawing serves light mode, dark mode and print. It is shown at about the
width it is made for, which keeps the text size: a page has a wide and a narrow drawing of each chart and shows the one
that fits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup, escape

from toolkit.report.chart import Chart, Line, thin

_DIGIT = 6.4
_LETTER = 7.5
_LABEL_ROW = 14.0
_LONGEST_LABEL = 20
_MOST_GAPS = 200
BOUND = "bound"
"""The group of labels of bounds, which stand on curves: they have a halo."""

Points = Sequence[tuple[float, float]]
"""Lines through pixels, interrupted by NaN."""
_END = (math.nan, math.nan)
_DOT = ((-0.05, -0.05), (0.05, 0.05))  # with round ends; Matplotlib omits a shorter or a horizontal one
_TICK = ((0, 0), (0, -7))
_CROSS = ((-3, -3), (3, 3), _END, (3, -3), (-3, 3))
_RING = tuple((5 * math.cos(turn * math.tau / 24), 5 * math.sin(turn * math.tau / 24)) for turn in range(25))


@dataclass(frozen=True)
class Area:
    """A filled polygon."""

    corners: Points
    tone: str

    def markup(self) -> str:
        return f'<path d="{_path(self.corners)}" style="fill:var(--{self.tone})"/>'


@dataclass(frozen=True)
class Stroke:
    """Lines of one color."""

    points: Points
    tone: str
    group: str = ""
    """CSS class on a page, and the key of the curve to which it belongs."""
    width: float = 1.0
    dash: Sequence[float] = ()
    offset: float = 0.0
    """Pixels of the dash pattern that come before the first point."""
    has_round_ends: bool = False

    def markup(self) -> str:
        look = f'style="stroke:var(--{self.tone})" stroke-width="{self.width:g}"'
        if self.has_round_ends:
            look += ' stroke-linecap="round"'
        if self.dash:
            lengths = " ".join(f"{length:g}" for length in self.dash)
            look += f' stroke-dasharray="{lengths}" stroke-dashoffset="{self.offset:g}"'
        return f'<path{_attributes(self.group)} d="{_path(self.points)}" {look}/>'


@dataclass(frozen=True)
class Label:
    """A line of text. Its baseline starts at (x, y), or has its middle or its end there."""

    x: float
    y: float
    text: str
    tone: str
    group: str = ""
    size: float = 11.5
    anchor: Literal["start", "middle", "end"] = "start"
    weight: Literal["normal", "bold"] = "normal"

    def markup(self) -> str:
        place = f'x="{self.x:.1f}" y="{self.y:.1f}" text-anchor="{self.anchor}"'
        look = f"fill:var(--{self.tone});font-size:{self.size:g}px;font-weight:{self.weight}"
        return f'<text{_attributes(self.group)} {place} style="{look}">{escape(self.text)}</text>'


Shape = Area | Stroke | Label


def _attributes(group: str) -> str:
    kind, _, key = group.partition(" ")
    return (f' class="{kind}"' if kind else "") + (f' data-k="{escape(key)}"' if key else "")


def _path(points: Points) -> str:
    path = ""
    command = "M"
    for x, y in points:
        if math.isnan(x):
            command = "M"
        else:
            path += f"{command}{x:.1f} {y:.1f}"
            command = "L"
    return path


class Drawing:
    """A chart of `width` x `height` pixels. `head` and `foot` are left free for the title and the legend of a file.

    A page shows both beside the drawing.
    """

    def __init__(self, chart: Chart, width: int, height: int, *, head: float = 0.0, foot: float = 0.0) -> None:
        self.chart = chart
        self.width = width
        self.height = height
        self.kind = "wide" if width >= 480 else "narrow"
        self.x = chart.x_axis(round(width / 68))
        self.y = chart.y_axis(round(height / 60))
        self.lines = [line for line in chart.lines if any(line.runs())]
        self._labelled = [line for line in self.lines if line.labelled and self.kind == "wide"]
        self.top = 26 + head
        self.bottom = height - 36 - foot
        self.left = 10 + _DIGIT * max((len(tick.label) for tick in self.y.ticks), default=1)
        margin = 16.0
        if self._labelled:
            margin = 12 + _LETTER * max(len(_short(line)) for line in self._labelled)
        self.right = width - margin
        self._areas: list[Area] = []
        self._strokes: list[Stroke] = []
        self._labels: list[Label] = []
        self._grid()
        for line in self.lines:
            self._curve(line)
        self._bands()
        self._marks()
        self._end_labels()

    def markup(self) -> Markup:
        """Return the content of an <svg>."""
        return Markup("".join(shape.markup() for shape in self.shapes()))

    def shapes(self) -> list[Shape]:
        """Return all that is drawn, labels over lines over areas."""
        return [*self._areas, *self._strokes, *self._labels]

    def _places(self, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return the pixels of (step, value)."""
        width = self.right - self.left
        height = self.bottom - self.top
        return [(self.left + self.x.fraction(x) * width, self.bottom - self.y.fraction(y) * height) for x, y in points]

    def _grid(self) -> None:
        for tick in self.y.ticks:
            ((_, height),) = self._places([(0, tick.value)])
            dash = (1, 3) if self.y.zero and tick.value == 0 else ()
            self._strokes.append(Stroke([(self.left, height), (self.right, height)], "rule", dash=dash))
            self._labels.append(Label(self.left - 6, height + 4, tick.label, "muted", anchor="end"))
        self._strokes.append(Stroke([(self.left, self.bottom), (self.right, self.bottom)], "muted"))
        for tick in self.x.ticks:
            ((across, _),) = self._places([(tick.value, 0)])
            self._labels.append(Label(across, self.bottom + 16, tick.label, "muted", anchor="middle"))
        self._labels.append(Label(self.right, self.bottom + 31, "step", "muted", anchor="end"))
        self._labels.append(Label(2, self.top - 13, self.chart.unit, "muted"))

    def _curve(self, line: Line) -> None:
        runs = [self._places(thin(run, self.width)) for run in line.runs()]
        dots = [place for run in runs for place in run if line.dots or len(run) == 1]
        diameter = 5.0
        if line.dots:
            diameter = 6.0 if len(dots) < 60 else 3.2
        group = f"curve {line.key}"
        if dots:
            self._strokes.append(Stroke(_each(dots, _DOT), line.tone, group, width=diameter, has_round_ends=True))
        shape = [place for run in runs for place in (*run, _END)]
        self._strokes.append(Stroke(shape, line.tone, group, width=line.width, dash=line.dash, offset=line.offset))

    def _bands(self) -> None:
        for band in self.chart.bands:
            places = self._places(band.points)
            if not places:
                continue
            if band.filled:
                corners = [*places, (places[-1][0], self.bottom), (places[0][0], self.bottom)]
                self._areas.append(Area(corners, "tolerance-ground"))
            self._strokes.append(Stroke(places, "tolerance", width=1.2, dash=(5, 4)))
            self._labels.append(
                Label(self.right - 4, places[-1][1] - 6, band.label, "muted", BOUND, size=11, anchor="end")
            )

    def _marks(self) -> None:
        """Draw a cross at the upper edge for each value that was not finite, the events, and rings."""
        for line in self.chart.lines:
            gaps = self._places([(step, math.inf) for step, value in line.points if value is None][:_MOST_GAPS])
            if gaps:
                self._strokes.append(Stroke(_each(gaps, _CROSS), line.tone, f"gap {line.key}", width=1.8))
        for kind in sorted({event.kind for event in self.chart.events}):
            steps = self._places([(event.step, -math.inf) for event in self.chart.events if event.kind == kind])
            self._strokes.append(Stroke(_each(steps, _TICK), kind, width=1.4))
        for ring in self.chart.marks:
            places = self._places([(ring.step, ring.value)])
            self._strokes.append(Stroke(_each(places, _RING), ring.tone, f"ring {ring.key}", width=2))

    def _end_labels(self) -> None:
        """Draw the labels of curves at their ends, moved apart if they would overlap."""
        last = [(self._places([[*line.runs()][-1][-1]])[0][1], line) for line in self._labelled]
        ends = sorted(last, key=lambda end: end[0])
        heights: list[float] = []
        for height, _ in ends:
            heights.append(max(height, heights[-1] + _LABEL_ROW) if heights else height)
        excess = max(0.0, heights[-1] - self.bottom) if heights else 0.0
        for height, (_, line) in zip(heights, ends, strict=True):
            label = _short(line)
            self._labels.append(
                Label(self.right + 6, height - excess + 4, label, line.tone, f"end {line.key}", size=11, weight="bold")
            )


def _each(places: Points, mark: Points) -> Points:
    """Return a mark at each place."""
    return [(x + right, y + down) for x, y in places for right, down in (*mark, _END)]


def _short(line: Line) -> str:
    return line.label if len(line.label) <= _LONGEST_LABEL else line.label[: _LONGEST_LABEL - 1] + "…"
