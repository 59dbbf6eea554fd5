"""Image files, drawn with matplotlib in light colors: charts, heat maps, loss.png, and the memory of each stage."""

import json
import math
import textwrap
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure, FigureBase
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.transforms import Affine2D

from toolkit.errors import ReportError
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.report.chart import LIGHT, Chart, Line, line_points, running_mean
from toolkit.report.drawing import BOUND, Area, Drawing, Label, Shape, Stroke
from toolkit.report.heat_map import HeatMap

_CHART_WIDTH = 720
_LEGEND_ROW = 17.0
_TITLE_ROW = 26.0
_MOST_IN_LEGEND = 12
_LEGEND_COLUMNS = 3
_PER_INCH = 72
"""Pixels: one is a point of Matplotlib."""
_LARGEST_PNG = 20_000
"""Pixels: a heat map of thousands of parameters would exceed matplotlib's limit of 65536."""
_HEAT = [*(f"heat{i}" for i in range(9)), "missing", "ground"]

_INK = LIGHT["ink"]
_LIMIT = LIGHT["differs"]
_GIB = 2**30
_PARTS = json.loads((Path(__file__).parent / "templates" / "memory_parts.json").read_text(encoding="utf-8"))
"""The parts of a bar from the bottom, each a sum of fields; all of them are `MemoryBreakdown.total`."""
_FEWEST_TO_LABEL = 0.035
"""Fraction of the picture's height: thinner parts have no room for a number."""
_MOST_TO_LABEL = 16
"""Number of bars above which some have no label."""
_MOST_TO_NAME = 9
"""Number of labels that have room for words."""
_TITLE_WIDTH = 100
"""Characters of a line."""


