"""Model states of DeepSpeed's engines, to the byte. Derived from the sources of DeepSpeed 0.19.8.

Which optimizer DeepSpeed wraps around the one that updates decides: here are those without ZeRO and BF16_Optimizer;
`zero12_states` and `zero3_states` have those of the ZeRO stages.
"""

from functools import lru_cache

from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.optimizer_memory import UpdatedTensors, moment_bytes, temporary_bytes
from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.states import ModelStates, StateBytes
from toolkit.estimate.zero3_states import zero3_states
from toolkit.estimate.zero12_states import zero12_states

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


def _without_zero(settings: DeepSpeedSettings, params: RankParameters, dp: int, accumulation: int) -> ModelStates:
    """Return the states of a plain PyTorch optimizer over fp32 weights, or of FP16_UnfusedOptimizer.

    The former has 4 + 4 + 8 bytes a parameter; what autocast casts counts with activations. The latter has 16-bit
    weights and gradients, fp32 masters, and at the step fp32 gradients of all.
    """
    weight_bytes = settings.model_bytes
    is_plain = settings.wrapper == "none"
    gradients = weight_bytes * params.trained
    masters = 0 if is_plain else 4 * params.trained
    reduced_bytes = weight_bytes
    if settings.communication_bytes != weight_bytes:
        reduced_bytes += settings.communication_bytes
    flattened = min(params.trained, _FALLBACK_BUCKET + params.largest_trained)
    tensors = [UpdatedTensors(group, numel, count) for group in params.groups for numel, count in group.counted]
    other_numel = sum(group.numel for group in params.groups if not group.is_hidden)
    # All that is not a matrix of a decoder layer is updated at once.
    updated = [UpdatedTensors(group, group.numel if group.is_hidden else other_numel) for group in params.groups]
    return ModelStates(
        resident=StateBytes(
            parameters=weight_bytes * params.numel,
            masters=masters,
            optimizer=moment_bytes(settings, params, tensors),
            model_buffers=params.buffers(weight_bytes),
            counters=8 if is_plain and settings.autocast == "fp16" else 0,
        ),
        accumulated=gradients if accumulation > 1 else 0,
        fresh_layer=weight_bytes * params.trained_layer if accumulation == 1 else 0,
        reduction=gradients + flattened * reduced_bytes,
        complete=gradients,
        step=gradients + masters + temporary_bytes(settings, params, updated, dp=dp),
    )


def _bf16(settings: DeepSpeedSettings, params: RankParameters, dp: int) -> ModelStates:
    """Return the states of BF16_Optimizer (deepspeed/runtime/bf16_optimizer.py).

    Flat gradients in the accumulation dtype are replicated; masters and moments are sharded over `dp` ranks. The
    weights' own bf16 gradients live from the first backward pass to the step: between micro-batches they are zeroed,
    not freed.
    """
    flat_numel = sum(group.padded(dp) for group in params.groups)
    updated = [UpdatedTensors(group, group.part(dp)) for group in params.groups]
    weight_gradients = settings.model_bytes * params.trained
    return ModelStates(
        resident=StateBytes(
            parameters=settings.model_bytes * (flat_numel + params.frozen.numel),
            gradients=settings.accumulation_bytes * flat_numel,
            masters=4 * sum(tensor.numel for tensor in updated),
            optimizer=moment_bytes(settings, params, updated),
            model_buffers=params.buffers(settings.model_bytes),
            counters=4,  # the norm
        ),
        accumulated=weight_gradients,
        reduction=weight_gradients + _flat_reduction_bytes(settings, params, dp),
        complete=weight_gradients,
        step=weight_gradients + temporary_bytes(settings, params, updated, dp=dp),
    )


def _flat_reduction_bytes(settings: DeepSpeedSettings, params: RankParameters, dp: int) -> int:
    """Bytes of copies while flat gradients are reduced: of several groups together, and in another dtype.

    A single tensor is reduced in place; the flat gradients of several groups are copied together.
    """
    group_numels = [group.padded(dp) for group in params.groups]
    largest = max(group_numels)
    copied = 0
    if largest <= _FALLBACK_BUCKET and len(group_numels) > 1:
        copied = sum(group_numels)
    cast = 0
    if settings.communication_bytes != settings.accumulation_bytes:
        cast = copied if copied > 0 else largest
    return settings.accumulation_bytes * copied + settings.communication_bytes * cast
