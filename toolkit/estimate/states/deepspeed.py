"""What DeepSpeed's engines hold of a rank's parameters, to the byte. Read from the sources of DeepSpeed 0.19.8.

Letters in the formulas: N elements of a rank's parameters after tensor and pipeline cuts, D data-parallel ranks,
F = N padded, group by group, to a multiple of 2D, P = F / D; w, a, c bytes of a weight, of an accumulated gradient
and of a gradient in transit.
"""

from functools import lru_cache

from toolkit.estimate.parameters import Holdings
from toolkit.estimate.states.flat import optimizer_bytes, padded
from toolkit.estimate.states.model_states import Bytes, ModelStates
from toolkit.estimate.states.settings import DeepSpeedSettings
from toolkit.estimate.states.zero3 import zero3_states
from toolkit.estimate.states.zero12 import zero12_states

_FALLBACK_BUCKET = 500_000_000
"""Elements that `allreduce_gradients` flattens at once (engine.py, MEMORY_OPT_ALLREDUCE_SIZE)."""


@lru_cache(maxsize=8192)
def deepspeed_states(
    settings: DeepSpeedSettings, holdings: Holdings, *, dp: int, data_rank: int = 0, accumulation: int = 2
) -> ModelStates:
    """The states of data-parallel rank `data_rank` of `dp`, with `accumulation` micro-batches a step."""
    match settings.wrapper:
        case "none":
            return _plain(settings, holdings, accumulation)
        case "unfused":
            return _unfused(settings, holdings, accumulation)
        case "bf16":
            return _bf16(settings, holdings, dp)
        case "zero12":
            return zero12_states(settings, holdings, dp, data_rank, accumulation)
        case "zero3":
            return zero3_states(settings, holdings, dp)


def _plain(s: DeepSpeedSettings, held: Holdings, accumulation: int) -> ModelStates:
    """A plain PyTorch optimizer over fp32 weights: 4 + 4 + 8 bytes. What autocast casts counts with activations."""
    gradients = 4 * held.numel
    flat = min(held.numel, _FALLBACK_BUCKET + held.largest)
    return ModelStates(
        held=Bytes(
            parameters=4 * held.numel,
            optimizer=optimizer_bytes(s, held.numel, held.count),
            model_buffers=held.buffer_bytes,
            counters=8 if s.autocast == "fp16" else 0,
        ),
        accumulated=gradients if accumulation > 1 else 0,
        fresh_layer=4 * held.layer_numel if accumulation == 1 else 0,
        reduction=gradients + flat * (4 + (s.communication_bytes if s.communication_bytes != 4 else 0)),
        complete=gradients,
        step=gradients + (0 if s.fused else 4 * held.numel),
    )


def _unfused(s: DeepSpeedSettings, held: Holdings, accumulation: int) -> ModelStates:
    """FP16_UnfusedOptimizer: 16-bit weights and gradients, fp32 masters, and at the step fp32 gradients of all."""
    w = s.model_bytes
    gradients = w * held.numel
    flat = min(held.numel, _FALLBACK_BUCKET + held.largest)
    return ModelStates(
        held=Bytes(
            parameters=w * held.numel,
            masters=4 * held.numel,
            optimizer=optimizer_bytes(s, held.numel, held.count),
            model_buffers=held.buffer_bytes,
            counters=4,
        ),
        accumulated=gradients if accumulation > 1 else 0,
        fresh_layer=w * held.layer_numel if accumulation == 1 else 0,
        reduction=gradients + flat * (w + (s.communication_bytes if s.communication_bytes != w else 0)),
        complete=gradients,
        step=gradients + 4 * held.numel * (1 if s.fused else 2),
    )


def _bf16(s: DeepSpeedSettings, held: Holdings, dp: int) -> ModelStates:
    """BF16_Optimizer: whole flat gradients in the accumulation dtype, never sharded; masters and moments over D.

    The weights' own bf16 gradients live from the first backward pass to the step: between micro-batches they are
    zeroed, not freed.
    """
    flats = [padded(group, dp) for group in held.groups]
    flat = sum(flats)
    part = flat // dp
    # One tensor alone is reduced where it lies; the flat gradients of several groups are copied together.
    largest = max(flats)
    copied = 0 if largest > _FALLBACK_BUCKET or len(flats) == 1 else flat
    cast = 0 if s.communication_bytes == s.accumulation_bytes else (copied or largest)
    own = s.model_bytes * held.numel
    return ModelStates(
        held=Bytes(
            parameters=s.model_bytes * flat,
            gradients=s.accumulation_bytes * flat,
            masters=4 * part,
            optimizer=optimizer_bytes(s, part, len(flats)),
            model_buffers=held.buffer_bytes,
            counters=4,
        ),
        accumulated=own,
        reduction=own + s.accumulation_bytes * copied + s.communication_bytes * cast,
        complete=own,
        step=own + (0 if s.fused else 4 * largest // dp),
    )
