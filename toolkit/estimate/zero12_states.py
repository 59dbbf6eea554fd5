"""Model states of DeepSpeedZeroOptimizer, ZeRO stages 1 and 2, to the byte (deepspeed/runtime/zero/stage_1_and_2.py).

Stage 1 accumulates whole gradients and reduces them once; stage 2 reduces those of each micro-batch, beside the sum of
those before. Derived from the sources of DeepSpeed 0.19.8.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.optimizer_memory import UpdatedTensors, moment_bytes, temporary_bytes
from toolkit.estimate.rank_parameters import ParameterGroup, RankParameters
from toolkit.estimate.states import ModelStates, StateBytes


def zero12_states(
    settings: DeepSpeedSettings, params: RankParameters, dp: int, data_rank: int, accumulation: int
) -> ModelStates:
    """Return the states of data-parallel rank `data_rank` of `dp`, with `accumulation` micro-batches a step."""
    weight_bytes = settings.model_bytes
    offloads = settings.offload_optimizer
    partitions = [_Partition.of(group, dp, data_rank) for group in params.groups]
    gradients = _Gradients.of(settings, params, partitions, accumulation)
    buckets = _Buckets.of(settings)
    updated = _updated_states(settings, params, partitions, gradients)
    kept_bucket = buckets.one if _stays_in_bucket(settings, params, partitions) else 0
    reducing_last = _reducing_bytes(settings, params, params.largest_trained)
    padded_numel = sum(group.padded(dp) for group in params.groups)
    return ModelStates(
        resident=StateBytes(
            parameters=weight_bytes * (padded_numel + params.frozen.numel),
            masters=0 if offloads else updated.masters,
            optimizer=0 if offloads else updated.optimizer,
            buckets=updated.buckets,
            model_buffers=params.buffers(weight_bytes),
            counters=4,
        ),
        host=updated if offloads else StateBytes(),
        accumulated=gradients.accumulated,
        fresh_layer=gradients.fresh_layer,
        buckets=_bytes_in_backward_pass(settings, params, buckets),
        last_gradient=weight_bytes * params.largest_trained + buckets.all + reducing_last,
        reduction=gradients.at_reduction + buckets.all + reducing_last,
        complete=gradients.averaged,
        complete_buckets=kept_bucket,
        # A norm in fp64 of each parameter that this rank updates a part of.
        host_complete=8 * sum(partition.parameters for partition in partitions) if offloads else 0,
        step=gradients.averaged + kept_bucket + _update_bytes(settings, params, partitions, dp),
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
        first_parameter = _parameter_at(self.group, self.start)
        last_parameter = _parameter_at(self.group, stop - 1)
        return last_parameter.stop - first_parameter.start

    @property
    def parameters(self) -> int:
        """Number of parameters that have any element in the partition."""
        count = 0
        offset = 0
        for numel in self.group:
            if offset < self.stop and offset + numel > self.start:
                count += 1
            offset += numel
        return count


def _parameter_at(group: ParameterGroup, element: int) -> range:
    """Return the elements of the parameter of a flattened group that holds this element."""
    before = 0
    for sizes, times in group.runs:
        period = sum(sizes)
        if element < before + period * times:
            start = before + (element - before) // period * period
            for numel in sizes:
                if element < start + numel:
                    return range(start, start + numel)
                start += numel
        before += period * times
    raise AssertionError("the element is beyond the group")


@dataclass(frozen=True, kw_only=True)
class _Gradients:
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

    @classmethod
    def of(
        cls, settings: DeepSpeedSettings, params: RankParameters, partitions: Sequence[_Partition], accumulation: int
    ) -> Self:
        """Count the gradients of a rank that updates these partitions."""
        averaged = _averaged_bytes(settings, partitions)
        if settings.zero_stage == 1:
            element_bytes = max(settings.accumulation_bytes, settings.model_bytes)
            whole = element_bytes * params.trained
            return cls(
                averaged=averaged,
                accumulated=whole if accumulation > 1 else 0,
                at_reduction=whole if whole > 0 else averaged,
                fresh_layer=element_bytes * params.trained_layer if accumulation == 1 else 0,
                waiting_on_host=0,
            )
        adds_up = accumulation > 1 and not _sums_in_fp32(settings)
        touched = sum(partition.touched for partition in partitions)
        return cls(
            averaged=averaged,
            accumulated=2 * averaged if adds_up else averaged,
            at_reduction=averaged,
            fresh_layer=0,
            waiting_on_host=settings.model_bytes * touched if adds_up else 0,
        )


def _sums_in_fp32(settings: DeepSpeedSettings) -> bool:
    """Whether gradients of 16-bit weights are added up in fp32."""
    return settings.accumulation_bytes == 4 and settings.model_bytes != 4


def _averaged_bytes(settings: DeepSpeedSettings, partitions: Sequence[_Partition]) -> int:
    """Bytes on the device of the gradients of a rank's partition, before the update."""
    if _sums_in_fp32(settings):
        return 4 * sum(partition.numel for partition in partitions)
    if settings.offload_optimizer:
        return 0
    # Whole parameters, and zeros that pad the partition behind the last of them.
    return settings.model_bytes * sum(partition.touched + partition.padding for partition in partitions)


