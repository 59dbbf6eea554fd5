"""Compare finished runs by what they logged, and by their recipe.yaml.

A run on a cluster can be compared with an earlier one, with one on fewer GPUs, or with one of another library. Finished
runs keep no gradients, so the diagnosis uses samples, learning rates, and how the difference grows.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from toolkit.config import dump_recipe, load_recipe
from toolkit.config.recipe import Precision, Recipe
from toolkit.config.recipe_schema import flat_fields
from toolkit.errors import DataError, ToolkitError
from toolkit.models.shape import ModelShape, find_config, with_overrides
from toolkit.parity.bounds import Bounds
from toolkit.parity.comparison import Baseline, Comparison, StrategyResult
from toolkit.parity.diagnosis.cause import Cause, Diagnosis
from toolkit.parity.diagnosis.update import JUMP, largest_jump
from toolkit.parity.parity_run import LossCurve, ParityRun
from toolkit.parity.result import ParityResult
from toolkit.parity.run_log import RunLog, read_log
from toolkit.parity.tolerance import (
    ENVELOPE_FACTOR,
    UNIT_ROUNDOFF,
    ModelExtent,
    RoundingBound,
    Tolerance,
    relative,
    rounding_bound,
)
from toolkit.units import plural, some

_LIMIT = 1e-2
"""Largest relative difference that is taken for rounding of fp32 without a rerun that shows it."""
_GPT2 = ModelExtent(layers=12, longest_sum=50_257, largest_tensor=50_257 * 768)


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A finished run as read from disk."""

    run: ParityRun
    log: RunLog
    recipe: Recipe | None
    """The recipe of the run; None if there is no readable recipe.yaml beside its log."""


def compare_runs(
    paths: Sequence[Path],
    *,
    reruns: Sequence[Path] = (),
    tolerance: float | None = None,
    loss_names: Sequence[str] = (),
    command: str = "",
) -> Comparison:
    """Compare every run with the first. `reruns` are runs of the same recipe that round differently.

    With neither `reruns` nor `tolerance`, a run in fp32 may differ by rounding in its first step, and from there the
    difference must grow without a jump. `loss_names` are tags or columns that hold a loss. Raises DataError for a path
    that is not a run, and if low precision leaves nothing to derive a bound from.
    """
    every = read_runs([*paths, *reruns], loss_names)
    runs = every[: len(paths)]
    repeated = every[len(paths) :]
    first = runs[0]
    others = runs[1:]
    is_given = tolerance is not None or repeated
    bounds = _bounds(first, others, [rerun.run.curve for rerun in repeated], tolerance)
    results = []
    for path, finished in zip(paths[1:], others, strict=True):
        run_bounds = bounds if is_given else _follow_growth(bounds, finished.run.curve, first.run.curve)
        result = ParityResult.of(finished.run, first.run, run_bounds)
        why = result.diagnosis
        if why is not None and why.cause == Cause.CHAOS and is_given:
            source = run_bounds.curve.source
            why = Diagnosis(Cause.UNKNOWN, f"the difference grows without a jump, and beyond {source}.")
        results.append(StrategyResult(name=str(path), result=result, closer_diagnosis=why))
    return Comparison(
        title=f"{len(runs)} runs",
        baselines=[Baseline(run=first.run, bounds=bounds)],
        results=results,
        recipe="" if first.recipe is None else dump_recipe(first.recipe),
        notes=[*_recipe_changes(first, others), *_assumptions(every, is_given=bool(is_given))],
        command=command,
    )


