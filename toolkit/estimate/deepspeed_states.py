"""Model states of DeepSpeed's engines, to the byte. Derived from the sources of DeepSpeed 0.19.8.

Letters in the formulas: N elements of a rank's parameters after tensor and pipeline parallelism, D data-parallel ranks
(of experts that replicas share out, those that have the same ones),
F = N padded, group by group, to a multiple of 2D, P = F / D, S = the sum over parameters of ceil(n / D); w, a, c bytes
of a weight, of an accumulated gradient and of a gradient in transit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Self

from toolkit.config.update_chunk import UPDATE_CHUNK_ELEMENTS
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.rank_parameters import ParameterGroup, RankParameters
from toolkit.estimate.states import ModelStates, StateBytes, moments_8bit, update_of_factored

_FALLBACK_BUCKET = 500_000_000
"""Elements that `allreduce_gradients` flattens at once (engine.py, MEMORY_OPT_ALLREDUCE_SIZE)."""


@lru_cache(maxsize=8192)
def deepspeed_states(
    settings: DeepSpeedSettings, params: RankParameters, *, dp: int, data_rank: int = 0, accumulation: int = 2
) -> ModelStates:
    """Return the states of data-parallel rank `data_rank` of `dp`, with `accumulation` micro-batches a step."""
    match settings.wrapper:
        case "none" | "unfused":
            return _without_zero(settings, params, dp, accumulation)
        case "bf16":
            return _bf16(settings, params, dp)
        case "zero12":
            return zero12_states(settings, params, dp, data_rank, accumulation)
        case "zero3":
            return zero3_states(settings, params, dp)


def _without_zero(s: DeepSpeedSettings, params: RankParameters, dp: int, accumulation: int) -> ModelStates:
    """A plain PyTorch optimizer over fp32 weights, 4 + 4 + 8 bytes; what autocast casts counts with activations.

    Or FP16_UnfusedOptimizer: 16-bit weights and gradients, fp32 masters, and at the step fp32 gradients of all.
    """
    w = s.model_bytes
    is_plain = s.wrapper == "none"
    gradients = w * params.trained
    masters = 0 if is_plain else 4 * params.trained
    in_transit = s.communication_bytes if s.communication_bytes != w else 0
    flat = min(params.trained, _FALLBACK_BUCKET + params.largest_trained)
    alone = sum(group.numel for group in params.groups if not group.is_hidden)
    updated = [(group, group.numel if group.is_hidden else alone) for group in params.groups]
    tensors = [(group, numel, count) for group in params.groups for numel, count in group.counted]
    return ModelStates(
        resident=StateBytes(
            parameters=w * params.numel,
            masters=masters,
            optimizer=_moments(s, params, tensors),
            model_buffers=params.buffers(s.model_bytes),
            counters=8 if is_plain and s.autocast == "fp16" else 0,
        ),
        accumulated=gradients if accumulation > 1 else 0,
        fresh_layer=w * params.trained_layer if accumulation == 1 else 0,
        reduction=gradients + flat * (w + in_transit),
        complete=gradients,
        step=gradients + masters + _temporaries(s, params, updated, dp),
    )


def _bf16(s: DeepSpeedSettings, params: RankParameters, dp: int) -> ModelStates:
    """BF16_Optimizer: replicated flat gradients in the accumulation dtype; masters and moments over D.

    The weights' own bf16 gradients live from the first backward pass to the step: between micro-batches they are
    zeroed, not freed.
    """
    flats = [group.padded(dp) for group in params.groups]
    parts = [group.part(dp) for group in params.groups]
    flat = sum(flats)
    part = sum(parts)
    updated = [*zip(params.groups, parts, strict=True)]
    # A single tensor is reduced in place; the flat gradients of several groups are copied together.
    largest = max(flats)
    copied = 0 if largest > _FALLBACK_BUCKET or len(flats) == 1 else flat
    cast = 0 if s.communication_bytes == s.accumulation_bytes else (copied or largest)
    weight_gradients = s.model_bytes * params.trained
    return ModelStates(
        resident=StateBytes(
            parameters=s.model_bytes * (flat + params.frozen.numel),
            gradients=s.accumulation_bytes * flat,
            masters=4 * part,
            optimizer=_moments(s, params, [(group, size, 1) for group, size in updated]),
            model_buffers=params.buffers(s.model_bytes),
            counters=4,  # the norm
        ),
        accumulated=weight_gradients,
        reduction=weight_gradients + s.accumulation_bytes * copied + s.communication_bytes * cast,
        complete=weight_gradients,
        step=weight_gradients + _temporaries(s, params, updated, dp),
    )


def zero12_states(
    settings: DeepSpeedSettings, params: RankParameters, dp: int, data_rank: int, accumulation: int
) -> ModelStates:
    """Return the states of DeepSpeedZeroOptimizer, stages 1 and 2.

    Stage 1 accumulates whole gradients and reduces them once; stage 2 reduces those of each micro-batch, beside the sum
    of those before.
    """
    weight_bytes = settings.model_bytes
    is_stage_1 = settings.zero_stage == 1
    offloads = settings.offload_optimizer
    partitions = [_Partition.of(group, dp, data_rank) for group in params.groups]
    updated = [(partition.group, partition.numel) for partition in partitions]
    partition_numel = sum(partition.numel for partition in partitions)
    masters = 4 * partition_numel
    moments = _moments(settings, params, [(group, numel, 1) for group, numel in updated])
    gradients = _zero12_gradients(settings, params, partitions, accumulation)
    buckets = _zero12_buckets(settings)
    # Stage 1 keeps the gradients of the whole pass, so that what the activations leave free is taken until it ends.
    largest = params.largest_trained if is_stage_1 else params.largest_early
    reducing = _reducing(settings, params, largest)
    reducing_last = _reducing(settings, params, params.largest_trained)
    touched = sum(partition.touched for partition in partitions)
    stays_in_bucket = is_stage_1 and weight_bytes != settings.accumulation_bytes and touched < params.trained
    update = 0 if offloads else _zero12_update(settings, params, updated, dp)
    staging = weight_bytes * params.largest_trained if offloads else 0
    host = StateBytes(
        parameters=weight_bytes * partition_numel,
        gradients=masters + gradients.waiting_on_host,
        masters=masters,
        optimizer=moments,
        buckets=staging,
    )
    padded_numel = sum(group.padded(dp) for group in params.groups)
    return ModelStates(
        resident=StateBytes(
            parameters=weight_bytes * (padded_numel + params.frozen.numel),
            masters=0 if offloads else masters,
            optimizer=0 if offloads else moments,
            buckets=staging,
            model_buffers=params.buffers(weight_bytes),
            counters=4,
        ),
        host=host if offloads else StateBytes(),
        accumulated=gradients.accumulated,
        fresh_layer=gradients.fresh_layer,
        # Without overlap, stage 1 reduces when the backward pass is over.
        buckets=buckets.all + reducing if not is_stage_1 or settings.overlap_comm else buckets.one,
        last_gradient=weight_bytes * params.largest_trained + buckets.all + reducing_last,
        reduction=gradients.at_reduction + buckets.all + reducing_last,
        complete=gradients.averaged,
        complete_buckets=buckets.one if stays_in_bucket else 0,
        # A norm in fp64 of each parameter that this rank updates a part of.
        host_complete=8 * sum(partition.parameters for partition in partitions) if offloads else 0,
        step=gradients.averaged + (buckets.one if stays_in_bucket else 0) + update,
    )


@dataclass(frozen=True, kw_only=True)
class _Partition:
    """The elements [start, stop) of an optimizer group, flattened, that a rank updates; the last may be padding."""

    group: ParameterGroup
    start: int
    stop: int

    @classmethod
    def of(cls, group: ParameterGroup, dp: int, data_rank: int) -> Self:
        """Return the partition of a data-parallel rank, which with experts is one of those with the same ones."""
        numel = group.part(dp)
        index = data_rank // group.ep
        return cls(group=group, start=index * numel, stop=(index + 1) * numel)

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start

    @property
    def padding(self) -> int:
        """Elements behind the last parameter."""
        return min(max(self.stop - self.group.numel, 0), self.numel)

    @property
    def touched(self) -> int:
        """Elements of the parameters that have any element in the partition, counted whole."""
        stop = min(self.stop, self.group.numel)
        if self.start >= stop:
            return 0
        first, _ = _boundary(self.group, self.start)
        _, last = _boundary(self.group, stop - 1)
        return last - first

    @property
    def parameters(self) -> int:
        """Number of parameters that have any element in the partition."""
        count = 0
        offset = 0
        for numel in self.group:
            count += offset < self.stop and offset + numel > self.start
            offset += numel
        return count


@dataclass(frozen=True, kw_only=True)
class _Zero12Gradients:
    """Bytes of gradients under ZeRO stages 1 and 2."""

    averaged: int
    """Gradients of the rank's partition, before the update."""
    accumulated: int
    """Gradients that are there while the last micro-batch computes."""
    at_reduction: int
    """Gradients that are there while they are reduced."""
    fresh_layer: int
    """Gradients of a decoder layer, where the backward pass allocates them."""
    waiting_on_host: int
    """Sums of earlier micro-batches in host memory."""


