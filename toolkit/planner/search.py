"""The search: every layout that training accepts, in the order of their predicted steps; the first ones that fit.

Times come first, because they are cheap; memory is estimated in their order, and only until enough layouts fit. What
the states alone make too large is left out before: 4 bytes a parameter stay on every rank of ZeRO-1 (weights and fp32
gradients take more), 2 with ZeRO-2, none with ZeRO-3.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from toolkit.config.layout import Batch, Layout, OffloadDevice, Recompute
from toolkit.errors import BatchError, LayoutError, ModelError, ToolkitError
from toolkit.models.support import expert_parallel_sizes, misfits, tensor_parallel_sizes
from toolkit.models.weights import routed_parameters
from toolkit.planner.request import Plan, PlanRequest
from toolkit.planner.step_time import StepTime

Goal = Literal["speed", "cost", "memory"]

LARGEST_MICRO_BATCH = 64
_OFFLOADS: tuple[tuple[OffloadDevice, OffloadDevice], ...] = (("none", "none"), ("cpu", "none"), ("cpu", "cpu"))


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found: the best plans in order, and how many candidates there were."""

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
    shape, gpus = request.model.shape, request.gpus
    widest = min(gpus, request.cluster.gpus_per_node)
    for tp in [size for size in tensor_parallel_sizes(shape) if size <= widest and gpus % size == 0]:
        for pp in [size for size in _divisors(gpus // tp) if size <= shape.layers]:
            if request.global_batch_size % (gpus // tp // pp) == 0:
                for ep in [size for size in expert_parallel_sizes(shape, tp=tp) if gpus // tp // pp % size == 0]:
                    yield from _kept(request, _variants(request, tp=tp, pp=pp, ep=ep))
    for ulysses in _divisors(min(gpus, shape.heads)):
        is_whole = gpus % ulysses == 0 and not list(misfits(shape, ulysses=ulysses))
        if ulysses > 1 and is_whole and request.global_batch_size % (gpus // ulysses) == 0:
            yield from _kept(request, _variants(request, ulysses=ulysses))


def _kept(request: PlanRequest, found: Iterator[Layout]) -> Iterator[Layout]:
    """Those with the values that are decided."""
    decided = [(name, value) for name, value in request.kept.items() if name != "micro_batch_size"]
    return (layout for layout in found if all(getattr(layout, name) == value for name, value in decided))


def _variants(request: PlanRequest, *, tp: int = 1, pp: int = 1, ulysses: int = 1, ep: int = 1) -> Iterator[Layout]:
    """Stages of ZeRO, offload, recomputation and sequence parallelism. ZeRO-0 keeps fp32 weights: never better."""
    dp = request.gpus // (tp * pp * ulysses)
    recomputations: tuple[Recompute, ...] = ("none", "full")
    if request.setup_attention == "eager":
        recomputations = ("none", "selective", "full")
    stages = (0,) if request.kept.get("zero_stage") == 0 else (1,) if pp > 1 else (1, 2, 3)
    recomputations = (request.kept["recompute"],) if "recompute" in request.kept else recomputations
    for stage in stages:
        for optimizer, params in _OFFLOADS if request.offloads and not request.cluster.cores else _OFFLOADS[:1]:
            # Where parameters are sharded, a strategy offloads both.
            if (optimizer == "cpu" and (pp > 1 or stage < 2)) or (params == "cpu") != (
                optimizer == "cpu" and stage == 3
            ):
                continue
            for sequence_parallel in (True, False) if tp > 1 else (False,):
                first = Layout(
                    dp=dp,
                    ep=ep,
                    tp=tp,
                    pp=pp,
                    ulysses=ulysses,
                    zero_stage=stage,
                    sequence_parallel=sequence_parallel,
                    offload_optimizer=optimizer,
                    offload_params=params,
                    offload_activations=request.kept.get("offload_activations", False),
                    tiled_mlp=request.kept.get("tiled_mlp", False),
                )
                if request.refusal(first) is None:
                    variants = (replace(first, recompute=recompute) for recompute in recomputations)
                    yield from (one for one in variants if one.recompute != "selective" or not request.impossible(one))


def candidates(request: PlanRequest) -> list[Candidate]:
    """All layouts with all micro-batches, predicted. Raises LayoutError or BatchError where there are none."""
    found = []
    for layout in layouts(request):
        found += [
            Candidate(layout=layout, batch=batch, step=request.step(layout, batch))
            for batch in batches(request, layout)
        ]
    if not found:
        raise _none_is_kept(request) or _no_layout(request)
    return found


def batches(request: PlanRequest, layout: Layout) -> list[Batch]:
    """Every split of the batch in a layout, the smallest micro-batches first. Raises BatchError where there is none."""
    total, decided = request.global_batch_size, request.kept.get("micro_batch_size")
    if total % layout.dp:
        reason = f"{layout.dp} replicas cannot share it equally"
        per = total // layout.dp * layout.dp or layout.dp
        raise BatchError.of("--global-batch", total, reason, ("--global-batch", per))
    each = total // layout.dp
    sizes = _divisors(each, LARGEST_MICRO_BATCH)
    if decided is not None:
        sizes = [decided] if each % decided == 0 else []
    return [Batch(global_batch_size=total, micro_batch_size=size, dp=layout.dp) for size in sizes]


def best_micro_batch(request: PlanRequest, layout: Layout, *, stand_ins: bool = False) -> Plan:
    """The fastest plan of one layout that fits; where none does, that of the smallest micro-batch.

    `stand_ins`: see PlanRequest.memory. Raises BatchError where no micro-batch divides what a replica has.
    """
    plans: list[Plan] = []
    for batch in batches(request, layout):
        plans.append(request.estimated(layout, batch, request.step(layout, batch), stand_ins=stand_ins))
        if not plans[-1].fits:
            break
    if not plans:
        raise _none_is_kept(request) or _no_layout(request)
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.step.seconds, default=plans[0])


def _none_is_kept(request: PlanRequest) -> LayoutError | None:
    """What is decided leaves no layout; None where there is none anyway."""
    if not request.kept or not any(layouts(replace(request, kept={}))):
        return None
    reason = "no layout that training accepts has them and splits the batch"
    given = (("--gpus", request.gpus), ("--global-batch", request.global_batch_size), *request.kept.items())
    return LayoutError.between(given, reason, "leave some of them to the plan")


def search(request: PlanRequest, *, goal: Goal = "speed", top: int = 10) -> Found:
    """The best `top` plans that fit, one of each layout: the best of its micro-batches."""
    if goal == "cost":
        return _cheapest(request, top)
    found = candidates(request)
    if goal == "memory":
        return Found(plans=_smallest(request, found, top), candidates=len(found))
    plans: list[Plan] = []
    seen: set[Layout] = set()
    too_large: dict[Layout, int] = {}
    unknown: ModelError | None = None
    for candidate in sorted(found, key=lambda candidate: candidate.step.seconds):
        layout, size = candidate.layout, candidate.batch.micro_batch_size
        # More samples never need less.
        if layout in seen or size >= too_large.get(layout, size + 1) or least_bytes(request, layout) > _room(request):
            continue
        try:
            plan = request.estimated(layout, candidate.batch, candidate.step)
        except ModelError as error:  # a layout in which this model's activations cannot be recorded
            too_large[layout], unknown = 1, unknown or error
            continue
        if not plan.fits:
            # Most layouts that do not fit do not with one sample either: then no other size is tried.
            one = replace(candidate.batch, micro_batch_size=1)
            one_fits = layout in too_large or request.estimated(layout, one, candidate.step).fits
            too_large[layout] = size if one_fits else 1
            continue
        seen.add(layout)
        plans.append(plan)
        if len(plans) == top:
            break
    if unknown is not None and not plans:
        raise unknown
    return Found(plans=plans, candidates=len(found))


def evaluated(request: PlanRequest, *, goal: Goal = "speed") -> Found:
    """Every candidate that the states alone do not make too large, with its memory; the fastest first.

    A thousand take a third of a second.
    """
    plans: list[Plan] = []
    count = 0
    for asked in _halves(request) if goal == "cost" else [request]:
        found = candidates(asked)
        count += len(found)
        fitting = (one for one in found if least_bytes(asked, one.layout) <= _room(asked))
        plans += [asked.estimated(one.layout, one.batch, one.step) for one in fitting]
    plans.sort(key=lambda plan: -plan.step.tokens_per_second_per_gpu)
    return Found(plans=plans, candidates=count)


def frontier(plans: Iterable[Plan]) -> list[Plan]:
    """Of the plans that fit, those that no other beats in throughput and memory; the fastest first."""
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
        asked = replace(request, gpus=gpus)
        if gpus == request.gpus or next(layouts(asked), None) is not None:
            yield asked
        if gpus % 2:
            break
        gpus //= 2


def _cheapest(request: PlanRequest, top: int) -> Found:
    """The plans with the fewest GPU-seconds a token: fewer GPUs take longer, and communicate less."""
    found = [search(asked, top=top) for asked in _halves(request)]
    plans = sorted((plan for one in found for plan in one.plans), key=lambda plan: -plan.step.tokens_per_second_per_gpu)
    return Found(plans=plans[:top], candidates=sum(one.candidates for one in found))


def _smallest(request: PlanRequest, found: list[Candidate], top: int) -> list[Plan]:
    """The plans that need least memory: with micro-batches of one sample, in the order of what they keep at least."""
    ones = [one for one in found if one.batch.micro_batch_size == 1]
    ones.sort(key=lambda one: least_bytes(request, one.layout))
    plans = [request.estimated(one.layout, one.batch, one.step) for one in ones[: max(top, 400)]]
    return sorted((plan for plan in plans if plan.fits), key=lambda plan: plan.memory.total)[:top]


def least_bytes(request: PlanRequest, layout: Layout) -> float:
    """Less than the model states of a rank: weights in 16 bits, and the shares of gradients, masters and moments."""
    numel = request.model.parameters.numel / (layout.tp * layout.pp)
    routed = request.model.shape.layers * routed_parameters(request.model.shape) / (layout.tp * layout.pp)
    held = numel - routed * (1 - 1 / layout.ep)
    shards = layout.dp * layout.ulysses
    if request.trained is not None:  # of what does not train a rank has weights alone, and maybe in 4 bits
        return held / 2 if layout.zero_stage < 3 else 0.0
    whole = {1: 4.0, 2: 2.0, 3: 0.0}.get(layout.zero_stage, 8.0)
    shared = 0.0 if layout.offload_optimizer != "none" else 12.0
    return held * whole + numel * shared / shards


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
        *first(shorter, lambda length: replace(request, seq_len=length), "--seq {}"),
    ]


def _no_layout(request: PlanRequest) -> LayoutError | BatchError:
    """No layout at all: the batch is no multiple of any possible number of replicas."""
    gpus, batch = request.gpus, request.global_batch_size
    fewest = min(_replicas(request, gpus))
    if fewest == gpus > 1:
        near = (other for step in range(1, gpus) for other in (gpus - step, gpus + step))
        other = next(n for n in near if any(batch % replicas == 0 for replicas in _replicas(request, n)))
        reason = f"neither tensor ranks nor stages of {request.name} divide them, and {batch} samples do not either"
        multiple = -(-batch // gpus) * gpus
        return LayoutError.of("--gpus", gpus, reason, ("--gpus", other), ("--global-batch", multiple))
    lower = batch // fewest * fewest
    near_batch = f"{lower} or {lower + fewest}" if lower else str(fewest)
    reason = f"no layout splits it: {gpus} GPUs make {fewest} replicas or a multiple of that"
    return BatchError.of("--global-batch", batch, reason, ("--global-batch", near_batch))


def _replicas(request: PlanRequest, gpus: int) -> set[int]:
    """Every dp of layouts with tensor ranks and stages."""
    shape, widest = request.model.shape, request.cluster.gpus_per_node
    sizes = [size for size in tensor_parallel_sizes(shape) if size <= widest and gpus % size == 0]
    return {gpus // tp // pp for tp in sizes for pp in _divisors(gpus // tp) if pp <= shape.layers}


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [size for size in range(1, min(number, most or number) + 1) if number % size == 0]