def _updated_states(
    settings: DeepSpeedSettings, params: RankParameters, partitions: Sequence[_Partition], gradients: _Gradients
) -> StateBytes:
    """Return what the update reads and writes, in host memory or, as far as it is not there already, on the device.

    `buckets` is the buffer through which gradients go to the host, which both have; 0 without offload.
    """
    partition_numel = sum(partition.numel for partition in partitions)
    masters = 4 * partition_numel
    return StateBytes(
        parameters=settings.model_bytes * partition_numel,
        gradients=masters + gradients.waiting_on_host,
        masters=masters,
        optimizer=moment_bytes(settings, params, _tensors_of(partitions)),
        buckets=settings.model_bytes * params.largest_trained if settings.offload_optimizer else 0,
    )


def _tensors_of(partitions: Sequence[_Partition]) -> list[UpdatedTensors]:
    """Return the tensors that the optimizer updates: one for each partition."""
    return [UpdatedTensors(partition.group, partition.numel) for partition in partitions]


class _Buckets(NamedTuple):
    """Bytes of the buckets in which gradients are reduced: of one, and of all."""

    one: int
    all: int

    @classmethod
    def of(cls, settings: DeepSpeedSettings) -> Self:
        """Count the buckets: two where reductions overlap with the backward pass."""
        if not settings.contiguous_gradients:
            return cls(one=0, all=0)
        bucket = _staged_bytes(settings) * settings.reduce_bucket_size
        return cls(one=bucket, all=2 * bucket if settings.overlap_comm else bucket)


def _staged_bytes(settings: DeepSpeedSettings) -> int:
    """Bytes of an element in a bucket: stage 1 stages the accumulator, stage 2 the gradient itself."""
    if settings.zero_stage == 1:
        return max(settings.accumulation_bytes, settings.model_bytes)
    return settings.model_bytes


def _bytes_in_backward_pass(settings: DeepSpeedSettings, params: RankParameters, buckets: _Buckets) -> int:
    """Bytes of buckets, and of the copies of one that is reduced, until the last gradient is complete."""
    if settings.zero_stage == 2:
        return buckets.all + _reducing_bytes(settings, params, params.largest_early)
    if settings.overlap_comm:
        # Stage 1 keeps the gradients of the whole pass, so that what the activations leave free is taken until it ends.
        return buckets.all + _reducing_bytes(settings, params, params.largest_trained)
    # Without overlap, stage 1 reduces when the backward pass is over.
    return buckets.one


def _reducing_bytes(settings: DeepSpeedSettings, params: RankParameters, largest: int) -> int:
    """Copies of a bucket: the slices for each rank concatenated, and again in the dtype of communication.

    `largest`: elements of the largest gradient, which is reduced alone where it is more than a bucket.
    """
    element_bytes = _staged_bytes(settings)
    if settings.communication_bytes != element_bytes:
        element_bytes += settings.communication_bytes
    return min(max(settings.reduce_bucket_size, largest), params.trained) * element_bytes


def _stays_in_bucket(settings: DeepSpeedSettings, params: RankParameters, partitions: Sequence[_Partition]) -> bool:
    """Whether gradients of stage 1 that are reduced keep a bucket alive: the rank's own are slices of it."""
    touched = sum(partition.touched for partition in partitions)
    is_cast = settings.model_bytes != settings.accumulation_bytes
    return settings.zero_stage == 1 and is_cast and touched < params.trained


def _update_bytes(
    settings: DeepSpeedSettings, params: RankParameters, partitions: Sequence[_Partition], dp: int
) -> int:
    """Bytes of one group's flat fp32 gradient if it does not exist yet, and the optimizer's temporaries; at most.

    An update on the host takes nothing on the device.
    """
    if settings.offload_optimizer:
        return 0
    gradient_bytes = 0
    if not _sums_in_fp32(settings):
        # Flattened in the weights' dtype, and cast.
        gradient_bytes = 4 if settings.model_bytes == 4 else 4 + settings.model_bytes
    return max(
        gradient_bytes * tensor.numel + temporary_bytes(settings, params, [tensor], dp=dp)
        for tensor in _tensors_of(partitions)
    )