def _zero12_gradients(
    settings: DeepSpeedSettings, params: RankParameters, partitions: Sequence[_Partition], accumulation: int
) -> _Zero12Gradients:
    weight_bytes = settings.model_bytes
    whole_bytes = max(settings.accumulation_bytes, weight_bytes)
    sums_in_fp32 = weight_bytes != settings.accumulation_bytes == 4
    touched = sum(partition.touched for partition in partitions)
    if sums_in_fp32:
        averaged = 4 * sum(partition.numel for partition in partitions)
    else:
        # Whole parameters, and zeros that pad the partition behind the last of them.
        averaged = weight_bytes * (touched + sum(partition.padding for partition in partitions))
        if settings.offload_optimizer:
            averaged = 0
    if settings.zero_stage == 1:
        whole = whole_bytes * params.trained
        return _Zero12Gradients(
            averaged=averaged,
            accumulated=whole if accumulation > 1 else 0,
            at_reduction=whole or averaged,
            fresh_layer=whole_bytes * params.trained_layer if accumulation == 1 else 0,
            waiting_on_host=0,
        )
    adds_up = accumulation > 1 and not sums_in_fp32
    return _Zero12Gradients(
        averaged=averaged,
        accumulated=2 * averaged if adds_up else averaged,
        at_reduction=averaged,
        fresh_layer=0,
        waiting_on_host=weight_bytes * touched if adds_up else 0,
    )


