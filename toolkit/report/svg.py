"""A chart as inline SVG. Colours are CSS variables, so that one drawing serves light, dark and paper.

A drawing is made for a width in pixels and shown at about that width: text keeps its size. A page holds a wide and a
narrow one of each chart and shows the one that fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from toolkit.report.chart import Band, Chart, Line, thin
from toolkit.report.scale import Axis

_DIGIT, _LABEL_ROW, _TOP, _BOTTOM = 6.4, 14.0, 26.0, 36.0
_LONGEST_LABEL = 20


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """Pixels, and the frame that values lie in."""

    width: float
    height: float
    left: float
    right: float
    x: Axis
    y: Axis

    @property
    def top(self) -> float:
        """The upper edge of the frame."""
        return _TOP

    @property
    def bottom(self) -> float:
        """The lower edge of the frame."""
        return self.height - _BOTTOM

    def across(self, step: float) -> float:
        """The place of a step."""
        return self.left + self.x.fraction(step) * (self.right - self.left)

    def down(self, value: float) -> float:
        """The place of a value."""
        return self.bottom - self.y.fraction(value) * (self.bottom - self.top)

    def path(self, points: Sequence[tuple[int, float]]) -> str:
        """A line through points."""
        return "M" + "L".join(f"{self.across(x):.1f} {self.down(y):.1f}" for x, y in points)


def drawing(chart: Chart, *, width: int, height: int, kind: str) -> Markup:
    """The chart as an <svg> of CSS class `kind`."""
    wide = width >= 480
    y = chart.y_axis(5 if wide else 4)
    left = 10 + _DIGIT * max((len(tick.label) for tick in y.ticks), default=1)
    labels = [line for line in chart.lines if line.labelled and any(line.runs())] if wide else []
    room = 12 + _DIGIT * max(min(len(line.label), _LONGEST_LABEL) for line in labels) if labels else 10
    canvas = Canvas(width=width, height=height, left=left, right=width - room, x=chart.x_axis(8 if wide else 5), y=y)
    name = f"{chart.name}-{kind}"
    first, last = chart.steps()
    parts = [
        Markup(
            '<svg class="chart {}" viewBox="0 0 {} {}" role="img" aria-labelledby="{}-t {}-d" data-chart="{}" '
            'data-frame="{:.1f} {:.1f} {:.1f} {:.1f}" data-steps="{} {}">'
        ).format(
            kind,
            width,
            height,
            name,
            name,
            chart.name,
            left,
            canvas.top,
            canvas.right,
            canvas.bottom,
            first,
            max(last, first + 1),
        ),
        Markup('<title id="{}-t">{}</title><desc id="{}-d">{}</desc>').format(
            name, chart.title, name, chart.description
        ),
        *(_band_ground(band, canvas) for band in chart.bands if band.filled),
        _grid(chart, canvas),
        *(_line(line, canvas, 500 if wide else 260) for line in chart.lines),
        *(_band_edge(band, canvas) for band in chart.bands),
        *_gaps(chart, canvas),
        *_events(chart, canvas),
        *(
            Markup('<circle class="ring" data-k="{}" cx="{:.1f}" cy="{:.1f}" r="5" style="stroke:var(--{})"/>').format(
                mark.key, canvas.across(mark.step), canvas.down(mark.value), mark.tone
            )
            for mark in chart.marks
        ),
        *_end_labels(labels, canvas),
        Markup('<line class="cursor" y1="{:.1f}" y2="{:.1f}" x1="0" x2="0" hidden="hidden"/></svg>').format(
            canvas.top, canvas.bottom
        ),
    ]
    return Markup("").join(parts)


def swatch(tone: str, dash: Sequence[float] = (), *, width: float = 2.5) -> Markup:
    """A short piece of a line, for legends and tables."""
    return Markup(
        '<svg class="swatch" width="22" height="10" viewBox="0 0 22 10" aria-hidden="true">'
        '<line x1="0" x2="22" y1="5" y2="5" style="stroke:var(--{});stroke-width:{}"{}/></svg>'
    ).format(tone, width, _dash(dash, 0))


def _grid(chart: Chart, canvas: Canvas) -> Markup:
    parts = []
    for tick in canvas.y.ticks:
        height = canvas.down(tick.value)
        kind = "zero" if canvas.y.zero and tick.value == 0 else "grid"
        parts.append(
            Markup('<line class="{}" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>').format(
                kind, canvas.left, canvas.right, height, height
            )
        )
        if tick.label:
            parts.append(
                Markup('<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="end">{}</text>').format(
                    canvas.left - 6, height + 4, tick.label
                )
            )
    parts.append(
        Markup('<line class="axis" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>').format(
            canvas.left, canvas.right, canvas.bottom, canvas.bottom
        )
    )
    for tick in canvas.x.ticks:
        parts.append(
            Markup('<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>').format(
                canvas.across(tick.value), canvas.bottom + 16, tick.label
            )
        )
    parts.append(
        Markup('<text class="unit" x="{:.1f}" y="{:.1f}" text-anchor="end">step</text>').format(
            canvas.right, canvas.bottom + 31
        )
    )
    parts.append(Markup('<text class="unit" x="2" y="13">{}</text>').format(chart.unit))
    return Markup("").join(parts)


def _line(line: Line, canvas: Canvas, most: int) -> Markup:
    shapes = []
    for run in line.runs():
        points = thin(run, most)
        if len(points) == 1 and not line.dots:
            shapes.append(
                Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2.5" style="fill:var(--{})"/>').format(
                    canvas.across(points[0][0]), canvas.down(points[0][1]), line.tone
                )
            )
        elif len(points) > 1:
            shapes.append(
                Markup('<path d="{}" style="stroke:var(--{});stroke-width:{:g}"{}/>').format(
                    canvas.path(points), line.tone, line.width, _dash(line.dash, line.offset)
                )
            )
        if line.dots:
            shapes += [
                Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}" style="fill:var(--{})"/>').format(
                    canvas.across(x), canvas.down(y), 3 if len(points) < 60 else 1.6, line.tone
                )
                for x, y in points
            ]
    return Markup('<g class="curve" data-k="{}">{}</g>').format(line.key, Markup("").join(shapes))


def _band_ground(band: Band, canvas: Canvas) -> Markup:
    if not band.points:
        return Markup("")
    return Markup('<path class="allowed" d="{}L{:.1f} {:.1f}L{:.1f} {:.1f}Z"/>').format(
        canvas.path(band.points),
        canvas.across(band.points[-1][0]),
        canvas.bottom,
        canvas.across(band.points[0][0]),
        canvas.bottom,
    )


def _band_edge(band: Band, canvas: Canvas) -> Markup:
    if not band.points:
        return Markup("")
    return Markup(
        '<path class="bound" d="{}"/><text class="bound" x="{:.1f}" y="{:.1f}" text-anchor="end">{}</text>'
    ).format(canvas.path(band.points), canvas.right - 4, canvas.down(band.points[-1][1]) - 6, band.label)


def _gaps(chart: Chart, canvas: Canvas) -> list[Markup]:
    """A cross at the upper edge for each value that was not finite, up to a few."""
    return [
        Markup('<path class="gap" data-k="{}" d="M{:.1f} {:.1f}l6 6m0 -6l-6 6" style="stroke:var(--{})"/>').format(
            line.key, canvas.across(step) - 3, canvas.top - 3, line.tone
        )
        for line, step in list(chart.gaps())[:200]
    ]


def _events(chart: Chart, canvas: Canvas) -> list[Markup]:
    return [
        Markup('<line class="event" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}" style="stroke:var(--{})"/>').format(
            canvas.across(event.step), canvas.across(event.step), canvas.bottom - 7, canvas.bottom, event.kind
        )
        for event in chart.events
    ]


def _end_labels(lines: Sequence[Line], canvas: Canvas) -> list[Markup]:
    """The names of curves at their ends, moved apart where they would lie on each other."""
    ends = sorted(((canvas.down(list(line.runs())[-1][-1][1]), line) for line in lines), key=lambda end: end[0])
    heights: list[float] = []
    for height, _ in ends:
        heights.append(max(height, heights[-1] + _LABEL_ROW) if heights else height)
    excess = heights[-1] - canvas.bottom if heights else 0.0
    if excess > 0:
        heights = [height - excess for height in heights]
    return [
        Markup('<text class="end" data-k="{}" x="{:.1f}" y="{:.1f}" style="fill:var(--{})">{}</text>').format(
            line.key, canvas.right + 6, height + 4, line.tone, _shortened(line.label)
        )
        for height, (_, line) in zip(heights, ends, strict=True)
    ]


def _dash(dash: Sequence[float], offset: float) -> Markup:
    if not dash:
        return Markup("")
    pattern = " ".join(f"{length:g}" for length in dash)
    return Markup(' stroke-dasharray="{}" stroke-dashoffset="{:g}"').format(pattern, offset)


def _shortened(label: str) -> str:
    return label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"
