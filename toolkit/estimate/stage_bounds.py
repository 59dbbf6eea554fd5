"""The stage bounds that training chooses, from the FLOPs that a recording has counted, without building the model."""

from functools import lru_cache

from toolkit.config.layout import Recompute
from toolkit.config.pipeline_schedules import Schedule
from toolkit.config.stage_balance import GPU_FLOPS_PER_BYTE, Costs, balance, balance_schedule, recompute_cost
from toolkit.estimate.parameters import ModelParameters
from toolkit.estimate.training_setup import TrainingSetup

_LOSS_BYTES = 24
"""Memory traffic of one token's loss and its gradient per vocabulary entry: six passes over fp32."""
_GRADIENT_BYTES = 16
"""Memory traffic per parameter in each micro-batch: two reads and two writes of fp32."""


@lru_cache(maxsize=4096)
def balanced_bounds(
    model: ModelParameters,
    stages: int,
    *,
    micro_batch_size: int,
    seq_len: int,
    recompute: Recompute = "none",
    head_alone: bool = True,
    flops_per_byte: float = GPU_FLOPS_PER_BYTE,
    schedule: Schedule | None = None,
) -> tuple[int, ...]:
    """Return training's bounds: stage k has layers [bounds[k], bounds[k + 1]). Raises LayoutError for too many.

    `schedule`: the toolkit's own; None: DeepSpeed's, a stage for each rank.
    """
    if stages == 1:
        return (0, len(model.pattern))
    costs = _costs(model, micro_batch_size * seq_len, seq_len, recompute, flops_per_byte)
    if schedule is None:
        return balance(costs, stages, head_alone=head_alone)
    return balance_schedule(costs, schedule, head_alone=head_alone)


def bounds_of(
    setup: TrainingSetup, *, adapters_alone: bool, flops_per_byte: float = GPU_FLOPS_PER_BYTE
) -> tuple[int, ...]:
    """Return the bounds of a setup's stages. With `adapters_alone`, where only adapters train, each has a layer."""
    layout = setup.layout
    return balanced_bounds(
        setup.model.parameters,
        layout.stages,
        micro_batch_size=setup.micro_batch_size,
        seq_len=setup.seq_len,
        recompute=layout.recompute,
        head_alone=not adapters_alone,
        flops_per_byte=flops_per_byte,
        schedule=layout.table(setup.accumulation) if layout.schedule else None,
    )


def _costs(model: ModelParameters, tokens: int, seq_len: int, recompute: Recompute, flops_per_byte: float) -> Costs:
    """FLOPs a token, as `toolkit.parallel.pipeline.balance.count_costs` counts them, from the recorded counts."""
    traffic = flops_per_byte * _GRADIENT_BYTES / tokens
    counted = [
        tuple(constant + slope * seq_len for constant, slope in (part.flops, part.with_weights)) for part in model.flops
    ]
    (before, _), *kinds, (after, _) = counted

    def layer(index: int) -> float:
        kind = model.pattern[index]
        flops, weighted = kinds[kind]
        numel = model.layer_numels[kind]
        return 3 * flops + recompute_cost(recompute, index, flops, weighted) + traffic * numel

    loss = flops_per_byte * _LOSS_BYTES * next(parameter.shape[0] for parameter in model.outside if parameter.is_head)
    return Costs(
        before=3 * before + traffic * sum(parameter.numel for parameter in model.outside if parameter.first),
        layers=tuple(map(layer, range(len(model.pattern)))),
        after=3 * after + traffic * sum(parameter.numel for parameter in model.outside if parameter.last) + loss,
    )
