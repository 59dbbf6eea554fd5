"""The loop: steps from the recipe, micro-batches from the feed, an engine that does the arithmetic, and its trail."""

from pathlib import Path

from toolkit.errors import NonFiniteError, PreemptedError
from toolkit.recipe import Recipe
from toolkit.train.checkpointing import Checkpointer
from toolkit.train.engines.base import Engine
from toolkit.train.fed_samples import FedSamples
from toolkit.train.feed import Feed
from toolkit.train.metrics import StepMetrics, peak_memory_bytes
from toolkit.train.optimizer import learning_rate
from toolkit.train.preemption import Preemption
from toolkit.train.progress import ProgressLine, Stopwatch
from toolkit.train.run_directory import RunDirectory
from toolkit.train.trackers import Trackers
from toolkit.train.trainer_state import TrainerState


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

    A loss or gradient that is not finite ends the run: a checkpoint of the last good step is saved, and NonFiniteError
    says where. So does a signal: PreemptedError. Nothing is written at a time that depends on the layout.
    """
    rate = learning_rate(recipe)
    history: list[StepMetrics] = []
    fed = FedSamples(feed)
    watch = Stopwatch()
    start = 0 if after is None else after.step
    consumed = 0 if after is None else after.tokens
    with progress, feed.prefetch(start) as ahead:
        for step in range(start, recipe.train.steps):
            tokens = feed.target_tokens(step)
            try:
                result = engine.train_step(
                    fed.watch(feed.micro_batches(step, ahead)), target_tokens=tokens, learning_rate=rate(step)
                )
            except NonFiniteError as error:
                trackers.finish()  # the process ends without asking them again
                saved = _save(checkpointer, run, step, consumed, rate(max(0, step - 1)))
                raise NonFiniteError(
                    f"step {step + 1}: {error}. Training stopped{f'; {saved} is of step {step}' if saved else ''}. "
                    "Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the samples of this step."
                ) from None
            consumed += tokens
            digest, stopping = fed.last_digest(engine.device, stop=preemption is not None and bool(preemption.received))
            seconds = watch.lap()
            metrics = StepMetrics(
                step=step + 1,
                loss=result.loss,
                lr=rate(step),
                grad_norm=result.grad_norm,
                tokens=tokens,
                seconds=seconds,
                memory_bytes=peak_memory_bytes(engine.device),
                skipped=result.skipped,
                eval_loss=_evaluate(recipe, engine, feed, step + 1),
                batch=digest,
            )
            history.append(metrics)
            progress.step(metrics)
            trackers.step(metrics)
            if run.metrics is not None:
                run.metrics.write(metrics)
            if checkpointer is not None:
                checkpointer.poll()
            if (
                checkpointer is not None
                and _is_due(recipe, step + 1)
                and recipe.checkpoint.asynchronous
                and not stopping
            ):
                checkpointer.begin(run.path, step + 1, tokens=consumed, learning_rate=rate(step))
            elif stopping or _is_due(recipe, step + 1):
                saved = _save(checkpointer, run, step + 1, consumed, rate(step))
                if stopping:
                    trackers.finish()
                    raise PreemptedError(
                        f"stopped by a signal after step {step + 1} of {recipe.train.steps}; "
                        f"{f'saved {saved}. Go on with --resume {run.path}' if saved else 'nothing was saved'}."
                    )
            watch.lap()  # validation and checkpoints are not part of a step's time
        if checkpointer is not None:
            checkpointer.finish()
    return history


def _is_due(recipe: Recipe, finished: int) -> bool:
    every = recipe.checkpoint.every
    return bool(every) and (finished % every == 0 or finished == recipe.train.steps)


def _save(
    checkpointer: Checkpointer | None, run: RunDirectory, step: int, tokens: int, rate: float, *, wait: bool = True
) -> Path | None:
    """The checkpoint, where it is complete."""
    if checkpointer is None:
        return None
    if checkpointer.recipe.checkpoint.asynchronous and not wait:
        checkpointer.begin(run.path, step, tokens=tokens, learning_rate=rate)
        return None
    return checkpointer.save(run.path, step, tokens=tokens, learning_rate=rate).path


def _evaluate(recipe: Recipe, engine: Engine, feed: Feed, finished: int) -> float | None:
    every = recipe.train.eval_every
    if not every or feed.held_out is None:
        return None
    if finished % every and finished != recipe.train.steps:
        return None
    return engine.evaluate(feed.held_out_batches())
