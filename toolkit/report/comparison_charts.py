"""The plots of a comparison: loss, gradient norm, their differences from the baseline, and a heat map of gradients.

The heat map has each parameter's gradient in each strategy, by layer, colored by its difference / tolerance.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.parity.tolerance import relative
from toolkit.report.chart import COOL, DASHES, WARM, Band, Chart, Line, Point, RingMark, line_points, stripe
from toolkit.units import difference, english_list, plural, scientific

Curve = Mapping[str, Any]

_MOST_TOLERANCES = 3
_MANY = 12
_FALLBACK_TOLERANCE = 1e-6
_DECADES_WITHIN = 4
_DECADES_BEYOND = 4


@dataclass(frozen=True, kw_only=True)
class Look:
    """Color and dash pattern with which one strategy is drawn everywhere in the report."""

    key: str
    tone: str
    dash: tuple[float, ...]
    differs: bool

    def line(self, strategy: Curve, points: tuple[Point, ...], **options: Any) -> Line:
        """Return a curve of the strategy; it has its label if the strategy differs."""
        labelled = self.differs
        return Line(label=strategy["label"], points=points, tone=self.tone, key=self.key, labelled=labelled, **options)


def looks(strategies: Sequence[Curve]) -> list[Look]:
    """Assign cool colors to strategies that are the same and warm colors to the others."""
    assigned: list[Look] = []
    counts = {True: 0, False: 0}
    for index, strategy in enumerate(strategies):
        differs = strategy["result"] != "same"
        tones = WARM if differs else COOL
        round_, place = divmod(counts[differs], len(tones))
        counts[differs] += 1
        assigned.append(Look(key=f"k{index}", tone=tones[place], dash=DASHES[round_ % len(DASHES)], differs=differs))
    return assigned


def comparison_charts(comparison: Mapping[str, Any]) -> list[Chart]:
    """Return the plots of loss, its difference, gradient norm, and its difference."""
    norm = "norm of the whole gradient, before clipping"
    charts = [
        _overlay(comparison, "losses", files="losses", noun="loss", unit="nats per token"),
        _differences(comparison, "losses", "loss", files="loss-difference", noun="loss"),
        _overlay(comparison, "grad_norms", files="grad-norms", noun="gradient norm", unit=norm),
        _differences(comparison, "grad_norms", "grad_norm", files="grad-norm-difference", noun="gradient norm"),
    ]
    return charts if comparison["baselines"][0]["grad_norms"] else charts[:2]


def _overlay(comparison: Curve, field: str, *, files: str, noun: str, unit: str) -> Chart:
    baselines = comparison["baselines"]
    strategies = comparison["strategies"]
    steps = comparison.get("steps")
    equal = [look for strategy, look in _looked(strategies) if not look.differs]
    bands = [
        (line_points(baseline[field], steps), baseline["label"], f"reference{index}")
        for index, baseline in enumerate(baselines)
    ]
    lines = [Line(label=label, points=points, tone="reference", key=key, width=8) for points, label, key in bands]
    # Strategies that differ are drawn first: the others show where they leave.
    for strategy, look in sorted(_looked(strategies), key=lambda pair: not pair[1].differs):
        # Equal curves overlap: their dashes alternate so that each is visible.
        striped = not look.differs and len(equal) > 1
        dashes = stripe(equal.index(look), len(equal)) if striped else {}
        points = line_points(strategy[field], steps)
        lines.append(look.line(strategy, points, **dashes, width=2.6))
    values = [value for value in baselines[0][field] if value is not None]
    course = f"That of {baselines[0]['label']} goes from {values[0]:.4f} to {values[-1]:.4f}. " if values else ""
    names = english_list([baseline["label"] for baseline in baselines])
    caption = f"The gray band is {names}." if len(baselines) == 1 else f"The gray bands are {names}."
    if len(equal) > 1:
        caption += " Equal curves overlap, so their colors alternate."
    return Chart(
        name=files,
        title=noun.capitalize(),
        unit=unit,
        caption=caption,
        description=f"{noun.capitalize()} of each step of {plural(len(strategies), 'strategy', 'strategies')}. "
        f"{course}{_outcomes(strategies)}",
        lines=tuple(lines),
    )


@dataclass(frozen=True, kw_only=True)
class _Rerun:
    """A baseline that ran again, rounding differently."""

    curve: Curve
    baseline: Curve


def _differences(comparison: Curve, field: str, bound: str, *, files: str, noun: str) -> Chart:
    strategies = comparison["strategies"]
    steps = comparison.get("steps")
    baselines = {baseline["label"]: baseline for baseline in comparison["baselines"]}
    reruns = [_Rerun(curve=rerun, baseline=baseline) for baseline in baselines.values() for rerun in baseline["reruns"]]
    lines = _rerun_lines(reruns, field, steps)
    marks: list[RingMark] = []
    largest_of_equal: list[float] = []
    for strategy, look in _looked(strategies):
        points = relative_points(strategy[field], baselines[strategy["baseline"]][field], steps)
        lines.append(look.line(strategy, points, dash=look.dash, width=_width(look, count=len(strategies))))
        known = [value for _, value in points if value is not None]
        if known and not look.differs:
            largest_of_equal.append(max(known))
        beyond = first_beyond(points, _limits(strategy, bound))
        if beyond is not None:
            marks.append(RingMark(step=beyond[0], value=beyond[1], tone=look.tone, key=look.key))
    names = english_list([*baselines])
    longest = max(len(baseline[field]) for baseline in baselines.values())
    bands = tuple(_bands(strategies, bound, steps or range(1, longest + 1)))
    caption = f"|{noun} − baseline| / baseline, on a logarithmic axis."
    if bands:
        caption += " Everything below the dashed line is within the tolerance."
    if marks:
        caption += " A ring marks the first step beyond it."
    if reruns:
        labels = dict.fromkeys(rerun.curve["label"] for rerun in reruns)
        caption += f" Gray: {names} again, rounding differently ({english_list(list(labels))})."
    description = f"Relative difference of the {noun} from {names} at each step."
    if largest_of_equal:
        description += f" Strategies that are the same differ by {difference(max(largest_of_equal))} at most."
    return Chart(
        name=files,
        title=f"Difference of the {noun}",
        unit="relative difference",
        caption=caption,
        description=f"{description} {_outcomes(strategies)}",
        lines=tuple(lines),
        bands=bands,
        marks=tuple(marks),
        log=True,
    )


def _rerun_lines(reruns: Sequence[_Rerun], field: str, steps: Sequence[int] | None) -> list[Line]:
    """Return the differences of each rerun from its baseline."""
    lines = []
    for index, rerun in enumerate(reruns):
        points = relative_points(rerun.curve[field], rerun.baseline[field], steps)
        label = f"rerun: {rerun.curve['label']}"
        lines.append(Line(label=label, points=points, tone="rerun", key=f"rerun{index}", width=1.2))
    return lines


def _width(look: Look, *, count: int) -> float:
    """Return the width of a strategy's line, one of `count`: those that differ are wider."""
    if look.differs:
        return 2.2
    return 1.5 if count <= _MANY else 0.9


