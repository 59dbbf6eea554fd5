"""The error of a request that leaves `dstk plan` no layout, with the nearest request that has one."""

from collections.abc import Iterator
from dataclasses import replace

from toolkit.errors import BatchError, LayoutError
from toolkit.planner.layout_candidates import layouts, replica_counts
from toolkit.planner.request import PlanRequest


def no_layout(request: PlanRequest) -> LayoutError | BatchError:
    """Return the error of a request without any layout: that of its fixed values, or of its GPUs and its batch."""
    if request.fixed and any(layouts(replace(request, fixed={}))):
        return _no_layout_with_fixed(request)
    return _no_layout_for_batch(request)


def _no_layout_with_fixed(request: PlanRequest) -> LayoutError:
    """Return the error that the fixed values leave no layout."""
    reason = "no layout that training accepts has them and splits the batch"
    settings = (("--gpus", request.gpus), ("--global-batch", request.global_batch_size), *request.fixed.items())
    return LayoutError.between(settings, reason, "leave some of them to the plan")


def _no_layout_for_batch(request: PlanRequest) -> LayoutError | BatchError:
    """Return the error of a request without any layout: the batch is no multiple of any possible dp."""
    gpus = request.gpus
    batch = request.global_batch_size
    dp_sizes = replica_counts(request, gpus)
    if not dp_sizes:
        cp = request.fixed["cp"]
        reason = "the ranks of a sequence do not divide them"
        remedy = ("--gpus", next(_nearest_gpus(request), cp))
        return LayoutError.between((("--gpus", gpus), ("cp", cp)), reason, remedy)
    fewest = min(dp_sizes)
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
            if any(batch % replicas == 0 for replicas in replica_counts(request, gpus)):
                yield gpus
