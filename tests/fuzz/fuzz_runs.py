"""Train compositions, and hold each layout against one plain process, as `dstk validate` and `dstk compare` do it.

Most runs pass, so that they are first trained many in the same forked ranks and compared with the rounding that fp32
allows, or in low precision with what two reruns of the baseline show. What does not pass is trained again alone and
judged by `compare_strategies`, the code of `dstk compare`, whose verdict counts.
"""

import contextlib
import io
import pickle
import re
import shutil
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from compositions import BASE, Composition
from fresh_ranks import fresh_ranks

from toolkit.cli.main import main
from toolkit.config import load_recipe
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.errors import NonFiniteError, RecipeError, ToolkitError
from toolkit.launch.local_ranks import RankFailedError, in_one_line, preload, run_ranks
from toolkit.parity import Bounds, ParityResult, ParityRun
from toolkit.parity.bounds import extent_of
from toolkit.parity.run import compare_strategies as runner
from toolkit.parity.run.compare_strategies import StrategyRun
from toolkit.parity.run.train_in_memory import train_in_memory
from toolkit.parity.tolerance import FP32_UNIT, UNIT_ROUNDOFF, Tolerance, rounding_bound

SECONDS_A_FORK = 90
SECONDS_A_RUN = 20
"""Of a fork of ranks that train several compositions; a run that was trained alone has both."""
SCREEN_SEEDS = 1
"""Reruns of a low-precision baseline with other rounding, beside one with other micro-batches."""
RERUNS = 3
"""Like the default of `dstk compare`."""
FINE = ("same", "refused", "refused at start", "cannot tell")
"""Verdicts that are no failure. `cannot tell`: growth of rounding explains the difference."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a layout of a composition."""

    layout: str
    verdict: str
    """`same`, `cannot tell`, `differs`, `failed`, `refused` (by `dstk validate`), `refused at start` (by what is known
    only when the model is built, or of this machine) or `bad refusal` (more than a line, or another exit code)."""
    reason: str = ""
    """Of a refusal, an error, or the cause that `dstk compare` names."""
    loss: float | None = None
    norm: float | None = None
    weights: float | None = None
    """Largest relative differences."""


@dataclass(kw_only=True)
class _Trial:
    """A composition in work."""

    composition: Composition
    recipe: Recipe | None = None
    """As `dstk compare` trains it, without a strategy."""
    jobs: dict[str, StrategyRun] = field(default_factory=dict)
    """Layout -> run."""
    baselines: dict[str, StrategyRun] = field(default_factory=dict)
    """Layout -> its baseline."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    runs: dict[tuple[str, str], "ParityRun | ToolkitError | str"] = field(default_factory=dict)
    """(name of the strategy, name of the rerun) -> what was trained, or why not."""


def judge(compositions: Sequence[Composition], *, confirms: bool = True) -> list[list[Verdict]]:
    """The verdicts of each composition's layouts. Without `confirms`, what is beyond rounding counts as different."""
    trials = [_Trial(composition=composition) for composition in compositions]
    for trial in trials:
        _plan(trial)
    preload(*dict.fromkeys(trial.composition.family.replace("-", "_") for trial in trials))
    _train_together(trials)
    for trial in trials:
        for layout in trial.jobs:
            verdict = _screened(trial, layout)
            is_doubtful = verdict.verdict not in FINE
            trial.verdicts[layout] = compared(trial.composition, layout) if is_doubtful and confirms else verdict
    return [[trial.verdicts[layout] for layout in trial.composition.layouts] for trial in trials]


def _plan(trial: _Trial) -> None:
    """Decide what to train: the layouts that `dstk validate` accepts."""
    composition = trial.composition
    for layout in composition.layouts:
        refusal = validated(composition, layout)
        if refusal is not None:
            trial.verdicts[layout] = refusal
            continue
        try:
            recipe = trial.recipe or runner.for_comparison(composition.load(), steps=composition.steps, dropout=False)
            trial.recipe = recipe
            (job,) = runner.plan(recipe, [Strategy.parse(layout)], 1)
            baseline = Strategy.parse(layout).baseline(recipe.precision)
            (trial.baselines[layout],) = runner.plan(recipe, [Strategy.parse(baseline)], 1)
            trial.jobs[layout] = job
        except ToolkitError as error:
            trial.verdicts[layout] = _refused_at_start(layout, error)