def _limits(strategy: Curve, bound: str) -> Sequence[float | None]:
    """Return a strategy's bounds of each step; empty where it has none."""
    tolerance: Curve = strategy.get("tolerance") or {}
    return tolerance.get(bound) or []


def relative_points(
    values: Sequence[float | None], baseline: Sequence[float | None], steps: Sequence[int] | None = None
) -> tuple[Point, ...]:
    """Return |value - baseline| / |baseline| of the steps that both have; a gap if one of them was not finite."""
    pairs = zip(values, baseline, strict=False)
    gaps = [None if value is None or wanted is None else relative(value, wanted) for value, wanted in pairs]
    return line_points(gaps, steps)


def first_beyond(points: Sequence[Point], limits: Sequence[float | None]) -> tuple[int, float] | None:
    """Return the first step whose difference exceeds its bound; the last bound applies to all later steps."""
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    for place, (step, value) in enumerate(points):
        if value is not None and value > known[min(place, len(known) - 1)]:
            return step, value
    return None


def _bands(strategies: Sequence[Curve], bound: str, steps: Sequence[int]) -> Iterator[Band]:
    """Yield each tolerance, or the tightest and the loosest of many."""
    distinct: dict[tuple[float, ...], None] = {}
    for strategy in strategies:
        limits = [limit for limit in _limits(strategy, bound) if limit is not None]
        if limits and steps:
            # The last bound applies to all later steps.
            distinct[tuple(limits[min(place, len(limits) - 1)] for place in range(len(steps)))] = None
    labelled: list[tuple[str, tuple[float, ...]]] = []
    if len(distinct) > _MOST_TOLERANCES:
        of_steps = list(zip(*distinct, strict=True))
        labelled.append(("loosest tolerance", tuple(map(max, of_steps))))
        labelled.append(("tightest tolerance", tuple(map(min, of_steps))))
    else:
        for limits_of_steps in sorted(distinct, reverse=True):
            is_constant = len(set(limits_of_steps)) == 1
            label = f"tolerance {scientific(limits_of_steps[0])}" if is_constant else "tolerance"
            labelled.append((label, limits_of_steps))
    for index, (label, limits_of_steps) in enumerate(labelled):
        yield Band(label=label, points=tuple(zip(steps, limits_of_steps, strict=True)), filled=index == 0)


def _looked(strategies: Sequence[Curve]) -> Iterator[tuple[Curve, Look]]:
    yield from zip(strategies, looks(strategies), strict=True)


