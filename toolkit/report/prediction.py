"""A run beside its plan: the step and the memory that are predicted for it, and what it took."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeVar

from toolkit.config.layout import Layout
from toolkit.config.recipe import Recipe
from toolkit.errors import ToolkitError
from toolkit.planner.calibration.file import stored
from toolkit.planner.cluster import Cluster
from toolkit.planner.request import predict
from toolkit.planner.run_memory import estimate_for_run
from toolkit.planner.step_time import StepTime
from toolkit.report.recorded_run import RecordedRun
from toolkit.report.step_bars import StepBar, digits, step_bars
from toolkit.report.trace_terms import ProfiledSteps

T = TypeVar("T")
TRACED: Mapping[str, tuple[str, ...]] = {
    "compute": ("compute",),
    "recompute": (),
    "reference": (),
    "host": ("idle",),
    "tensor": ("tensor", "sequence"),
    "context": ("context",),
    "expert": ("expert",),
    "pipeline": ("pipeline",),
    "bubble": (),
    "data": ("data", "world"),
    "optimizer": ("optimizer",),
    "offload": ("copies",),
}
"""Terms of the time model, and those of a trace that are the same time; empty where a trace does not tell it.

A trace does not tell recomputation from the rest of the backward pass, nor waiting for the host from waiting for other
stages: both are with the first of the two.
"""


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term of the predicted step."""

    name: str
    seconds: float
    share: float
    """Share of the predicted step that the term takes."""
    profiled: float | None
    """Seconds of the term in the steps that train.profile traced; None where none was traced."""
    factor: float | None
    """Factor by which the term would be longer if it alone were off; None where it is shorter than what is off."""


@dataclass(frozen=True, kw_only=True)
class PredictedRun:
    """The predicted step and memory of a run beside the measured ones; None in a field that is not known."""

    label: str
    predicted: StepTime | None
    constants: str
    """Source of the constants of the prediction."""
    reason: str
    """Reason why no step is predicted; empty where one is."""
    seconds: float | None
    """The median of the run's steps."""
    steps: int
    """Steps that it is the median of."""
    traced: ProfiledSteps | None
    """The steps of train.profile; None where there are none."""
    estimated_bytes: int | None
    peak_bytes: int | None

    @property
    def ratio(self) -> float | None:
        """The step that was measured over the predicted one."""
        return None if self.seconds is None or self.predicted is None else self.seconds / self.predicted.seconds

    @property
    def memory_ratio(self) -> float | None:
        """The peak that was measured over the estimated one."""
        return self.peak_bytes / self.estimated_bytes if self.peak_bytes and self.estimated_bytes else None

    @property
    def terms(self) -> list[Term]:
        """The predicted terms, the longest first, beside those of a traced step."""
        if self.predicted is None or self.seconds is None:
            return []
        whole = self.predicted.seconds
        off = self.seconds - whole
        terms = [
            Term(
                name=name,
                seconds=term,
                share=term / whole,
                profiled=self._profiled(name),
                factor=(term + off) / term if term and term + off > 0 else None,
            )
            for name, term in self.predicted.terms.items()
            if term > 0 or self._profiled(name)
        ]
        return sorted(terms, key=lambda term: -term.seconds)

    def _profiled(self, name: str) -> float | None:
        """Return the seconds of a predicted term in the traced step; None where a trace does not tell it.

        See `TRACED`.
        """
        if self.traced is None or not TRACED[name]:
            return None
        step = self.traced.step()
        return sum(step[part] for part in TRACED[name])

    @property
    def bars(self) -> list[StepBar]:
        """Bars of the predicted and the measured step on one scale; empty where one of them is not known."""
        if self.predicted is None or self.seconds is None:
            return []
        return step_bars([("predicted", self.predicted.terms), ("measured", {"measured": self.seconds})])

    @property
    def traced_bars(self) -> list[StepBar]:
        """The traced step on one scale: the mean of all ranks, and the rank that computes longest."""
        if self.traced is None:
            return []
        busiest = self.traced.busiest
        return step_bars([("all ranks", self.traced.step()), (f"rank {busiest}", self.traced.step(busiest))])


