"""Draw a chart with matplotlib, for image files and for pages: one layout, in pixels from the upper left corner.

A page embeds the figure as inline SVG. Colors are CSS variables there, so one drawing serves light mode, dark mode and
print. It is shown at about the width it is made for, which keeps the text size: a page has a wide and a narrow drawing
of each chart and shows the one that fits.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.backend_bases import GraphicsContextBase, RendererBase
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon
from matplotlib.path import Path
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.transforms import Affine2D, Transform

from toolkit.report.chart import LIGHT, Chart, Line, thin

_DIGIT, _LETTER, _LABEL_ROW, _LEGEND_ROW, _TITLE_ROW = 6.4, 7.5, 14.0, 17.0, 26.0
_LONGEST_LABEL = 20
_MOST_IN_LEGEND, _LEGEND_COLUMNS = 12, 3
_MOST_GAPS = 200
_PER_INCH = 72
"""Pixels: one is a point of matplotlib."""

_TONES = {color: name for name, color in LIGHT.items()}
_LETTERS = {Path.MOVETO: "M", Path.LINETO: "L"}

Shape = Sequence[tuple[float, float]]
"""Lines through pixels, interrupted by NaN."""
_END = (math.nan, math.nan)
_DOT = ((-0.05, -0.05), (0.05, 0.05))  # with round ends; matplotlib omits a shorter or a horizontal one
_TICK = ((0, 0), (0, -7))
_CROSS = ((-3, -3), (3, 3), _END, (3, -3), (-3, 3))
_RING = tuple((5 * math.cos(turn * math.tau / 24), 5 * math.sin(turn * math.tau / 24)) for turn in range(25))


class Drawing:
    """A chart of `width` x `height` pixels. A file also has its title and a legend, which a page shows beside it."""

    def __init__(self, chart: Chart, width: int, height: int, *, is_file: bool = False) -> None:
        self.chart, self.width, self.height, self._is_file = chart, width, height, is_file
        self.kind = "wide" if width >= 480 else "narrow"
        self.x, self.y = chart.x_axis(round(width / 68)), chart.y_axis(round(height / 60))
        drawn = [line for line in chart.lines if any(line.runs())]
        labels = [line for line in drawn if line.labelled and self.kind == "wide"]
        named = [line for line in drawn if len(drawn) <= _MOST_IN_LEGEND or line.labelled or line.key == "reference"]
        rows = math.ceil(len(named) / _LEGEND_COLUMNS)
        self.top, self.bottom = 26 + is_file * _TITLE_ROW, height - 36 - is_file * rows * _LEGEND_ROW
        self.left = 10 + _DIGIT * max((len(tick.label) for tick in self.y.ticks), default=1)
        self.right = width - (12 + _LETTER * max(len(_short(line)) for line in labels) if labels else 16)
        self.figure = Figure(figsize=(width / _PER_INCH, height / _PER_INCH), dpi=_PER_INCH, facecolor=LIGHT["ground"])
        upward = Affine2D().scale(1 / _PER_INCH, -1 / _PER_INCH).translate(0, height / _PER_INCH)
        self._pixels = upward + self.figure.dpi_scale_trans
        self._grid()
        curves = {id(line): self._curve(line) for line in drawn}
        self._bands()
        self._marks()
        self._end_labels(labels)
        if is_file:
            self._text(2, 22, chart.title, "ink", fontsize=15)
            self._legend([curves[id(line)] for line in named], [line.label for line in named])

    def markup(self) -> Markup:
        """Return the content of an <svg>."""
        renderer = PageRenderer(self.width, self.height)
        self.figure.patch.set_visible(False)
        self.figure.draw(renderer)
        return Markup("").join(renderer.parts)

    def _places(self, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return the pixels of (step, value)."""
        width, height = self.right - self.left, self.bottom - self.top
        return [(self.left + self.x.fraction(x) * width, self.bottom - self.y.fraction(y) * height) for x, y in points]

    def _add(self, artist: Artist, group: str = "") -> Artist:
        """Draw it. On a page, the words of `group` are its CSS class and the key of its curve."""
        artist.set(transform=self._pixels, gid=None if self._is_file else group)
        return self.figure.add_artist(artist)

    def _line(self, shape: Shape, tone: str, group: str = "", dash: Sequence[float] = (), offset: float = 0,
              width: float = 1, **look: Any) -> Artist:  # fmt: skip
        # matplotlib multiplies the pattern by the width.
        style = (offset / width, [length / width for length in dash]) if dash else "-"
        look = {"linewidth": width, "linestyle": style, "solid_capstyle": "butt"} | look
        x, y = zip(*shape, strict=True)
        return self._add(Line2D(x, y, color=LIGHT[tone], **look), group)

    def _each(self, places: Shape, mark: Shape, *style: Any, **look: Any) -> None:
        """Draw a mark at each place."""
        if places:
            self._line([(x + right, y + down) for x, y in places for right, down in (*mark, _END)], *style, **look)

    def _text(self, x: float, y: float, text: str, tone: str, group: str = "", **look: Any) -> None:
        text = text.replace("\n", " ")
        look = {"fontsize": 11.5} | look
        self._add(Text(x, y, text, color=LIGHT[tone], parse_math=False, usetex=False, **look), group)

    def _grid(self) -> None:
        for tick in self.y.ticks:
            ((_, height),) = self._places([(0, tick.value)])
            dash = (1, 3) if self.y.zero and tick.value == 0 else ()
            self._line([(self.left, height), (self.right, height)], "rule", dash=dash)
            self._text(self.left - 6, height + 4, tick.label, "muted", ha="right")
        self._line([(self.left, self.bottom), (self.right, self.bottom)], "muted")
        for tick in self.x.ticks:
            ((across, _),) = self._places([(tick.value, 0)])
            self._text(across, self.bottom + 16, tick.label, "muted", ha="center")
        self._text(self.right, self.bottom + 31, "step", "muted", ha="right")
        self._text(2, self.top - 13, self.chart.unit, "muted")

    def _curve(self, line: Line) -> Artist:
        runs = [self._places(thin(run, self.width)) for run in line.runs()]
        dots = [place for run in runs for place in run if line.dots or len(run) == 1]
        diameter = 5 if not line.dots else 6 if len(dots) < 60 else 3.2
        group = f"curve {line.key}"
        self._each(dots, _DOT, line.tone, group, width=diameter, solid_capstyle="round")
        shape = [place for run in runs for place in (*run, _END)]
        return self._line(shape, line.tone, group, line.dash, line.offset, line.width)

    def _bands(self) -> None:
        halo = [withStroke(linewidth=3, foreground=LIGHT["ground"])] if self._is_file else []  # a page: page.css
        for band in self.chart.bands:
            places = self._places(band.points)
            if band.filled and places:
                corners = [*places, (places[-1][0], self.bottom), (places[0][0], self.bottom)]
                self._add(Polygon(corners, color=LIGHT["tolerance-ground"], linewidth=0))
            if places:
                self._line(places, "tolerance", dash=(5, 4), width=1.2)
                place = self.right - 4, places[-1][1] - 6
                self._text(*place, band.label, "muted", "bound", fontsize=11, ha="right", path_effects=halo)

    def _marks(self) -> None:
        """Draw a cross at the upper edge for each value that was not finite, the events, and rings."""
        for line in self.chart.lines:
            gaps = self._places([(step, math.inf) for step, value in line.points if value is None][:_MOST_GAPS])
            self._each(gaps, _CROSS, line.tone, f"gap {line.key}", width=1.8)
        for kind in sorted({event.kind for event in self.chart.events}):
            steps = [(event.step, -math.inf) for event in self.chart.events if event.kind == kind]
            self._each(self._places(steps), _TICK, kind, width=1.4)
        for ring in self.chart.marks:
            self._each(self._places([(ring.step, ring.value)]), _RING, ring.tone, f"ring {ring.key}", width=2)

    def _end_labels(self, lines: Sequence[Line]) -> None:
        """Draw the labels of curves at their ends, moved apart if they would overlap."""
        ends = sorted(((self._places([[*line.runs()][-1][-1]])[0][1], line) for line in lines), key=lambda end: end[0])
        heights: list[float] = []
        for height, _ in ends:
            heights.append(max(height, heights[-1] + _LABEL_ROW) if heights else height)
        excess = max(0.0, heights[-1] - self.bottom) if heights else 0.0
        for height, (_, line) in zip(heights, ends, strict=True):
            place = self.right + 6, height - excess + 4
            self._text(*place, _short(line), line.tone, f"end {line.key}", fontsize=11, weight="bold")

    def _legend(self, curves: list[Artist], labels: list[str]) -> None:
        look = {"ncols": _LEGEND_COLUMNS, "frameon": False, "fontsize": 10, "labelcolor": LIGHT["ink"]}
        legend = self.figure.legend(curves, labels, loc="lower left", borderaxespad=0.2, **look)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _short(line: Line) -> str:
    return line.label if len(line.label) <= _LONGEST_LABEL else line.label[: _LONGEST_LABEL - 1] + "…"


