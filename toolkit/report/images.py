"""Plots as files, PNG and SVG, for slides and documents: the charts of a page and its heat map, in light colours."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from toolkit.report.chart import Chart
from toolkit.report.heat_map import HeatMap
from toolkit.report.palette import LIGHT
from toolkit.report.scale import Axis

_PNG_DPI = 200
_LARGEST_PNG = 20_000
"""Pixels: a heat map of thousands of parameters would pass 65536, which cannot be drawn."""
_MOST_IN_LEGEND = 12
_HEAT = [*(f"heat{i}" for i in range(9)), "missing", "ground"]


def write_chart(folder: Path, chart: Chart) -> None:
    """NAME.png (1600 pixels wide) and NAME.svg."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    y = chart.y_axis()
    x = chart.x_axis(8)
    for band in chart.bands:
        steps, bounds = [step for step, _ in band.points], [y.fraction(bound) for _, bound in band.points]
        if band.filled:
            axes.fill_between(steps, 0, bounds, color=LIGHT["tolerance-ground"], zorder=0)
        axes.plot(steps, bounds, color=LIGHT["tolerance"], linewidth=1, linestyle=(0, (4, 3)), label=band.label)
    for line in chart.lines:
        label = line.label if line.in_legend else None
        for run in line.runs():
            axes.plot(
                [step for step, _ in run],
                [y.fraction(value) for _, value in run],
                color=LIGHT[line.tone],
                linewidth=line.width * 0.9,
                linestyle=(line.offset, line.dash) if line.dash else "-",
                marker="o" if line.dots or len(run) == 1 else None,
                markersize=3,
                solid_capstyle="round",
                label=label,
                clip_on=False,
                zorder=3 if line.tone == "reference" else 4,
            )
            label = None
    for mark in chart.marks:
        place = [mark.step], [y.fraction(mark.value)]
        axes.plot(*place, "o", markersize=8, markerfacecolor="none", markeredgecolor=LIGHT[mark.tone])
    for event in chart.events:
        axes.plot([event.step] * 2, [0, 0.02], color=LIGHT[event.kind], linewidth=1)
    _dress(axes, chart, x, y)
    _save(figure, folder / chart.name)


def write_heat_map(folder: Path, heat: HeatMap, labels: Sequence[str]) -> None:
    """gradients.png and gradients.svg: a row for each parameter, a column for each strategy."""
    parameters = heat.parameters()
    rows, columns = max(1, len(parameters)), max(1, len(heat.columns))
    figure = Figure(figsize=(3.0 + 0.24 * columns, 1.6 + 0.15 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tones = [
        [_HEAT.index(cell.tone if cell is not None else "ground") for cell in parameter.cells]
        for parameter in parameters
    ] or [[_HEAT.index("ground")]]
    colours = ListedColormap([LIGHT[name] for name in _HEAT])
    axes.pcolormesh(tones, cmap=colours, vmin=0, vmax=len(_HEAT) - 1, edgecolor="white", linewidth=0.6)
    axes.invert_yaxis()
    axes.set_yticks([i + 0.5 for i in range(len(parameters))], [p.name for p in parameters], fontsize=6.5)
    names = [labels[index] for index in heat.columns]
    axes.set_xticks([i + 0.5 for i in range(len(names))], names, fontsize=7, rotation=90)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, colors=LIGHT["ink"])
    axes.spines[:].set_visible(False)
    axes.set_xlabel(
        "difference of the first gradient: blue within the tolerance, orange beyond it\n"
        "(each shade a power of ten), dark: missing or not finite",
        fontsize=7,
        color=LIGHT["muted"],
    )
    boundary = 0
    for group in heat.groups[:-1]:
        boundary += len(group.parameters)
        axes.axhline(boundary, color=LIGHT["muted"], linewidth=0.8)
    _save(figure, folder / "gradients")


def _dress(axes: Axes, chart: Chart, x: Axis, y: Axis) -> None:
    """Title, ticks, grid and legend. Values are drawn as fractions of the axis, as the page does."""
    axes.set_title(chart.title, loc="left", fontsize=12, color=LIGHT["ink"], pad=12)
    axes.set_xlabel("step", color=LIGHT["muted"])
    axes.set_ylabel(chart.unit, color=LIGHT["muted"])
    axes.set_xlim(x.low, x.high)
    axes.set_ylim(0, 1)
    axes.set_xticks([tick.value for tick in x.ticks], [tick.label for tick in x.ticks])
    axes.set_yticks([y.fraction(tick.value) for tick in y.ticks], [tick.label for tick in y.ticks])
    axes.tick_params(length=0, colors=LIGHT["muted"], labelsize=9)
    axes.grid(axis="y", color=LIGHT["rule"], linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT["muted"])
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > _MOST_IN_LEGEND:
        kept = [i for i, label in enumerate(labels) if label in _telling(chart)]
        handles, labels = [handles[i] for i in kept], [labels[i] for i in kept]
    if handles:
        axes.figure.legend(handles, labels, loc="outside lower left", ncols=3, frameon=False, fontsize=8)


def _telling(chart: Chart) -> set[str]:
    """Of a chart with many curves, the ones whose names matter."""
    return {line.label for line in chart.lines if line.labelled or line.key == "reference"} | {
        band.label for band in chart.bands
    }


def _save(figure: Figure, path: Path) -> None:
    # Text stays text, and the same data gives the same bytes.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dstk"}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    longest = max(figure.get_size_inches())
    figure.savefig(path.with_suffix(".png"), dpi=min(_PNG_DPI, _LARGEST_PNG / longest))