def validated(composition: Composition, layout: str) -> Verdict | None:
    """How `dstk validate` refuses a layout; None where it accepts it."""
    try:
        ranks = str(Strategy.parse(layout).world_size(1))
    except ToolkitError:
        ranks = "1"
    arguments = ["validate", BASE, *composition.overrides_for(layout), "--layout", layout, "--world-size", ranks]
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            main(arguments)
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        except Exception:  # which `dstk` would print as a traceback
            code = 1
            traceback.print_exc()
    if code == 0:
        return None
    lines = stderr.getvalue().splitlines()
    is_good = code == 2 and lines and all(line.startswith("error: ") for line in lines) and not stdout.getvalue()
    if not is_good:
        return Verdict(layout=layout, verdict="bad refusal", reason=f"exit code {code}: {stderr.getvalue()[-2000:]}")
    return Verdict(layout=layout, verdict="refused", reason=_reason(composition, layout, int(ranks), lines[0]))


def _reason(composition: Composition, layout: str, ranks: int, line: str) -> str:
    """The rule that refuses: its reason without the values that were given."""
    try:
        load_recipe(BASE, composition.overrides_for(layout), world_size=ranks, layout=layout)
    except RecipeError as error:
        if error.refusals:
            return error.refusals[0].reason
    except ToolkitError:
        pass
    return _rule(line.removeprefix("error: "))


def _refused_at_start(layout: str, error: ToolkitError) -> Verdict:
    text = str(error)
    if "\n" in text.strip() and not isinstance(error, RecipeError):
        return Verdict(layout=layout, verdict="bad refusal", reason=text[-2000:])
    return Verdict(layout=layout, verdict="refused at start", reason=_rule(text))


def _rule(line: str) -> str:
    """What a line of an error says is not allowed, without the settings before it and the advice after it."""
    settings = r"(?:strategy \S+: )?(?:[\w.]+=.*?: )?"
    return re.sub(f"^{settings}", "", line.splitlines()[0]).split(". ")[0]


def _reruns(baseline: StrategyRun) -> list[StrategyRun]:
    """The baseline; in low precision with reruns that measure how far rounding goes."""
    if baseline.recipe.precision == "fp32":
        return [baseline]
    return [baseline, *runner.baseline_reruns(baseline, SCREEN_SEEDS)[1:]]


@dataclass(frozen=True, kw_only=True)
class _Task:
    """One run of a trial."""

    trial: _Trial
    key: tuple[str, str]
    run: StrategyRun


def _train_together(trials: Sequence[_Trial]) -> None:
    """Train all runs: those with the same number of ranks in the same forked ranks."""
    tasks: dict[int, list[_Task]] = defaultdict(list)
    for trial in trials:
        runs = {(base.name, run.name): run for base in trial.baselines.values() for run in _reruns(base)}
        runs |= {(layout, ""): job for layout, job in trial.jobs.items()}
        for key, run in runs.items():
            tasks[run.ranks].append(_Task(trial=trial, key=key, run=run))
    for ranks, together in tasks.items():
        for task, outcome in _train_in_turn(together, ranks):
            task.trial.runs[task.key] = outcome


def _train_in_turn(tasks: Sequence[_Task], ranks: int) -> Iterator[tuple[_Task, ParityRun | ToolkitError | str]]:
    """Train runs one after the other in the same ranks; in new ones after each that fails."""
    waiting = list(tasks)
    while waiting:
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        failure = ""
        try:
            timeout = SECONDS_A_FORK + SECONDS_A_RUN * len(waiting)
            runs = [task.run for task in waiting]
            run_ranks(partial(_train_each, runs, folder), ranks, timeout_seconds=timeout)
        except (RankFailedError, ToolkitError) as error:
            failure = in_one_line(error)
        done = sorted(folder.glob("*.pickle"), key=lambda path: int(path.stem))
        for path in done:
            yield waiting[int(path.stem)], pickle.loads(path.read_bytes())
        shutil.rmtree(folder)
        waiting = waiting[len(done) :]
        if failure and waiting:
            yield waiting.pop(0), failure