class PageRenderer(RendererBase):
    """Writes lines, areas and text as SVG, with colors of the palette as CSS variables."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__()
        self.parts: list[Markup] = []
        self._group = Markup()
        self._size, self._downward = (width, height), Affine2D().scale(1, -1).translate(0, height)

    def get_canvas_width_height(self) -> tuple[float, float]:
        return self._size

    def get_text_width_height_descent(self, s: str, prop: FontProperties, ismath: Any) -> tuple[float, float, float]:
        return 0.0, 0.0, 0.0  # the browser knows

    def open_group(self, s: str, gid: str | None = None) -> None:
        kind, _, key = (gid or "").partition(" ")
        self._group = Markup(' class="{}"').format(kind) if kind else Markup()
        self._group += Markup(' data-k="{}"').format(key) if key else ""

    def draw_path(
        self, gc: GraphicsContextBase, path: Path, transform: Transform, rgbFace: Any = None  # noqa: N803
    ) -> None:  # fmt: skip
        segments = path.iter_segments(transform + self._downward, simplify=False)
        d = "".join(f"{_LETTERS[code]}{x:.1f} {y:.1f}" for (x, y), code in segments if code in _LETTERS)
        if rgbFace is not None:
            look = f'style="fill:{_variable(rgbFace)}"'
        else:
            look = f'style="stroke:{_variable(gc.get_rgb())}" stroke-width="{gc.get_linewidth():g}"'
            look += ' stroke-linecap="round"' * (gc.get_capstyle() == "round")
        offset, dash = gc.get_dashes()
        if dash is not None:
            pattern = " ".join(f"{length:g}" for length in np.asarray(dash))
            look += f' stroke-dasharray="{pattern}" stroke-dashoffset="{offset:g}"'
        self.parts.append(Markup(f'<path{self._group} d="{d}" {look}/>'))

    def draw_text(
        self, gc: GraphicsContextBase, x: float, y: float, s: str, prop: FontProperties, angle: float,
        ismath: Any = False, mtext: Any = None,
    ) -> None:  # fmt: skip
        x, y = self._downward.transform(mtext.get_transform().transform(mtext.get_unitless_position()))
        look = f"fill:{_variable(gc.get_rgb())};font-size:{prop.get_size():g}px;font-weight:{prop.get_weight()}"
        anchor = {"left": "start", "center": "middle", "right": "end"}[mtext.get_horizontalalignment()]
        element = '<text{} x="{:.1f}" y="{:.1f}" text-anchor="{}" style="{}">{}</text>'
        self.parts.append(Markup(element).format(self._group, x, y, anchor, look, s))


def _variable(color: Any) -> str:
    return f"var(--{_TONES[to_hex(color)]})"
