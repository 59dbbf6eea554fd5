"""The verdict on a parallel run: what is held against one plain process, and which part of it raises the alarm."""

from dataclasses import dataclass
from typing import Any, Self

import torch

from toolkit.parallel.shard import shard_of
from toolkit.parity import (
    GradientRow,
    ParityReport,
    Tolerance,
    compare,
    gradient_rows,
    gradient_table,
    whole_difference,
)
from toolkit.train.engines.base import Engine
from toolkit.train.trial import Trial

PARAMETER_TOLERANCE = 1e-6
"""Of the norm of all parameters as one vector, after the last step."""
GRADIENT_TOLERANCE = 1e-6
"""Of the norm of the whole gradient, for each parameter in the first step."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One strategy against the baseline. Its ranks must have been trained with `inspect=copies`."""

    report: ParityReport
    """Loss and gradient norm of each step."""
    rows: list[GradientRow]
    """Gradients of the first step, the largest difference first."""
    parameters: float
    """Difference of all parameters after the last step."""
    torn: frozenset[str]
    """Parameters of which two ranks should hold the same bits, and do not."""
    compared: int
    """Copies that were compared."""

    @classmethod
    def of(cls, trials: list[Trial], baseline: Trial) -> Self:
        """The verdict on the ranks' trials."""
        found: dict[Any, bytes] = {}
        torn = set()
        compared = 0
        for trial in trials:
            for key, bits in trial.seen.items():
                compared += key in found
                if found.setdefault(key, bits) != bits:
                    torn.add(key[0])
        return cls(
            report=compare(trials[0].curve, baseline.curve, Tolerance.fp32()),
            rows=gradient_rows(trials[0].first_gradients, baseline.first_gradients),
            parameters=whole_difference(trials[0].parameters, baseline.parameters),
            torn=frozenset(torn),
            compared=compared,
        )

    @property
    def wrong_gradients(self) -> set[str]:
        """Parameters whose first gradient is not the baseline's. (A NaN is within no bound.)"""
        return {row.name for row in self.rows if not row.difference <= GRADIENT_TOLERANCE}

    @property
    def right_gradients(self) -> set[str]:
        """The others."""
        return {row.name for row in self.rows} - self.wrong_gradients

    @property
    def alarms(self) -> set[str]:
        """Which comparisons fail, of: loss, norm, gradient, parameters, copies."""
        loss, norm = self.report.tolerance.at(0)
        kept = {
            "loss": self.report.max_loss_difference <= loss,
            "norm": self.report.max_norm_difference <= norm,
            "gradient": not self.wrong_gradients,
            "parameters": self.parameters <= PARAMETER_TOLERANCE,
            "copies": not self.torn,
        }
        return {name for name, holds in kept.items() if not holds}

    def check(self, *, has_copies: bool = True) -> None:
        """Fail with the first of: gradients, curve, parameters, copies. `has_copies`: whether ranks share anything."""
        assert not self.wrong_gradients, "\n" + gradient_table(self.rows)
        assert self.report.passed, str(self.report)
        assert self.parameters <= PARAMETER_TOLERANCE
        assert not self.torn, f"{', '.join(sorted(self.torn))} differ between ranks that should hold the same"
        assert bool(self.compared) == has_copies

    def __str__(self) -> str:
        torn = f"\ncopies differ: {', '.join(sorted(self.torn))}" if self.torn else ""
        return (
            f"{self.report}\nparameters: {self.parameters:.1e}; alarms: {', '.join(sorted(self.alarms))}{torn}\n"
            f"{gradient_table(self.rows, limit=40)}"
        )


def copies(engine: Engine) -> dict[Any, bytes]:
    """The bits of what this rank holds: equal keys on two ranks are copies of each other."""
    cut = engine.cut  # type: ignore[attr-defined]
    place = cut.groups.coordinate
    held = {}
    for parameter in engine.model.parameters():
        shard = shard_of(parameter)
        local = getattr(parameter, "ds_tensor", parameter).detach()
        # Sharded over replicas by ZeRO-3, split over tensor-parallel ranks, or the same on all of them.
        data = place.data if hasattr(parameter, "ds_tensor") else "any"
        key = (shard.name, shard.pieces, place.model if shard.is_split and not shard.pieces else "any", data)
        held[key] = local.contiguous().view(torch.uint8).numpy().tobytes()
    return held
