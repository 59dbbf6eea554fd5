"""The search: every layout that training accepts, in the order of their predicted steps; the first ones that fit.

Times come first, because they are cheap; memory is estimated in their order, and only until enough layouts fit. What
the states alone make too large is left out before: 4 bytes a parameter stay on every rank of ZeRO-1 (weights and fp32
gradients take more), 2 with ZeRO-2, none with ZeRO-3.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from toolkit.config.layout import Batch, Layout, OffloadDevice, Recompute
from toolkit.config.pipeline_schedules import SPLITTING, Kind
from toolkit.config.recipe import OptimizerName
from toolkit.errors import BatchError, LayoutError, ModelError, ToolkitError
from toolkit.models.support import expert_parallel_sizes, misfits, tensor_parallel_sizes
from toolkit.models.weights import routed_parameters
from toolkit.planner.request import Plan, PlanRequest
from toolkit.planner.step_time import StepTime
from toolkit.units import divisors

Goal = Literal["speed", "cost", "memory"]

LARGEST_MICRO_BATCH = 64
"""Samples of a micro-batch that are tried, at most."""
LEAST_POSITIONS = 4096
"""Positions of a sequence that a context-parallel rank has at least in the layouts that are tried."""
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
_FEWEST_ESTIMATES = 400
"""Layouts whose memory is estimated, at least, where the ones that need least are asked for."""


class _Offload(NamedTuple):
    """Devices that keep the optimizer states and the parameters."""

    optimizer: OffloadDevice
    params: OffloadDevice


_OFFLOADS = (_Offload("none", "none"), _Offload("cpu", "none"), _Offload("cpu", "cpu"))


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


@dataclass(frozen=True, kw_only=True)
class _RankSplit:
    """What the ranks of a layout share out, besides the samples of its replicas."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ulysses: int = 1
    ep: int = 1


def layouts(request: PlanRequest) -> Iterator[Layout]:
    """Every layout of the request's GPUs that training accepts and whose replicas share the batch equally."""
    fixed = {name: value for name, value in request.fixed.items() if name != "micro_batch_size"}
    for split in _rank_splits(request):
        for layout in _variants(request, split):
            if all(getattr(layout, name) == value for name, value in fixed.items()):
                yield layout


