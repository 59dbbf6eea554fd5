"""Runs of cells: many of them one after the other in the same forked ranks, each judged against its baseline."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch.distributed as dist
from fresh_ranks import fresh_ranks
from matrix import ACTIVE_CLIP, GLOBAL_BATCH, Cell, Mathematics, Text

from toolkit.parity import Bounds, Trial, Verdict
from toolkit.parity.tolerance import UNIT_ROUNDOFF
from toolkit.recipe import Recipe
from toolkit.train.local_ranks import run_jobs
from toolkit.train.trial import run_trial

ROUNDING_SEEDS = (1, 2, 3)
CELLS_A_FORK = 12
"""Groups that a cell makes keep some of their sockets until the process ends."""
SECONDS_A_CELL = 60


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """What is to be trained: a cell and for how many steps."""

    cell: Cell
    steps: int

    @property
    def baseline(self) -> tuple[Mathematics, int]:
        """What it is held against: runs with the same share it."""
        return self.cell.mathematics, self.steps


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came out of a run. Differences are relative to the baseline."""

    loss: float = float("inf")
    norm: float = float("inf")
    parameters: float = float("inf")
    gradient: float = float("inf")
    """The largest difference of one parameter's first gradient, over the norm of the whole gradient."""
    alarms: tuple[str, ...] = ()
    failure: str = ""
    """All that is known where something is wrong; empty where the cell passed."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The oracle of some cells and what they may differ by."""

    trial: Trial
    bounds: Bounds

    def judge(self, cell: Cell, trial: Trial) -> Outcome:
        """One run of a cell against it."""
        verdict = Verdict.of(trial, self.trial, self.bounds)
        wrong = [] if verdict.passed else [str(verdict)]
        if bool(trial.copies) != cell.has_copies:
            wrong.append(f"{trial.copies} copies of parameters were compared")
        if cell.clipped and min(self.trial.curve.grad_norms) <= ACTIVE_CLIP:
            wrong.append(f"a step of the baseline is not clipped: {min(self.trial.curve.grad_norms)}")
        return Outcome(
            loss=verdict.report.max_loss_difference,
            norm=verdict.report.max_norm_difference,
            parameters=verdict.parameters,
            gradient=verdict.rows[0].difference,
            alarms=tuple(sorted(verdict.alarms)),
            failure="\n".join(wrong),
        )


class Baselines:
    """Trained once each: a plain process in fp32; in bf16 one rank of ZeRO-1, with reruns that round differently."""

    def __init__(self, text: Text, *, cores: int) -> None:
        self._text, self._cores = text, cores
        self._known: dict[tuple[Mathematics, int], Baseline] = {}

    def of(self, run: CellRun) -> Baseline:
        """The one for a run. Call `train` first."""
        return self._known[run.baseline]

    def train(self, runs: Iterable[CellRun]) -> None:
        """All that these runs need and that are not known, some to a fork."""
        missing = [key for key in dict.fromkeys(run.baseline for run in runs) if key not in self._known]
        parts = [missing[start : start + CELLS_A_FORK // 2] for start in range(0, len(missing), CELLS_A_FORK // 2)]
        calls = [(partial(_train_baselines, part, self._text), 1) for part in parts]
        timeout = SECONDS_A_CELL * CELLS_A_FORK
        for number, outcome, _ in run_jobs(calls, cores=self._cores, timeout_seconds=timeout):
            if not isinstance(outcome, list):
                raise outcome
            self._known.update(zip(parts[number], outcome[0], strict=True))


def _train_baselines(keys: Sequence[tuple[Mathematics, int]], text: Text) -> list[Baseline]:
    return [_baseline(mathematics, steps, text) for mathematics, steps in keys]


def _baseline(mathematics: Mathematics, steps: int, text: Text) -> Baseline:
    recipe = mathematics.recipe(text, steps=steps)
    trial = _train(recipe)
    if mathematics.precision == "fp32":
        return Baseline(trial=trial, bounds=Bounds.fixed())
    split = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"micro_size": GLOBAL_BATCH // 4})})
    reruns = [_train(split), *(_train(recipe, rounding_seed=seed) for seed in ROUNDING_SEEDS)]
    return Baseline(trial=trial, bounds=Bounds.measured(trial, reruns, unit=UNIT_ROUNDOFF[mathematics.precision]))


def _train(recipe: Recipe, rounding_seed: int | None = None) -> Trial:
    with fresh_ranks():
        return run_trial(recipe, rounding_seed=rounding_seed)


def run_cells(
    runs: Sequence[CellRun], text: Text, baselines: Baselines, *, cores: int
) -> Iterator[tuple[CellRun, Outcome, float]]:
    """Train all of them; yields (run, outcome, seconds) as forks end."""
    baselines.train(runs)
    parts = [list(part) for part in _forks(runs)]
    calls = [
        (partial(_train_cells, part, text, [baselines.of(run) for run in part]), part[0].cell.ranks) for part in parts
    ]
    for number, outcome, seconds in run_jobs(calls, cores=cores, timeout_seconds=SECONDS_A_CELL * CELLS_A_FORK):
        part = parts[number]
        if isinstance(outcome, list):
            yield from zip(part, outcome[0], [seconds / len(part)] * len(part), strict=True)
        elif len(part) == 1:
            yield part[0], Outcome(alarms=("error",), failure=str(outcome)), seconds
        else:
            # One of them failed and took the others along.
            for run in part:
                yield from run_cells([run], text, baselines, cores=cores)


def _forks(runs: Sequence[CellRun]) -> Iterator[list[CellRun]]:
    """What runs in the same ranks: as many of them; the largest first, so that no core waits for them at the end."""
    for _, group in groupby(sorted(runs, key=lambda run: -run.cell.ranks), key=lambda run: run.cell.ranks):
        alike = list(group)
        for start in range(0, len(alike), CELLS_A_FORK):
            yield alike[start : start + CELLS_A_FORK]


def _train_cells(runs: Sequence[CellRun], text: Text, baselines: Sequence[Baseline]) -> list[Outcome]:
    """On every rank."""
    outcomes = []
    for run, baseline in zip(runs, baselines, strict=True):
        with fresh_ranks():
            trial = run_trial(run.cell.recipe(text, steps=run.steps))
        if dist.get_rank() == 0:
            outcomes.append(baseline.judge(run.cell, trial))
    return outcomes
