"""The heat map of a run's experts: for each decoder layer over steps, the load of the busiest expert over the mean.

All cells of one shade are one path, which keeps a map of 60 layers small. Pixels count from the upper left corner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import fmean
from typing import Literal

from markupsafe import Markup

from toolkit.report.chart import step_axis
from toolkit.report.drawing import Label
from toolkit.report.recorded_run import RecordedRun
from toolkit.units import plural

_BOUNDS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)
"""Loads at which shades end; the last shade has no end. Blue up to 3 times the mean, orange beyond."""
_COLUMN = 6
_LEFT = 34
_RIGHT = 40
_TOP = 20
_Loads = Sequence[tuple[int, Sequence[float | None]]]
"""Steps, each with the load of every decoder layer."""


@dataclass(frozen=True, kw_only=True)
class LoadMap:
    """Drawings for wide and narrow screens, with what a screen reader says, and the legend."""

    label: str
    drawings: tuple[tuple[str, int, int, Markup], ...]
    """Class, width, height and content of each <svg>."""
    description: str
    legend: tuple[tuple[str, str], ...]


def load_map(run: RecordedRun) -> LoadMap | None:
    """Draw the map of a run; None for a model without experts."""
    loads = [(step.step, step.layer_expert_load) for step in run.log.steps if step.layer_expert_load]
    count = max((len(row) for _, row in loads), default=0)
    layers = [layer for layer in range(count) if any(_of(row, layer) is not None for _, row in loads)]
    if not layers:
        return None
    shades = [f"up to {_BOUNDS[0]:g}", *(f"{low:g} to {high:g}" for low, high in pairwise(_BOUNDS))]
    return LoadMap(
        label=run.label,
        drawings=tuple(_drawing(kind, width, loads, layers) for kind, width in (("wide", 540), ("narrow", 340))),
        description=_describe(loads, layers),
        legend=tuple((f"heat{i}", label) for i, label in enumerate([*shades, f"over {_BOUNDS[-1]:g}"])),
    )


def _of(row: Sequence[float | None], layer: int) -> float | None:
    return row[layer] if layer < len(row) else None


def _mean(rows: Sequence[Sequence[float | None]], layer: int) -> float | None:
    known = [load for row in rows if (load := _of(row, layer)) is not None]
    return fmean(known) if known else None


def _shade(load: float | None) -> str:
    return "ground" if load is None else f"heat{sum(load > bound for bound in _BOUNDS)}"


def _describe(loads: _Loads, layers: Sequence[int]) -> str:
    rows = [row for _, row in loads]
    sentences = []
    for place, part in (("At first", rows[:1]), ("at last", rows[-1:])):
        means = {layer: mean for layer in layers if (mean := _mean(part, layer)) is not None}
        if means:
            worst = max(means, key=lambda layer: means[layer])
            sentences.append(f"{place} {means[worst]:.2f} in layer {worst}, where it is highest")
    return f"{plural(len(layers), 'layer')} over steps {loads[0][0]} to {loads[-1][0]}. {', '.join(sentences)}."


def _drawing(kind: str, width: int, loads: _Loads, layers: Sequence[int]) -> tuple[str, int, int, Markup]:
    """Draw cells of equal width, each the mean of some steps, and beside each layer the value of the last cell."""
    most = (width - _LEFT - _RIGHT) // _COLUMN
    columns = min(most, len(loads))
    ends = [round((i + 1) * len(loads) / columns) for i in range(columns)]
    parts = [[row for _, row in loads[start:end]] for start, end in zip([0, *ends], ends, strict=False)]
    size = (width - _LEFT - _RIGHT) / columns
    tall = max(8, min(18, 360 // len(layers)))
    bottom = _TOP + tall * len(layers)
    paths: dict[str, list[str]] = {}
    labels = [_label(2, 12, "layer", "start"), _label(width - 2, 12, "last", "end")]
    every = -(-12 // tall)
    for place, layer in enumerate(layers):
        top = _TOP + tall * place
        values = [_mean(part, layer) for part in parts]
        start = 0
        for shade, cells in groupby(values, _shade):
            end = start + len(list(cells))
            across = _LEFT + start * size
            wide = (end - start) * size
            paths.setdefault(shade, []).append(f"M{across:.1f} {top}h{wide:.1f}v{tall - 1}h-{wide:.1f}z")
            start = end
        if place % every == 0:
            labels.append(_label(_LEFT - 6, top + tall / 2 + 4, str(layer), "end"))
            if values[-1] is not None:
                labels.append(_label(width - 2, top + tall / 2 + 4, f"{values[-1]:.2f}", "end"))
    axis = step_axis(loads[0][0], loads[-1][0], most=round(width / 68))
    for tick in axis.ticks:
        across = _LEFT + size / 2 + axis.fraction(tick.value) * (width - _LEFT - _RIGHT - size)
        labels.append(_label(across, bottom + 16, tick.label, "middle"))
    labels.append(_label(width - _RIGHT, bottom + 31, "step", "end"))
    shades = [f'<path d="{"".join(cells)}" style="fill:var(--{tone})"/>' for tone, cells in paths.items()]
    return kind, width, bottom + 36, Markup("".join([*shades, *labels]))


def _label(x: float, y: float, text: str, anchor: Literal["start", "middle", "end"]) -> str:
    return Label(x, y, text, "muted", size=11, anchor=anchor).markup()
