"""Incidents: what becomes of a step whose loss or gradient is not finite, or whose loss spikes.

Decided from what every rank knows alike (the loss of the global batch, the recipe, the counts so far), so that all of
them do the same without a collective.
"""

import math
import statistics
from collections import deque
from typing import Literal, NoReturn

from typing_extensions import override

from toolkit.config.recipe import TrainSection
from toolkit.engines.base import StepResult
from toolkit.errors import NonFiniteError
from toolkit.training.callback import Action, Callback, Rollback
from toolkit.training.loop import TrainingRun
from toolkit.training.resume import newest_checkpoint


class SpikeDetector:
    """Detect a loss more than `sigmas` standard deviations above the mean of the last `window` losses.

    It detects nothing before it has seen `window` losses. A spike is not added to them.
    """

    def __init__(self, *, sigmas: float, window: int) -> None:
        self._sigmas = sigmas
        self._recent: deque[float] = deque(maxlen=window)

    def limit(self) -> float:
        """The largest loss that is no spike; infinite where detection is off or has not seen `window` losses."""
        if not self._sigmas or len(self._recent) < (self._recent.maxlen or 0):
            return math.inf
        return statistics.fmean(self._recent) + self._sigmas * statistics.stdev(self._recent)

    def add(self, loss: float) -> None:
        self._recent.append(loss)

    def forget(self) -> None:
        """Start again after a rollback: the losses before it no longer count."""
        self._recent.clear()


class Incidents(Callback):
    """train.on_nonfinite, train.spike_sigmas and train.max_incidents of a recipe."""

    def __init__(self, section: TrainSection) -> None:
        self._policy = section.on_nonfinite
        self._most = section.max_incidents
        self._skips = 0
        self._target: int | None = None
        self._rollbacks = 0
        self.spikes = SpikeDetector(sigmas=section.spike_sigmas, window=section.spike_window)

    @override
    def on_nonfinite(self, run: TrainingRun, error: NonFiniteError) -> Action:
        if self._policy == "rollback" and self._rolls_back(run, str(error)):
            return Action.RETRY
        if self._policy == "stop":
            _stop(run, str(error))
        if not self.may_skip():
            _stop(run, f"{error}, after {self._most} steps in a row that were skipped")
        run.progress.say(f"step {run.step + 1}: {error}. No weight changes in this step")
        if run.directory is not None:
            run.directory.note(step=run.step + 1, kind="skip", reason=str(error))
        return Action.SKIP

    @override
    def on_after_update(self, run: TrainingRun, result: StepResult) -> Literal[Action.RETRY] | None:
        limit = self.spikes.limit()
        if result.loss > limit and self._rolls_back(run, f"the loss rose to {result.loss:.4f}, over {limit:.4f}"):
            return Action.RETRY
        if not result.skipped:
            self.went_well(result.loss)
        return None

    @override
    def on_rollback(self, run: TrainingRun, rollback: Rollback) -> None:
        self.spikes.forget()

    def may_skip(self) -> bool:
        """Count one more skipped step in a row; whether the recipe allows it."""
        self._skips += 1
        return self._skips <= self._most

    def may_roll_back(self, step: int) -> bool:
        """Count one more rollback to the checkpoint of `step`; whether the recipe allows it."""
        if step != self._target:
            self._target = step
            self._rollbacks = 0
        self._rollbacks += 1
        self.spikes.forget()
        return self._rollbacks <= self._most

    def went_well(self, loss: float) -> None:
        """Remember a step whose loss is finite and no spike."""
        self._skips = 0
        self.spikes.add(loss)

    def _rolls_back(self, run: TrainingRun, reason: str) -> bool:
        """Roll the run back to its newest complete checkpoint; False where there is none yet.

        Raises NonFiniteError where it was rolled back to the same one too often.
        """
        if run.checkpointer is None or run.directory is None:
            return False
        run.checkpointer.finish()
        earlier = newest_checkpoint(run.directory.checkpoints)
        if earlier is None or earlier.state.step > run.step:
            run.progress.say(f"step {run.step + 1}: {reason}. There is no checkpoint yet to roll back to")
            return False
        if not self.may_roll_back(earlier.state.step):
            _stop(run, f"{reason}, again after {self._most} rollbacks to step {earlier.state.step}")
        run.roll_back(earlier, reason)
        return True


def _stop(run: TrainingRun, reason: str) -> NoReturn:
    saved = run.save_checkpoint()
    raise NonFiniteError(
        f"step {run.step + 1}: {reason}. Training stopped{f'; {saved} is of step {run.step}' if saved else ''}. "
        "Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the samples of this step."
    ) from None
