"""The search: every layout that training accepts, in the order of their predicted steps; the first ones that fit.

Times come first, because they are cheap; memory is estimated in their order, and only until enough layouts fit. What
the states alone make too large is left out before: 4 bytes a parameter stay on every rank of ZeRO-1 (weights and fp32
gradients take more), 2 with ZeRO-2, none with ZeRO-3.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

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
_OFFLOADS: tuple[tuple[OffloadDevice, OffloadDevice], ...] = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))


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


def layouts(request: PlanRequest) -> Iterator[Layout]:
    """Every layout of the request's GPUs that training accepts and whose replicas share the batch equally."""
    shape = request.model.shape
    gpus = request.gpus
    widest = min(gpus, request.cluster.gpus_per_node)
    for tp in tensor_parallel_sizes(shape):
        if tp > widest or gpus % tp:
            continue
        for pp in divisors(gpus // tp):
            if pp > shape.layers:
                continue
            for cp in context_parallel_sizes(request, gpus // tp // pp):
                dp = gpus // tp // pp // cp
                if request.global_batch_size % dp:
                    continue
                for ep in expert_parallel_sizes(shape, tp=tp):
                    if dp * cp % ep == 0:
                        yield from _with_fixed_values(request, _variants(request, tp=tp, pp=pp, cp=cp, ep=ep))
    for ulysses in divisors(min(gpus, shape.heads)):
        is_whole = gpus % ulysses == 0 and not list(misfits(shape, ulysses=ulysses))
        if ulysses > 1 and is_whole and request.global_batch_size % (gpus // ulysses) == 0:
            yield from _with_fixed_values(request, _variants(request, ulysses=ulysses))


def context_parallel_sizes(request: PlanRequest, ranks: int) -> list[int]:
    """Return every cp that so many ranks allow: 1, those with LEAST_POSITIONS of a sequence, or the fixed one.

    Where a rank has fewer, attention is a small part of a step, and replicas or tensor-parallel ranks do more with it.
    """
    fixed = request.fixed.get("cp")
    if fixed is not None:
        return [fixed] if ranks % fixed == 0 else []
    most = max(1, request.seq_len // LEAST_POSITIONS)
    return [cp for cp in divisors(ranks, most) if cp == 1 or request.seq_len % (2 * cp) == 0]


def _with_fixed_values(request: PlanRequest, variants: Iterator[Layout]) -> Iterator[Layout]:
    """Yield the layouts that have the values which the request fixes."""
    fixed = [(name, value) for name, value in request.fixed.items() if name != "micro_batch_size"]
    return (layout for layout in variants if all(getattr(layout, name) == value for name, value in fixed))


def _variants(
    request: PlanRequest, *, tp: int = 1, pp: int = 1, cp: int = 1, ulysses: int = 1, ep: int = 1
) -> Iterator[Layout]:
    """Stages of ZeRO, offload, recomputation and sequence parallelism. ZeRO-0 keeps fp32 weights: never better."""
    cp_ulysses = request.fixed.get("cp_ulysses", 1)
    experts = request.fixed.get("experts", "whole")
    if cp % cp_ulysses or (experts == "inner" and (tp == 1 or ep > 1)):
        return
    dp = request.gpus // (tp * pp * cp * ulysses)
    recomputations: tuple[Recompute, ...] = ("none", "full")
    if "recompute" in request.fixed:
        recomputations = (request.fixed["recompute"],)
    elif request.kernel == "eager":
        recomputations = ("none", "selective", "full")
    stages: tuple[int, ...] = (1, 2, 3)
    if request.fixed.get("zero_stage") == 0:
        stages = (0,)
    elif pp > 1:
        stages = (1,)
    fixes_both_offloads = {"offload_optimizer", "offload_params"} <= request.fixed.keys()
    least_offloading_stage = 1 if request.fixed.get("zero_stage") == 1 else 2
    sequence_parallel_choices = (True, False) if tp > 1 else (False,)
    for stage in stages:
        for optimizer, params in _offloads(request):
            if optimizer == "cpu" and (pp > 1 or stage < least_offloading_stage):
                continue
            if params == "cpu" and stage < 3:
                continue
            # Where parameters are sharded, a strategy offloads both.
            if stage == 3 and optimizer != params and not fixes_both_offloads:
                continue
            for sequence_parallel in sequence_parallel_choices:
                first = Layout(
                    dp=dp,
                    ep=ep,
                    cp=cp,
                    cp_ulysses=cp_ulysses,
                    tp=tp,
                    pp=pp,
                    ulysses=ulysses,
                    zero_stage=stage,
                    sequence_parallel=sequence_parallel,
                    experts=experts,
                    offload_optimizer=optimizer,
                    offload_params=params,
                    offload_activations=request.fixed.get("offload_activations", False),
                    tiled_mlp=request.fixed.get("tiled_mlp", False),
                )
                if request.refusal(first) is not None:
                    continue
                for recompute in recomputations:
                    layout = replace(first, recompute=recompute)
                    if recompute != "selective" or not request.impossible(layout):
                        yield from scheduled(request, layout)


def _offloads(request: PlanRequest) -> tuple[tuple[OffloadDevice, OffloadDevice], ...]:
    """Return the devices of optimizer states and of parameters that are tried."""
    optimizer = request.fixed.get("offload_optimizer")
    params = request.fixed.get("offload_params")
    if optimizer is not None and params is not None:
        return ((optimizer, params),)
    if "cpu" in (optimizer, params) or (request.offloads and not request.cluster.cores):
        return _OFFLOADS
    return _OFFLOADS[:1]


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
        per = total // layout.dp * layout.dp or layout.dp
        raise BatchError.of("--global-batch", total, reason, ("--global-batch", per))
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
    seen: set[Layout] = set()
    too_large: dict[Layout, int] = {}
    errors: list[ModelError] = []
    for candidate in sorted(predicted, key=lambda candidate: candidate.step.seconds):
        layout = candidate.layout
        size = candidate.batch.micro_batch_size
        # More samples never need less.
        if layout in seen or size >= too_large.get(layout, size + 1) or least_bytes(request, layout) > _room(request):
            continue
        plan = _estimated(request, candidate, errors)
        if plan is None:
            too_large[layout] = 1
            continue
        if not plan.fits:
            # Most layouts that do not fit do not with one sample either: then no other size is tried.
            one_fits = layout in too_large
            if not one_fits:
                one_sample = replace(candidate.batch, micro_batch_size=1)
                plan_of_one = _estimated(request, replace(candidate, batch=one_sample), errors)
                one_fits = plan_of_one is not None and plan_of_one.fits
            too_large[layout] = size if one_fits else 1
            continue
        seen.add(layout)
        plans.append(plan)
        if len(plans) == top:
            break
    if errors and not plans:
        raise errors[0]
    return SearchResult(plans=plans, candidates=len(predicted))


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
            if least_bytes(part, candidate.layout) > _room(part):
                continue
            plan = _estimated(part, candidate, errors)
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
    for candidate in in_order[: max(top, 400)]:
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
    numel = request.model.parameters.numel / (layout.tp * layout.pp)
    routed = request.model.shape.layers * routed_parameters(request.model.shape) / (layout.tp * layout.pp)
    held = numel - routed * (1 - 1 / layout.ep)
    if request.trained is not None:  # of what does not train a rank has weights alone, and maybe in 4 bits
        return held / 2 if layout.zero_stage < 3 else 0.0
    whole = {1: 4.0, 2: 2.0, 3: 0.0}.get(layout.zero_stage, 8.0)
    if layout.offload_optimizer != "none":
        return held * whole
    shared = LEAST_MOMENTS[request.optimizer]
    if layout.zero_stage > 0:
        shared += _MASTER
    return held * whole + numel * shared / layout.zero_shards


def _room(request: PlanRequest) -> int:
    return request.gpu.memory_bytes


def nearest_that_fits(request: PlanRequest) -> list[str]:
    """Sentences: which change of GPUs or of the sequence would make a layout fit."""

    def fits(changed: PlanRequest) -> Plan | None:
        try:
            plans = search(changed, top=1).plans
        except ToolkitError:
            return None
        return plans[0] if plans else None

    def first(values: list[int], change: Callable[[int], PlanRequest], words: str) -> Iterator[str]:
        for value in values:
            plan = fits(change(value))
            if plan is not None:
                yield f"{words.format(value)}: {plan.strategy}"
                return

    more = [request.gpus * 2**power for power in range(1, 6)]
    shorter = [request.seq_len // 2**power for power in range(1, 6) if request.seq_len % 2**power == 0]
    return [
        *first(more, lambda gpus: replace(request, gpus=gpus), "{} GPUs"),
        *first(shorter, lambda length: replace(request, setup=replace(request.setup, seq_len=length)), "--seq {}"),
    ]


def _no_layout(request: PlanRequest) -> LayoutError | BatchError:
    """No layout at all: the batch is no multiple of any possible number of replicas."""
    gpus = request.gpus
    batch = request.global_batch_size
    possible = _replicas(request, gpus)
    near = (other for step in range(1, gpus) for other in (gpus - step, gpus + step))
    fitting = (n for n in near if any(batch % replicas == 0 for replicas in _replicas(request, n)))
    if not possible:
        cp = request.fixed["cp"]
        settings = (("--gpus", gpus), ("cp", cp))
        return LayoutError.between(
            settings, "the ranks of a sequence do not divide them", ("--gpus", next(fitting, cp))
        )
    fewest = min(possible)
    if fewest == gpus > 1:
        other = next(fitting)
        reason = f"neither tensor ranks nor stages of {request.name} divide them, and {batch} samples do not either"
        multiple = -(-batch // gpus) * gpus
        return LayoutError.of("--gpus", gpus, reason, ("--gpus", other), ("--global-batch", multiple))
    lower = batch // fewest * fewest
    near_batch = f"{lower} or {lower + fewest}" if lower else str(fewest)
    reason = f"no layout splits it: {gpus} GPUs make {fewest} replicas or a multiple of that"
    return BatchError.of("--global-batch", batch, reason, ("--global-batch", near_batch))


def _replicas(request: PlanRequest, gpus: int) -> set[int]:
    """Every dp of layouts with tensor ranks, stages and context-parallel ranks."""
    shape = request.model.shape
    widest = request.cluster.gpus_per_node
    sizes = [size for size in tensor_parallel_sizes(shape) if size <= widest and gpus % size == 0]
    return {
        gpus // tp // pp // cp
        for tp in sizes
        for pp in divisors(gpus // tp)
        if pp <= shape.layers
        for cp in context_parallel_sizes(request, gpus // tp // pp)
    }