class _Zero12Buckets(NamedTuple):
    """Bytes of the buckets in which gradients are reduced: of one, and of all."""

    one: int
    all: int


def _zero12_buckets(settings: DeepSpeedSettings) -> _Zero12Buckets:
    bucket = 0
    if settings.contiguous_gradients:
        bucket = _staged_bytes(settings) * settings.reduce_bucket_size
    return _Zero12Buckets(one=bucket, all=2 * bucket if settings.overlap_comm else bucket)


def _boundary(group: ParameterGroup, offset: int) -> tuple[int, int]:
    """Return the first element of the parameter that holds element `offset`, and the first behind it."""
    before = 0
    for sizes, times in group.runs:
        period = sum(sizes)
        if offset < before + period * times:
            base = before + (offset - before) // period * period
            for numel in sizes:
                if offset < base + numel:
                    return base, base + numel
                base += numel
        before += period * times
    raise AssertionError("offset beyond the group")


def _staged_bytes(s: DeepSpeedSettings) -> int:
    """Bytes of an element in a bucket: stage 1 stages the accumulator, stage 2 the gradient itself."""
    return max(s.accumulation_bytes, s.model_bytes) if s.zero_stage == 1 else s.model_bytes


def _reducing(s: DeepSpeedSettings, params: RankParameters, largest: int) -> int:
    """Copies of a bucket: the slices for each rank concatenated, and again in the dtype of communication.

    `largest`: elements of the largest gradient, which is reduced alone where it is more than a bucket.
    """
    staged = _staged_bytes(s)
    copies = staged + (s.communication_bytes if s.communication_bytes != staged else 0)
    return min(max(s.reduce_bucket_size, largest), params.trained) * copies


