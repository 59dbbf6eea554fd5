"""Run a recipe under several strategies on this machine, and hold each against a baseline.

All of them start from the same weights and see the same samples in the same order. A baseline runs several times: once
more as it is, to see whether it repeats to the bit, and with other rounding, to see how far rounding alone goes. If the
first step of a strategy is right and a later one is not, a replay finds out whether it grew out of rounding.
"""

import datetime
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.config import dump_recipe, recipe_problems
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.engines.factory import create_engine
from toolkit.errors import BatchError, ConfigError, LayoutError, ModelError, RecipeError, RunError, ToolkitError
from toolkit.launch.environment import describe_environment, local_device
from toolkit.launch.local_ranks import Outcome, RankFailedError, in_one_line, run_jobs
from toolkit.launch.rank_environment import RankEnvironment
from toolkit.model_init.build_model import load_config
from toolkit.parity import Bounds, Diagnosis, ParityResult, ParityRun
from toolkit.parity.bounds import extent_of
from toolkit.parity.comparison import Baseline, Comparison, StrategyResult
from toolkit.parity.diagnosis.cause import diagnosis
from toolkit.parity.replay import StepRecord, explain, steps_to_replay
from toolkit.parity.run.step_recorder import StepRecorder
from toolkit.parity.run.train_in_memory import train_in_memory
from toolkit.parity.tolerance import FP32_UNIT, UNIT_ROUNDOFF, rounding_bound
from toolkit.training.preflight import check_model, deepspeed_config, find_shape
from toolkit.training.train import EngineFactory, train


@dataclass(frozen=True, kw_only=True)
class StrategyRun:
    """One run: a recipe on a number of ranks."""

    name: str
    recipe: Recipe
    ranks: int
    rounding_seed: int | None = None
    rerun_of: str = ""
    """The baseline that this run repeats."""
    engine_factory: EngineFactory = create_engine
    trainer: Strategy | None = None
    """The layout of Hugging Face's Trainer, where that trains."""


_LEFT_OUT = [
    "eval_every",
    "eval_samples",
    "compile",
    "on_nonfinite",
    "spike_sigmas",
    "spike_window",
    "max_incidents",
    "replica_check",
    "repeat_check",
]
_REFUSALS = (RecipeError, LayoutError, BatchError, ConfigError, ModelError)
"""What ranks raise for a recipe that cannot be, some of it only once they build the model."""
_REPLAYED_ELEMENTS = 200_000_000
"""Parameters x steps of a replay, of which each keeps seven numbers on disk and each rerun four more."""
_FEWEST_REPLAYED = 4

_Run = Callable[..., Iterator[tuple[Outcome, float]]]
Progress = Callable[[str, str, float], None]
"""Called when a run ends, with its name, `done` or its error, and the seconds it took."""