def plot_loss(
    path: Path,
    losses: Sequence[float | None],
    *,
    title: str,
    held_out: Sequence[tuple[int, float]] = (),
    unigram_entropy: float | None = None,
    entropy_rate: float | None = None,
) -> None:
    """Write loss.png, 1600 x 900 pixels: training and validation loss, with entropies of the text as bounds.

    `losses` are nats per token of steps 1, 2, …, None if not finite; `held_out` are (step, loss).
    """
    points = line_points(losses)
    window = max(1, len(losses) // 30)
    if window > 1:
        mean = running_mean(points, window)
        lines = [
            Line(label="loss of a step", points=points, tone="reference", width=1.1),
            Line(label=f"mean of the last {window} steps", points=mean, tone="cool0", width=2.2),
        ]
    else:
        lines = [Line(label="loss", points=points, tone="cool0", width=2.2, dots=len(losses) < 20)]
    if held_out:
        lines.append(Line(label="held out", points=tuple(held_out), tone="warm0", dots=True))
    for label, nats, dash in (("unigram entropy", unigram_entropy, (4, 3)), ("entropy rate", entropy_rate, (1, 2))):
        if nats is not None:
            level = ((1, nats), (max(2, len(losses)), nats))
            lines.append(Line(label=label, points=level, tone="ink", width=1.1, dash=dash))
    chart = Chart(name="loss", title=title, unit="loss (nats per token)", lines=tuple(lines))
    write_chart(chart, path, height=405)


def write_chart(chart: Chart, *paths: Path, height: int = 432) -> None:
    """Write the chart to each of `paths`: as PNG, 720 x `height` pixels scaled up to 1600 pixels wide."""
    lines = [line for line in chart.lines if any(line.runs())]
    if len(lines) > _MOST_IN_LEGEND:
        lines = [line for line in lines if line.labelled or line.key == "reference"]
    legend_rows = math.ceil(len(lines) / _LEGEND_COLUMNS)
    drawing = Drawing(chart, _CHART_WIDTH, height, head=_TITLE_ROW, foot=legend_rows * _LEGEND_ROW)
    title = Label(2, 22, chart.title, "ink", size=15)
    figure = Figure(figsize=(_CHART_WIDTH / _PER_INCH, height / _PER_INCH), facecolor=LIGHT["ground"])
    upward = Affine2D().scale(1 / _PER_INCH, -1 / _PER_INCH).translate(0, height / _PER_INCH)
    for shape in (*drawing.shapes(), title):
        artist = _artist(shape)
        artist.set_transform(upward + figure.dpi_scale_trans)
        figure.add_artist(artist)
    samples = [_artist(Stroke((), line.tone, "", line.width, line.dash, line.offset)) for line in lines]
    legend = figure.legend(
        samples,
        [line.label for line in lines],
        loc="lower left",
        borderaxespad=0.2,
        ncols=_LEGEND_COLUMNS,
        frameon=False,
        fontsize=10,
        labelcolor=LIGHT["ink"],
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    _save(figure, *paths, dpi=160)


def _artist(shape: Shape) -> Artist:
    """Return a part of a drawing as Matplotlib's."""
    color = LIGHT[shape.tone]
    if isinstance(shape, Area):
        return Polygon(shape.corners, color=color, linewidth=0)
    if isinstance(shape, Stroke):
        # Matplotlib multiplies the lengths of dashes by the width.
        dashes = (shape.offset / shape.width, [length / shape.width for length in shape.dash])
        return Line2D(
            [x for x, _ in shape.points],
            [y for _, y in shape.points],
            color=color,
            linewidth=shape.width,
            linestyle=dashes if shape.dash else "-",
            solid_capstyle="round" if shape.has_round_ends else "butt",
        )
    on_one_line = shape.text.replace("\n", " ")
    text = Text(shape.x, shape.y, on_one_line, color=color, fontsize=shape.size, parse_math=False, usetex=False)
    alignment = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
    text.set(horizontalalignment=alignment, fontweight=shape.weight)
    if shape.group == BOUND:
        text.set_path_effects([withStroke(linewidth=3, foreground=LIGHT["ground"])])  # a page: page.css
    return text


def write_heat_map(heat: HeatMap, labels: Sequence[str], *paths: Path) -> None:
    """Write the map to each of `paths`: a row for each parameter, a column for each strategy."""
    parameters = heat.parameters()
    columns = max(1, len(heat.columns))
    axes = _new_axes(3.0 + 0.24 * columns, 1.6 + 0.15 * max(1, len(parameters)))
    ground = _HEAT.index("ground")
    tones = [[_HEAT.index(cell.tone) if cell else ground for cell in row.cells] for row in parameters] or [[ground]]
    colors = ListedColormap([LIGHT[name] for name in _HEAT])
    axes.pcolormesh(tones, cmap=colors, vmin=0, vmax=len(_HEAT) - 1, edgecolor="white", linewidth=0.6)
    axes.grid(visible=False)
    axes.invert_yaxis()
    axes.set_yticks([i + 0.5 for i in range(len(parameters))], [p.name for p in parameters], fontsize=6.5)
    names = [labels[index] for index in heat.columns]
    axes.set_xticks([i + 0.5 for i in range(len(names))], names, fontsize=7, rotation=90)
    axes.xaxis.tick_top()
    axes.tick_params(labelcolor=LIGHT["ink"])
    axes.spines[:].set_visible(False)
    axes.set_xlabel(
        "difference of the first gradient: blue within the tolerance, orange beyond it\n"
        "(each shade a power of ten), dark: missing or not finite",
        fontsize=7,
    )
    for boundary in accumulate(len(group.parameters) for group in heat.groups[:-1]):
        axes.axhline(boundary, color=LIGHT["muted"], linewidth=0.8)
    _save(axes.figure, *paths)


def _new_axes(width: float, height: float) -> Axes:
    """Return empty axes in the style of all plots, on a figure of this size in inches."""
    axes = Figure(figsize=(width, height), layout="constrained").add_subplot()
    axes.xaxis.label.set_color(LIGHT["muted"])
    axes.yaxis.label.set_color(LIGHT["muted"])
    axes.tick_params(length=0, colors=LIGHT["muted"], labelsize=9)
    axes.grid(axis="y", color=LIGHT["rule"], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT["muted"])
    return axes


def _save(figure: FigureBase, *paths: Path, dpi: float = 200) -> None:
    assert isinstance(figure, Figure)
    dpi = min(dpi, _LARGEST_PNG / max(figure.get_size_inches()))
    for path in paths:
        # Keep text as text, and give the same bytes for the same data.
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dstk"}):
            figure.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else None)


def plot_memory(path: Path, stages: Sequence[MemoryBreakdown], *, title: str) -> None:
    """Write a plot (1600 x 1000 pixels as PNG). Raises ReportError if the file cannot be written."""
    axes = _new_axes(8, 5)
    axes.set_title(textwrap.fill(title, _TITLE_WIDTH), loc="left", fontsize=10, color=_INK, pad=12)
    axes.set_ylabel("GiB of a GPU's memory")
    device = stages[0].device_bytes / _GIB
    tallest = max(stage.total for stage in stages) / _GIB
    top = max(tallest, device) * 1.06
    width = min(0.72, 0.12 * len(stages) + 0.12)
    bottoms = [0.0] * len(stages)
    for part in _PARTS:
        heights = [sum(_part_bytes(stage, field) for field in part["fields"]) / _GIB for stage in stages]
        if not any(heights):
            continue
        axes.bar(
            range(len(stages)), heights, width, bottom=bottoms, color=part["color"], label=part["label"], linewidth=0
        )
        if len(stages) <= 8:
            for place, (height, bottom) in enumerate(zip(heights, bottoms, strict=True)):
                if height > _FEWEST_TO_LABEL * top:
                    ink = part.get("ink", _INK)
                    middle = bottom + height / 2
                    axes.text(place, middle, f"{height:.1f}", ha="center", va="center", fontsize=7, color=ink)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    _label_bars(axes, stages, bottoms, top)
    axes.set_ylim(0, top)
    axes.legend(reverse=True, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), borderaxespad=0)
    try:
        _save(axes.figure, path)
    except (OSError, ValueError) as error:
        raise ReportError(f"--plot {path}: {error}. Name a .png, .svg or .pdf in a directory that exists.") from None


