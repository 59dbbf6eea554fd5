"""Comparison: the verdicts on several strategies against one baseline, as data that prints and serialises."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.parity.bounds import Bounds
from toolkit.parity.curve import LossCurve
from toolkit.parity.diagnosis import Diagnosis
from toolkit.parity.gradients import GradientRow
from toolkit.parity.trial import Trial
from toolkit.parity.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One strategy: its verdict, or what kept it from one."""

    asked: str
    """As it was named on the command line."""
    command: str = ""
    """What runs this strategy alone."""
    seconds: float = 0.0
    verdict: Verdict | None = None
    error: str = ""
    """Where its ranks failed."""

    @property
    def passed(self) -> bool:
        """Whether it trains what the baseline trains."""
        return self.verdict is not None and self.verdict.passed

    @property
    def label(self) -> str:
        """The strategy in full."""
        return self.asked if self.verdict is None else self.verdict.report.label

    @property
    def word(self) -> str:
        """`same`, `differs` or `failed`."""
        return "failed" if self.verdict is None else "same" if self.passed else "differs"

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Why it differs."""
        return None if self.verdict is None else self.verdict.diagnosis


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that was compared with one baseline."""

    title: str
    baseline: Trial
    bounds: Bounds
    entries: Sequence[Entry]
    reruns: Sequence[LossCurve] = ()
    recipe: str = ""
    """YAML."""
    notes: Sequence[str] = ()
    command: str = ""
    created: str = ""
    """ISO 8601."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every strategy trains what the baseline trains."""
        return all(entry.passed for entry in self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON and for the report. What is not finite becomes None."""
        return {
            "title": self.title,
            "created": self.created,
            "command": self.command,
            "passed": self.passed,
            "environment": dict(self.environment),
            "recipe": self.recipe,
            "notes": list(self.notes),
            "baseline": _curve(self.baseline.curve) | {"learning_rates": _numbers(self.baseline.learning_rates)},
            "reruns": [_curve(curve) for curve in self.reruns],
            "strategies": [self._strategy(entry) for entry in self.entries],
        }

    def _strategy(self, entry: Entry) -> dict[str, Any]:
        diagnosis = entry.diagnosis
        found: dict[str, Any] = {
            "label": entry.asked,
            "layout": entry.label,
            "asked": entry.asked,
            "verdict": entry.word,
            "cause": str(diagnosis.cause) if diagnosis else "",
            "sentence": diagnosis.sentence if diagnosis else "",
            "evidence": diagnosis.evidence if diagnosis else "",
            "error": entry.error,
            "command": entry.command,
            "seconds": round(entry.seconds, 1),
        }
        steps, verdict = len(self.baseline.curve), entry.verdict
        bounds = self.bounds if verdict is None else verdict.case.bounds  # of finished runs each has its own
        tolerance = bounds.curve
        found["tolerance"] = {
            "loss": _numbers([tolerance.at(step)[0] for step in range(steps)]),
            "grad_norm": _numbers([tolerance.at(step)[1] for step in range(steps)]),
            "parameters": _number(bounds.parameters),
            "gradient": _number(bounds.gradient),
            "source": tolerance.source,
        }
        if verdict is None:
            lists = ("losses", "grad_norms", "gradients", "updates", "copies_differ")
            numbers = ("loss_difference", "norm_difference", "parameter_difference", "first_diverging_step")
            return found | {"rung": "none"} | {name: [] for name in lists} | dict.fromkeys(numbers)
        return found | {
            "rung": verdict.rung,
            "losses": _numbers(verdict.case.trial.curve.losses),
            "grad_norms": _numbers(verdict.case.trial.curve.grad_norms),
            "loss_difference": _number(verdict.report.max_loss_difference),
            "norm_difference": _number(verdict.report.max_norm_difference),
            "parameter_difference": _number(verdict.parameters if self.baseline.initial else math.nan),
            "first_diverging_step": verdict.report.first_diverging_step,
            "gradients": _rows(verdict.case.gradients, self.baseline),
            "updates": _rows(verdict.case.updates, self.baseline),
            "copies_differ": sorted(verdict.torn),
        }


def _curve(curve: LossCurve) -> dict[str, Any]:
    return {"label": curve.label, "losses": _numbers(curve.losses), "grad_norms": _numbers(curve.grad_norms)}


def _rows(rows: Sequence[GradientRow], baseline: Trial) -> list[dict[str, Any]]:
    """In the order of the model."""
    places = {name: place for place, name in enumerate(baseline.initial)}
    return [
        {
            "name": row.name,
            "ratio": _number(row.ratio),
            "cosine": _number(row.cosine),
            "difference": _number(row.difference),
        }
        for row in sorted(rows, key=lambda row: places.get(row.name, len(places)))
    ]


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
