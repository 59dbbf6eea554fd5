"""A strategy's curve against a baseline's: how far apart, from which step on, and whether that is allowed."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.parity.curve import LossCurve
from toolkit.parity.tolerance import Tolerance, relative


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """The verdict on one strategy. Differences are relative; steps count from 1."""

    label: str
    baseline: str
    steps: int
    max_loss_difference: float
    max_norm_difference: float
    first_loss_beyond: int | None
    """The first step whose loss is beyond its bound."""
    first_norm_beyond: int | None
    tolerance: Tolerance

    @property
    def first_diverging_step(self) -> int | None:
        """The first step of which anything is beyond its bound."""
        return min((step for step in (self.first_loss_beyond, self.first_norm_beyond) if step), default=None)

    @property
    def passed(self) -> bool:
        """Whether every step stayed within its bound."""
        return self.first_diverging_step is None

    def __str__(self) -> str:
        verdict = "same" if self.passed else f"differs from step {self.first_diverging_step} on"
        return (
            f"{self.label} against {self.baseline}, {self.steps} steps: {verdict}. Largest relative difference: "
            f"loss {self.max_loss_difference:.1e}, gradient norm {self.max_norm_difference:.1e} "
            f"({self.tolerance.source})"
        )


def compare(curve: LossCurve, baseline: LossCurve, tolerance: Tolerance) -> ParityReport:
    """Hold `curve` against `baseline` step by step. A shorter or longer curve differs from where one of them ends."""
    shared = min(len(curve), len(baseline))
    losses = [relative(curve.losses[i], baseline.losses[i]) for i in range(shared)]
    norms = [relative(curve.grad_norms[i], baseline.grad_norms[i]) for i in range(shared)]
    end = [] if len(curve) == len(baseline) else [shared + 1]
    loss_beyond = [i + 1 for i in range(shared) if losses[i] > tolerance.at(i)[0]] + end
    norm_beyond = [i + 1 for i in range(shared) if norms[i] > tolerance.at(i)[1]] + end
    return ParityReport(
        label=curve.label,
        baseline=baseline.label,
        steps=shared,
        max_loss_difference=max(losses, default=0.0),
        max_norm_difference=max(norms, default=0.0),
        first_loss_beyond=loss_beyond[0] if loss_beyond else None,
        first_norm_beyond=norm_beyond[0] if norm_beyond else None,
        tolerance=tolerance,
    )


def parameter_differences(
    values: Mapping[str, NDArray[np.floating]], reference: Mapping[str, NDArray[np.floating]]
) -> dict[str, float]:
    """Per parameter ||value - reference|| / ||reference||, in float64; infinite for a missing or misshapen one."""
    differences: dict[str, float] = {}
    for name, wanted in reference.items():
        found = values.get(name)
        if found is None or found.shape != wanted.shape:
            differences[name] = float("inf")
            continue
        gap = float(np.linalg.norm(found.astype(np.float64) - wanted.astype(np.float64)))
        differences[name] = gap / max(float(np.linalg.norm(wanted.astype(np.float64))), 1e-300) if gap else 0.0
    return differences | {name: float("inf") for name in values if name not in reference}


def whole_difference(
    values: Mapping[str, NDArray[np.floating]], reference: Mapping[str, NDArray[np.floating]]
) -> float:
    """||value - reference|| / ||reference|| of all parameters as one vector, in float64; 0 where there are none."""
    if values.keys() != reference.keys() or any(values[name].shape != reference[name].shape for name in reference):
        return float("inf")
    gap = sum(float(np.sum((values[k].astype(np.float64) - r.astype(np.float64)) ** 2)) for k, r in reference.items())
    size = sum(float(np.sum(r.astype(np.float64) ** 2)) for r in reference.values())
    return float(np.sqrt(gap / max(size, 1e-300))) if gap else 0.0