def compare_with_plan(run: RecordedRun) -> PredictedRun:
    """Predict a run that is over or still runs. Never raises: a page about a run does not depend on a model of it."""
    timed = [step.seconds for step in run.timed_steps if step.seconds and not step.skipped]
    predicted = None
    constants = ""
    reason = ""
    prediction = _unless_it_fails(partial(_predicted, run))
    if isinstance(prediction, str):
        reason = prediction
    else:
        predicted, constants = prediction
    return PredictedRun(
        label=run.label,
        predicted=predicted,
        constants=constants,
        reason=reason,
        seconds=median(timed) if timed else None,
        steps=len(timed),
        traced=ProfiledSteps.read(run.folder),
        estimated_bytes=estimated_bytes(run),
        peak_bytes=max((step.memory_bytes for step in run.log.steps if step.memory_bytes), default=None),
    )


def estimated_bytes(run: RecordedRun) -> int | None:
    """The estimated peak of PyTorch's allocations on rank 0, which the metrics record; None if unknown."""
    if run.recipe is None or run.layout is None or run.shape is None or run.gpu is None:
        return None
    estimate = _unless_it_fails(partial(_first_rank_bytes, run.recipe, run.layout))
    return None if isinstance(estimate, str) else estimate


def _first_rank_bytes(recipe: Recipe, layout: Layout) -> int:
    return estimate_for_run(recipe, layout, recipe.resolve_batch(layout))[0].allocated


def _unless_it_fails(model: Callable[[], T]) -> T | str:
    """Return what a model of time or memory gives; the reason where it does not cover the run, or fails."""
    try:
        return model()
    except ToolkitError as error:
        return error.problems[0].rstrip(".")
    except Exception as error:
        return f"the model fails: {error!r}"


def cluster_of(run: RecordedRun) -> tuple[Cluster, str] | None:
    """Return the cluster that ran it, and the source of its constants; None where nothing is known.

    `dstk calibrate` measured them, if this machine has what ran it; or they are the reference system's of the GPU.
    """
    measured = stored()
    if measured is not None and run.layout is not None and measured.hardware == run.device:
        return measured.of_ranks(run.layout.world_size), f"measured by dstk calibrate, {measured.date}"
    return None if run.gpu is None else (Cluster.of(run.gpu), f"data sheets of {run.gpu.name} and its reference system")


def _predicted(run: RecordedRun) -> tuple[StepTime, str] | str:
    """Return the step and the source of its constants; a reason where the time model does not cover the run."""
    if run.recipe is None:
        return "its recipe is not known"
    if run.layout is None:
        return "the number of its ranks is not known"
    if run.recipe.train.engine != "deepspeed":
        return f"the time model knows DeepSpeed's engines, not {run.recipe.train.engine}"
    known = cluster_of(run)
    if known is None:
        return (
            f"{run.device or 'its device'} is not in the catalogue of GPUs, and dstk calibrate did not measure it here"
        )
    cluster, constants = known
    return predict(run.recipe, run.layout, run.recipe.resolve_batch(run.layout), cluster), constants


def state_difference(comparisons: Sequence[PredictedRun]) -> str:
    """A sentence about a single run; nothing about several."""
    if len(comparisons) != 1 or comparisons[0].ratio is None:
        return ""
    percent = 100 * (comparisons[0].ratio - 1)
    if abs(percent) < 1:
        return "A step took what was predicted, within 1 %."
    if percent > 100:
        return f"A step took {digits(comparisons[0].ratio)} times as long as predicted."
    return f"A step took {abs(percent):.0f} % {'longer' if percent > 0 else 'less'} than predicted."
