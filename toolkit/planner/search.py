"""The search: every layout that training accepts, in the order of their predicted steps; the first ones that fit.

Times come first, because they are cheap; memory is estimated in their order, and only until enough layouts fit. What
the states alone make too large is left out before: 4 bytes a parameter stay on every rank of ZeRO-1 (weights and fp32
gradients take more), 2 with ZeRO-2, none with ZeRO-3.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from toolkit.config.layout import Batch, Layout
from toolkit.config.recipe import OptimizerName
from toolkit.errors import ModelError, ToolkitError
from toolkit.models.weights import routed_parameters
from toolkit.planner.layout_candidates import batches, layouts
from toolkit.planner.no_layout import no_layout
from toolkit.planner.request import Plan, PlanRequest
from toolkit.planner.step_time import StepTime

Goal = Literal["speed", "cost", "memory"]

LEAST_MOMENTS: Mapping[OptimizerName, float] = {
    "adamw": 8.0,
    "adam": 8.0,
    "adamw8bit": 2.0,
    "muon": 4.0,
    "adafactor": 0.0,
    "lion": 4.0,
    "sgd": 0.0,
}
"""Bytes a parameter of an optimizer's moments at least: of Muon's momentum, and of SGD without one."""
_MASTER = 4.0
"""Bytes a parameter of the fp32 copy of weights that ZeRO updates. Without ZeRO the weights may be in fp32."""
_WHOLE_STATES: Mapping[int, float] = {0: 8.0, 1: 4.0, 2: 2.0, 3: 0.0}
"""Bytes a parameter of weights and gradients that each rank of a ZeRO stage keeps whole, at least."""
_MOST_DOUBLINGS = 5
"""How often GPUs are doubled, or the sequence is halved, to find a request with a layout that fits."""
_FEWEST_ESTIMATES = 400
"""Layouts whose memory is estimated, at least, where the ones that need least are asked for."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search: the best plans in order, and how many candidates there were."""

    plans: list[Plan]
    candidates: int


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with a batch, and the step that is predicted."""

    layout: Layout
    batch: Batch
    step: StepTime


def candidates(request: PlanRequest) -> list[Candidate]:
    """All layouts with all micro-batches, predicted. Raises LayoutError or BatchError where there are none."""
    predicted = []
    for layout in layouts(request):
        for batch in batches(request, layout):
            predicted.append(Candidate(layout=layout, batch=batch, step=request.step(layout, batch)))
    if not predicted:
        raise no_layout(request)
    return predicted


def best_micro_batch(request: PlanRequest, layout: Layout, *, stand_ins: bool = False) -> Plan:
    """The fastest plan of one layout that fits; where none does, that of the smallest micro-batch.

    `stand_ins`: as in `PlanRequest.memory_request`. Raises BatchError where no micro-batch divides what a replica has.
    """
    plans: list[Plan] = []
    for batch in batches(request, layout):
        plans.append(request.estimated(layout, batch, request.step(layout, batch), stand_ins=stand_ins))
        if not plans[-1].fits:
            break
    if not plans:
        raise no_layout(request)
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.step.seconds, default=plans[0])


def search(request: PlanRequest, *, goal: Goal = "speed", top: int = 10) -> SearchResult:
    """The best `top` plans that fit, one of each layout: the best of its micro-batches."""
    if goal == "cost":
        return _cheapest(request, top)
    predicted = candidates(request)
    if goal == "memory":
        return SearchResult(plans=_smallest(request, predicted, top), candidates=len(predicted))
    return SearchResult(plans=_fastest(request, predicted, top), candidates=len(predicted))


def _fastest(request: PlanRequest, predicted: Sequence[Candidate], top: int) -> list[Plan]:
    """Return the `top` fastest plans that fit, one of each layout."""
    plans: list[Plan] = []
    chosen: set[Layout] = set()
    # The least micro-batch of each layout that does not fit: a larger one never needs less.
    too_large: dict[Layout, int] = {}
    errors: list[ModelError] = []
    for candidate in sorted(predicted, key=lambda candidate: candidate.step.seconds):
        layout = candidate.layout
        size = candidate.batch.micro_batch_size
        if layout in chosen or size >= too_large.get(layout, math.inf) or not _may_fit(request, layout):
            continue
        plan = _estimated(request, candidate, errors)
        if plan is None:
            too_large[layout] = 1
        elif not plan.fits:
            # Most layouts that do not fit do not with one sample either: then no other size is tried.
            fits_with_one = layout in too_large or _fits_with_one_sample(request, candidate, errors)
            too_large[layout] = size if fits_with_one else 1
        else:
            chosen.add(layout)
            plans.append(plan)
            if len(plans) == top:
                break
    if errors and not plans:
        raise errors[0]
    return plans


def _fits_with_one_sample(request: PlanRequest, candidate: Candidate, errors: list[ModelError]) -> bool:
    """Return whether a candidate's layout fits with the smallest micro-batch."""
    batch = replace(candidate.batch, micro_batch_size=1)
    plan = _estimated(request, replace(candidate, batch=batch), errors)
    return plan is not None and plan.fits


def _estimated(request: PlanRequest, candidate: Candidate, errors: list[ModelError]) -> Plan | None:
    """Return the candidate's plan; None, and one error more, where its activations cannot be recorded."""
    try:
        return request.estimated(candidate.layout, candidate.batch, candidate.step)
    except ModelError as error:
        errors.append(error)
        return None


