"""The verdict on one strategy: everything that is compared, which of it raises the alarm, and the diagnosis."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

from toolkit.parity.bounds import Bounds
from toolkit.parity.compare import ParityReport, compare, whole_difference
from toolkit.parity.diagnosis import Case, Diagnosis, diagnose
from toolkit.parity.gradients import GradientRow, gradient_rows, gradient_table
from toolkit.parity.trial import Trial

Rung = Literal["none", "first step", "curve", "bitwise"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One trial against the baseline."""

    report: ParityReport
    """Loss and gradient norm of each step."""
    case: Case
    parameters: float
    """Difference of all parameters after the last step."""

    @classmethod
    def of(cls, trial: Trial, baseline: Trial, bounds: Bounds | None = None) -> Self:
        """Compare; without `bounds`, to what our own engines are held to (1e-6)."""
        bounds = bounds or Bounds.fixed()
        report = compare(trial.curve, baseline.curve, bounds.curve)
        return cls(
            report=report,
            case=Case(
                trial=trial,
                baseline=baseline,
                bounds=bounds,
                report=report,
                gradients=gradient_rows(trial.first_gradients, baseline.first_gradients),
                updates=gradient_rows(trial.first_updates, baseline.first_updates),
            ),
            parameters=whole_difference(trial.parameters, baseline.parameters),
        )

    @property
    def rows(self) -> list[GradientRow]:
        """Gradients of the first step, the largest difference first."""
        return self.case.gradients

    @property
    def torn(self) -> frozenset[str]:
        """Parameters of which two ranks should hold the same bits, and do not."""
        return self.case.trial.torn

    @property
    def wrong_gradients(self) -> set[str]:
        """Parameters whose first gradient is not the baseline's."""
        return self.case.wrong_gradients

    @property
    def right_gradients(self) -> set[str]:
        """The others."""
        return {row.name for row in self.rows} - self.wrong_gradients

    @property
    def alarms(self) -> set[str]:
        """Which comparisons fail, of: samples, rates, loss, norm, gradient, parameters, copies."""
        kept = {
            "samples": self.case.other_samples_from is None,
            "rates": self.case.other_rates_from is None,
            "loss": self.report.first_loss_beyond is None,
            "norm": self.report.first_norm_beyond is None,
            "gradient": not self.wrong_gradients,
            "parameters": self.parameters <= self.case.bounds.parameters,
            "copies": not self.torn,
        }
        return {name for name, holds in kept.items() if not holds}

    @property
    def passed(self) -> bool:
        """Whether the strategy trains what the baseline trains."""
        return not self.alarms

    @property
    def rung(self) -> Rung:
        """How far the two agree: in the first step, over the curve, or to the bit."""
        trial, baseline = self.case.trial.curve, self.case.baseline.curve
        if self.passed:
            same = (trial.losses, trial.grad_norms) == (baseline.losses, baseline.grad_norms) and self.parameters == 0
            return "bitwise" if same else "curve"
        first = self.report.first_diverging_step
        return "none" if first == 1 or self.wrong_gradients or self.case.other_samples_from == 1 else "first step"

    @cached_property
    def diagnosis(self) -> Diagnosis | None:
        """Why it failed, as far as the pattern tells; None where it passed."""
        return None if self.passed else diagnose(self.case)

    def settled(self) -> Self:
        """The same once the diagnosis is made: it needs the tensors, which may go afterwards."""
        _ = self.diagnosis, self.rung
        return self

    def check(self, *, has_copies: bool = True) -> None:
        """Assert that nothing is wrong. `has_copies`: whether ranks share anything."""
        assert self.passed, str(self)
        assert bool(self.case.trial.copies) == has_copies

    def __str__(self) -> str:
        torn = f"\ncopies differ: {', '.join(sorted(self.torn))}" if self.torn else ""
        return (
            f"{self.report}\nparameters: {self.parameters:.1e}; alarms: {', '.join(sorted(self.alarms)) or 'none'}"
            f"{torn}\n{self.diagnosis or ''}\n{gradient_table(self.rows, limit=40)}"
        )
