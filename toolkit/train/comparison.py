"""Run a recipe under several strategies on this machine, and hold each against a baseline.

All of them start from the same weights and see the same samples in the same order. The baseline runs several times:
once more as it is, to see whether it repeats to the bit, and with other rounding, to see how far rounding alone goes.
"""

import datetime
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolkit import recipe_file
from toolkit.errors import RecipeError, ToolkitError
from toolkit.parity import Bounds, Trial, Verdict
from toolkit.parity.comparison import Comparison, Entry
from toolkit.parity.strategy import Strategy
from toolkit.parity.tolerance import FP32_UNIT
from toolkit.recipe import Precision, Recipe
from toolkit.train.environment import describe_environment, local_device
from toolkit.train.launch import RankEnvironment, pick_device, process_group
from toolkit.train.local_ranks import Outcome, run_jobs
from toolkit.train.model import load_config
from toolkit.train.trial import EngineFactory, run_trial

UNIT: dict[Precision, float] = {"fp32": FP32_UNIT, "bf16": 2.0**-9, "fp16": 2.0**-11}
"""Unit roundoff."""


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
    share = section.global_size // (baseline.ranks // baseline.recipe.layout(baseline.ranks).model_size)
    other = 1 if section.micro_size > 1 else min(2, share)
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
    """Run all and judge. Raises what the baseline raises; a strategy that fails is an entry with its error.

    Tensors lie in a temporary directory, one file a parameter: no process holds two whole models.
    """
    reruns = baseline_reruns(baseline, rounding_seeds)
    jobs = [baseline, *reruns, *strategies]
    with tempfile.TemporaryDirectory(prefix="dstk-compare-") as folder:
        outcomes, seconds = _run(jobs, Path(folder), timeout_seconds, progress)
        first, *others = [_trial(outcome) for outcome in outcomes[: 1 + len(reruns)]]
        bounds = Bounds.measured(first, others[1:], unit=UNIT[recipe.precision])
        entries = []
        for number, (job, outcome) in enumerate(zip(strategies, outcomes[1 + len(reruns) :], strict=True)):
            trial, error = (outcome[0], "") if isinstance(outcome, list) else (None, _last_line(outcome))
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
    jobs: Sequence[Job], folder: Path, timeout_seconds: float, progress: Progress
) -> tuple[list[Outcome], list[float]]:
    outcomes: dict[int, Outcome] = {}
    times: dict[int, float] = {}
    on_cpu = local_device().type == "cpu"
    calls = [(partial(_train, job, folder / str(number), joined=on_cpu), job.ranks) for number, job in enumerate(jobs)]
    # On GPUs every rank has a device of its own, and jobs would meet on them.
    cores = len(os.sched_getaffinity(0)) if on_cpu else 1
    for number, outcome, seconds in run_jobs(calls, cores=cores, timeout_seconds=timeout_seconds, joined=on_cpu):
        outcomes[number], times[number] = outcome, seconds
        progress(jobs[number].name, "done" if isinstance(outcome, list) else _last_line(outcome), seconds)
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
    if not isinstance(outcome, list):
        raise outcome
    trial: Trial = outcome[0]
    return trial


def _last_line(error: ToolkitError | Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _without_dropout(recipe: Recipe) -> dict[str, float]:
    config = load_config(recipe.model).to_dict()
    return {name: 0.0 for name, value in config.items() if "drop" in name and isinstance(value, float) and value}
