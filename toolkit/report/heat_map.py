"""The heat map: each parameter's gradient in each strategy, layer by layer, coloured by its difference / tolerance."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.report.numerals import difference, scientific

FALLBACK_TOLERANCE = 1e-6
_DECADES_WITHIN = 4
_DECADES_BEYOND = 4

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One parameter of one strategy."""

    tone: str
    """heat0 (equal) to heat4 are within the tolerance, heat5 to heat8 beyond it; or missing."""
    text: str
    difference: float | None
    ratio: float | None
    cosine: float | None

    def numbers(self) -> list[float | None]:
        """Difference, ratio and cosine with the digits that are shown."""
        return [_short(self.difference, 2), _short(self.ratio, 7), _short(self.cosine, 8)]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One row: a cell for each column; None where a strategy says nothing of the parameter."""

    name: str
    short_name: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """The parameters of one layer, or those before or after all layers."""

    title: str
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Groups in model order. `columns` are positions in the list of strategies."""

    columns: tuple[int, ...]
    groups: tuple[Group, ...]

    def parameters(self) -> list[Parameter]:
        """All rows."""
        return [parameter for group in self.groups for parameter in group.parameters]

    def data(self) -> list[dict[str, Any]]:
        """What the script shows under the pointer: name, and ratio, cosine and difference of each column."""
        return [
            {
                "name": parameter.name,
                "cells": [None if cell is None else cell.numbers() for cell in parameter.cells],
            }
            for parameter in self.parameters()
        ]


def heat_map(strategies: Sequence[Mapping[str, Any]], field: str = "gradients") -> HeatMap:
    """The map of all strategies that have gradients. Parameters come in the order of the first of them."""
    columns = tuple(index for index, strategy in enumerate(strategies) if strategy.get(field))
    rows = [{str(row["name"]): row for row in strategies[index][field]} for index in columns]
    bounds = [gradient_tolerance(strategies[index]) for index in columns]
    names = list(dict.fromkeys(name for column in rows for name in column))
    groups = tuple(
        Group(
            title=title,
            parameters=tuple(
                Parameter(
                    name=name,
                    short_name=short,
                    cells=tuple(
                        _cell(column[name], bound) if name in column else None
                        for column, bound in zip(rows, bounds, strict=True)
                    ),
                )
                for name, short in members
            ),
        )
        for title, members in grouped(names)
    )
    return HeatMap(columns=columns, groups=groups)


def gradient_tolerance(strategy: Mapping[str, Any]) -> float:
    """The strategy's own bound on a parameter's gradient."""
    return (strategy.get("tolerance") or {}).get("gradient") or FALLBACK_TOLERANCE


def grouped(names: Sequence[str]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Names by layer, each with what is left of it there; layers ascend, and the rest stands where it came."""
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
    found = [(f"layer {layer}", layers[layer]) for layer in sorted(layers)]
    first = "before the layers" if layers else "parameters"
    return [group for group in ((first, before), *found, ("after the layers", after)) if group[1]]


def tone_of(value: float | None, tolerance: float) -> str:
    """A colour for each power of ten between a difference and its tolerance."""
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
    """(tone, label) of each colour: in absolute numbers where all strategies share a tolerance."""
    if len(set(tolerances)) == 1:
        tolerance = tolerances[0]
        bounds = [scientific(tolerance * 10.0**power) for power in range(-3, 4)]
    else:
        bounds = ["1/1000", "1/100", "1/10", "tolerance", "x 10", "x 100", "x 1000"]
    within = [(f"heat{i + 1}", f"≤ {bounds[i]}") for i in range(4)]
    beyond = [(f"heat{i + 5}", f"≤ {bounds[i + 4]}") for i in range(3)]
    return [
        ("heat0", "equal"),
        *within,
        *beyond,
        ("heat8", f"> {bounds[6]}"),
        ("missing", "missing or not finite"),
    ]


def _cell(row: Row, tolerance: float) -> Cell:
    value = row.get("difference")
    return Cell(
        tone=tone_of(value, tolerance),
        text=difference(value),
        difference=value,
        ratio=row.get("ratio"),
        cosine=row.get("cosine"),
    )


def _outer(name: str) -> str:
    head, _, rest = name.partition(".")
    return rest if head in ("transformer", "model", "gpt_neox") and rest else name


def _short(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")
