"""ParityResult: everything that is compared between a run and the baseline, which checks fail, and the diagnosis."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Self

from toolkit.parity.bounds import Bounds
from toolkit.parity.first_batch import Split
from toolkit.parity.parity_run import ParityRun, TensorDifference, tensor_differences, tensor_table, whole_difference
from toolkit.parity.signs import decided_updates
from toolkit.parity.tolerance import FP32_UNIT, CurveComparison, compare_curves, relative

if TYPE_CHECKING:
    from toolkit.parity.diagnosis import Diagnosis

Agreement = Literal["none", "first step", "curve", "bitwise"]

SAME_RATE = 1e-6
"""Relative bound of equal learning rates: they are computed in float64, and some engines keep them in fp32."""


@dataclass(frozen=True, kw_only=True)
class ParityResult:
    """One parity run, the baseline, and everything that is compared between them."""

    run: ParityRun
    baseline: ParityRun
    bounds: Bounds
    curves: CurveComparison
    """Loss and gradient norm of each step."""
    gradients: list[TensorDifference]
    """Differences of the gradients in the first step, the largest first."""
    updates: list[TensorDifference]
    """Differences of the first update, without signs that rounding decides, the largest first."""
    parameters: float
    """Relative difference of all parameters after the last step, as one vector."""

    @classmethod
    def of(cls, run: ParityRun, baseline: ParityRun, bounds: Bounds | None = None) -> Self:
        """Compare; without `bounds`, within the 1e-6 that our own engines must meet."""
        bounds = bounds or Bounds.fixed()
        return cls(
            run=run,
            baseline=baseline,
            bounds=bounds,
            curves=compare_curves(run.curve, baseline.curve, bounds.curve),
            gradients=tensor_differences(run.first_gradients, baseline.first_gradients),
            updates=tensor_differences(decided_updates(run, baseline, bounds.gradient), baseline.first_updates),
            parameters=whole_difference(run.parameters, baseline.parameters),
        )

    @property
    def failed_checks(self) -> set[str]:
        """Comparisons that fail, of: samples, rates, loss, norm, gradient, parameters, replicas, dropout."""
        checks = {
            "samples": self.other_samples_from is None,
            "rates": self.other_rates_from is None,
            "loss": self.curves.first_loss_beyond is None,
            "norm": self.curves.first_norm_beyond is None,
            "gradient": not self.wrong_gradients,
            "parameters": self.parameters <= self.bounds.parameters,
            "replicas": not self.run.diverged,
            "dropout": not self.run.mask_faults,
        }
        return {name for name, holds in checks.items() if not holds}

    @property
    def passed(self) -> bool:
        """Whether the strategy trains what the baseline trains."""
        return not self.failed_checks

    @property
    def agreement(self) -> Agreement:
        """Extent to which the two agree: not even in the first step, in it, over the whole curve, or to the bit."""
        run = self.run.curve
        baseline = self.baseline.curve
        if self.passed:
            same = (run.losses, run.grad_norms) == (baseline.losses, baseline.grad_norms) and self.parameters == 0
            return "bitwise" if same else "curve"
        first = self.curves.first_diverging_step
        return "none" if first == 1 or self.wrong_gradients or self.other_samples_from == 1 else "first step"

    @cached_property
    def diagnosis(self) -> "Diagnosis | None":
        """The likely cause of a failure; None if the run passed."""
        from toolkit.parity.diagnosis import diagnose  # its rules read this class

        return None if self.passed else diagnose(self)

    def with_diagnosis(self) -> Self:
        """Return this result after computing the diagnosis, which needs tensors that may be deleted afterwards."""
        _ = self.diagnosis
        return self

    def check(self, *, has_replicas: bool = True) -> None:
        """Assert that nothing is wrong, and that replicas of parameters were compared if `has_replicas`."""
        assert self.passed, str(self)
        assert bool(self.run.replicas_compared) == has_replicas

    def __str__(self) -> str:
        diverged = f"\ndiverged replicas: {', '.join(sorted(self.run.diverged))}" if self.run.diverged else ""
        failed = ", ".join(sorted(self.failed_checks)) or "none"
        return (
            f"{self.curves}\nparameters: {self.parameters:.1e}; failed checks: {failed}"
            f"{diverged}\n{self.diagnosis or ''}\n{tensor_table(self.gradients, limit=40)}"
        )

    @cached_property
    def wrong_gradients(self) -> set[str]:
        """Parameters whose first gradient is not the baseline's. (A NaN is within no bound.)"""
        return {row.name for row in self.gradients if not row.difference <= self.bounds.gradient}

    @cached_property
    def wrong_updates(self) -> set[str]:
        """Parameters whose first update is not the baseline's.

        Empty in low precision, where the recorded weights are rounded and the updates are not.
        """
        if self.bounds.unit > FP32_UNIT:
            return set()
        return {row.name for row in self.updates if not row.difference <= self.bounds.update}

    @cached_property
    def other_samples_from(self) -> int | None:
        """The first step with other samples than the baseline's, or with ranks that disagree about them."""
        pairs = zip(self.run.batches, self.baseline.batches, strict=False)
        return next(
            (step for step, (batch, baseline_batch) in enumerate(pairs, start=1) if batch != baseline_batch), None
        )

    @cached_property
    def other_rates_from(self) -> int | None:
        """The first step with another learning rate than the baseline's; NaN means unknown."""
        pairs = enumerate(zip(self.run.learning_rates, self.baseline.learning_rates, strict=False), start=1)
        known = (
            (step, rate, baseline_rate)
            for step, (rate, baseline_rate) in pairs
            if not math.isnan(rate) and not math.isnan(baseline_rate)
        )
        return next((step for step, rate, baseline_rate in known if relative(rate, baseline_rate) > SAME_RATE), None)

    @property
    def loss_is_right(self) -> bool:
        """Whether the first step's loss is within its bound."""
        gap = relative(self.run.curve.losses[0], self.baseline.curve.losses[0])
        return gap <= self.bounds.curve.at(0)[0]

    @cached_property
    def micro_batches(self) -> list[tuple[float, int]]:
        """Sum of token losses and target tokens of each of the run's first micro-batches, computed by the baseline.

        Empty if the baseline did not record samples one by one.
        """
        parts = self.baseline.micro_losses
        size = self.run.micro_batch_size
        blocks = [parts[start : start + size] for start in range(0, len(parts), size)]
        return [(sum(loss for loss, _ in block), sum(count for _, count in block)) for block in blocks]

    @cached_property
    def first_wrong_output(self) -> str | None:
        """The first of `outputs` that is not the baseline's in the first step; None where none is, or none is known."""
        outputs = self.run.outputs
        baseline_outputs = self.baseline.outputs
        if not outputs:
            return None
        gaps = ((name, relative(outputs.get(name, math.nan), value)) for name, value in baseline_outputs.items())
        return next((name for name, gap in gaps if not gap <= self.bounds.output), None)

    @property
    def split(self) -> Split:
        """How the run splits the samples of the first global batch."""
        samples = len(self.baseline.micro_losses)
        return Split(samples=samples, micro_batch_size=self.run.micro_batch_size, replicas=self.run.replicas)

    @cached_property
    def layer_of(self) -> dict[str, int | None]:
        """Map each parameter to the index of its decoder layer; None outside of the layers."""
        prefixes = {name.rpartition(".")[0] for name in self.baseline.outputs if "." in name and " " not in name}
        # Families without layer outputs still number their layers.
        pattern = re.compile(rf"^{re.escape(prefixes.pop())}\.(\d+)\." if prefixes else r"^.*?\.(\d+)\.")
        return {row.name: int(match[1]) if (match := pattern.match(row.name)) else None for row in self.gradients}

    @cached_property
    def layers(self) -> set[int]:
        """Indices of the decoder layers that own parameters."""
        return {layer for layer in self.layer_of.values() if layer is not None}

    def is_vector(self, name: str) -> bool:
        """Whether a parameter is a norm or a bias."""
        value = self.baseline.initial.get(name)
        return value is not None and value.ndim < 2

    def is_table(self, name: str) -> bool:
        """Whether a parameter is an embedding or a head: a matrix outside of the layers."""
        return self.layer_of.get(name) is None and not self.is_vector(name)

    def kinds(self, names: Iterable[str]) -> list[str]:
        """Names without the number of their layer: `attn.c_proj.bias`."""
        inside = ((name, self.layer_of.get(name)) for name in names)
        return sorted({name if layer is None else name.partition(f".{layer}.")[2] for name, layer in inside})
