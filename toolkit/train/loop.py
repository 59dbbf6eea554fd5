"""The loop: steps from the recipe, micro-batches from the feed, an engine that does the arithmetic, and its trail."""

from transformers import PreTrainedTokenizerBase

from toolkit.errors import NonFiniteError
from toolkit.recipe import Recipe
from toolkit.train.engines.base import Engine
from toolkit.train.fed_samples import FedSamples
from toolkit.train.feed import Feed
from toolkit.train.metrics import StepMetrics, peak_memory_bytes
from toolkit.train.optimizer import learning_rate
from toolkit.train.progress import ProgressLine, Stopwatch
from toolkit.train.run_directory import RunDirectory, snapshot_name
from toolkit.train.trackers import Trackers


def fit(
    recipe: Recipe,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    feed: Feed,
    run: RunDirectory,
    progress: ProgressLine,
    trackers: Trackers,
) -> list[StepMetrics]:
    """Train for recipe.train.steps; the metrics of every step.

    A loss or gradient that is not finite ends the run: the weights of the last good step are saved, and NonFiniteError
    says where. Nothing is written at a time that depends on the layout.
    """
    rate = learning_rate(recipe)
    history: list[StepMetrics] = []
    fed = FedSamples(feed)
    watch = Stopwatch()
    with progress, feed.prefetch() as ahead:
        for step in range(recipe.train.steps):
            tokens = feed.target_tokens(step)
            try:
                result = engine.train_step(
                    fed.watch(feed.micro_batches(step, ahead)), target_tokens=tokens, learning_rate=rate(step)
                )
            except NonFiniteError as error:
                trackers.finish()  # the process ends without asking them again
                raise _stopped(error, step, engine, tokenizer, run) from None
            batch = fed.last_digest(engine.device)
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
                batch=batch,
            )
            history.append(metrics)
            progress.step(metrics)
            trackers.step(metrics)
            if run.metrics is not None:
                run.metrics.write(metrics)
            if recipe.checkpoint.every and (step + 1) % recipe.checkpoint.every == 0:
                run.save_model(snapshot_name(step + 1), engine, tokenizer)
                run.keep_newest_snapshots(recipe.checkpoint.keep)
            watch.lap()  # validation and snapshots are not part of a step's time
    return history


def _evaluate(recipe: Recipe, engine: Engine, feed: Feed, finished: int) -> float | None:
    every = recipe.train.eval_every
    if not every or feed.held_out is None:
        return None
    if finished % every and finished != recipe.train.steps:
        return None
    return engine.evaluate(feed.held_out_batches())


def _stopped(
    error: NonFiniteError,
    step: int,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    run: RunDirectory,
) -> NonFiniteError:
    saved = run.save_model(snapshot_name(step), engine, tokenizer)
    return NonFiniteError(
        f"step {step + 1}: {error}. Training stopped; the weights after step {step} are in {saved}. "
        "Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the samples of this step."
    )
