"""The loop: steps from the recipe, micro-batches from the feed, an engine that does the arithmetic, and its trail."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from toolkit.errors import NonFiniteError, PreemptedError
from toolkit.recipe import Recipe
from toolkit.train.checkpointing import Checkpointer
from toolkit.train.data.prefetch import TensorBatch
from toolkit.train.engines.base import Engine, StepResult
from toolkit.train.fed_samples import FedSamples
from toolkit.train.feed import Feed
from toolkit.train.incidents import Action, Incidents
from toolkit.train.metrics import StepMetrics, peak_memory_bytes
from toolkit.train.optimizer import learning_rate
from toolkit.train.preemption import Preemption
from toolkit.train.progress import ProgressLine, Stopwatch
from toolkit.train.resume import newest_checkpoint
from toolkit.train.run_directory import RunDirectory
from toolkit.train.trackers import Trackers
from toolkit.train.trainer_state import TrainerState

_WITHOUT_UPDATE = StepResult(loss=math.nan, grad_norm=math.nan, skipped=True)


def fit(
    recipe: Recipe,
    engine: Engine,
    feed: Feed,
    run: RunDirectory,
    progress: ProgressLine,
    trackers: Trackers,
    checkpointer: Checkpointer | None = None,
    preemption: Preemption | None = None,
    *,
    after: TrainerState | None = None,
) -> list[StepMetrics]:
    """Train up to recipe.train.steps, from the beginning or `after` a checkpoint; the metrics of every step.

    A loss or gradient that is not finite stops the run, or the step is left out, or the run goes back to its last
    checkpoint, as train.on_nonfinite says; so does a loss that leaps, where train.spike_sigmas asks for it. A run that
    stops saves a checkpoint of its last good step, and NonFiniteError says where. So does a signal: PreemptedError.
    Nothing is written at a time that depends on the layout.
    """
    loop = _Loop(
        recipe=recipe,
        engine=engine,
        feed=feed,
        run=run,
        progress=progress,
        trackers=trackers,
        checkpointer=checkpointer,
        preemption=preemption,
    )
    if after is not None:
        loop.stand_at(after)
    with progress:
        loop.train()
    return loop.history


@dataclass(kw_only=True)
class _Loop:
    """A run in progress. `step` steps are done; the next one reads the global batch `step` + `left_out`."""

    recipe: Recipe
    engine: Engine
    feed: Feed
    run: RunDirectory
    progress: ProgressLine
    trackers: Trackers
    checkpointer: Checkpointer | None
    preemption: Preemption | None
    step: int = 0
    left_out: int = 0
    tokens: int = 0
    """Target tokens that were trained on."""

    def __post_init__(self) -> None:
        self.history: list[StepMetrics] = []
        self._rate = learning_rate(self.recipe)
        self._fed = FedSamples(self.feed)
        self._watch = Stopwatch()
        self._incidents = Incidents(self.recipe.train)

    def stand_at(self, state: TrainerState) -> None:
        """Go on after a checkpoint."""
        self.step, self.left_out, self.tokens = state.step, state.left_out, state.tokens

    def train(self) -> None:
        """Take all the steps that are left."""
        while self.step < self.recipe.train.steps:
            with self.feed.prefetch(self.step, left_out=self.left_out) as ahead:
                while self.step < self.recipe.train.steps and self._take_step(ahead):
                    pass
        if self.checkpointer is not None:
            self.checkpointer.finish()

    def _take_step(self, ahead: Iterator[TensorBatch]) -> bool:
        """One step; False where the run has gone back to a checkpoint, so that other samples come next."""
        tokens = self.feed.target_tokens(self.step + self.left_out)
        micro_batches = self.feed.micro_batches(self.step, ahead, left_out=self.left_out)
        try:
            result = self.engine.train_step(
                self._fed.watch(micro_batches), target_tokens=tokens, learning_rate=self._rate(self.step)
            )
        except NonFiniteError as error:
            if self._is_answered(error):
                return False
            result = _WITHOUT_UPDATE
        else:
            limit = self._incidents.spikes.limit()
            if result.loss > limit and self._roll_back(f"the loss leaped to {result.loss:.4f}, over {limit:.4f}"):
                return False
            if not result.skipped:
                self._incidents.went_well(result.loss)
        self._finish_step(result, tokens)
        return True

    def _is_answered(self, error: NonFiniteError) -> bool:
        """Whether the run has gone back because of a step that is not finite; otherwise it goes on without the step.

        Raises where the run ends.
        """
        policy = self._incidents.on_nonfinite
        if policy is Action.ROLL_BACK and self._roll_back(str(error)):
            return True
        if policy is Action.STOP:
            self._stop(str(error))
        if not self._incidents.may_skip():
            self._stop(f"{error}, after {self.recipe.train.max_incidents} steps in a row that were skipped")
        self.progress.say(f"step {self.step + 1}: {error}. No weight changes in this step")
        self.run.note(step=self.step + 1, kind="skip", reason=str(error))
        return False

    def _roll_back(self, reason: str) -> bool:
        """Go back to the newest whole checkpoint, and on from it with the samples after this step's.

        False where there is no checkpoint yet: nothing is changed. Raises NonFiniteError where it has gone back to the
        same one too often.
        """
        if self.checkpointer is None:
            return False
        self.checkpointer.finish()
        earlier = newest_checkpoint(self.run.path)
        if earlier is None or earlier.state.step > self.step:
            self.progress.say(f"step {self.step + 1}: {reason}. There is no checkpoint yet to go back to")
            return False
        state = earlier.state
        if not self._incidents.may_roll_back(state.step):
            self._stop(f"{reason}, again after {self.recipe.train.max_incidents} times back to step {state.step}")
        self.checkpointer.restore(earlier.saved, state)
        first = state.step + state.left_out + 1
        last = self.step + self.left_out + 1
        failed = self.step + 1
        self.stand_at(state)
        self.left_out = last - state.step
        self.run.go_back_to(state.step, at=failed, reason=reason, left_out=last - first + 1)
        del self.history[len(self.history) - (failed - 1 - state.step) :]
        self.progress.say(
            f"step {failed}: {reason}. Back to {earlier.saved.path.name}, and on with other samples: "
            f"those of {last - first + 1} steps are left out"
        )
        self._watch.lap()
        return True

    def _stop(self, reason: str) -> NoReturn:
        self.trackers.finish()  # the process ends without asking them again
        saved = self._save(self._rate(max(0, self.step - 1)))
        raise NonFiniteError(
            f"step {self.step + 1}: {reason}. Training stopped{f'; {saved} is of step {self.step}' if saved else ''}. "
            "Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the samples of this step."
        ) from None

    def _finish_step(self, result: StepResult, tokens: int) -> None:
        rate = self._rate(self.step)
        asked_to_stop = self.preemption is not None and bool(self.preemption.received)
        digest, stopping = self._fed.last_digest(self.engine.device, stop=asked_to_stop)
        self.step += 1
        self.tokens += tokens
        seconds = self._watch.lap()
        metrics = StepMetrics(
            step=self.step,
            loss=result.loss,
            lr=rate,
            grad_norm=result.grad_norm,
            tokens=tokens,
            seconds=seconds,
            memory_bytes=peak_memory_bytes(self.engine.device),
            skipped=result.skipped,
            eval_loss=self._evaluate(),
            batch=digest,
        )
        self._report(metrics)
        self._checkpoint(rate, stopping=stopping)
        self._watch.lap()  # validation and checkpoints are not part of a step's time

    def _report(self, metrics: StepMetrics) -> None:
        self.history.append(metrics)
        self.progress.step(metrics)
        self.trackers.step(metrics)
        if self.run.metrics is not None:
            self.run.metrics.write(metrics)

    def _checkpoint(self, rate: float, *, stopping: bool) -> None:
        if self.checkpointer is not None:
            self.checkpointer.poll()
        every = self.recipe.checkpoint.every
        is_due = bool(every) and (self.step % every == 0 or self.step == self.recipe.train.steps)
        if stopping:
            saved = self._save(rate)
            self.trackers.finish()
            raise PreemptedError(
                f"stopped by a signal after step {self.step} of {self.recipe.train.steps}; "
                f"{f'saved {saved}. Go on with --resume {self.run.path}' if saved else 'nothing was saved'}."
            )
        if is_due and self.checkpointer is not None and self.recipe.checkpoint.asynchronous:
            self.checkpointer.begin(
                self.run.path, self.step, tokens=self.tokens, learning_rate=rate, left_out=self.left_out
            )
        elif is_due:
            self._save(rate)

    def _save(self, rate: float) -> Path | None:
        """The checkpoint, where there is to be one."""
        if self.checkpointer is None:
            return None
        return self.checkpointer.save(
            self.run.path, self.step, tokens=self.tokens, learning_rate=rate, left_out=self.left_out
        ).path

    def _evaluate(self) -> float | None:
        every = self.recipe.train.eval_every
        if not every or self.feed.held_out is None:
            return None
        if self.step % every and self.step != self.recipe.train.steps:
            return None
        return self.engine.evaluate(self.feed.held_out_batches())
