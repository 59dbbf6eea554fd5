"""Callback: how code watches or steers a run without changing the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from toolkit.errors import NonFiniteError

if TYPE_CHECKING:
    from toolkit.engines.base import StepResult
    from toolkit.step_metrics import StepMetrics
    from toolkit.training.loop import TrainingRun


class Action(Enum):
    """A callback's answer for a step that does not simply count."""

    SKIP = auto()
    """Count the step although it changed no weight."""
    RETRY = auto()
    """Do not count the step. Take the step at `run.step` next, which the callback may have set back."""


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """A return to an earlier checkpoint of the run."""

    failed_step: int
    """The step, from 1, that did not count."""
    restored_step: int
    """The step of the checkpoint: so many steps are done now."""
    checkpoint: Path
    skipped_batches: int
    """Global batches that training passes over: those of the restored step to the failed one, or none."""
    reason: str


class Callback:
    """Hooks of a training run. Override those that you need.

    Every hook is called on every rank, in the order of the callbacks, so that a hook may call collectives. Where a hook
    may return an Action, the first callback that returns one decides, and the callbacks after it are not called. A hook
    that raises ends the run; a ToolkitError ends it with one line and its exit code.
    """

    def on_run_begin(self, run: TrainingRun) -> None:
        """Called when the engine is built and a checkpoint to resume from is loaded, before the first step."""

    def on_step_begin(self, run: TrainingRun) -> None:
        """Called before a step reads its samples. `run.step` steps are done."""

    def on_before_update(self, run: TrainingRun) -> None:
        """Called when the gradients are complete and not clipped yet, before the optimizer step."""

    def on_after_update(self, run: TrainingRun, result: StepResult) -> Literal[Action.RETRY] | None:
        """Called after the optimizer step, before the step counts.

        Return Action.RETRY after `run.roll_back`, so that the step does not count. The weights have changed, so
        Action.SKIP is no answer here: the loop raises ValueError.
        """
        return None

    def on_nonfinite(self, run: TrainingRun, error: NonFiniteError) -> Action | None:
        """Called where the loss or the gradient of a step is not finite; no weight has changed.

        Return Action.SKIP to count the step as skipped, or Action.RETRY to take `run.step` again, for instance after
        `run.roll_back`. Where no callback returns an Action, the run ends with `error`.
        """
        return None

    def on_rollback(self, run: TrainingRun, rollback: Rollback) -> None:
        """Called when the run is restored to an earlier checkpoint, before it goes on from there."""

    def on_step_end(self, run: TrainingRun, metrics: StepMetrics) -> None:
        """Called when the step counts: `run.step` includes it, and a validation that was due is done."""

    def on_evaluate(self, run: TrainingRun, eval_loss: float) -> None:
        """Called after a validation with the mean token loss on held-out text, in nats."""

    def on_checkpoint(self, run: TrainingRun, path: Path) -> None:
        """Called when a checkpoint is complete on disk."""

    def on_run_end(self, run: TrainingRun) -> None:
        """Called when training ends: complete (`run.is_complete`), or stopped by a signal or by train.on_nonfinite.

        Not called where the run fails: other ranks may then be gone, and a collective would hang.
        """
