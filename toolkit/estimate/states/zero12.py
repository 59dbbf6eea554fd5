"""ZeRO-1 and ZeRO-2: one flat buffer of weights a group, of whose fp32 masters and moments a rank has its part.

Letters: N elements, D ranks, F = N padded to a multiple of 2D, P = F / D; w and a bytes of a weight and of an
accumulated gradient. Where w = a, reduced gradients stay in one buffer of whole parameters, those at both ends of a
rank's part included; where they differ and a is fp32, in a flat buffer of exactly P elements.
"""

from toolkit.estimate.parameters import Group, Holdings
from toolkit.estimate.states.flat import optimizer_bytes, padded
from toolkit.estimate.states.model_states import Bytes, ModelStates
from toolkit.estimate.states.settings import DeepSpeedSettings


def zero12_states(s: DeepSpeedSettings, held: Holdings, dp: int, data_rank: int, accumulation: int) -> ModelStates:
    """DeepSpeedZeroOptimizer, stages 1 and 2."""
    parts = [padded(group, dp) // dp for group in held.groups]
    part = sum(parts)
    w, a = s.model_bytes, s.accumulation_bytes
    compact = w != a and a == 4
    touched = [
        group.touching(data_rank * size, (data_rank + 1) * size) for group, size in zip(held.groups, parts, strict=True)
    ]
    averaged = a * part if compact else _loose(held.groups, parts, touched, data_rank, w)
    complete = 0 if s.offload_optimizer and not compact else averaged
    whole = max(a, w) * held.numel if s.zero_stage == 1 else 0
    one_bucket = _bucket(s)
    buckets = one_bucket * (2 if s.overlap_comm else 1) + _reducing(s, held)
    keeps = s.zero_stage == 1 and w != a and sum(touched) < held.numel
    fp32, moments = 4 * part, optimizer_bytes(s, part, len(parts))
    offload = s.offload_optimizer
    staging = w * held.largest if offload else 0
    host = Bytes(
        parameters=w * part,
        # Stage 2 reduces every micro-batch and sums on the host; stage 1 reduces once.
        gradients=4 * part + (w * sum(touched) if s.zero_stage == 2 and accumulation > 1 and not compact else 0),
        masters=fp32,
        optimizer=moments,
        buckets=staging,
    )
    return ModelStates(
        held=Bytes(
            parameters=w * part * dp,
            masters=0 if offload else fp32,
            optimizer=0 if offload else moments,
            buckets=staging,
            model_buffers=held.buffer_bytes,
            counters=4,
        ),
        host=host if offload else Bytes(),
        accumulated=_accumulated(s, whole, complete, accumulation, compact=compact),
        fresh_layer=max(a, w) * held.layer_numel if s.zero_stage == 1 and accumulation == 1 else 0,
        # Without overlap, stage 1 reduces when the backward pass is over.
        buckets=buckets if s.zero_stage == 2 or s.overlap_comm else one_bucket,
        reduction=(whole or complete) + buckets,
        complete=complete,
        complete_buckets=one_bucket if keeps else 0,
        host_complete=_norms(held.groups, parts, data_rank) if offload else 0,
        step=complete + (one_bucket if keeps else 0) + (0 if offload else _update(s, parts, compact=compact)),
    )


def _loose(groups: tuple[Group, ...], parts: list[int], touched: list[int], data_rank: int, w: int) -> int:
    """One buffer of whole parameters, and zeros for what a part lacks behind the last of them."""
    total = w * sum(touched)
    for group, size in zip(groups, parts, strict=True):
        total += w * min(max((data_rank + 1) * size - group.numel, 0), size)
    return total


def _accumulated(s: DeepSpeedSettings, whole: int, complete: int, accumulation: int, *, compact: bool) -> int:
    """Stage 1 adds up whole gradients and reduces once; stage 2 reduces each micro-batch's, beside the sum so far."""
    if s.zero_stage == 1:
        return whole if accumulation > 1 else 0
    return complete if compact or accumulation == 1 else 2 * complete


def _staged_bytes(s: DeepSpeedSettings) -> int:
    """Of an element in a bucket: stage 1 stages the accumulator, stage 2 the gradient as it comes."""
    return max(s.accumulation_bytes, s.model_bytes) if s.zero_stage == 1 else s.model_bytes


def _bucket(s: DeepSpeedSettings) -> int:
    return _staged_bytes(s) * s.reduce_bucket_size if s.contiguous_gradients else 0


def _reducing(s: DeepSpeedSettings, held: Holdings) -> int:
    """Copies of a bucket: the slices for each rank one behind the other, and again in the dtype of communication."""
    staged = _staged_bytes(s)
    copies = staged + (s.communication_bytes if s.communication_bytes != staged else 0)
    return min(max(s.reduce_bucket_size, held.largest), held.numel) * copies


def _norms(groups: tuple[Group, ...], parts: list[int], data_rank: int) -> int:
    """A norm in fp64 of each parameter that this rank updates a part of."""
    return 8 * sum(
        group.count_touching(data_rank * size, (data_rank + 1) * size)
        for group, size in zip(groups, parts, strict=True)
    )


def _update(s: DeepSpeedSettings, parts: list[int], *, compact: bool) -> int:
    """The group's flat fp32 gradient where it is not there yet, and the optimizer's temporaries."""
    flat = 0 if compact else 4 + (s.model_bytes if s.model_bytes < 4 else 0)
    return max(parts) * (flat + (0 if s.fused else 4))
