"""The peak of a pipeline stage under an engine's own schedule: one stage on each rank, as DeepSpeed, DDP and FSDP run.

The activations at the worst moment come from the recording of the stage's pass, the rest from the engine's states.
"""

from collections.abc import Mapping
from dataclasses import replace

from toolkit.estimate.activation_shares import ActivationShares
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.pipeline_buffers import PipelineBuffers, in_flight_micro_batches
from toolkit.estimate.rank_breakdown import RankPeak, pipeline_buffers, rank_breakdown
from toolkit.estimate.rank_pass import stage_pass
from toolkit.estimate.rank_states import Engine, rank_states
from toolkit.estimate.recorded.recordings import activations
from toolkit.estimate.states import ModelStates
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.estimate.training_step import TrainingStep
from toolkit.estimate.unrecorded import unrecorded_bytes, unrecorded_in_layer
from toolkit.estimate.worst_moment import WorstMoment, worst_moment
from toolkit.hardware import Gpu


def stage_breakdown(
    setup: TrainingSetup, engine: Engine, gpu: Gpu | None, stage: int, layers: range, *, stand_ins: bool
) -> MemoryBreakdown:
    """Compute the two moments of one stage that may be its peak, and break the worse one down.

    `stand_ins`: as in MemoryRequest. Raises LayoutError and ModelError for a pass that cannot run.
    """
    layout = setup.layout
    rank = rank_states(setup, engine, stage, layers)
    rank_pass = stage_pass(setup, stage, rank.precision, stand_ins=stand_ins)
    recorded = activations(rank_pass, setup.micro_batch_size, setup.rank_positions)
    in_flight = in_flight_micro_batches(layout.pp, stage, setup.accumulation)
    unrecorded = unrecorded_in_layer(setup, rank)
    worst = worst_moment(setup, recorded, rank, layers, in_flight=in_flight, unrecorded=unrecorded)
    on_host = max(recorded.offloaded(layers)) if layout.offload_activations else 0
    buffers = pipeline_buffers(setup, engine, stage, rank.product_bytes)
    shares = ActivationShares.of(
        recorded,
        layers,
        in_flight=in_flight,
        peak=worst.activations,
        on_host=on_host,
        has_head=stage == layout.pp - 1,
    )
    beside_recording = {kind: in_flight * size for kind, size in unrecorded_bytes(setup, layers, rank).items()}
    beside_recording_bytes = sum(beside_recording.values())
    peak = _stage_peak(rank.states, buffers, worst, shares, beside_recording)
    breakdown = rank_breakdown(setup, engine, gpu, stage, rank, buffers, peak)
    step = TrainingStep(
        setup=setup,
        engine=engine,
        rank_pass=rank_pass,
        layers=layers,
        in_flight=in_flight,
        states=rank.states,
        params=rank.params,
        buffers=buffers,
        unrecorded=unrecorded,
        workspace=breakdown.workspace + beside_recording_bytes,
    )
    return replace(
        breakdown,
        host=replace(rank.states.host, activations=on_host * in_flight),
        static=breakdown.static + buffers.between,
        step=step,
    )


def _stage_peak(
    states: ModelStates,
    buffers: PipelineBuffers,
    worst: WorstMoment,
    shares: ActivationShares,
    beside_recording: Mapping[str, int],
) -> RankPeak:
    """Add states and buffers to the worst moment of the passes, and to the end of the step.

    `beside_recording`: bytes of activations that the recording lacks, by kind, of all micro-batches in flight.
    """
    gradients = states.accumulated + worst.fresh_gradients
    buckets = states.buckets + buffers.at_peak
    gathered = states.gathered + worst.casts
    last_gradient = states.accumulated + states.last_gradient + gathered + buffers.at_peak
    return RankPeak(
        gradients=gradients,
        buckets=buckets,
        gathered=gathered,
        activations=shares.shown(beside_recording),
        logits=shares.logits,
        backward=gradients + buckets + gathered + worst.activations + sum(beside_recording.values()),
        update=max(last_gradient, max(states.reduction, states.step) + buffers.between),
    )
