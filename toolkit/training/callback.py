"""Callback: how code watches or steers a run without changing the training loop."""

from __future__ import annotations

from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import NonFiniteError

if TYPE_CHECKING:
    from toolkit.engines.base import StepResult
    from toolkit.training.loop import TrainingRun
    from toolkit.training.metrics import StepMetrics


class Action(Enum):
    """What the loop does with a step that a callback does not let count as usual."""

    SKIP = auto()
    """Count the step although it changed no weight."""
    RETRY = auto()
    """Take the step at `run.step` next: the run was rolled back to a checkpoint."""


class Callback:
    """Hooks of a training run. Override those that you need.

    Every hook is called on every rank, in the order of the callbacks, so that a hook may call collectives. A hook that
    raises ends the run; a ToolkitError ends it with one line and its exit code.
    """

    def on_run_begin(self, run: TrainingRun) -> None:
        """Called when the engine is built and a checkpoint to resume from is loaded, before the first step."""

    def on_step_begin(self, run: TrainingRun) -> None:
        """Called before a step reads its samples. `run.step` steps are done."""

    def on_before_update(self, run: TrainingRun) -> None:
        """Called when the gradients are complete and not clipped yet, before the optimizer step."""

    def on_after_update(self, run: TrainingRun, result: StepResult) -> Action | None:
        """Called after the optimizer step, before the step counts. The first Action that is returned is taken."""
        return None

    def on_nonfinite(self, run: TrainingRun, error: NonFiniteError) -> Action | None:
        """Called where the loss or the gradient of a step is not finite; no weight has changed.

        The first Action that is returned is taken; where no callback returns one, the run ends with `error`.
        """
        return None

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
