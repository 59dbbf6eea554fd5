"""The layouts and the micro-batches that `dstk plan` tries for a request.

They are those that training accepts, without what another one always beats (ZeRO-0, GPipe), and with context
parallelism only where a rank keeps LEAST_POSITIONS of a sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from toolkit.config.layout import Batch, Layout, OffloadDevice, Recompute
from toolkit.config.pipeline_schedules import SPLITTING, Kind
from toolkit.errors import BatchError
from toolkit.models.support import expert_parallel_sizes, misfits, tensor_parallel_sizes
from toolkit.planner.request import PlanRequest
from toolkit.units import divisors

LARGEST_MICRO_BATCH = 64
"""Samples of a micro-batch that are tried, at most."""
LEAST_POSITIONS = 4096
"""Positions of a sequence that a context-parallel rank has at least in the layouts that are tried."""
SCHEDULES: tuple[tuple[Kind, int], ...] = (
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zb-h1", 1),
    ("zb-v", 2),
)
"""Schedules that are tried, and their chunks, the simplest first. GPipe has 1F1B's bubble and needs more memory."""


class _Offload(NamedTuple):
    """Devices that keep the optimizer states and the parameters."""

    optimizer: OffloadDevice
    params: OffloadDevice


_OFFLOADS = (_Offload("none", "none"), _Offload("cpu", "none"), _Offload("cpu", "cpu"))


@dataclass(frozen=True, kw_only=True)
class _RankSplit:
    """What the ranks of a layout share out, besides the samples of its replicas."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ulysses: int = 1
    ep: int = 1


def layouts(request: PlanRequest) -> Iterator[Layout]:
    """Yield every layout of the request's GPUs that training accepts and whose replicas share the batch equally."""
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
        if ulysses == 1 or gpus % ulysses or list(misfits(shape, ulysses=ulysses)):
            continue
        if request.global_batch_size % (gpus // ulysses) == 0:
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
    if split.cp % cp_ulysses:
        return
    # Tensor parallelism shards every expert, and expert parallelism shares out whole ones.
    if experts == "inner" and (split.tp == 1 or split.ep > 1):
        return
    for stage in _zero_stages(request, pp=split.pp):
        for offload in _offloads(request, stage=stage, pp=split.pp):
            for sequence_parallel in _sequence_parallel(split):
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


def _sequence_parallel(split: _RankSplit) -> tuple[bool, ...]:
    """Return whether sequence parallelism is tried: where tensor parallelism replicates something."""
    return (True, False) if split.tp > 1 else (False,)


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


def replica_counts(request: PlanRequest, gpus: int) -> set[int]:
    """Return every dp of layouts with tensor ranks, stages and context-parallel ranks."""
    return {gpus // (split.tp * split.pp * split.cp) for split in _model_splits(request, gpus)}