def _rank_splits(request: PlanRequest) -> Iterator[_RankSplit]:
    """Every split of the request's GPUs whose replicas share the batch equally; those with Ulysses come last."""
    shape = request.model.shape
    gpus = request.gpus
    for model in _model_splits(request, gpus):
        dp = gpus // (model.tp * model.pp * model.cp)
        if request.global_batch_size % dp:
            continue
        for ep in expert_parallel_sizes(shape, tp=model.tp):
            if dp * model.cp % ep == 0:
                yield replace(model, ep=ep)
    for ulysses in divisors(min(gpus, shape.heads)):
        is_whole = gpus % ulysses == 0 and not list(misfits(shape, ulysses=ulysses))
        if ulysses > 1 and is_whole and request.global_batch_size % (gpus // ulysses) == 0:
            yield _RankSplit(ulysses=ulysses)


def _model_splits(request: PlanRequest, gpus: int) -> Iterator[_RankSplit]:
    """Every combination of tensor-parallel ranks, stages and context-parallel ranks that so many GPUs allow."""
    shape = request.model.shape
    for tp in tensor_parallel_sizes(shape):
        if tp > request.cluster.gpus_per_node or gpus % tp:
            continue
        for pp in divisors(gpus // tp):
            if pp > shape.layers:
                continue
            for cp in context_parallel_sizes(request, gpus // tp // pp):
                yield _RankSplit(tp=tp, pp=pp, cp=cp)


def context_parallel_sizes(request: PlanRequest, ranks: int) -> list[int]:
    """Return every cp that so many ranks allow: 1, those with LEAST_POSITIONS of a sequence, or the fixed one.

    Where a rank has fewer, attention is a small part of a step, and replicas or tensor-parallel ranks do more with it.
    """
    fixed = request.fixed.get("cp")
    if fixed is not None:
        return [fixed] if ranks % fixed == 0 else []
    most = max(1, request.seq_len // LEAST_POSITIONS)
    return [cp for cp in divisors(ranks, most) if cp == 1 or request.seq_len % (2 * cp) == 0]


def _variants(request: PlanRequest, split: _RankSplit) -> Iterator[Layout]:
    """Yield the layouts of a split: stages of ZeRO, offload, sequence parallelism, recomputation and schedules."""
    cp_ulysses = request.fixed.get("cp_ulysses", 1)
    experts = request.fixed.get("experts", "whole")
    if split.cp % cp_ulysses or (experts == "inner" and (split.tp == 1 or split.ep > 1)):
        return
    for stage in _zero_stages(request, pp=split.pp):
        for offload in _offloads(request, stage=stage, pp=split.pp):
            for sequence_parallel in (True, False) if split.tp > 1 else (False,):
                without_recompute = Layout(
                    dp=request.gpus // (split.tp * split.pp * split.cp * split.ulysses),
                    ep=split.ep,
                    cp=split.cp,
                    cp_ulysses=cp_ulysses,
                    tp=split.tp,
                    pp=split.pp,
                    ulysses=split.ulysses,
                    zero_stage=stage,
                    sequence_parallel=sequence_parallel,
                    experts=experts,
                    offload_optimizer=offload.optimizer,
                    offload_params=offload.params,
                    offload_activations=request.fixed.get("offload_activations", False),
                    tiled_mlp=request.fixed.get("tiled_mlp", False),
                )
                if request.refusal(without_recompute) is not None:
                    continue
                for recompute in _recomputations(request):
                    layout = replace(without_recompute, recompute=recompute)
                    if recompute != "selective" or not request.impossible(layout):
                        yield from scheduled(request, layout)


def _recomputations(request: PlanRequest) -> tuple[Recompute, ...]:
    """Return what is tried of recomputation: that of attention alone where attention keeps its scores."""
    if "recompute" in request.fixed:
        return (request.fixed["recompute"],)
    if request.kernel == "eager":
        return ("none", "selective", "full")
    return ("none", "full")


def _zero_stages(request: PlanRequest, *, pp: int) -> tuple[int, ...]:
    """Return the stages of ZeRO that are tried. ZeRO-0 keeps fp32 weights: never better."""
    if request.fixed.get("zero_stage") == 0:
        return (0,)
    return (1,) if pp > 1 else (1, 2, 3)


def _offloads(request: PlanRequest, *, stage: int, pp: int) -> Iterator[_Offload]:
    """Yield the devices of optimizer states and of parameters that are tried with a ZeRO stage."""
    least_stage = 1 if request.fixed.get("zero_stage") == 1 else 2
    fixes_both = {"offload_optimizer", "offload_params"} <= request.fixed.keys()
    for offload in _offloads_of_any_stage(request):
        if offload.optimizer == "cpu" and (pp > 1 or stage < least_stage):
            continue
        if offload.params == "cpu" and stage < 3:
            continue
        # Where parameters are sharded, a strategy offloads both.
        if stage == 3 and offload.optimizer != offload.params and not fixes_both:
            continue
        yield offload


def _offloads_of_any_stage(request: PlanRequest) -> tuple[_Offload, ...]:
    """Return the devices that the request allows."""
    optimizer = request.fixed.get("offload_optimizer")
    params = request.fixed.get("offload_params")
    if optimizer is not None and params is not None:
        return (_Offload(optimizer, params),)
    if "cpu" in (optimizer, params) or (request.offloads and not request.cluster.cores):
        return _OFFLOADS
    return (_Offload("none", "none"),)


def scheduled(request: PlanRequest, layout: Layout) -> Iterator[Layout]:
    """Yield a layout with each pipeline schedule that the request asks for and training accepts."""
    kind = request.fixed.get("schedule")
    if layout.pp == 1 or (kind is None and not request.schedules):
        yield layout
        return
    if kind is None:
        yield layout
    bound = request.fixed.get("max_pending_weights")
    for schedule, chunks in SCHEDULES:
        if kind not in (None, schedule) or layout.pp * chunks > request.model.shape.layers:
            continue
        if bound is not None and schedule not in SPLITTING:
            continue
        with_schedule = replace(layout, schedule=schedule, chunks=chunks, max_pending_weights=bound)
        if request.refusal(with_schedule) is None:
            yield with_schedule


SCHEDULES: tuple[tuple[Kind, int], ...] = (
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zb-h1", 1),
    ("zb-v", 2),
)
"""Schedules that are tried, and their chunks, the simplest first. GPipe has 1F1B's bubble and needs more memory."""


def candidates(request: PlanRequest) -> list[Candidate]:
    """All layouts with all micro-batches, predicted. Raises LayoutError or BatchError where there are none."""
    predicted = []
    for layout in layouts(request):
        for batch in batches(request, layout):
            predicted.append(Candidate(layout=layout, batch=batch, step=request.step(layout, batch)))
    if not predicted:
        raise _no_layout_with_fixed(request) or _no_layout(request)
    return predicted


def batches(request: PlanRequest, layout: Layout) -> list[Batch]:
    """Every split of the batch in a layout, the smallest micro-batches first. Raises BatchError where there is none."""
    total = request.global_batch_size
    fixed_size = request.fixed.get("micro_batch_size")
    if total % layout.dp:
        reason = f"{layout.dp} replicas cannot share it equally"
        nearest = total // layout.dp * layout.dp or layout.dp
        raise BatchError.of("--global-batch", total, reason, ("--global-batch", nearest))
    samples = total // layout.dp
    sizes = divisors(samples, LARGEST_MICRO_BATCH)
    if fixed_size is not None:
        sizes = [fixed_size] if samples % fixed_size == 0 else []
    return [Batch(global_batch_size=total, micro_batch_size=size, dp=layout.dp) for size in sizes]


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
        raise _no_layout_with_fixed(request) or _no_layout(request)
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.step.seconds, default=plans[0])


def _no_layout_with_fixed(request: PlanRequest) -> LayoutError | None:
    """Return the error that the fixed values leave no layout; None where there is no layout anyway."""
    if not request.fixed or not any(layouts(replace(request, fixed={}))):
        return None
    reason = "no layout that training accepts has them and splits the batch"
    settings = (("--gpus", request.gpus), ("--global-batch", request.global_batch_size), *request.fixed.items())
    return LayoutError.between(settings, reason, "leave some of them to the plan")


def search(request: PlanRequest, *, goal: Goal = "speed", top: int = 10) -> SearchResult:
    """The best `top` plans that fit, one of each layout: the best of its micro-batches."""
    if goal == "cost":
        return _cheapest(request, top)
    predicted = candidates(request)
    if goal == "memory":
        return SearchResult(plans=_smallest(request, predicted, top), candidates=len(predicted))
    plans: list[Plan] = []
    chosen: set[Layout] = set()
    too_large: dict[Layout, int] = {}  # the least micro-batch of a layout that does not fit: more never needs less
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
    return SearchResult(plans=plans, candidates=len(predicted))


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
    for part in requests:
        predicted = candidates(part)
        count += len(predicted)
        for candidate in predicted:
            plan = _estimated(part, candidate, errors) if _may_fit(part, candidate.layout) else None
            if plan is not None:
                plans.append(plan)
    if errors and not plans:
        raise errors[0]
    plans.sort(key=lambda plan: -plan.step.tokens_per_second_per_gpu)
    return SearchResult(plans=plans, candidates=count)


def frontier(plans: Iterable[Plan]) -> list[Plan]:
    """Return the plans that fit and that no other beats in both throughput and memory; the fastest first."""
    best: list[Plan] = []
    fitting = (plan for plan in plans if plan.fits)
    for plan in sorted(fitting, key=lambda plan: (-plan.step.tokens_per_second_per_gpu, plan.memory.total)):
        if not best or plan.memory.total < best[-1].memory.total:
            best.append(plan)
    return best


def _halves(request: PlanRequest) -> Iterator[PlanRequest]:
    """The request on all, a half, a quarter, … of its GPUs, where layouts are: none for all of them is an error."""
    gpus = request.gpus
    while gpus >= 1:
        part = replace(request, gpus=gpus)
        if gpus == request.gpus or next(layouts(part), None) is not None:
            yield part
        if gpus % 2:
            break
        gpus //= 2


def _cheapest(request: PlanRequest, top: int) -> SearchResult:
    """The plans with the fewest GPU-seconds a token: fewer GPUs take longer, and communicate less."""
    results = [search(part, top=top) for part in _halves(request)]
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
    for gpus in (request.gpus * 2**power for power in range(1, 6)):
        plan = _first_that_fits(replace(request, gpus=gpus))
        if plan is not None:
            sentences.append(f"{gpus} GPUs: {plan.strategy}")
            break
    for seq_len in (request.seq_len // 2**power for power in range(1, 6) if request.seq_len % 2**power == 0):
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


def _no_layout(request: PlanRequest) -> LayoutError | BatchError:
    """Return the error of a request without any layout: the batch is no multiple of any possible dp."""
    gpus = request.gpus
    batch = request.global_batch_size
    possible = _replicas(request, gpus)
    if not possible:
        cp = request.fixed["cp"]
        reason = "the ranks of a sequence do not divide them"
        remedy = ("--gpus", next(_nearest_gpus(request), cp))
        return LayoutError.between((("--gpus", gpus), ("cp", cp)), reason, remedy)
    fewest = min(possible)
    if fewest == gpus > 1:
        reason = f"neither tensor ranks nor stages of {request.name} divide them, and {batch} samples do not either"
        multiple = -(-batch // gpus) * gpus
        other_gpus = ("--gpus", next(_nearest_gpus(request)))
        return LayoutError.of("--gpus", gpus, reason, other_gpus, ("--global-batch", multiple))
    lower = batch // fewest * fewest
    near_batch = f"{lower} or {lower + fewest}" if lower else str(fewest)
    reason = f"no layout splits it: {gpus} GPUs make {fewest} replicas or a multiple of that"
    return BatchError.of("--global-batch", batch, reason, ("--global-batch", near_batch))


def _nearest_gpus(request: PlanRequest) -> Iterator[int]:
    """Yield the numbers of GPUs that have a layout for the batch, the nearest to the request's first."""
    batch = request.global_batch_size
    for distance in range(1, request.gpus):
        for gpus in (request.gpus - distance, request.gpus + distance):
            if any(batch % replicas == 0 for replicas in _replicas(request, gpus)):
                yield gpus


def _replicas(request: PlanRequest, gpus: int) -> set[int]:
    """Every dp of layouts with tensor ranks, stages and context-parallel ranks."""
    return {gpus // (split.tp * split.pp * split.cp) for split in _model_splits(request, gpus)}