def _train_each(runs: Sequence[StrategyRun], folder: Path) -> None:
    """On every rank."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    for number, run in enumerate(runs):
        outcome: Any
        with fresh_ranks():
            try:
                outcome = train_in_memory(run.recipe, rounding_seed=run.rounding_seed)
            except ToolkitError as error:
                outcome = error
        if is_first:
            partial_file = folder / f"{number}.part"
            partial_file.write_bytes(pickle.dumps(outcome))
            partial_file.rename(folder / f"{number}.pickle")


def _screened(trial: _Trial, layout: str) -> Verdict:
    """The verdict as far as the runs in shared ranks show it."""
    base = trial.baselines[layout]
    own = trial.runs[layout, ""]
    baseline = [trial.runs[base.name, run.name] for run in _reruns(base)]
    errors = [run for run in (*baseline, own) if not isinstance(run, ParityRun)]
    if errors:
        error = errors[0]
        if isinstance(error, ToolkitError) and not isinstance(error, NonFiniteError):
            return _refused_at_start(layout, error)
        return Verdict(layout=layout, verdict="failed", reason=str(error))
    first, *reruns = [run for run in baseline if isinstance(run, ParityRun)]
    assert isinstance(own, ParityRun)
    result = ParityResult.of(own, first, _bounds(first, reruns, base.recipe))
    return _verdict(layout, "same" if result.passed else "differs", result, ", ".join(sorted(result.failed_checks)))


def _bounds(first: ParityRun, reruns: Sequence[ParityRun], recipe: Recipe) -> Bounds:
    """How far a run may differ at once: by rounding alone in fp32, or by what the reruns show."""
    if reruns:
        return Bounds.measured(first, reruns, unit=UNIT_ROUNDOFF[recipe.precision])
    least = rounding_bound(extent_of(first))
    curve = Tolerance(loss=(least.loss,), grad_norm=(least.grad_norm,), source="fp32 rounding")
    return Bounds(
        curve=curve,
        gradient=least.gradient,
        update=least.gradient,
        parameters=least.gradient,
        output=least.loss,
        unit=FP32_UNIT,
    )


def _verdict(layout: str, verdict: str, result: ParityResult, reason: str = "") -> Verdict:
    return Verdict(
        layout=layout,
        verdict=verdict,
        reason=reason,
        loss=result.curves.max_loss_difference,
        norm=result.curves.max_norm_difference,
        weights=result.parameters,
    )


def compared(composition: Composition, layout: str) -> Verdict:
    """The verdict of `dstk compare` on one layout."""
    try:
        recipe = runner.for_comparison(composition.load(), steps=composition.steps, dropout=False)
        jobs = runner.plan(recipe, [Strategy.parse(layout)], 1)
        baselines = runner.plan(recipe, [Strategy.parse(Strategy.parse(layout).baseline(recipe.precision))], 1)
        comparison = runner.compare_strategies(
            recipe,
            jobs,
            baselines,
            title="",
            rounding_seeds=RERUNS,
            timeout_seconds=SECONDS_A_FORK + SECONDS_A_RUN,
        )
    except RankFailedError as error:
        return Verdict(layout=layout, verdict="failed", reason=in_one_line(error))
    except ToolkitError as error:
        if "failed, so there is nothing to compare with" in str(error):
            return Verdict(layout=layout, verdict="failed", reason=str(error))
        return _refused_at_start(layout, error)
    (found,) = comparison.results
    if found.result is None:
        return Verdict(layout=layout, verdict="failed", reason=found.error)
    cause = "" if found.diagnosis is None else f"{found.diagnosis.cause}: {found.diagnosis.sentence}"
    return _verdict(layout, found.outcome, found.result, cause)
