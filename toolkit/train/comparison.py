"""Run a recipe under several strategies on this machine, and hold each against a baseline.

All of them start from the same weights and see the same samples in the same order. The baseline runs several times:
once more as it is, to see whether it repeats to the bit, and with other rounding, to see how far rounding alone goes.
"""

import datetime
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolkit import recipe_file
from toolkit.errors import RecipeError, RunError, ToolkitError
from toolkit.parity import Bounds, Trial, Verdict
from toolkit.parity.comparison import Comparison, Entry
from toolkit.parity.strategy import Strategy
from toolkit.parity.tolerance import UNIT_ROUNDOFF
from toolkit.recipe import Recipe
from toolkit.train.environment import describe_environment, local_device
from toolkit.train.launch import RankEnvironment, pick_device, process_group
from toolkit.train.local_ranks import Outcome, RankFailedError, run_jobs
from toolkit.train.model import load_config
from toolkit.train.trial import EngineFactory, run_trial


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: a recipe on a number of ranks."""

    name: str
    recipe: Recipe
    ranks: int
    rounding_seed: int | None = None
    engine_factory: EngineFactory | None = None


Progress = Callable[[str, str, float], None]
"""Told of each run that ends: its name, `done` or what went wrong, and the seconds it took."""


def for_comparison(recipe: Recipe, *, steps: int, dropout: bool) -> Recipe:
    """The first `steps` of a recipe without what only takes time: validation, snapshots, trackers.

    The warm-up is shortened to a tenth of them, so that updates have their full size; dropout is off unless asked for,
    because layouts draw other masks.
    """
    warmup = min(recipe.schedule.warmup_steps, max(1, steps // 10))
    decay = recipe.schedule.decay_steps
    overrides = recipe.model.overrides if dropout else recipe.model.overrides | _without_dropout(recipe)
    train = {"steps": steps, "eval_every": 0, "eval_samples": 64, "compile": False}
    changes: dict[str, Any] = {
        "model": recipe.model.model_copy(update={"overrides": overrides}),
        "schedule": recipe.schedule.model_copy(
            update={"warmup_steps": warmup, "decay_steps": decay and min(decay, max(1, steps // 10))}
        ),
        "train": recipe.train.model_copy(update=train),
        "checkpoint": type(recipe.checkpoint)(),
        "log": type(recipe.log)(level="warning"),
        "run_dir": None,
    }
    return recipe.model_copy(update=changes)


def default_baseline(recipe: Recipe) -> str:
    """One plain process in fp32; in low precision one rank of ZeRO-1, which holds the same weights in the same bits."""
    return "reference" if recipe.precision == "fp32" else "dp1-z1"


def plan(recipe: Recipe, strategies: Sequence[Strategy], nproc: int) -> list[Job]:
    """A job for each strategy. Raises RecipeError with everything that keeps one of them from running."""
    jobs, problems = [], []
    for strategy in strategies:
        own, ranks = strategy.apply(recipe, nproc), strategy.world_size(nproc)
        problems += [f"strategy {strategy.text}: {problem}" for problem in recipe_file.problems(own, ranks)]
        jobs.append(Job(name=strategy.text, recipe=own, ranks=ranks))
    if problems:
        raise RecipeError(problems)
    return jobs


def baseline_reruns(baseline: Job, seeds: int) -> list[Job]:
    """The baseline again: as it is, in micro-batches of another size, and with `seeds` other ways to round."""
    section = baseline.recipe.batch
    share = section.global_size // baseline.recipe.layout(baseline.ranks).dp
    # Samples of one replica in parts of one, or where they are: in the smallest parts that divide them.
    divisors = (size for size in range(2, share + 1) if share % size == 0)
    other = 1 if section.micro_size > 1 else next(divisors, 1)
    split = baseline.recipe.model_copy(update={"batch": section.model_copy(update={"micro_size": other})})
    return [
        Job(name="once more", recipe=baseline.recipe, ranks=baseline.ranks),
        Job(name=f"micro-batches of {other}", recipe=split, ranks=baseline.ranks),
        *(
            Job(name=f"rounding seed {seed}", recipe=baseline.recipe, ranks=baseline.ranks, rounding_seed=seed)
            for seed in range(1, seeds + 1)
        ),
    ]


def compare_strategies(
    recipe: Recipe,
    strategies: Sequence[Job],
    baseline: Job,
    *,
    title: str,
    rounding_seeds: int = 3,
    timeout_seconds: float = 1800,
    progress: Progress = lambda name, outcome, seconds: None,
    command: str = "",
    commands: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Comparison:
    """Run all and judge. A strategy that fails is an entry with its error; where the baseline fails all of it ends.

    Raises the ToolkitError of the baseline, or RunError for what else went wrong in it. Tensors lie in a temporary
    directory, one file a parameter: no process holds two whole models.
    """
    reruns = baseline_reruns(baseline, rounding_seeds)
    jobs = [baseline, *reruns, *strategies]
    with tempfile.TemporaryDirectory(prefix="dstk-compare-") as folder:
        outcomes, seconds = _run(jobs, Path(folder), timeout_seconds, progress, needed=1 + len(reruns))
        first, *others = [_trial(outcome) for outcome in outcomes[: 1 + len(reruns)]]
        bounds = Bounds.measured(first, others[1:], unit=UNIT_ROUNDOFF[recipe.precision])
        entries = []
        for number, (job, outcome) in enumerate(zip(strategies, outcomes[1 + len(reruns) :], strict=True)):
            trial, error = (outcome[0], "") if isinstance(outcome, list) else (None, _in_one_line(outcome))
            entries.append(
                Entry(
                    asked=job.name,
                    command=commands[number] if commands else "",
                    seconds=seconds[1 + len(reruns) + number],
                    verdict=None if trial is None else Verdict.of(trial, first, bounds).settled(),
                    error=error,
                )
            )
        repeats = Verdict.of(others[0], first, bounds).rung == "bitwise"
        again = "The baseline repeats to the bit." if repeats else "The baseline does not repeat to the bit."
        return Comparison(
            title=title,
            baseline=first.without_values(),
            bounds=bounds,
            entries=entries,
            reruns=[rerun.curve.named(job.name) for job, rerun in zip(reruns[1:], others[1:], strict=True)],
            recipe=recipe_file.dump(recipe),
            notes=[*notes, again],
            command=command,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            environment=describe_environment(local_device()),
        )


def _run(
    jobs: Sequence[Job], folder: Path, timeout_seconds: float, progress: Progress, *, needed: int
) -> tuple[list[Outcome], list[float]]:
    """Outcome and seconds of each job. Where one of the first `needed` fails, the others are not waited for."""
    outcomes: dict[int, Outcome] = {}
    times: dict[int, float] = {}
    on_cpu = local_device().type == "cpu"
    calls = [(partial(_train, job, folder / str(number), joined=on_cpu), job.ranks) for number, job in enumerate(jobs)]
    # On GPUs every rank has a device of its own, and jobs would meet on them.
    cores = len(os.sched_getaffinity(0)) if on_cpu else 1
    # Closed at once when something is raised here: the ranks must be gone before the folder is.
    with closing(run_jobs(calls, cores=cores, timeout_seconds=timeout_seconds, joined=on_cpu)) as ended:
        for number, outcome, seconds in ended:
            outcomes[number], times[number] = outcome, seconds
            progress(jobs[number].name, "done" if isinstance(outcome, list) else _in_one_line(outcome), seconds)
            if number < needed and not isinstance(outcome, list):
                raise _failed_baseline(jobs[0].name, jobs[number].name, outcome)
    return [outcomes[number] for number in range(len(jobs))], [times[number] for number in range(len(jobs))]


def _train(job: Job, folder: Path, *, joined: bool) -> Trial:
    """On every rank."""
    options: dict[str, Any] = {"rounding_seed": job.rounding_seed, "folder": folder}
    if job.engine_factory is not None:
        options["engine_factory"] = job.engine_factory
    if joined:
        return run_trial(job.recipe, **options)
    here = RankEnvironment.detect()
    with process_group(here, pick_device(here)):
        return run_trial(job.recipe, **options)


def _trial(outcome: Outcome) -> Trial:
    assert isinstance(outcome, list)
    trial: Trial = outcome[0]
    return trial


def _failed_baseline(baseline: str, run: str, error: ToolkitError | RankFailedError) -> ToolkitError:
    if isinstance(error, ToolkitError):
        return error
    which = f"the baseline {baseline}" if run == baseline else f"the baseline {baseline} ({run})"
    return RunError(
        f"{which} failed, and without it there is nothing to compare with: {_in_one_line(error).rstrip('.')}. "
        "Mend that, or take another one with --baseline."
    )


def _in_one_line(error: ToolkitError | RankFailedError) -> str:
    """Of a traceback, the rank and the last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RankFailedError) and len(lines) > 1:
        return f"{lines[0]} {lines[-1]}"
    return "; ".join(lines)


def _without_dropout(recipe: Recipe) -> dict[str, float]:
    config = load_config(recipe.model).to_dict()
    return {name: 0.0 for name, value in config.items() if "drop" in name and isinstance(value, float) and value}
