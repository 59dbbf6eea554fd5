"""Comparison: the results of several strategies against one baseline, as data that prints and serializes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.parity.bounds import Bounds
from toolkit.parity.diagnosis import Cause, Diagnosis
from toolkit.parity.parity_run import LossCurve, ParityRun, TensorDifference
from toolkit.parity.result import ParityResult


@dataclass(frozen=True, kw_only=True)
class StrategyResult:
    """One strategy: its result, or the error that prevented one."""

    name: str
    """Name of the strategy as given on the command line."""
    command: str = ""
    """The command that runs this strategy alone."""
    seconds: float = 0.0
    result: ParityResult | None = None
    error: str = ""
    """The error of the strategy's ranks; empty without one."""
    closer_diagnosis: Diagnosis | None = None
    """Diagnosis by more than the curve, for instance a replay of its steps (toolkit/parity/replay.py); None without."""

    @property
    def passed(self) -> bool:
        """Whether it trains what the baseline trains."""
        return self.result is not None and self.result.passed

    @property
    def label(self) -> str:
        """The full name of the strategy."""
        return self.name if self.result is None else self.result.curves.label

    @property
    def outcome(self) -> str:
        """`same`, `differs`, `cannot tell` (growth of rounding explains what differs) or `failed`."""
        if self.result is None or self.passed:
            return "failed" if self.result is None else "same"
        return "cannot tell" if self.diagnosis and self.diagnosis.cause == Cause.CHAOS else "differs"

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The likely cause of a difference; None if the strategy passed or has no result."""
        if self.closer_diagnosis is not None:
            return self.closer_diagnosis
        return None if self.result is None else self.result.diagnosis


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The run that strategies are compared with, and how far they may differ."""

    run: ParityRun
    bounds: Bounds
    reruns: Sequence[LossCurve] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return _curve(self.run.curve) | {
            "learning_rates": _numbers(self.run.learning_rates),
            "reruns": [_curve(curve) for curve in self.reruns],
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that was compared. In low precision, each kind of rounding has a baseline of its own."""

    title: str
    baselines: Sequence[Baseline]
    results: Sequence[StrategyResult]
    recipe: str = ""
    """YAML of the recipe."""
    notes: Sequence[str] = ()
    command: str = ""
    created: str = ""
    """Time of the comparison, in ISO 8601."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every strategy trains what the baseline trains."""
        return all(result.passed for result in self.results)

    @property
    def outcome(self) -> str:
        """Outcome of the worst result: `same`, `cannot tell` or `differs`, which includes what failed."""
        outcomes = {result.outcome for result in self.results} - {"same"}
        if not outcomes:
            return "same"
        return "cannot tell" if outcomes == {"cannot tell"} else "differs"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON and for the report. Numbers that are not finite become None."""
        return {
            "title": self.title,
            "created": self.created,
            "command": self.command,
            "passed": self.passed,
            "outcome": self.outcome,
            "environment": dict(self.environment),
            "recipe": self.recipe,
            "notes": list(self.notes),
            "steps": list(self.baselines[0].run.curve.steps),
            "baselines": [baseline.to_dict() for baseline in self.baselines],
            "strategies": [self._strategy(result) for result in self.results],
        }

    def _strategy(self, strategy: StrategyResult) -> dict[str, Any]:
        diagnosis = strategy.diagnosis
        result = strategy.result
        baseline = self.baselines[0].run
        steps = len(baseline.curve)
        bounds = self.baselines[0].bounds if result is None else result.bounds  # finished runs have bounds of their own
        limits = [bounds.curve.at(step) for step in range(steps)]
        curve = LossCurve(label="", losses=(), grad_norms=()) if result is None else result.run.curve
        curves = None if result is None else result.curves
        parameters = None if result is None or not baseline.initial else _number(result.parameters)
        return {
            "label": strategy.name,
            "layout": strategy.label,
            "baseline": (baseline if result is None else result.baseline).curve.label,
            "result": strategy.outcome,
            "cause": str(diagnosis.cause) if diagnosis else "",
            "sentence": diagnosis.sentence if diagnosis else "",
            "evidence": diagnosis.evidence if diagnosis else "",
            "error": strategy.error,
            "command": strategy.command,
            "seconds": round(strategy.seconds, 1),
            "tolerance": {
                "loss": _numbers([loss for loss, _ in limits]),
                "grad_norm": _numbers([norm for _, norm in limits]),
                "parameters": _number(bounds.parameters),
                "gradient": _number(bounds.gradient),
                "source": bounds.curve.source,
            },
            "agreement": "none" if result is None else result.agreement,
            "losses": _numbers(curve.losses),
            "grad_norms": _numbers(curve.grad_norms),
            "loss_difference": curves and _number(curves.max_loss_difference),
            "norm_difference": curves and _number(curves.max_norm_difference),
            "parameter_difference": parameters,
            "first_diverging_step": curves
            and curves.first_diverging_step
            and baseline.curve.step(curves.first_diverging_step),
            "gradients": [] if result is None else _rows(result.gradients, baseline),
            "updates": [] if result is None else _rows(result.updates, baseline),
            "diverged_replicas": [] if result is None else sorted(result.run.diverged),
        }


def _curve(curve: LossCurve) -> dict[str, Any]:
    return {"label": curve.label, "losses": _numbers(curve.losses), "grad_norms": _numbers(curve.grad_norms)}


def _rows(rows: Sequence[TensorDifference], baseline: ParityRun) -> list[dict[str, Any]]:
    places = {name: place for place, name in enumerate(baseline.initial)}
    return [
        {"name": row.name} | {key: _number(getattr(row, key)) for key in ("ratio", "cosine", "difference")}
        for row in sorted(rows, key=lambda row: places.get(row.name, len(places)))
    ]


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