def _zero12_update(
    s: DeepSpeedSettings, params: RankParameters, sizes: list[tuple[ParameterGroup, int]], dp: int
) -> int:
    """The group's flat fp32 gradient if it does not exist yet, and the optimizer's temporaries."""
    w = s.model_bytes
    compact = w != s.accumulation_bytes == 4
    flat = 0 if compact else 4 + (w if w < 4 else 0)
    return max(size * flat + _temporaries(s, params, [(group, size)], dp) for group, size in sizes)


def zero3_states(s: DeepSpeedSettings, params: RankParameters, dp: int) -> ModelStates:
    """Return the states of DeepSpeedZeroOptimizer_Stage3.

    Weights, gradients, masters and moments are sharded; weights of at most `persistence_threshold` elements are
    replicated.
    """
    weight_bytes = s.model_bytes
    shards = _shards(params.groups, dp)
    frozen_shards = _shards((params.frozen,), dp)
    sub_groups = [(group, size) for group in params.groups for size in _sub_groups(group, dp, s.sub_group_size)]
    # A single rank uses its shard as the parameter, if both are on the same device.
    gathers = dp > 1 or (s.offload_params and s.device != "cpu")
    replicated = _persistent(params, s.persistence_threshold, dp) if gathers else 0
    second = _second_partition(s, params, dp)
    sharded_weights = weight_bytes * (shards + frozen_shards)
    updated = StateBytes(
        masters=4 * shards,
        optimizer=_moments(s, params, [(group, size, 1) for group, size in sub_groups]),
        gradients=s.accumulation_bytes * shards,
    )
    on_device = StateBytes() if s.offload_optimizer else updated
    on_host = StateBytes(parameters=sharded_weights if s.offload_params else 0)
    if s.offload_optimizer:
        # Beside the accumulated gradients there are fp32 ones, from which the optimizer updates.
        on_host = replace(updated, parameters=on_host.parameters, gradients=updated.gradients + 4 * shards)
    files = _Files.of(s, params, dp, [size for _, size in sub_groups])
    update = 0
    if not s.offload_optimizer:
        update = max(_zero3_update(s, params, group, size, dp) for group, size in sub_groups)
    weights_on_device = weight_bytes * replicated + (0 if s.offload_params else sharded_weights)
    return ModelStates(
        resident=replace(
            on_device,
            parameters=weights_on_device + second.frozen,
            buckets=s.communication_bytes * s.reduce_bucket_size if s.contiguous_gradients else 0,
            model_buffers=params.buffers(weight_bytes),
            counters=1 + (4 if s.offload_optimizer else 8),
        ),
        host=files.left_of(on_host),
        nvme=files.written,
        host_complete=8 * params.count if s.offload_optimizer else 0,
        buckets=_scattering(s, params, params.largest_early),
        gathered=(weight_bytes * _gathered(s, params) if gathers else 0) + second.trained,
        last_gradient=weight_bytes * params.largest_trained + _scattering(s, params, params.largest_trained),
        reduction=second.trained + files.waiting_gradients,
        complete=files.waiting_gradients,
        step=second.trained + files.waiting_gradients + update,
    )


@dataclass(frozen=True, kw_only=True)
class _SecondPartition:
    """Bytes of ZeRO++'s second partition of the weights, within groups of `hpz` ranks; 0 without it."""

    trained: int
    """The partition of weights that train, which is made in the forward pass, and dropped after the update."""
    frozen: int
    """The partition of frozen weights, which stays."""


def _second_partition(s: DeepSpeedSettings, params: RankParameters, dp: int) -> _SecondPartition:
    if s.hpz <= 1:
        return _SecondPartition(trained=0, frozen=0)
    return _SecondPartition(
        trained=s.model_bytes * dp * _gathered_shards(params, s.persistence_threshold, dp) // s.hpz,
        frozen=s.model_bytes * dp * _shards((params.frozen,), dp) // s.hpz,
    )


