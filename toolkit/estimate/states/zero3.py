"""ZeRO-3: every parameter lies in shards over the data-parallel ranks, and layers are gathered when they compute.

Letters: N elements, D ranks, S = the sum over parameters of ceil(n / D), w, a, c bytes of a weight, of an accumulated
gradient and of a gradient in transit.
"""

from functools import lru_cache

from toolkit.estimate.parameters import Group, Holdings
from toolkit.estimate.states.model_states import Bytes, ModelStates
from toolkit.estimate.states.settings import DeepSpeedSettings


def zero3_states(s: DeepSpeedSettings, held: Holdings, dp: int) -> ModelStates:
    """DeepSpeedZeroOptimizer_Stage3: shards of weights, gradients, masters and moments; small weights whole besides."""
    w, a = s.model_bytes, s.accumulation_bytes
    shards = _shards(held, dp)
    # One rank alone uses its shard as the parameter, where both are on the same device.
    gathers = dp > 1 or (s.offload_params and s.device != "cpu")
    whole = _persistent(held, s.persistence_threshold, dp) if gathers else 0
    sub_groups = [size for group in held.groups for size in _sub_groups(group, dp, s.sub_group_size)]
    counters = 4 * len(sub_groups) if s.counts_in_tensors else 0
    bucket = s.communication_bytes * s.reduce_bucket_size if s.contiguous_gradients else 0
    gathered = w * _gathered(s, held) if gathers else 0
    device = Bytes(
        parameters=w * (whole + (0 if s.offload_params else shards)),
        gradients=0 if s.offload_optimizer else a * shards,
        masters=0 if s.offload_optimizer else 4 * shards,
        optimizer=0 if s.offload_optimizer else 4 * s.moments * shards + counters,
        buckets=bucket,
        model_buffers=held.buffer_bytes,
        counters=1 + (4 if s.offload_optimizer else 8),
    )
    host = Bytes(
        parameters=w * shards if s.offload_params else 0,
        gradients=(a + 4) * shards if s.offload_optimizer else 0,
        masters=4 * shards if s.offload_optimizer else 0,
        optimizer=4 * s.moments * shards + counters if s.offload_optimizer else 0,
    )
    return ModelStates(
        held=device,
        host=host,
        host_complete=8 * held.count if s.offload_optimizer else 0,
        buckets=_scattering(s, held),
        gathered=gathered,
        step=0 if s.offload_optimizer else _update(s, max(sub_groups)),
    )


@lru_cache(maxsize=8192)
def _shards(held: Holdings, dp: int) -> int:
    """S: each parameter is padded to a multiple of D by itself."""
    return sum(-(-numel // dp) * count for group in held.groups for numel, count in group.counted)


@lru_cache(maxsize=4096)
def _persistent(held: Holdings, threshold: int, dp: int) -> int:
    """Elements of the parameters that stay whole, each with the padding of its shards."""
    small = ((numel, count) for group in held.groups for numel, count in group.counted if numel <= threshold)
    return sum(-(-numel // dp) * dp * count for numel, count in small)


@lru_cache(maxsize=8192)
def _sub_groups(group: Group, dp: int, size: int) -> tuple[int, ...]:
    """Elements of the runs of shards that are updated at once: each closes with the parameter that fills it."""
    total = sum(-(-numel // dp) * count for numel, count in group.counted)
    if size >= total:
        return (total,)
    closed, local = [], 0
    for numel in group:
        local += -(-numel // dp)
        if local >= size:
            closed.append(local)
            local = 0
    return (*closed, local) if local else tuple(closed)


def _update(s: DeepSpeedSettings, elements: int) -> int:
    """A sub-group's gradients put together, and again in fp32; once that is made, the optimizer's temporaries."""
    flat = s.accumulation_bytes if s.accumulation_bytes != 4 else 0
    return elements * (4 + max(flat, 0 if s.fused else 4))


def _gathered(s: DeepSpeedSettings, held: Holdings) -> int:
    """Elements of other ranks' weights that are here at once, at worst.

    The layer at work, and what is fetched ahead: whole parameters until the prefetch bucket is full. Never more than
    `stage3_max_live_parameters`, but for the module at work itself.
    """
    outside = max(sum(group.front) + sum(group.back) for group in held.groups)
    largest = max(held.layer_numel, min(outside, held.largest))
    return min(largest + s.prefetch_bucket_size, max(s.max_live_parameters, largest), held.numel)


def _scattering(s: DeepSpeedSettings, held: Holdings) -> int:
    """Copies while a bucket is scattered: in the dtype of communication, and again with each rank's parts together."""
    elements = min(max(s.reduce_bucket_size, held.largest), held.numel)
    casts = s.communication_bytes if s.communication_bytes != s.model_bytes else 0
    return elements * (casts + s.communication_bytes)
