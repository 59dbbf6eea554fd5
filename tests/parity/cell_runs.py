"""Run cells one after the other in the same forked ranks, and compare each with its baseline."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol, runtime_checkable

import torch.distributed as dist
from fresh_ranks import fresh_ranks
from matrix import GLOBAL_BATCH, ROUNDING_SEEDS, STEPS, Text
from mixtures import LEAST_MARGIN, Margins, MixtureMathematics

from toolkit.config.recipe import Precision, Recipe
from toolkit.launch.local_ranks import run_jobs
from toolkit.parity import Bounds, ParityResult, ParityRun
from toolkit.parity.run.train_in_memory import train_in_memory
from toolkit.parity.tolerance import UNIT_ROUNDOFF, relative

MIXTURE_SEEDS = range(1, 21)
"""Tried in order (mixtures.py)."""
CELLS_A_FORK = 12
"""Bounded, because process groups of a cell keep some of their sockets until the process ends."""
SECONDS_A_STEP = 10
CORES = 4
"""Ranks at a time. Ranks wait for each other, so two cores have time for four."""


class Computed(Protocol):
    """Everything that decides what is computed: cells for which it is equal share a baseline. Hashable."""

    @property
    def precision(self) -> Precision: ...

    def recipe(self, text: Text, *, steps: int) -> Recipe:
        """Return the recipe of the baseline."""


@runtime_checkable
class TrainedCell(Protocol):
    """One way to train a model. Its string is its name."""

    @property
    def strategy(self) -> str: ...

    @property
    def family(self) -> str: ...

    @property
    def precision(self) -> Precision: ...

    @property
    def ranks(self) -> int: ...

    @property
    def mathematics(self) -> Computed: ...

    @property
    def has_replicas(self) -> bool:
        """Whether several ranks have replicas of a parameter."""

    def recipe(self, text: Text, *, steps: int) -> Recipe:
        """Return the recipe of the cell."""


@dataclass(frozen=True, kw_only=True)
class CellRun:
    """A cell to train, and for how many steps."""

    cell: TrainedCell
    steps: int

    @property
    def baseline(self) -> tuple[Computed, int]:
        """Key of its baseline: runs with the same key share one."""
        return self.cell.mathematics, self.steps


def run_of(cell: TrainedCell) -> CellRun:
    """How a cell is trained by pytest."""
    return CellRun(cell=cell, steps=getattr(cell, "steps", STEPS))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a run. Differences are relative to the baseline."""

    loss: float = float("inf")
    norm: float = float("inf")
    parameters: float = float("inf")
    gradient: float = float("inf")
    """The largest difference of one parameter's first gradient, over the norm of the whole gradient."""
    failed_checks: tuple[str, ...] = ()
    failure: str = ""
    """Full description of what is wrong; empty if the cell passed."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The baseline of some cells, and how far they may differ from it."""

    run: ParityRun
    bounds: Bounds
    seed: int
    """With which it and the cells are trained."""
    clip: float
    """The norm at which gradients are clipped, which has to be below that of each step; 0 for none."""

    def compare(self, cell: TrainedCell, trained: ParityRun) -> Outcome:
        """Compare one run of a cell with the baseline."""
        result = ParityResult.of(trained, self.run, self.bounds)
        wrong = [] if result.passed else [str(result)]
        if bool(trained.replicas_compared) != cell.has_replicas:
            wrong.append(f"{trained.replicas_compared} replicas of parameters were compared")
        if self.clip and min(self.run.curve.grad_norms) <= self.clip:
            wrong.append(f"a step of the baseline is not clipped: {min(self.run.curve.grad_norms)}")
        if len(trained.batches) != len(self.run.batches):
            wrong.append(
                f"samples of {len(trained.batches)} steps are known, and {len(self.run.batches)} of the baseline"
            )
        if not self._has_validation_loss(trained.eval_loss):
            wrong.append(f"the validation loss is {trained.eval_loss}, and {self.run.eval_loss} of the baseline")
        return Outcome(
            loss=result.curves.max_loss_difference,
            norm=result.curves.max_norm_difference,
            parameters=result.parameters,
            gradient=result.gradients[0].difference,
            failed_checks=tuple(sorted(result.failed_checks)),
            failure="\n".join(wrong),
        )

    def _has_validation_loss(self, value: float | None) -> bool:
        expected = self.run.eval_loss
        if expected is None or value is None:
            return expected is value
        bound, _ = self.bounds.curve.at(-1)
        return relative(value, expected) <= bound