@dataclass(frozen=True, kw_only=True)
class _Files:
    """Model states of ZeRO-3 that are written to files on NVMe, in bytes.

    Sub-groups of masters and moments, a parameter's gradients and shards have files if they have `file_bytes`, padded
    to the alignment. Gradients are written up to the last multiple of it: the rest, and with it the memory of all,
    waits on the device for the update.
    """

    written: StateBytes
    """Bytes in files, padding included."""
    moved: StateBytes
    """Bytes in host memory that files save, less what stands there for weights in files."""
    staging: int
    """Buffers in host memory, through which files are read and written."""
    waiting_gradients: int
    """Gradients that wait on the device."""

    @classmethod
    def of(cls, s: DeepSpeedSettings, params: RankParameters, dp: int, sub_groups: Sequence[int]) -> Self:
        """Return the files of a rank, which updates its parameters in `sub_groups` of so many elements."""
        written = StateBytes()
        moved = StateBytes()
        staging = 0
        waiting_gradients = 0
        if s.nvme_optimizer:
            filed_sub_groups = [size for size in sub_groups if 4 * size >= s.file_bytes]
            masters = sum(_aligned(s, size, 4) for size in filed_sub_groups)
            moved_bytes = 4 * sum(filed_sub_groups)
            gradients = 0
            for group in params.groups:
                for size, count in group.shards(dp):
                    rest = 4 * size % s.file_alignment if 4 * size >= s.file_bytes else 4 * size
                    gradients += (4 * size - rest) * count
                    if rest and s.device != "cpu":
                        waiting_gradients += 4 * size * count
            written = StateBytes(masters=masters, optimizer=s.moments * masters, gradients=gradients)
            moved = StateBytes(masters=moved_bytes, optimizer=s.moments * moved_bytes, gradients=moved_bytes)
            staging += s.optimizer_buffers * _aligned(s, max(sub_groups), 4)
        if s.nvme_params:
            weight_bytes = s.model_bytes
            shards = [shard for group in (*params.groups, params.frozen) for shard in group.shards(dp)]
            filed_shards = [(size, count) for size, count in shards if weight_bytes * size >= s.file_bytes]
            stand_ins = weight_bytes * len(params.groups) + 2
            moved_weights = weight_bytes * sum(size * count for size, count in filed_shards)
            written = replace(
                written, parameters=sum(_aligned(s, size, weight_bytes) * count for size, count in filed_shards)
            )
            moved = replace(moved, parameters=moved_weights - stand_ins)
            # The buffers for reading, and one for writing back what the largest sub-group updates.
            staging += _aligned(s, s.param_buffer_elements, weight_bytes)
            staging += _largest_padded(s, params, dp, weight_bytes)
        return cls(written=written, moved=moved, staging=staging, waiting_gradients=waiting_gradients)

    def left_of(self, on_host: StateBytes) -> StateBytes:
        """Return what is left in host memory of states that would be there without files."""
        return replace(
            on_host,
            parameters=on_host.parameters - self.moved.parameters,
            gradients=on_host.gradients - self.moved.gradients,
            masters=on_host.masters - self.moved.masters,
            optimizer=on_host.optimizer - self.moved.optimizer,
            buckets=self.staging,
        )