def evaluated(request: PlanRequest, *, goal: Goal = "speed") -> SearchResult:
    """Every candidate that the states alone do not make too large, with its memory; the fastest first.

    A thousand take a third of a second.
    """
    plans: list[Plan] = []
    errors: list[ModelError] = []
    count = 0
    requests = _halves(request) if goal == "cost" else [request]
    for on_gpus in requests:
        predicted = candidates(on_gpus)
        count += len(predicted)
        for candidate in predicted:
            if not _may_fit(on_gpus, candidate.layout):
                continue
            plan = _estimated(on_gpus, candidate, errors)
            if plan is not None:
                plans.append(plan)
    if errors and not plans:
        raise errors[0]
    plans.sort(key=lambda plan: -plan.step.tokens_per_second_per_gpu)
    return SearchResult(plans=plans, candidates=count)


def frontier(plans: Iterable[Plan]) -> list[Plan]:
    """Return the plans that fit and that no other beats in both throughput and memory; the fastest first."""
    best: list[Plan] = []
    fitting = [plan for plan in plans if plan.fits]
    # Among plans of one speed the smallest comes first: sorting is stable.
    fitting.sort(key=lambda plan: plan.memory.total)
    fitting.sort(key=lambda plan: plan.step.tokens_per_second_per_gpu, reverse=True)
    for plan in fitting:
        if not best or plan.memory.total < best[-1].memory.total:
            best.append(plan)
    return best


def _halves(request: PlanRequest) -> Iterator[PlanRequest]:
    """The request on all, a half, a quarter, … of its GPUs, where layouts are: none for all of them is an error."""
    gpus = request.gpus
    while gpus >= 1:
        on_gpus = replace(request, gpus=gpus)
        if gpus == request.gpus or next(layouts(on_gpus), None) is not None:
            yield on_gpus
        if gpus % 2:
            break
        gpus //= 2


def _cheapest(request: PlanRequest, top: int) -> SearchResult:
    """The plans with the fewest GPU-seconds a token: fewer GPUs take longer, and communicate less."""
    results = [search(on_gpus, top=top) for on_gpus in _halves(request)]
    plans = [plan for result in results for plan in result.plans]
    plans.sort(key=lambda plan: -plan.step.tokens_per_second_per_gpu)
    return SearchResult(plans=plans[:top], candidates=sum(result.candidates for result in results))


def _smallest(request: PlanRequest, predicted: list[Candidate], top: int) -> list[Plan]:
    """The plans that need least memory: each layout's smallest micro-batch, in the order of what they keep at least."""
    smallest: dict[Layout, Candidate] = {}
    for candidate in predicted:
        before = smallest.setdefault(candidate.layout, candidate)
        if candidate.batch.micro_batch_size < before.batch.micro_batch_size:
            smallest[candidate.layout] = candidate
    in_order = sorted(smallest.values(), key=lambda candidate: least_bytes(request, candidate.layout))
    plans: list[Plan] = []
    errors: list[ModelError] = []
    for candidate in in_order[: max(top, _FEWEST_ESTIMATES)]:
        plan = _estimated(request, candidate, errors)
        if plan is not None:
            plans.append(plan)
    if errors and not plans:
        raise errors[0]
    return sorted((plan for plan in plans if plan.fits), key=lambda plan: plan.memory.total)[:top]


def least_bytes(request: PlanRequest, layout: Layout) -> float:
    """Return a lower bound of a rank's model states: 16-bit weights, and shares of gradients, masters and moments.

    It is 0 for other engines and frameworks, which keep other states.
    """
    engine = "deepspeed" if request.base is None else request.base.train.engine
    if request.execution.framework != "toolkit" or engine != "deepspeed":
        return 0.0
    model_shards = layout.tp * layout.pp
    parameters = request.model.parameters.numel / model_shards
    routed = request.model.shape.layers * routed_parameters(request.model.shape) / model_shards
    held = parameters - routed * (1 - 1 / layout.ep)
    if request.trained is not None:  # of what does not train a rank has weights alone, and maybe in 4 bits
        return held / 2 if layout.zero_stage < 3 else 0.0
    whole_bytes = held * _WHOLE_STATES[layout.zero_stage]
    if layout.offload_optimizer != "none":
        return whole_bytes
    sharded_states = LEAST_MOMENTS[request.optimizer]
    if layout.zero_stage > 0:
        sharded_states += _MASTER
    return whole_bytes + parameters * sharded_states / layout.zero_shards


def _may_fit(request: PlanRequest, layout: Layout) -> bool:
    """Return whether the states alone do not make a layout too large."""
    return least_bytes(request, layout) <= request.gpu.memory_bytes


def nearest_that_fits(request: PlanRequest) -> list[str]:
    """Sentences: which change of GPUs or of the sequence would make a layout fit."""
    sentences = []
    for power in range(1, _MOST_DOUBLINGS + 1):
        gpus = request.gpus * 2**power
        plan = _first_that_fits(replace(request, gpus=gpus))
        if plan is not None:
            sentences.append(f"{gpus} GPUs: {plan.strategy}")
            break
    for power in range(1, _MOST_DOUBLINGS + 1):
        seq_len, remainder = divmod(request.seq_len, 2**power)
        if remainder:
            break
        plan = _first_that_fits(replace(request, setup=replace(request.setup, seq_len=seq_len)))
        if plan is not None:
            sentences.append(f"--seq {seq_len}: {plan.strategy}")
            break
    return sentences


def _first_that_fits(request: PlanRequest) -> Plan | None:
    """Return the fastest plan of a request; None where no layout exists or fits."""
    try:
        plans = search(request, top=1).plans
    except ToolkitError:
        return None
    return plans[0] if plans else None