def for_comparison(recipe: Recipe, *, steps: int, dropout: bool) -> Recipe:
    """The first `steps` of a recipe without validation, checkpoints and trackers, which only take time.

    The warm-up is shortened to a tenth of them, so that updates reach their full size; dropout and the noise of routers
    are off unless requested, because layouts draw different masks.
    """
    warmup = min(recipe.schedule.warmup_steps, max(1, steps // 10))
    decay = recipe.schedule.decay_steps
    overrides = recipe.model.overrides if dropout else recipe.model.overrides | _without_dropout(recipe)
    train = {name: type(recipe.train).model_fields[name].default for name in _LEFT_OUT}
    schedule = {"warmup_steps": warmup, "decay_steps": decay and min(decay, max(1, steps // 10))}
    changed = recipe.changed(
        {"model": {"overrides": overrides}, "schedule": schedule, "train": train | {"steps": steps}}
    )
    plain = {"checkpoint": type(recipe.checkpoint)(), "log": type(recipe.log)(level="warning"), "run_dir": None}
    return changed.model_copy(update=plain)


def plan(recipe: Recipe, strategies: Sequence[Strategy], nproc: int) -> list[StrategyRun]:
    """A run for each strategy. Raises RecipeError with every problem that keeps one of them from running.

    The model's config is read too, as it is before a run: some families are known by that alone.
    """
    runs: dict[str, StrategyRun] = {}
    problems = []
    for strategy in strategies:
        if strategy.text in runs:  # one baseline serves several
            continue
        applied = strategy.apply(recipe, nproc)
        ranks = strategy.world_size(nproc)
        replicas = ranks // strategy.model_size if strategy.trainer else ranks
        refused = recipe_problems(applied, replicas) or _model_problems(applied, replicas)
        if strategy.trainer and not refused:
            from toolkit.parity.run.trainer_run import trainer_problems  # transformers' Trainer takes seconds to import

            refused = trainer_problems(applied)
        problems += [f"strategy {strategy.text}: {problem}" for problem in refused]
        trainer = strategy if strategy.trainer else None
        runs[strategy.text] = StrategyRun(name=strategy.text, recipe=applied, ranks=ranks, trainer=trainer)
    if problems:
        raise RecipeError(problems)
    return [runs[strategy.text] for strategy in strategies]


def _model_problems(recipe: Recipe, ranks: int) -> list[str]:
    device = local_device()
    try:
        config = check_model(recipe, device)
        deepspeed_config(Job.of(recipe, ranks, find_shape(config)), config, device)
    except ToolkitError as error:
        return error.problems
    return []


def baseline_reruns(baseline: StrategyRun, seeds: int) -> list[StrategyRun]:
    """The baseline again: unchanged, in micro-batches of another size, and with `seeds` other roundings."""
    section = baseline.recipe.batch
    share = section.global_batch_size // baseline.recipe.layout(baseline.ranks).dp
    # One sample per micro-batch, or if it has that already, the smallest larger size that divides a replica's samples.
    divisors = (size for size in range(2, share + 1) if share % size == 0)
    micro_batch_size = 1 if (section.micro_batch_size or 1) > 1 else next(divisors, 1)
    split = baseline.recipe.changed({"batch": {"micro_batch_size": micro_batch_size}})
    once_more = replace(baseline, name="once more", rerun_of=baseline.name)
    return [
        once_more,
        replace(once_more, name=f"micro-batches of {micro_batch_size}", recipe=split),
        *(replace(once_more, name=f"rounding seed {seed}", rounding_seed=seed) for seed in range(1, seeds + 1)),
    ]


def compare_strategies(
    recipe: Recipe,
    strategies: Sequence[StrategyRun],
    baselines: Sequence[StrategyRun],
    *,
    title: str,
    rounding_seeds: int = 3,
    timeout_seconds: float = 1800,
    progress: Progress = lambda name, outcome, seconds: None,
    command: str = "",
    commands: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Comparison:
    """Run all strategies and compare each with its baseline. A strategy that fails becomes an entry with its error.

    Raises the ToolkitError of a baseline that fails, or RunError for any other failure of it, and RecipeError if a
    strategy turns out to be one that cannot run, which is bad input and not a result. Tensors are kept in a
    temporary directory, one file per parameter: no process holds two whole models.
    """
    groups = {job.name: [job, *baseline_reruns(job, rounding_seeds)] for job in baselines}
    fixed = [job for group in groups.values() for job in group]
    with tempfile.TemporaryDirectory(prefix="dstk-compare-") as folder:
        run = partial(_run, folder=Path(folder), timeout_seconds=timeout_seconds, progress=progress)
        ended = run([*fixed, *strategies], _train, needed=len(fixed))
        repeats = True
        measured = {}
        for name, group in groups.items():
            first, again, *reruns = [_result(next(ended)[0]) for _ in group]
            bounds = Bounds.measured(first, reruns, unit=UNIT_ROUNDOFF[recipe.precision])
            if ParityResult.of(again, first, bounds).agreement != "bitwise":
                repeats = False
            curves = [replace(run.curve, label=job.name) for job, run in zip(group[2:], reruns, strict=True)]
            measured[name] = Baseline(run=first, bounds=bounds, reruns=curves)
        entries = []
        for number, (job, baseline_job) in enumerate(zip(strategies, baselines, strict=True)):
            outcome, seconds = next(ended)
            baseline = measured[baseline_job.name]
            entry = StrategyResult(name=job.name, command=commands[number] if commands else "", seconds=seconds)
            if isinstance(outcome, list):
                result = ParityResult.of(outcome[0], baseline.run, baseline.bounds).with_diagnosis()
                replayed = _replay(run, job, groups[baseline_job.name], result)
                entry = replace(entry, result=result, closer_diagnosis=replayed)
            else:
                entry = replace(entry, error=in_one_line(outcome))
            entries.append(entry)
    bits = "The baseline repeats to the bit." if repeats else "The baseline does not repeat to the bit."
    return Comparison(
        title=title,
        baselines=[replace(baseline, run=baseline.run.without_values()) for baseline in measured.values()],
        results=entries,
        recipe=dump_recipe(recipe),
        notes=[*notes, bits],
        command=command,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        environment=describe_environment(local_device()),
    )


def _replay(run: _Run, job: StrategyRun, baseline: Sequence[StrategyRun], result: ParityResult) -> Diagnosis | None:
    """Whether rounding explains a difference after a right first step; None where nothing of that kind differs."""
    if result.diagnosis is None or not result.diagnosis.is_late or job.trainer is not None:
        return None  # the Trainer's steps cannot be taken one by one from weights of ours
    first = result.baseline
    unit = result.bounds.unit
    elements = sum(value.size for value in first.initial.values())
    steps = steps_to_replay(result, max(_FEWEST_REPLAYED, _REPLAYED_ELEMENTS // max(1, elements)))
    ((ended, _),) = run([replace(job, name=f"{job.name}, once more")], partial(_record, steps=steps))
    outcomes = [ended]
    if isinstance(ended, list):
        again = [replace(rerun, name=f"{job.name}, replayed by {rerun.name}") for rerun in (baseline[0], *baseline[2:])]
        outcomes = [outcome for outcome, _ in run(again, partial(_record, origins=ended[0]))]
        records = [outcome[0] for outcome in outcomes if isinstance(outcome, list)]
        if len(records) == len(again):
            least = rounding_bound(extent_of(first)) if unit <= FP32_UNIT else None
            return explain(ended[0], records[0], records[1:], least)
    error = next(outcome for outcome in outcomes if not isinstance(outcome, list))
    return diagnosis("not replayed", error=in_one_line(error))


def _run(
    jobs: Sequence[StrategyRun],
    function: Callable[[StrategyRun, Path], Any],
    *,
    needed: int = 0,
    folder: Path,
    timeout_seconds: float,
    progress: Progress,
) -> Iterator[tuple[Outcome, float]]:
    """Yield what `function` returns on each rank, or the error, and the seconds, in the order of the jobs.

    All have ended before the first is yielded. If one of the first `needed` fails, the others are not waited for.
    """
    outcomes: dict[int, tuple[Outcome, float]] = {}
    on_cpu = local_device().type == "cpu"
    place = Path(tempfile.mkdtemp(dir=folder))
    calls = [(partial(function, job, place / str(number)), job.ranks) for number, job in enumerate(jobs)]
    # On GPUs every rank has a device of its own, and concurrent runs would share them.
    cores = len(os.sched_getaffinity(0)) if on_cpu else 1
    # Closed at once if something is raised here: the ranks must end before the folder is deleted.
    with closing(run_jobs(calls, cores=cores, timeout_seconds=timeout_seconds, joined=on_cpu)) as ended:
        for number, outcome, seconds in ended:
            outcomes[number] = outcome, seconds
            progress(jobs[number].name, "done" if isinstance(outcome, list) else in_one_line(outcome), seconds)
            if isinstance(outcome, _REFUSALS) and not jobs[number].rerun_of:
                raise RecipeError([f"strategy {jobs[number].name}: {problem}" for problem in outcome.problems])
            if number < needed and not isinstance(outcome, list):
                raise _failed_baseline(jobs[number], outcome)
    yield from (outcomes[number] for number in range(len(jobs)))


def _result(outcome: Outcome) -> ParityRun:
    assert isinstance(outcome, list)  # `_run` raises the error of a baseline
    run: ParityRun = outcome[0]
    return run


def _train(run: StrategyRun, folder: Path) -> ParityRun:
    """Train a strategy; called on every rank."""
    if run.trainer is not None:
        from toolkit.parity.run.trainer_run import train_with_transformers

        return train_with_transformers(run.recipe, run.trainer, folder)
    return train_in_memory(
        run.recipe, rounding_seed=run.rounding_seed, folder=folder, engine_factory=run.engine_factory
    )


def _record(run: StrategyRun, folder: Path, **which: Any) -> list[StepRecord]:
    """Record steps of a strategy; called on every rank."""
    recorder = StepRecorder(folder, seed=run.rounding_seed, **which)
    job = Job.of(run.recipe, RankEnvironment.detect().world_size)
    train(job, [recorder], in_memory=True, engine_factory=run.engine_factory)
    return recorder.records


def _failed_baseline(run: StrategyRun, error: ToolkitError | RankFailedError) -> ToolkitError:
    if isinstance(error, ToolkitError):
        return error
    which = f"the baseline {run.rerun_of} ({run.name})" if run.rerun_of else f"the baseline {run.name}"
    return RunError(
        f"{which} failed, so there is nothing to compare with: {in_one_line(error).rstrip('.')}. "
        "Fix that, or choose another one with --baseline."
    )


def _without_dropout(recipe: Recipe) -> dict[str, float]:
    config = load_config(recipe.model).to_dict()
    random = [name for name in config if "drop" in name or "jitter" in name]
    return {name: 0.0 for name in random if isinstance(config[name], float) and config[name]}