def _outcomes(strategies: Sequence[Curve]) -> str:
    differing = [strategy["label"] for strategy in strategies if strategy["result"] == "differs"]
    failed = [strategy["label"] for strategy in strategies if strategy["result"] == "failed"]
    unclear = [strategy["label"] for strategy in strategies if strategy["result"] == "cannot tell"]
    parts = [f"{english_list(differing)} {'differs' if len(differing) == 1 else 'differ'}."] if differing else []
    parts += [f"{english_list(failed)} failed and has no curve."] if failed else []
    parts += [f"{english_list(unclear)} cannot be told from rounding."] if unclear else []
    return " ".join(parts) or "All of them stay within their tolerance."


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One parameter of one strategy."""

    tone: str
    """heat0 (equal) to heat4 are within the tolerance, heat5 to heat8 beyond it; or missing."""
    text: str
    numbers: tuple[float | None, ...]
    """Difference, ratio and cosine with the displayed number of digits."""


@dataclass(frozen=True, kw_only=True)
class HeatMapRow:
    """One row: a cell for each column; None if a strategy lacks the parameter."""

    name: str
    short_name: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """The parameters of one layer, or those before or after all layers."""

    title: str
    parameters: tuple[HeatMapRow, ...]


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Groups in model order. `columns` are indices into the list of strategies."""

    columns: tuple[int, ...]
    groups: tuple[Group, ...]

    def parameters(self) -> list[HeatMapRow]:
        return [parameter for group in self.groups for parameter in group.parameters]

    def data(self) -> list[dict[str, Any]]:
        """Return the values that page.js shows under the pointer."""
        return [
            {"name": parameter.name, "cells": [None if cell is None else cell.numbers for cell in parameter.cells]}
            for parameter in self.parameters()
        ]


def heat_map(strategies: Sequence[Curve]) -> HeatMap:
    """Build the map of all strategies with gradients. Parameters are in the order of the first strategy."""
    columns = tuple(index for index, strategy in enumerate(strategies) if strategy.get("gradients"))
    rows = [{str(row["name"]): row for row in strategies[index]["gradients"]} for index in columns]
    bounds = [gradient_tolerance(strategies[index]) for index in columns]
    names = list(dict.fromkeys(name for column in rows for name in column))

    def row(name: str, short_name: str) -> HeatMapRow:
        pairs = zip(rows, bounds, strict=True)
        cells = tuple(_cell(column[name], bound) if name in column else None for column, bound in pairs)
        return HeatMapRow(name=name, short_name=short_name, cells=cells)

    groups = (
        Group(title=title, parameters=tuple(row(*member) for member in members)) for title, members in grouped(names)
    )
    return HeatMap(columns=columns, groups=tuple(groups))


def gradient_tolerance(strategy: Curve) -> float:
    """Return the strategy's bound on a parameter's gradient."""
    return (strategy.get("tolerance") or {}).get("gradient") or _FALLBACK_TOLERANCE


def grouped(names: Sequence[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Group names by layer, each with its name inside the layer; layers ascend between the other parameters."""
    before: list[tuple[str, str]] = []
    after: list[tuple[str, str]] = []
    layers: dict[int, list[tuple[str, str]]] = {}
    for name in names:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if place is None or place == len(parts) - 1:
            (after if layers else before).append((name, _outer(name)))
        else:
            layers.setdefault(int(parts[place]), []).append((name, ".".join(parts[place + 1 :])))
    of_layers = [(f"layer {layer}", layers[layer]) for layer in sorted(layers)]
    first = "before the layers" if layers else "parameters"
    return [group for group in ((first, before), *of_layers, ("after the layers", after)) if group[1]]


def tone_of(value: float | None, tolerance: float) -> str:
    """Return the color of a difference: one shade for each power of ten from its tolerance."""
    if value is None or not math.isfinite(value):
        return "missing"
    if value == 0:
        return "heat0"
    if value <= tolerance:
        decades = math.floor(math.log10(tolerance / value) + 1e-9)
        return f"heat{max(1, _DECADES_WITHIN - decades)}"
    decades = math.ceil(math.log10(value / tolerance) - 1e-9)
    return f"heat{_DECADES_WITHIN + max(1, min(_DECADES_BEYOND, decades))}"


def legend(tolerances: Sequence[float]) -> list[tuple[str, str]]:
    """Return (tone, label) of each color: absolute numbers if all strategies share a tolerance."""
    if len(set(tolerances)) == 1:
        tolerance = tolerances[0]
        bounds = [scientific(tolerance * 10.0**power) for power in range(-3, 4)]
    else:
        bounds = ["1/1000", "1/100", "1/10", "tolerance", "x 10", "x 100", "x 1000"]
    shades = [(f"heat{i}", f"≤ {bound}") for i, bound in enumerate(bounds, start=1)]
    return [("heat0", "equal"), *shades, ("heat8", f"> {bounds[-1]}"), ("missing", "missing or not finite")]


def _cell(row: Curve, tolerance: float) -> Cell:
    value = row.get("difference")
    numbers = (_short(value, 2), _short(row.get("ratio"), 7), _short(row.get("cosine"), 8))
    return Cell(tone=tone_of(value, tolerance), text=difference(value), numbers=numbers)


def _outer(name: str) -> str:
    head, _, rest = name.partition(".")
    return rest if head in ("transformer", "model", "gpt_neox") and rest else name


def _short(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")
