"""Finished runs held against each other: what their metrics.jsonl and recipe.yaml tell.

A cluster's run can be compared with yesterday's, or with one on fewer GPUs. There are no gradients here, and so the
diagnosis knows less: samples, learning rates, and how the difference grows.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.errors import DataError, ToolkitError
from toolkit.parity.bounds import Bounds
from toolkit.parity.comparison import Comparison, Entry
from toolkit.parity.curve import LossCurve
from toolkit.parity.diagnosis.update import JUMP, largest_jump
from toolkit.parity.tolerance import ENVELOPE_FACTOR, UNIT_ROUNDOFF, Extent, Tolerance, relative, rounding_bound
from toolkit.parity.trial import Trial
from toolkit.parity.verdict import Verdict
from toolkit.recipe import Precision, Recipe
from toolkit.recipe_file import dump, load
from toolkit.shape import ModelShape, find_config, with_overrides

_LIMIT = 1e-2
"""No rounding of fp32 is trusted beyond this without a rerun that shows it."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run."""

    trial: Trial
    recipe: Recipe | None
    """None where there is no recipe.yaml beside the metrics."""


def compare_runs(
    paths: Sequence[Path], *, reruns: Sequence[Path] = (), tolerance: float | None = None, command: str = ""
) -> Comparison:
    """Every run against the first. `reruns` are runs of the same recipe that round differently; `tolerance` a bound.

    Without either, fp32 has the bound of its first step, and what follows must grow from there without a jump. Raises
    DataError for what is no run, and where low precision leaves nothing to derive a bound from.
    """
    runs = [read_run(path) for path in paths]
    first, others = runs[0], runs[1:]
    bounds = _bounds(first, others, [read_run(path).trial.curve for path in reruns], tolerance)
    entries = []
    for path, run in zip(paths[1:], others, strict=True):
        own = bounds
        if tolerance is None and not reruns:
            own = _grown(bounds, run.trial.curve, first.trial.curve)
        entries.append(Entry(asked=str(path), verdict=Verdict.of(run.trial, first.trial, own).settled()))
    return Comparison(
        title=f"{len(runs)} runs",
        baseline=first.trial,
        bounds=bounds,
        entries=entries,
        recipe="" if first.recipe is None else dump(first.recipe),
        notes=[
            *_differences(first, others),
            "Finished runs keep no gradients: loss, norm, rate and samples are compared.",
        ],
        command=command,
    )


def read_run(path: Path) -> Run:
    """A run directory or its metrics.jsonl. Raises DataError."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    curve = LossCurve.read(file).named(str(path))
    if not len(curve):
        raise DataError(f"{file}: it has no step. Give a run that has trained.")
    records: list[dict[str, Any]] = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rates = [record.get("lr") for record in records]
    trial = Trial(
        curve=curve,
        learning_rates=tuple(float(rate) if isinstance(rate, int | float) else math.nan for rate in rates),
        batches=tuple(str(record["batch"]) for record in records if "batch" in record),
    )
    recipe = file.parent / "recipe.yaml"
    try:
        return Run(trial=trial, recipe=load(recipe) if recipe.is_file() else None)
    except ToolkitError:
        return Run(trial=trial, recipe=None)  # written by another version


def _bounds(first: Run, others: Sequence[Run], reruns: Sequence[LossCurve], tolerance: float | None) -> Bounds:
    if tolerance is not None:
        given = Tolerance(loss=(tolerance,), grad_norm=(tolerance,), source=f"given: {tolerance:g}")
        return Bounds(curve=given, gradient=tolerance, update=tolerance, parameters=math.inf, output=tolerance)
    precisions: list[Precision] = ["fp32", *(run.recipe.precision for run in (first, *others) if run.recipe)]
    coarsest = max(precisions, key=lambda precision: UNIT_ROUNDOFF[precision])
    least = rounding_bound(_extent(first.recipe)) if coarsest == "fp32" else None
    if reruns:
        curve = Tolerance.envelope([first.trial.curve, *reruns], factor=ENVELOPE_FACTOR)
        curve = curve if least is None else curve.at_least(least)
    elif least is None:
        same = all(run.trial.curve.losses == first.trial.curve.losses for run in others)
        if not same:
            raise DataError(
                f"runs in {coarsest} differ by their rounding, and how far only reruns tell. Give one with --rerun RUN "
                "(the same recipe with another batch.micro_size), or a bound of your own with --tolerance 1e-2."
            )
        curve = Tolerance(loss=(0.0,), grad_norm=(0.0,), source="the same bits")
    else:
        source = (
            f"fp32 rounding in step 1, and then no step in which the difference grows {JUMP:g} times, up to {_LIMIT:g}"
        )
        curve = Tolerance(loss=(least.loss,), grad_norm=(least.grad_norm,), source=source)
    unit = UNIT_ROUNDOFF[coarsest]
    return Bounds(curve=curve, gradient=0.0, update=0.0, parameters=math.inf, output=0.0, unit=unit)


def _grown(bounds: Bounds, curve: LossCurve, baseline: LossCurve) -> Bounds:
    """Bounds that follow a difference which starts within them and grows without a jump, up to `_LIMIT`."""
    shared = range(min(len(curve), len(baseline)))
    tolerance = bounds.curve
    grown = []
    for own, other, least in (
        (curve.losses, baseline.losses, tolerance.loss[0]),
        (curve.grad_norms, baseline.grad_norms, tolerance.grad_norm[0]),
    ):
        gaps = [relative(own[step], other[step]) for step in shared]
        _, jump = largest_jump(gaps, floor=least)
        is_smooth = bool(gaps) and gaps[0] <= least and jump < JUMP and max(gaps) <= _LIMIT
        highest = least
        steps = []
        for gap in gaps:
            highest = max(highest, gap) if is_smooth and math.isfinite(gap) else highest
            steps.append(highest)
        grown.append(tuple(steps) or (least,))
    return replace(bounds, curve=replace(tolerance, loss=grown[0], grad_norm=grown[1]))


def _extent(recipe: Recipe | None) -> Extent:
    """The sizes of the recipe's model; of GPT-2 where they are not known."""
    known = Extent(layers=12, longest_sum=50_257, largest_tensor=50_257 * 768)
    if recipe is None:
        return known
    try:
        config = find_config(recipe.model.name_or_path)
        shape = config and ModelShape.from_config(with_overrides(config, recipe.model.overrides))
    except ToolkitError:
        return known
    if not shape:
        return known
    widest = max(shape.vocab, shape.ffn, recipe.data.seq_len)
    return Extent(layers=shape.layers, longest_sum=widest, largest_tensor=shape.hidden * max(shape.vocab, shape.ffn))


def _differences(first: Run, others: Sequence[Run]) -> list[str]:
    """What the recipes of the runs do not share."""
    notes = []
    for run in others:
        if first.recipe is None or run.recipe is None:
            continue
        own, other = _flat(run.recipe.model_dump(mode="json")), _flat(first.recipe.model_dump(mode="json"))
        changed = [f"{key}={own[key]} (was {other.get(key)})" for key in own if own[key] != other.get(key)]
        changed = [text for text in changed if not text.startswith("run_dir=")]
        if changed:
            notes.append(f"{run.trial.curve.label}: {', '.join(changed)}")
    return notes


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
