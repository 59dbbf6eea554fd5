"""MarginHistogram: how many pairs had which margin of rewards in the first and in the last steps of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.report.recorded_run import RecordedRun
from toolkit.step_metrics import MARGIN_EDGES
from toolkit.units import plural

_PARTS = 10
"""The first and the last of so many equal parts of a run are shown."""


@dataclass(frozen=True, kw_only=True)
class MarginHistogram:
    """Shares of pairs by margin, in percent of the pairs of the same steps."""

    label: str
    """The run."""
    spans: tuple[str, str]
    """The steps that are counted, first and last ones."""
    rows: tuple[tuple[str, float, float], ...]
    """Margins from below to above, and the shares of the first and the last steps; without empty ends."""

    @property
    def scale(self) -> float:
        """The largest share."""
        return max(share for _, *shares in self.rows for share in shares)


def margin_histogram(run: RecordedRun) -> MarginHistogram | None:
    """Return the histogram of a run; None where no step has margins of pairs."""
    margins = {
        step.step: step.margins
        for step in run.log.steps
        if step.margins is not None and len(step.margins) == len(MARGIN_EDGES) + 1 and any(step.margins)
    }
    if not margins:
        return None
    steps = list(margins)
    count = max(1, len(steps) // _PARTS)
    parts = (steps[:count], steps[-count:])
    counts = np.array(
        [np.array([margins[step] for step in part]).sum(axis=0) for part in parts], dtype=np.float64
    )  # [2, bins]
    shares = 100 * counts / counts.sum(axis=1, keepdims=True)
    used = np.flatnonzero(shares.sum(axis=0))
    places = range(int(used[0]), int(used[-1]) + 1)
    return MarginHistogram(
        label=run.label,
        spans=(_span(parts[0]), _span(parts[1])),
        rows=tuple((_bin(place), float(shares[0, place]), float(shares[1, place])) for place in places),
    )


def _span(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]} ({plural(len(steps), 'step')})"


def _bin(place: int) -> str:
    """Name a bin by its edges."""
    if place == 0:
        return f"below {MARGIN_EDGES[0]:g}"
    if place == len(MARGIN_EDGES):
        return f"{MARGIN_EDGES[-1]:g} or more"
    return f"{MARGIN_EDGES[place - 1]:g} to {MARGIN_EDGES[place]:g}"