class Baselines:
    """Baselines, each trained once: a plain process in fp32; in bf16 one rank, with reruns that round differently."""

    def __init__(self, text: Text, *, cores: int) -> None:
        self._text, self._cores = text, cores
        self._known: dict[tuple[Computed, int], Baseline] = {}

    def of(self, run: CellRun) -> Baseline:
        """Return the baseline of a run. Call `train` first."""
        return self._known[run.baseline]

    def train(self, runs: Iterable[CellRun]) -> None:
        """Train the missing baselines of these runs, several in each fork."""
        missing = [key for key in dict.fromkeys(run.baseline for run in runs) if key not in self._known]
        parts = [missing[start : start + CELLS_A_FORK // 2] for start in range(0, len(missing), CELLS_A_FORK // 2)]
        calls = [(partial(_train_baselines, part, self._text), 1) for part in parts]
        timeout = _timeout_seconds(steps for _, steps in missing)
        for number, outcome, _ in run_jobs(calls, cores=self._cores, timeout_seconds=timeout):
            if not isinstance(outcome, list):
                raise outcome
            self._known.update(zip(parts[number], outcome[0], strict=True))


def _timeout_seconds(steps: Iterable[int]) -> float:
    """Return the time limit of a fork whose cells train so many steps each."""
    return SECONDS_A_STEP * max(steps, default=STEPS) * CELLS_A_FORK


def _train_baselines(keys: Sequence[tuple[Computed, int]], text: Text) -> list[Baseline]:
    return [_baseline(mathematics, steps, text) for mathematics, steps in keys]


def _baseline(mathematics: Computed, steps: int, text: Text) -> Baseline:
    recipe = mathematics.recipe(text, steps=steps)
    if isinstance(mathematics, MixtureMathematics) and mathematics.needs_margins(steps):
        return _baseline_with_margins(recipe)
    trained, seed = _train(recipe), recipe.train.seed
    if mathematics.precision == "fp32":
        return Baseline(run=trained, bounds=Bounds.fixed(), seed=seed, clip=recipe.train.grad_clip)
    split = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"micro_batch_size": GLOBAL_BATCH // 4})})
    reruns = [_train(split), *(_train(recipe, rounding_seed=seed) for seed in ROUNDING_SEEDS)]
    bounds = Bounds.measured(trained, reruns, unit=UNIT_ROUNDOFF[mathematics.precision])
    return Baseline(run=trained, bounds=bounds, seed=seed, clip=recipe.train.grad_clip)


def _baseline_with_margins(recipe: Recipe) -> Baseline:
    """With the first seed with which no choice is close."""
    for seed in MIXTURE_SEEDS:
        with Margins() as margins:
            trained = _train(with_seed(recipe, seed))
        if margins.smallest >= LEAST_MARGIN:
            return Baseline(run=trained, bounds=Bounds.fixed(), seed=seed, clip=recipe.train.grad_clip)
    raise AssertionError(f"{recipe.model.name_or_path}: close choices with each of {MIXTURE_SEEDS}")


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """The recipe with other weights and samples."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": seed})})


def _train(recipe: Recipe, rounding_seed: int | None = None) -> ParityRun:
    with fresh_ranks():
        return train_in_memory(recipe, rounding_seed=rounding_seed)


def run_cells(
    runs: Sequence[CellRun], text: Text, baselines: Baselines, *, cores: int
) -> Iterator[tuple[CellRun, Outcome, float]]:
    """Train all runs; yield (run, outcome, seconds) as forks end."""
    baselines.train(runs)
    parts = [list(part) for part in _forks(runs)]
    calls = [
        (partial(_train_cells, part, text, [baselines.of(run) for run in part]), part[0].cell.ranks) for part in parts
    ]
    timeout = _timeout_seconds(run.steps for run in runs)
    for number, outcome, seconds in run_jobs(calls, cores=cores, timeout_seconds=timeout):
        part = parts[number]
        if isinstance(outcome, list):
            yield from zip(part, outcome[0], [seconds / len(part)] * len(part), strict=True)
        elif len(part) == 1:
            yield part[0], Outcome(failed_checks=("error",), failure=str(outcome)), seconds
        else:
            # One of them failed and ended the fork.
            for run in part:
                yield from run_cells([run], text, baselines, cores=cores)


def _forks(runs: Sequence[CellRun]) -> Iterator[list[CellRun]]:
    """Group runs with the same number of ranks, the largest first, so that no core is idle at the end."""
    for _, group in groupby(sorted(runs, key=lambda run: -run.cell.ranks), key=lambda run: run.cell.ranks):
        alike = list(group)
        for start in range(0, len(alike), CELLS_A_FORK):
            yield alike[start : start + CELLS_A_FORK]


def _train_cells(runs: Sequence[CellRun], text: Text, baselines: Sequence[Baseline]) -> list[Outcome]:
    """On every rank."""
    outcomes = []
    for run, baseline in zip(runs, baselines, strict=True):
        with fresh_ranks():
            trained = train_in_memory(with_seed(run.cell.recipe(text, steps=run.steps), baseline.seed))
        if dist.get_rank() == 0:
            outcomes.append(baseline.compare(run.cell, trained))
    return outcomes
