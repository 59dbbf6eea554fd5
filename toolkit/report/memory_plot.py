"""memory.png: what each pipeline stage takes, as stacked bars, under the line of what the GPU has."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from toolkit.errors import ReportError
from toolkit.estimate.breakdown import MemoryBreakdown

_INK, _FAINT, _LIMIT = "#1f2933", "#eceff2", "#b91c1c"
_GIB = 2**30
_PARTS = (
    ("parameters", "#1d4ed8"),
    ("gradients", "#3b82f6"),
    ("fp32 masters", "#93c5fd"),
    ("optimizer states", "#c7d2fe"),
    ("buckets, gathered or cast weights", "#0f766e"),
    ("activations", "#d97706"),
    ("one layer at work", "#fbbf24"),
    ("logits and loss", "#be185d"),
    ("peak of the update", "#7c3aed"),
    ("context and NCCL", "#94a3b8"),
    ("allocator's margin", "#dbe2ea"),
)
_FEWEST_TO_LABEL = 0.035
"""Of the picture's height: thinner parts have no room for their number."""
_MOST_TO_LABEL = 16
"""Bars: of more than these, some go without a label."""
_MOST_TO_NAME = 9
"""Labels that have room for words."""
_TITLE_WIDTH = 100
"""Characters of a line."""


def plot_memory(path: Path, stages: Sequence[MemoryBreakdown], *, title: str) -> None:
    """Write a picture, of 1600 x 1000 pixels if it is a PNG. Raises ReportError where that cannot be done."""
    figure = Figure(figsize=(8, 5), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    device = stages[0].device_bytes / _GIB
    tallest = max(stage.total for stage in stages) / _GIB
    top = max(tallest, device) * 1.06
    width = min(0.72, 0.12 * len(stages) + 0.12)
    bottoms = [0.0] * len(stages)
    values = [parts(stage) for stage in stages]
    for index, (label, colour) in enumerate(_PARTS):
        heights = [value[index] / _GIB for value in values]
        if not any(heights):
            continue
        axes.bar(range(len(stages)), heights, width, bottom=bottoms, color=colour, label=label, linewidth=0)
        if len(stages) <= 8:
            for place, (height, bottom) in enumerate(zip(heights, bottoms, strict=True)):
                if height > _FEWEST_TO_LABEL * top:
                    ink = "white" if index in (0, 1, 4, 7, 8) else _INK
                    axes.text(
                        place, bottom + height / 2, f"{height:.1f}", ha="center", va="center", fontsize=7, color=ink
                    )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    _label(axes, stages, bottoms, top)
    axes.set_ylim(0, top)
    axes.set_ylabel("GiB of a GPU's memory")
    axes.set_title(textwrap.fill(title, _TITLE_WIDTH), loc="left", fontsize=10, color=_INK)
    axes.grid(axis="y", color=_FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1],
        labels[::-1],
        frameon=False,
        fontsize=8,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0,
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ReportError(f"--plot {path}: {error}. Name a .png, .svg or .pdf in a directory that exists.") from None


def _label(axes: Any, stages: Sequence[MemoryBreakdown], heights: Sequence[float], top: float) -> None:
    """The height above each bar, the stage below it, and the line of what the GPU has."""
    margin = max(0.5, 0.02 * len(stages))
    labelled = places_to_label(heights)
    for place in labelled:
        height = heights[place]
        written = axes.text(place, height + 0.008 * top, f"{height:.1f}", ha="center", va="bottom", fontsize=8)
        written.set(color=_INK, path_effects=[withStroke(linewidth=2, foreground="white")])  # higher bars beside it
    device = stages[0].device_bytes / _GIB
    if device:
        axes.axhline(device, color=_LIMIT, linewidth=1.2, linestyle=(0, (5, 3)))
        axes.text(
            len(stages) - 1 + margin, device, f"GPU {device:.1f}", ha="right", va="bottom", fontsize=8, color=_LIMIT
        )
    short = len(labelled) > _MOST_TO_NAME
    axes.set_xticks(labelled, [_name(stages, place, short=short) for place in labelled], fontsize=8)
    if short:
        axes.set_xlabel("stage, and its layers", fontsize=8)
    axes.set_xlim(-margin, len(stages) - 1 + margin)


def parts(stage: MemoryBreakdown) -> tuple[int, ...]:
    """The heights of a bar's parts, from the bottom; together `stage.total`."""
    working = stage.activations.get("working", 0)
    return (
        stage.parameters,
        stage.gradients,
        stage.masters,
        stage.optimizer,
        stage.buckets + stage.gathered + stage.model_buffers + stage.workspace,
        stage.activation_total - working,
        working,
        stage.logits,
        stage.update,
        stage.framework + stage.nccl,
        stage.margin,
    )


def places_to_label(heights: Sequence[float]) -> list[int]:
    """Every bar; of many the first, the last, the tallest and some at equal distances, none too near to another."""
    count = len(heights)
    if count <= _MOST_TO_LABEL:
        return list(range(count))
    step = -(-count // (_MOST_TO_LABEL // 2))
    chosen: list[int] = []
    for place in (heights.index(max(heights)), 0, count - 1, *range(step, count, step)):
        if all(abs(place - other) >= step for other in chosen):
            chosen.append(place)
    return sorted(chosen)


def _name(stages: Sequence[MemoryBreakdown], place: int, *, short: bool) -> str:
    if len(stages) == 1:
        return "each rank"
    stage = stages[place]
    if short:
        return f"{stage.stage}\n{stage.layers}"
    layers = f"{stage.layers} layer{'s' if stage.layers != 1 else ''}"
    return f"stage {stage.stage}\n{layers}"