def _part_bytes(stage: MemoryBreakdown, field: str) -> int:
    working = stage.activations.get("working", 0)
    computed = {"working": working, "kept": stage.activation_total - working, "teacher": stage.teacher}
    fields: dict[str, int] = vars(stage) | computed
    return fields[field]


def _label_bars(axes: Axes, stages: Sequence[MemoryBreakdown], heights: Sequence[float], top: float) -> None:
    """Label each bar with its height and its stage, and draw the line of the GPU's capacity."""
    margin = max(0.5, 0.02 * len(stages))
    labelled = places_to_label(heights)
    for place in labelled:
        height = heights[place]
        written = axes.text(place, height + 0.008 * top, f"{height:.1f}", ha="center", va="bottom", fontsize=8)
        written.set(color=_INK, path_effects=[withStroke(linewidth=2, foreground="white")])  # higher bars beside it
    device = stages[0].device_bytes / _GIB
    if device:
        axes.axhline(device, color=_LIMIT, linewidth=1.2, linestyle=(0, (5, 3)))
        right = len(stages) - 1 + margin
        axes.text(right, device, f"GPU {device:.1f}", ha="right", va="bottom", fontsize=8, color=_LIMIT)
    short = len(labelled) > _MOST_TO_NAME
    axes.set_xticks(labelled, [_stage_name(stages, place, short=short) for place in labelled], fontsize=8)
    if short:
        axes.set_xlabel("stage, and its layers", fontsize=8)
    axes.set_xlim(-margin, len(stages) - 1 + margin)


def places_to_label(heights: Sequence[float]) -> list[int]:
    """Choose the bars to label: all; of many the first, last and tallest, and some at equal distances."""
    count = len(heights)
    if count <= _MOST_TO_LABEL:
        return list(range(count))
    step = -(-count // (_MOST_TO_LABEL // 2))
    chosen: list[int] = []
    for place in (heights.index(max(heights)), 0, count - 1, *range(step, count, step)):
        if all(abs(place - other) >= step for other in chosen):
            chosen.append(place)
    return sorted(chosen)


def _stage_name(stages: Sequence[MemoryBreakdown], place: int, *, short: bool) -> str:
    if len(stages) == 1:
        return "each rank"
    stage = stages[place]
    if short:
        return f"{stage.stage}\n{stage.layers}"
    layers = f"{stage.layers} layer{'s' if stage.layers != 1 else ''}"
    return f"stage {stage.stage}\n{layers}"