def read_runs(paths: Sequence[Path], loss_names: Sequence[str] = ()) -> list[FinishedRun]:
    """Read runs, each a directory or a file, and reduce them to what all of them logged. Raises DataError."""
    logs = [read_log(path, loss_names) for path in paths]
    unused = sorted({*loss_names} - {log.loss_name for log in logs})
    if unused:
        raise DataError.of("--loss", unused[0], "no run calls its loss that", "give the name of a tag, column or key")
    losses = _common_losses(logs)
    logged = list(zip(logs, losses, strict=True))
    has_norms = all(step in log.grad_norms for log, loss_of_step in logged for step in loss_of_step)
    has_batches = all(step in log.batches for log, loss_of_step in logged for step in loss_of_step)
    is_one_kind = len({log.kind for log in logs}) == 1  # libraries log the rate before or after the step
    runs = []
    for log, loss_of_step in logged:
        steps = tuple(loss_of_step)
        is_every_step = steps == tuple(range(1, len(steps) + 1))
        curve = LossCurve(
            label=log.label,
            losses=tuple(loss_of_step.values()),
            grad_norms=tuple(log.grad_norms[step] for step in steps) if has_norms else (),
            steps=() if is_every_step else steps,
        )
        run = ParityRun(
            curve=curve,
            learning_rates=tuple(log.rates.get(step, math.nan) for step in steps) if is_one_kind else (),
            batches=tuple(log.batches[step] for step in steps) if has_batches else (),
        )
        runs.append(FinishedRun(run=run, log=log, recipe=_recipe(log.file.parent / "recipe.yaml")))
    return runs


def _common_losses(logs: Sequence[RunLog]) -> list[Mapping[int, float]]:
    """Return the losses of each log by step: the same steps, unless all are a metrics.jsonl with every step.

    Between two steps at which a loss of each log begins or ends, what a log has is compared as one mean, if it has
    losses of all steps between. So the Trainer's mean over ten steps is compared with the mean of ten losses.
    """
    if all(log.is_whole for log in logs):
        return [log.losses for log in logs]
    boundaries = sorted(set.intersection(*({step for a, b, _ in log.spans() for step in (a, b)} for log in logs)))
    means: list[dict[int, float]] = []
    for log in logs:
        parts: dict[int, list[float]] = {}
        for a, b, loss in log.spans():
            parts.setdefault(bisect_left(boundaries, b), []).extend([loss] * (b - a))
        means.append({})
        for place, losses in parts.items():
            if 0 < place < len(boundaries) and len(losses) == boundaries[place] - boundaries[place - 1]:
                means[-1][boundaries[place]] = losses[0] if len({*losses}) == 1 else sum(losses) / len(losses)
    shared = sorted(set.intersection(*map(set, means)))
    if not shared:
        raise DataError(f"{some([log.label for log in logs])}: no step has a loss in every run. Log each step.")
    return [{step: mean_of_step[step] for step in shared} for mean_of_step in means]


def _assumptions(runs: Sequence[FinishedRun], *, is_given: bool) -> list[str]:
    """Return notes on what is compared, and on what is assumed of runs of other libraries."""
    curve = runs[0].run.curve
    notes = ["Finished runs keep no gradients: loss, norm, rate and samples are compared."]
    if not all(run.log.is_whole for run in runs):
        which = f"{plural(len(curve), 'value')} from step {curve.step(1)} to {curve.step(len(curve))}"
        notes.append(f"What all runs log: {which}{'' if curve.grad_norms else ', without gradient norms'}.")
    means = [run.log.label for run in runs if run.log.is_mean]
    if means:
        notes.append(f"{some(means)}: a loss is the mean since the one before, so other runs are averaged too.")
    unknown = [run.log.label for run in runs if run.recipe is None and run.log.kind != "JSON lines"]
    if unknown and not is_given:
        notes.append(f"{some(unknown)}: the precision is unknown, and fp32 assumed. For others give --tolerance.")
    return notes


def _bounds(
    first: FinishedRun, others: Sequence[FinishedRun], reruns: Sequence[LossCurve], tolerance: float | None
) -> Bounds:
    if tolerance is not None:
        constant = Tolerance.constant(tolerance, f"given: {tolerance:g}")
        return Bounds(curve=constant, gradient=tolerance, update=tolerance, parameters=math.inf, output=tolerance)
    precisions: list[Precision] = ["fp32", *(run.recipe.precision for run in (first, *others) if run.recipe)]
    coarsest = max(precisions, key=lambda precision: UNIT_ROUNDOFF[precision])
    least, source = _first_bound([first, *others]) if coarsest == "fp32" else (None, "")
    if reruns:
        curve = Tolerance.envelope([first.run.curve, *reruns], factor=ENVELOPE_FACTOR)
        curve = curve if least is None else curve.at_least(least)
    elif least is None:
        if any(finished.run.curve.losses != first.run.curve.losses for finished in others):
            reason = "such runs differ by their rounding, and only reruns show how far"
            rerun = "give one with --rerun RUN (the same recipe with another batch.micro_batch_size)"
            raise DataError.of("precision", coarsest, reason, rerun, "give a bound of your own with --tolerance 1e-2")
        curve = Tolerance.constant(0.0, "the same bits")
    else:
        source += f", and then no step in which the difference grows {JUMP:g} times, up to {_LIMIT:g}"
        curve = Tolerance(loss=(least.loss,), grad_norm=(least.grad_norm,), source=source)
    unit = UNIT_ROUNDOFF[coarsest]
    return Bounds(curve=curve, gradient=0.0, update=0.0, parameters=math.inf, output=0.0, unit=unit)