def _aligned(s: DeepSpeedSettings, elements: int, element_bytes: int) -> int:
    """Return the bytes of elements, padded to the alignment of files."""
    unit = s.file_alignment // element_bytes
    return element_bytes * -(-elements // unit) * unit


def _largest_padded(s: DeepSpeedSettings, params: RankParameters, dp: int, element_bytes: int) -> int:
    """Return the bytes of the largest sub-group where each shard is padded to the alignment of files."""
    largest_numel = 0
    largest_bytes = 0
    for group in params.groups:
        numel = 0
        padded_bytes = 0
        for parameter_numel in group:
            shard = -(-parameter_numel * group.ep // dp)
            numel += shard
            padded_bytes += _aligned(s, shard, element_bytes)
            if numel > largest_numel:
                largest_numel = numel
                largest_bytes = padded_bytes
            if numel >= s.sub_group_size:
                numel = 0
                padded_bytes = 0
    return largest_bytes


@lru_cache(maxsize=8192)
def _shards(groups: tuple[ParameterGroup, ...], dp: int) -> int:
    """S: each parameter is padded to a multiple of D by itself."""
    return sum(size * count for group in groups for size, count in group.shards(dp))


def _gathered_shards(params: RankParameters, threshold: int, dp: int) -> int:
    """Elements of this rank's shards of what trains and is not replicated."""
    gathered = 0
    for group in params.groups:
        for (numel, count), (shard, _) in zip(group.counted, group.shards(dp), strict=True):
            if numel > threshold:
                gathered += shard * count
    return gathered


@lru_cache(maxsize=4096)
def _persistent(params: RankParameters, threshold: int, dp: int) -> int:
    """Elements of the replicated parameters, each with the padding of its shards."""
    replicated = 0
    for group in (*params.groups, params.frozen):
        for (numel, count), (shard, _) in zip(group.counted, group.shards(dp), strict=True):
            if numel <= threshold:
                replicated += shard * dp // group.ep * count
    return replicated


@lru_cache(maxsize=8192)
def _sub_groups(group: ParameterGroup, dp: int, size: int) -> tuple[int, ...]:
    """Elements of the sub-groups that are updated at once: each ends with the parameter that fills it."""
    total = _shards((group,), dp)
    replicas = dp // group.ep
    if size >= total:
        return (total,)
    closed = []
    local = 0
    for numel in group:
        local += -(-numel // replicas)
        if local >= size:
            closed.append(local)
            local = 0
    return (*closed, local) if local else tuple(closed)


def _zero3_update(s: DeepSpeedSettings, params: RankParameters, group: ParameterGroup, size: int, dp: int) -> int:
    """A sub-group's gradients in fp32, unless they are accumulated so; then the optimizer's temporaries."""
    cast = size * 4 if s.accumulation_bytes != 4 else 0
    return cast + _temporaries(s, params, [(group, size)], dp)


def _moments(s: DeepSpeedSettings, params: RankParameters, tensors: list[tuple[ParameterGroup, int, int]]) -> int:
    """States of the tensors that are updated, given as (group, elements, how many)."""
    if s.factored:
        return 4 * params.factors
    hidden = [(elements, count) for group, elements, count in tensors if group.is_hidden]
    others = [(elements, count) for group, elements, count in tensors if not group.is_hidden]
    if s.hidden_in_8_bits:
        of_hidden = moments_8bit(hidden)
    else:  # Muon's momentum
        of_hidden = sum(4 * elements * count for elements, count in hidden)
    return of_hidden + s.optimizer_bytes(others)


def _temporaries(s: DeepSpeedSettings, params: RankParameters, sizes: list[tuple[ParameterGroup, int]], dp: int) -> int:
    """Bytes of temporaries of updates one after the other: an fp32 copy of each for PyTorch's, 0 for a fused one.

    Muon's, at most: an owner's matrices of a round six times, as they arrive, side by side, scaled, their two products
    with themselves, and the next iterate (toolkit/engines/optimizers/muon.py). A rank has so many elements at once, or
    its share.
    """
    if s.factored:
        return update_of_factored(params)
    copied = 0 if s.fused else 4 * max((size for group, size in sizes if not group.is_hidden), default=0)
    if not s.muon:
        return copied
    share = sum(group.numel for group in params.groups if group.is_hidden) // dp
    largest_matrix = max((matrix.numel for matrix in params.hidden_matrices), default=0)
    elements_at_once = max(largest_matrix, min(share, UPDATE_CHUNK_ELEMENTS))
    element_bytes = 4 if s.precision == "fp32" else 2
    return max(copied, 6 * element_bytes * elements_at_once)


def _gathered(s: DeepSpeedSettings, params: RankParameters) -> int:
    """Elements of gathered weights, at most.

    Each module's fetch prefetches another bucket, until `stage3_max_live_parameters` are whole.
    On NVMe weights are prefetched into few buffers. Known error: one parameter, and `stage3_max_reuse_distance` where
    it is more than the former.
    """
    largest = max(params.layer_numel, min(params.outside, params.largest))
    ahead = min(largest + s.prefetch_bucket_size, s.max_live_parameters) if s.nvme_params else s.max_live_parameters
    return min(max(ahead, largest), params.numel)


def _scattering(s: DeepSpeedSettings, params: RankParameters, largest: int) -> int:
    """Copies while a bucket is scattered: in the dtype of communication, and again with each rank's parts together.

    `largest`: elements of the largest gradient, which is scattered alone where it is more than a bucket.
    """
    elements = min(max(s.reduce_bucket_size, largest), params.trained)
    casts = s.communication_bytes if s.communication_bytes != s.model_bytes else 0
    return elements * (casts + s.communication_bytes)
