"""The training loop: the one that recipes/train.py, `dstk compare`, the tests and a user's own script run.

It takes micro-batches from the loader and gives them to the engine. What is printed, written, saved or decided
is done by callbacks (toolkit/training/callback.py), by way of the run's progress line, directory and checkpointer.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit.config.job import Job
from toolkit.data.samples.fingerprint import BatchFingerprints, read_step_numbers
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.data.tokens.corpora import Corpora
from toolkit.engines.base import Engine, StepResult
from toolkit.engines.optimizer import learning_rate
from toolkit.engines.routing import RoutingStats
from toolkit.errors import NonFiniteError, PreemptedError
from toolkit.step_metrics import StepMetrics
from toolkit.training.callback import Action, Callback, Rollback
from toolkit.training.checkpointing import Checkpointer
from toolkit.training.metrics import peak_memory_bytes
from toolkit.training.progress import ProgressLine, Stopwatch
from toolkit.training.reference_model import compute_reference
from toolkit.training.resume import Resumed
from toolkit.training.run_directory import RunDirectory
from toolkit.training.slow_ranks import SlowRanks

_NO_UPDATE = StepResult(loss=math.nan, grad_norm=math.nan, skipped=True)


class TrainingRun:
    """A run in progress. `step` steps are done; the next one reads the global batch `step` + `skipped_batches`."""

    step = 0
    skipped_batches = 0
    """Global batches that rollbacks have skipped."""
    tokens = 0
    """Target tokens trained on."""
    is_stopping = False
    """Whether some rank requested a stop; the same on every rank."""
    is_complete = False
    """Whether all steps are done."""
    last_checkpoint: Path | None = None

    def __init__(
        self,
        job: Job,
        engine: Engine,
        loader: MicroBatchLoader,
        corpus: Corpora,
        callbacks: Iterable[Callback] = (),
        *,
        progress: ProgressLine | None = None,
        directory: RunDirectory | None = None,
        checkpointer: Checkpointer | None = None,
        resumed: Resumed | None = None,
        slow_ranks: SlowRanks | None = None,
    ) -> None:
        self.job = job
        self.engine = engine
        self.loader = loader
        self.corpus = corpus
        self.recipe = job.recipe
        self.callbacks = tuple(callbacks)
        self.progress = progress or ProgressLine(self.recipe.train.steps, every=1, enabled=False)
        self.directory = directory
        self.checkpointer = checkpointer
        self.resumed = resumed
        self.slow_ranks = slow_ranks
        self.history: list[StepMetrics] = []
        self.fingerprints = BatchFingerprints(loader)
        self.learning_rate = learning_rate(self.recipe)
        """Step from 0 -> learning rate."""
        self._stopwatch = Stopwatch()
        self._stop_cause = ""

    def fit(self) -> None:
        """Train to recipe.train.steps, from the beginning or from `resumed`.

        Raises PreemptedError after a requested stop, and NonFiniteError where the loss or a gradient is not finite and
        no callback handles it.
        """
        compute_reference(self)
        if self.resumed is not None:
            self._load(self.resumed)
        self.engine.before_update = partial(self._notify, "on_before_update")
        self.engine.loop_numbers = self._step_numbers
        watching = nullcontext() if self.slow_ranks is None else self.slow_ranks.watching()
        with self.progress, watching:
            self._notify("on_run_begin")
            try:
                self._take_steps()
            except (PreemptedError, NonFiniteError):
                self._notify("on_run_end")
                raise
            self.is_complete = True
            self._notify("on_run_end")

    def request_stop(self, cause: str = "a request") -> None:
        """End the run after the present step, with a checkpoint where it keeps some. One rank's request is enough."""
        self._stop_cause = cause

    @property
    def has_stepped(self) -> bool:
        """Whether this start has completed a step."""
        return bool(self.history)

    @property
    def unigram_entropy(self) -> float | None:
        """The loss in nats of a model that knows token frequencies only; None where the loss is not one of tokens."""
        has_token_loss = self.recipe.train.objective.name == "sft"
        return self.corpus.unigram_entropy if has_token_loss else None

    def describe_saved(self) -> str:
        """Say what this start has saved, and how to resume from it."""
        saved = self.last_checkpoint
        return "nothing was saved yet" if saved is None else f"saved {saved}. Resume with --resume {saved.parent}"

    def save_checkpoint(self, *, wait: bool = True) -> Path | None:
        """Save a checkpoint of the present step; None where the run keeps none. A collective call.

        With `wait` false it is written while training continues, and complete when `on_checkpoint` is called.
        """
        if self.checkpointer is None or self.directory is None:
            return None
        saved = self.checkpointer.save(
            self.directory.path,
            self.step,
            tokens=self.tokens,
            learning_rate=self.learning_rate(max(0, self.step - 1)),
            skipped_batches=self.skipped_batches,
            wait=wait,
        )
        if saved is not None:
            self.checkpoint_is_complete(saved.path)
        return None if saved is None else saved.path

    def checkpoint_is_complete(self, path: Path) -> None:
        """Tell the callbacks of a checkpoint that is complete on disk."""
        self.last_checkpoint = path
        self._notify("on_checkpoint", path)

    def roll_back(self, earlier: Resumed, reason: str, *, skips_batches: bool = True) -> None:
        """Restore a checkpoint of this run and skip the global batches up to the present one. A collective call.

        Without `skips_batches` the steps are taken again with the same samples. The hook that calls it returns
        Action.RETRY. The callbacks' `on_rollback` is called.
        """
        failed_step = self.step + 1
        last_batch = self.step + self.skipped_batches + 1
        first_batch = earlier.state.step + earlier.state.skipped_batches + 1
        undone_steps = self.step - earlier.state.step
        del self.history[len(self.history) - undone_steps :]
        self._load(earlier)
        if skips_batches:
            self.skipped_batches = last_batch - self.step
        rollback = Rollback(
            failed_step=failed_step,
            restored_step=self.step,
            checkpoint=earlier.saved.path,
            skipped_batches=last_batch - first_batch + 1 if skips_batches else 0,
            reason=reason,
        )
        self._notify("on_rollback", rollback)
        self._stopwatch.lap()

    def _load(self, resumed: Resumed) -> None:
        assert self.checkpointer is not None
        self.checkpointer.restore(resumed.saved, resumed.state)
        state = resumed.state
        self.step = state.step
        self.skipped_batches = state.skipped_batches
        self.tokens = state.tokens

    def _take_steps(self) -> None:
        while self.step < self.recipe.train.steps:
            with self.loader.prefetch(self.step, skipped_batches=self.skipped_batches) as batches:
                while self.step < self.recipe.train.steps and self._take_step(batches):
                    pass

    def _take_step(self, batches: Iterator[MicroBatch]) -> bool:
        """Take one step; False where the run was rolled back, so that other samples come next."""
        self._notify("on_step_begin")
        if self.slow_ranks is not None:
            self.slow_ranks.begin_step(self.step)
        batch_index = self.step + self.skipped_batches
        tokens = self.loader.target_tokens(batch_index)
        terms = tokens if self.engine.objective is None else self.loader.loss_terms(batch_index)
        micro_batches = self.loader.micro_batches(self.step, batches)
        self.engine.read_loop_numbers = ()
        try:
            result = self.engine.train_step(
                self.fingerprints.watch(micro_batches),
                target_tokens=terms,
                learning_rate=self.learning_rate(self.step),
            )
        except NonFiniteError as error:
            result = _NO_UPDATE
            action = self._first_action(callback.on_nonfinite(self, error) for callback in self.callbacks)
            if action is None:
                raise
        else:
            action = self._first_action(callback.on_after_update(self, result) for callback in self.callbacks)
            if action is Action.SKIP:
                raise ValueError("on_after_update returned Action.SKIP, but the step has changed the weights.")
        if action is Action.RETRY:
            return False
        self._finish_step(result, tokens)
        return True

    @staticmethod
    def _first_action(actions: Iterable[Action | None]) -> Action | None:
        return next((action for action in actions if action is not None), None)

    def _step_numbers(self) -> torch.Tensor:
        count, others = (0, {}) if self.slow_ranks is None else self.slow_ranks.local_numbers()
        return self.fingerprints.step_numbers(
            self.engine.device, stop=bool(self._stop_cause), count=count, others=others
        )

    def _finish_step(self, result: StepResult, tokens: int) -> None:
        source_tokens = self.loader.source_tokens(self.step + self.skipped_batches)
        # An engine from elsewhere need not read them together with its loss.
        numbers = self.engine.read_loop_numbers or self._step_numbers().tolist()
        digest, self.is_stopping, times = read_step_numbers(numbers)
        rate = self.learning_rate(self.step)
        self.step += 1
        self.tokens += tokens
        metrics = StepMetrics(
            step=self.step,
            loss=result.loss,
            lr=rate,
            grad_norm=result.grad_norm,
            tokens=tokens,
            seconds=self._stopwatch.lap(),
            memory_bytes=peak_memory_bytes(self.engine.device),
            skipped=result.skipped,
            **self._evaluate(),
            **_by_source(result, source_tokens),
            **_of_experts(result.routing),
            objective=result.objective,
            slow_ranks=self._compare_ranks(times),
            margins=result.margins,
            batch=digest,
        )
        self.history.append(metrics)
        self._notify("on_step_end", metrics)
        if self.is_stopping:
            # The request may have come to another rank.
            place = f"{self._stop_cause or 'a signal'} after step {self.step} of {self.recipe.train.steps}"
            raise PreemptedError(f"stopped by {place}; {self.describe_saved()}.")
        self._stopwatch.lap()  # validation and checkpoints are not part of a step's time

    def _compare_ranks(self, times: Sequence[float]) -> dict[str, float] | None:
        """Find the ranks that the others wait for, if the times of all ranks have come; say and note what is new."""
        if self.slow_ranks is None:
            return None
        for change in self.slow_ranks.read(times):
            self.progress.say(f"step {self.step}: {change}")
            if self.directory is not None:
                self.directory.note(step=self.step, kind="slow", reason=change)
        return self.slow_ranks.metrics()

    def _evaluate(self) -> dict[str, Any]:
        """Validate where that is due: the loss of each set, and of all their targets together."""
        every = self.recipe.train.eval_every
        sets = self.loader.validation
        if not every or not sets or (self.step % every and self.step != self.recipe.train.steps):
            return {}
        losses = {name: self.engine.evaluate(self.loader.validation_batches(name)) for name in sets}
        tokens = {name: self.loader.validation_tokens(name) for name in sets}
        eval_loss = sum(losses[name] * tokens[name] for name in sets) / sum(tokens.values())
        if "" in losses:
            eval_loss = losses[""]  # of a single source, which has no name
        self._notify("on_evaluate", eval_loss)
        return {"eval_loss": eval_loss, "eval_losses": None if "" in losses else losses}

    def _notify(self, hook: str, *arguments: object) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)


def _of_experts(stats: RoutingStats | None) -> dict[str, Any]:
    """The metrics of a model with experts."""
    loads = [load for load in stats.busiest if load is not None] if stats is not None else []
    if stats is None or not loads:
        return {}
    return {
        "router_aux_loss": stats.aux_loss,
        "router_z_loss": stats.z_loss,
        "expert_load": sum(loads) / len(loads),
        "unused_experts": stats.unused,
        "layer_expert_load": tuple(load if load is None else round(load, 4) for load in stats.busiest),
    }


def _by_source(result: StepResult, tokens: Mapping[str, int]) -> dict[str, Any]:
    """The metrics of a mixture: loss and targets of each source that has some in this step."""
    sums = dict(zip(tokens, result.source_losses, strict=False))
    present = {name: count for name, count in tokens.items() if count}
    losses = {name: sums.get(name, math.nan) / count for name, count in present.items()}
    return {"source_loss": losses, "source_tokens": present} if tokens else {}
