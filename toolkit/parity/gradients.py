"""Gradients of one step, parameter by parameter: a ratio and a cosine say which one is wrong, and often why.

A ratio that is the same everywhere is a scale (loss, accumulation, clipping); norms and biases alone are a missing
all-reduce; the embedding alone is tying; one layer is a wrong slice.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Gradients = Mapping[str, NDArray[np.floating]]


@dataclass(frozen=True, kw_only=True)
class GradientRow:
    """One parameter against the baseline."""

    name: str
    ratio: float
    """||g|| / ||g_ref||; NaN where it is missing or misshapen."""
    cosine: float
    """g . g_ref / (||g|| ||g_ref||)."""
    difference: float
    """||g - g_ref|| / the norm of the whole baseline gradient: how much the step feels it."""


def gradient_rows(gradients: Gradients, baseline: Gradients) -> list[GradientRow]:
    """Every parameter of either side, the largest difference first. In float64."""
    total = float(np.sqrt(sum(float(np.sum(g.astype(np.float64) ** 2)) for g in baseline.values()))) or 1.0
    rows = [_row(name, gradients.get(name), baseline.get(name), total) for name in baseline.keys() | gradients.keys()]
    return sorted(rows, key=lambda row: (-row.difference, row.name))


def gradient_table(rows: list[GradientRow], *, limit: int = 20) -> str:
    """The first `limit` rows as text: name, ratio, cosine, difference."""
    width = max([len(row.name) for row in rows[:limit]], default=4)
    lines = [f"{'parameter':{width}}  {'ratio':>10}  {'cosine':>10}  {'difference':>10}"]
    lines += [
        f"{row.name:{width}}  {row.ratio:10.6f}  {row.cosine:10.7f}  {row.difference:10.1e}" for row in rows[:limit]
    ]
    if len(rows) > limit:
        lines.append(f"and {len(rows) - limit} more with smaller differences")
    return "\n".join(lines)


def _row(
    name: str, found: NDArray[np.floating] | None, wanted: NDArray[np.floating] | None, total: float
) -> GradientRow:
    if found is None or wanted is None or found.shape != wanted.shape:
        return GradientRow(name=name, ratio=float("nan"), cosine=float("nan"), difference=float("inf"))
    a, b = found.astype(np.float64).ravel(), wanted.astype(np.float64).ravel()
    gap = float(np.linalg.norm(a - b))
    size_a, size_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    return GradientRow(
        name=name,
        ratio=size_a / size_b if size_b else (1.0 if not size_a else float("inf")),
        cosine=float(a @ b) / (size_a * size_b) if size_a and size_b else float(size_a == size_b),
        difference=gap / total if np.isfinite(gap) else float("inf"),
    )
