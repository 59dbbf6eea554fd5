"""Model states of DeepSpeedZeroOptimizer_Stage3, to the byte (deepspeed/runtime/zero/stage3.py).

Weights, gradients, masters and moments are sharded, each parameter by itself; weights of at most
`persistence_threshold` elements are replicated. Derived from the sources of DeepSpeed 0.19.8.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.optimizer_memory import UpdatedTensors, moment_bytes, temporary_bytes
from toolkit.estimate.rank_parameters import ParameterGroup, RankParameters
from toolkit.estimate.states import ModelStates, StateBytes
from toolkit.estimate.zero3_files import StateFiles


def zero3_states(settings: DeepSpeedSettings, params: RankParameters, dp: int) -> ModelStates:
    """Return the states of one of `dp` data-parallel ranks."""
    weight_bytes = settings.model_bytes
    sub_groups = [
        UpdatedTensors(group, numel)
        for group in params.groups
        for numel in _sub_group_numels(group, dp, settings.sub_group_size)
    ]
    updated = StateBytes(
        masters=4 * _shard_numel(params.groups, dp),
        optimizer=moment_bytes(settings, params, sub_groups),
        gradients=settings.accumulation_bytes * _shard_numel(params.groups, dp),
    )
    files = StateFiles.of(settings, params, dp, [tensor.numel for tensor in sub_groups])
    second = _SecondPartition.of(settings, params, dp)
    # A single rank uses its shard as the parameter, if both are on the same device.
    gathers = dp > 1 or (settings.offload_params and settings.device != "cpu")
    gathered = weight_bytes * _gathered_numel(settings, params) if gathers else 0
    resident = StateBytes() if settings.offload_optimizer else updated
    return ModelStates(
        resident=replace(
            resident,
            parameters=_weights_on_device(settings, params, dp, gathers=gathers) + second.frozen,
            buckets=settings.communication_bytes * settings.reduce_bucket_size if settings.contiguous_gradients else 0,
            model_buffers=params.buffers(weight_bytes),
            counters=1 + (4 if settings.offload_optimizer else 8),
        ),
        host=files.left_of(_states_on_host(settings, params, dp, updated)),
        nvme=files.written,
        host_complete=8 * params.count if settings.offload_optimizer else 0,
        buckets=_scattering_bytes(settings, params, params.largest_early),
        gathered=gathered + second.trained,
        last_gradient=weight_bytes * params.largest_trained
        + _scattering_bytes(settings, params, params.largest_trained),
        reduction=second.trained + files.waiting_gradients,
        complete=files.waiting_gradients,
        step=second.trained + files.waiting_gradients + _update_bytes(settings, params, sub_groups, dp),
    )


def _weights_on_device(settings: DeepSpeedSettings, params: RankParameters, dp: int, *, gathers: bool) -> int:
    """Bytes of the replicated weights, where any are gathered, and of the shards that are not offloaded."""
    numel = 0
    if gathers:
        numel += _replicated_numel(params, settings.persistence_threshold, dp)
    if not settings.offload_params:
        numel += _shard_numel((*params.groups, params.frozen), dp)
    return settings.model_bytes * numel


def _states_on_host(settings: DeepSpeedSettings, params: RankParameters, dp: int, updated: StateBytes) -> StateBytes:
    """Return the states in host memory, if none were in files. `updated`: what the optimizer updates."""
    weights = 0
    if settings.offload_params:
        weights = settings.model_bytes * _shard_numel((*params.groups, params.frozen), dp)
    if not settings.offload_optimizer:
        return StateBytes(parameters=weights)
    # Beside the accumulated gradients there are fp32 ones, from which the optimizer updates.
    fp32_gradients = 4 * _shard_numel(params.groups, dp)
    return replace(updated, parameters=weights, gradients=updated.gradients + fp32_gradients)


@dataclass(frozen=True, kw_only=True)
class _SecondPartition:
    """Bytes of ZeRO++'s second partition of the weights, within groups of `hpz` ranks; 0 without it."""

    trained: int = 0
    """The partition of weights that train, which is made in the forward pass, and dropped after the update."""
    frozen: int = 0
    """The partition of frozen weights, which stays."""

    @classmethod
    def of(cls, settings: DeepSpeedSettings, params: RankParameters, dp: int) -> Self:
        """Count the second partition of a rank's weights."""
        if settings.hpz <= 1:
            return cls()
        trained_numel = _sharded_alone_numel(params, settings.persistence_threshold, dp)
        return cls(
            trained=settings.model_bytes * dp * trained_numel // settings.hpz,
            frozen=settings.model_bytes * dp * _shard_numel((params.frozen,), dp) // settings.hpz,
        )


