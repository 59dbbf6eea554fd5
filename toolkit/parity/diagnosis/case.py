"""Case: one trial beside the baseline, as the rules of the diagnosis look at it."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from toolkit.parity.bounds import Bounds
from toolkit.parity.compare import ParityReport
from toolkit.parity.gradients import GradientRow
from toolkit.parity.tolerance import FP32_UNIT, relative
from toolkit.parity.trial import Trial

SAME_RATE = 1e-6
"""Relative, within which two learning rates are one: they are computed in float64, and kept in fp32 by some engines."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the rules look at: one trial, the baseline, and their differences."""

    trial: Trial
    baseline: Trial
    bounds: Bounds
    report: ParityReport
    gradients: list[GradientRow]
    """Of the first step, the largest difference first."""
    updates: list[GradientRow]

    @cached_property
    def wrong_gradients(self) -> set[str]:
        """Parameters whose first gradient is not the baseline's. (A NaN is within no bound.)"""
        return {row.name for row in self.gradients if not row.difference <= self.bounds.gradient}

    @cached_property
    def wrong_updates(self) -> set[str]:
        """The same of the first update. None in low precision, where weights are shown rounded and updates are not."""
        if self.bounds.unit > FP32_UNIT:
            return set()
        return {row.name for row in self.updates if not row.difference <= self.bounds.update}

    @cached_property
    def other_samples_from(self) -> int | None:
        """The first step with other samples than the baseline's, or with ranks that disagree about them."""
        pairs = zip(self.trial.batches, self.baseline.batches, strict=False)
        return next((step for step, (own, other) in enumerate(pairs, start=1) if own != other), None)

    @cached_property
    def other_rates_from(self) -> int | None:
        """The first step with another learning rate than the baseline's; a NaN is not known."""
        pairs = zip(self.trial.learning_rates, self.baseline.learning_rates, strict=False)
        return next(
            (
                step
                for step, (own, other) in enumerate(pairs, start=1)
                if not math.isnan(own) and not math.isnan(other) and relative(own, other) > SAME_RATE
            ),
            None,
        )

    @cached_property
    def loss_gap(self) -> float:
        """Relative difference of the first step's loss."""
        return relative(self.trial.curve.losses[0], self.baseline.curve.losses[0])

    @cached_property
    def layer_of(self) -> dict[str, int | None]:
        """Parameter -> index of its decoder layer; None outside of the layers."""
        prefixes = {name.rpartition(".")[0] for name in self.baseline.outputs if "." in name}
        # Families that are not taken apart still number their layers.
        found = re.compile(rf"^{re.escape(prefixes.pop())}\.(\d+)\." if prefixes else r"^.*?\.(\d+)\.")
        return {row.name: int(match[1]) if (match := found.match(row.name)) else None for row in self.gradients}

    @cached_property
    def micro_batches(self) -> list[tuple[float, int]]:
        """The trial's micro-batches of the first step as the baseline sees them: sum of token losses, target tokens.

        Empty where the baseline did not look at samples one by one.
        """
        parts, size = self.baseline.micro_losses, self.trial.micro_size
        blocks = [parts[start : start + size] for start in range(0, len(parts), size)]
        return [(sum(loss for loss, _ in block), sum(count for _, count in block)) for block in blocks]

    def is_vector(self, name: str) -> bool:
        """Norms and biases."""
        value = self.baseline.initial.get(name)
        return value is not None and value.ndim < 2

    @property
    def loss_is_right(self) -> bool:
        """Whether the first step's loss is within its bound."""
        return self.loss_gap <= self.bounds.curve.at(0)[0]

    @cached_property
    def layers(self) -> set[int]:
        """The decoder layers that own parameters."""
        return {layer for layer in self.layer_of.values() if layer is not None}

    def is_table(self, name: str) -> bool:
        """An embedding or a head: a matrix outside of the layers."""
        return self.layer_of.get(name) is None and not self.is_vector(name)

    def kinds(self, names: Iterable[str]) -> list[str]:
        """Names without the number of their layer: `attn.c_proj.bias`."""
        inside = ((name, self.layer_of.get(name)) for name in names)
        return sorted({name if layer is None else name.partition(f".{layer}.")[2] for name, layer in inside})
