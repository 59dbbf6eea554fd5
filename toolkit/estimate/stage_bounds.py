"""The stage bounds that training chooses, from the FLOPs that a recording has counted, without building the model."""

from functools import lru_cache

from toolkit.config.layout import Layout, Recompute
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


def bounds_of(setup: TrainingSetup, *, flops_per_byte: float = GPU_FLOPS_PER_BYTE) -> tuple[int, ...]:
    """Return the bounds of a setup's stages. Where adapters alone train, each stage has a layer."""
    layout = setup.layout
    return balanced_bounds(
        setup.model.parameters,
        layout.stages,
        micro_batch_size=setup.micro_batch_size,
        seq_len=setup.seq_len,
        recompute=layout.recompute,
        head_alone=not setup.trains_adapters,
        flops_per_byte=flops_per_byte,
        schedule=layout.table(setup.accumulation) if layout.schedule else None,
    )


def stages_of_rank(layout: Layout, pipe: int) -> list[int]:
    """Return the stages of pipeline rank `pipe`: several where the layout has several chunks on each rank."""
    return [stage for stage, rank in enumerate(layout.stage_ranks) if rank == pipe]


def _costs(model: ModelParameters, tokens: int, seq_len: int, recompute: Recompute, flops_per_byte: float) -> Costs:
    """Count the FLOPs of a token as `toolkit.parallel.pipeline.balance.count_costs` does, from the recorded counts.

    The backward pass of a part costs twice its forward pass. Memory traffic counts as the FLOPs of the time it takes.
    """
    front = model.flops[0]
    kinds = model.flops[1:-1]
    back = model.flops[-1]
    traffic_per_parameter = flops_per_byte * _GRADIENT_BYTES / tokens

    def cost_of_layer(index: int) -> float:
        kind = model.pattern[index]
        flops = kinds[kind].flops_at(seq_len)
        flops_with_weights = kinds[kind].flops_with_weights_at(seq_len)
        recomputed = recompute_cost(recompute, index, flops, flops_with_weights)
        return 3 * flops + recomputed + traffic_per_parameter * model.layer_numels[kind]

    front_numel = sum(parameter.numel for parameter in model.outside if parameter.first)
    back_numel = sum(parameter.numel for parameter in model.outside if parameter.last)
    vocabulary = next(parameter.shape[0] for parameter in model.outside if parameter.is_head)
    loss = flops_per_byte * _LOSS_BYTES * vocabulary
    return Costs(
        before=3 * front.flops_at(seq_len) + traffic_per_parameter * front_numel,
        layers=tuple(cost_of_layer(index) for index in model.layers),
        after=3 * back.flops_at(seq_len) + traffic_per_parameter * back_numel + loss,
    )
