"""The heat map of a comparison: the gradient of each parameter in each strategy, colored by difference / tolerance."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.units import difference, scientific

Curve = Mapping[str, Any]
"""A strategy of comparison.json, or a row of its gradients."""
_FALLBACK_TOLERANCE = 1e-6
"""Bound of a gradient's relative difference where a strategy has no tolerance."""
_DECADES_WITHIN = 4
"""Shades of differences within the tolerance, one for each power of ten."""
_DECADES_BEYOND = 4
"""Shades of differences beyond it."""


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
        """Return the rows of all groups."""
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
    groups = []
    for title, members in grouped(names):
        parameters = []
        for name, short_name in members:
            cells = tuple(
                _cell(column[name], bound) if name in column else None
                for column, bound in zip(rows, bounds, strict=True)
            )
            parameters.append(HeatMapRow(name=name, short_name=short_name, cells=cells))
        groups.append(Group(title=title, parameters=tuple(parameters)))
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
        words = name.split(".")
        place = next((index for index, word in enumerate(words) if word.isdecimal()), None)
        if place is not None and place < len(words) - 1:
            layers.setdefault(int(words[place]), []).append((name, ".".join(words[place + 1 :])))
        elif layers:
            after.append((name, _outer(name)))
        else:
            before.append((name, _outer(name)))
    of_layers = [(f"layer {layer}", layers[layer]) for layer in sorted(layers)]
    title_before = "before the layers" if layers else "parameters"
    groups = [(title_before, before), *of_layers, ("after the layers", after)]
    return [(title, members) for title, members in groups if members]


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
    """Return the cell of a parameter's gradient."""
    value = row.get("difference")
    numbers = (_short(value, 2), _short(row.get("ratio"), 7), _short(row.get("cosine"), 8))
    return Cell(tone=tone_of(value, tolerance), text=difference(value), numbers=numbers)


def _outer(name: str) -> str:
    """Return the name of a parameter outside the layers without that of the model."""
    for prefix in ("transformer.", "model.", "gpt_neox."):
        if name.startswith(prefix) and name != prefix:
            return name.removeprefix(prefix)
    return name


def _short(value: float | None, digits: int) -> float | None:
    """Return a number with so many digits; None for one that is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")