def _first_bound(runs: Sequence[FinishedRun]) -> tuple[RoundingBound, str]:
    """Return the bound of the first values, and where it comes from: rounding in step 1, and the decimals of logs.

    Where the first values are not of step 1 alone, their difference may have grown like that of one later step.
    """
    bound = rounding_bound(_extent(runs[0].recipe))
    start = runs[0].run.curve.step(1)
    factor = 1.0 if start == 1 else JUMP
    loss = max(run.log.resolution(run.log.losses) for run in runs)
    norm = max(run.log.resolution(run.log.grad_norms) for run in runs)
    source = f"{'' if start == 1 else f'{JUMP:g} times '}fp32 rounding in step {start}"
    source += f" and the decimals of the logs ({loss:.1e})" if loss > bound.loss else ""
    return replace(bound, loss=factor * bound.loss + loss, grad_norm=factor * bound.grad_norm + norm), source


def _follow_growth(bounds: Bounds, curve: LossCurve, baseline: LossCurve) -> Bounds:
    """Widen bounds to follow a difference that starts within them and grows without a jump, up to `_LIMIT`."""
    tolerance = bounds.curve
    grown = []
    for values, baseline_values, least in (
        (curve.losses, baseline.losses, tolerance.loss[0]),
        (curve.grad_norms, baseline.grad_norms, tolerance.grad_norm[0]),
    ):
        gaps = [relative(a, b) for a, b in zip(values, baseline_values, strict=False)]
        _, jump = largest_jump(gaps, floor=least)
        is_smooth = bool(gaps) and gaps[0] <= least and jump < JUMP and max(gaps) <= _LIMIT
        grown.append(tuple(accumulate((max(gap, least) for gap in gaps), max)) if is_smooth else (least,))
    return replace(bounds, curve=replace(tolerance, loss=grown[0], grad_norm=grown[1]))


def _recipe(path: Path) -> Recipe | None:
    try:
        return load_recipe(path, stored=True) if path.is_file() else None
    except ToolkitError:
        return None  # written by another version


def _extent(recipe: Recipe | None) -> ModelExtent:
    """Return the sizes of the recipe's model; those of GPT-2 if they are unknown."""
    try:
        config = recipe and find_config(recipe.model.name_or_path)
        shape = recipe and config and ModelShape.from_config(with_overrides(config, recipe.model.overrides))
    except ToolkitError:
        return _GPT2
    if not recipe or not shape:
        return _GPT2
    widest = max(shape.vocab, shape.ffn, recipe.data.seq_len)
    tensor = shape.hidden * max(shape.vocab, shape.ffn)
    return ModelExtent(layers=shape.layers, longest_sum=widest, largest_tensor=tensor)


def _recipe_changes(first: FinishedRun, others: Sequence[FinishedRun]) -> list[str]:
    """Return one line for each run whose recipe differs from the first one's."""
    notes = []
    for finished in others:
        if first.recipe is None or finished.recipe is None:
            continue
        new = flat_fields(finished.recipe.model_dump(mode="json"))
        old = flat_fields(first.recipe.model_dump(mode="json"))
        changed = [
            f"{key}={new[key]} (was {old.get(key)})" for key in new if new[key] != old.get(key) and key != "run_dir"
        ]
        if changed:
            notes.append(f"{finished.run.curve.label}: {', '.join(changed)}")
    return notes
