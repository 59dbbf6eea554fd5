"""Errors of predictions against measurements, in numbers: medians, 95th percentiles, recall and precision."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self


@dataclass(frozen=True, kw_only=True)
class ErrorSummary:
    """Relative errors of several predictions. An error is predicted / measured - 1: positive where too high."""

    count: int
    median_absolute: float
    p95_absolute: float
    median_signed: float
    within: float
    """Share of errors of at most a tenth."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Self | None:
        """Of (predicted, measured) pairs; None where there are none."""
        if not pairs:
            return None
        signed = [relative_error(predicted, measured) for predicted, measured in pairs]
        absolute = [abs(error) for error in signed]
        return cls(
            count=len(signed),
            median_absolute=median(absolute),
            p95_absolute=percentile(absolute, 0.95),
            median_signed=median(signed),
            within=sum(error <= 0.1 for error in absolute) / len(absolute),
        )


@dataclass(frozen=True, kw_only=True)
class FitSummary:
    """How well "does not fit" is told. Positive means: the run does not fit."""

    true_positives: int
    false_positives: int
    false_negatives: int
    true_negatives: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[bool, bool]]) -> Self:
        """Of (predicted to fit, did fit) pairs."""
        return cls(
            true_positives=sum(not predicted and not did for predicted, did in pairs),
            false_positives=sum(not predicted and did for predicted, did in pairs),
            false_negatives=sum(predicted and not did for predicted, did in pairs),
            true_negatives=sum(predicted and did for predicted, did in pairs),
        )

    @property
    def recall(self) -> float | None:
        """Share of the runs that did not fit of which it was said; None where all did fit."""
        positives = self.true_positives + self.false_negatives
        return self.true_positives / positives if positives else None

    @property
    def precision(self) -> float | None:
        """Share of the runs said not to fit that did not; None where it was said of none."""
        said = self.true_positives + self.false_positives
        return self.true_positives / said if said else None

    @property
    def fit_recall(self) -> float | None:
        """Share of the runs that fit of which it was said."""
        fitted = self.true_negatives + self.false_positives
        return self.true_negatives / fitted if fitted else None

    @property
    def fit_precision(self) -> float | None:
        """Share of the runs said to fit that did."""
        said = self.true_negatives + self.false_negatives
        return self.true_negatives / said if said else None


def relative_error(predicted: float, measured: float) -> float:
    """predicted / measured - 1."""
    return predicted / measured - 1


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of all lie, between the two nearest ones in proportion (as numpy's default)."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