@lru_cache(maxsize=8192)
def _shard_numel(groups: tuple[ParameterGroup, ...], dp: int) -> int:
    """Elements of a rank's shards: each parameter is padded to a multiple of the ranks by itself."""
    return sum(size * count for group in groups for size, count in group.shards(dp))


def _sharded_alone_numel(params: RankParameters, threshold: int, dp: int) -> int:
    """Elements of this rank's shards of the parameters that train and have more than `threshold` elements."""
    sharded = 0
    for group in params.groups:
        for (numel, count), (shard, _) in zip(group.counted, group.shards(dp), strict=True):
            if numel > threshold:
                sharded += shard * count
    return sharded


@lru_cache(maxsize=4096)
def _replicated_numel(params: RankParameters, threshold: int, dp: int) -> int:
    """Elements of the parameters of at most `threshold` elements, each with the padding of its shards."""
    replicated = 0
    for group in (*params.groups, params.frozen):
        for (numel, count), (shard, _) in zip(group.counted, group.shards(dp), strict=True):
            if numel <= threshold:
                replicated += shard * dp // group.ep * count
    return replicated


@lru_cache(maxsize=8192)
def _sub_group_numels(group: ParameterGroup, dp: int, most: int) -> tuple[int, ...]:
    """Elements of the sub-groups that are updated at once: each ends with the parameter that fills it to `most`."""
    total = _shard_numel((group,), dp)
    if most >= total:
        return (total,)
    replicas = dp // group.ep
    numels = []
    open_numel = 0
    for numel in group:
        open_numel += -(-numel // replicas)
        if open_numel >= most:
            numels.append(open_numel)
            open_numel = 0
    if open_numel > 0:
        numels.append(open_numel)
    return tuple(numels)


def _gathered_numel(settings: DeepSpeedSettings, params: RankParameters) -> int:
    """Elements of gathered weights, at most.

    Each module's fetch prefetches another bucket, until `stage3_max_live_parameters` are whole.
    On NVMe weights are prefetched into few buffers. Known error: one parameter, and `stage3_max_reuse_distance` where
    it is more than the former.
    """
    largest = max(params.layer_numel, min(params.outside, params.largest))
    ahead = settings.max_live_parameters
    if settings.nvme_params:
        ahead = min(largest + settings.prefetch_bucket_size, ahead)
    return min(max(ahead, largest), params.numel)


def _scattering_bytes(settings: DeepSpeedSettings, params: RankParameters, largest: int) -> int:
    """Copies while a bucket is scattered: in the dtype of communication, and again with each rank's parts together.

    `largest`: elements of the largest gradient, which is scattered alone where it is more than a bucket.
    """
    elements = min(max(settings.reduce_bucket_size, largest), params.trained)
    element_bytes = settings.communication_bytes
    if settings.communication_bytes != settings.model_bytes:
        element_bytes += settings.communication_bytes
    return elements * element_bytes


def _update_bytes(
    settings: DeepSpeedSettings, params: RankParameters, sub_groups: Sequence[UpdatedTensors], dp: int
) -> int:
    """Bytes of a sub-group's gradients in fp32, unless they are accumulated so, and of the optimizer's temporaries.

    An update on the host takes nothing on the device.
    """
    if settings.offload_optimizer:
        return 0
    cast_bytes = 0 if settings.accumulation_bytes == 4 else 4
    return max(cast_bytes * tensor.numel + temporary_bytes(settings, params, [tensor], dp=dp) for tensor in sub_groups)
