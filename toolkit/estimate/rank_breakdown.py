"""The MemoryBreakdown of a rank, from its model states, its buffers, and what the two moments that may be its peak add.

A rank's peak is the larger of two moments. In the backward pass: states, gradients so far, communication buffers,
gathered weights, and the activations of the micro-batches in flight. At the end of the step: states, all gradients, and
the temporaries of reduction and update, when activations are freed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.overhead import beside, workspace_bytes
from toolkit.estimate.pipeline_buffers import PipelineBuffers, routing_counters
from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.rank_states import Engine, RankStates
from toolkit.estimate.states import TorchStates
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.estimate.unrecorded import ulysses_elements
from toolkit.hardware import Gpu


@dataclass(frozen=True, kw_only=True)
class RankPeak:
    """Bytes beside those that stay between steps, at the two moments of which one is a rank's peak.

    All but `update` are of the moment at which most is live while the last micro-batch computes.
    """

    gradients: int
    buckets: int
    gathered: int
    activations: Mapping[str, int]
    """Bytes of each kind of activation, as in a MemoryBreakdown."""
    logits: int
    backward: int
    """All bytes of that moment."""
    update: int
    """All bytes at the end of the step: while the last gradient is reduced, or the update runs."""


def rank_breakdown(
    setup: TrainingSetup,
    engine: Engine,
    gpu: Gpu | None,
    pipe: int,
    rank: RankStates,
    buffers: PipelineBuffers,
    peak: RankPeak,
) -> MemoryBreakdown:
    """Break down the peak of pipeline rank `pipe`: what stays between steps, and what one of two moments adds."""
    layout = setup.layout
    params = rank.params
    resident = rank.states.resident
    counters = resident.counters + buffers.counters(params) + routing_counters(setup.model.shape)
    static = resident.total - resident.counters + counters
    workspace = 0 if gpu is None else workspace_bytes(gpu)
    return MemoryBreakdown(
        stage=pipe,
        rank=layout.rank(pipe=pipe),
        layers=params.layers,
        parameter_count=rank.parameter_count,
        trained_count=params.trained,
        parameters=resident.parameters,
        reference=resident.reference,
        gradients=resident.gradients + peak.gradients,
        masters=resident.masters,
        optimizer=resident.optimizer,
        buckets=resident.buckets + peak.buckets,
        gathered=peak.gathered,
        model_buffers=resident.model_buffers + counters,
        activations=peak.activations,
        logits=peak.logits,
        update=max(0, peak.update - peak.backward),
        host=rank.states.host,
        nvme=rank.states.nvme,
        host_loading=_loading_bytes(engine, params, layout.tp),
        static=static + workspace,
        workspace=workspace,
        **beside(layout, gpu, static + max(peak.backward, peak.update) + workspace),
    )


def pipeline_buffers(setup: TrainingSetup, engine: Engine, pipe: int, product_bytes: int) -> PipelineBuffers:
    """Return the buffers of pipeline rank `pipe`; only DeepSpeed's engine has any of a pipeline.

    `product_bytes`: bytes of an element that matrix products read and write.
    """
    layout = setup.layout
    weight_bytes = 0
    if layout.pp > 1 and isinstance(engine, DeepSpeedSettings):
        weight_bytes = engine.model_bytes
    shards = layout.tp if layout.sequence_parallel else 1
    return PipelineBuffers(
        hidden=setup.rank_tokens * setup.model.shape.hidden * weight_bytes // shards,
        weight_bytes=weight_bytes,
        is_last=layout.stage_ranks[-1] == pipe,
        micro_batches=setup.accumulation,
        exchanged=ulysses_elements(setup) * product_bytes if layout.ulysses > 1 else 0,
    )


def _loading_bytes(engine: Engine, params: RankParameters, tp: int) -> int:
    """Return the bytes in host memory while the model is built, before it moves to the device.

    A rank builds all of its share at once; under ZeRO-3 one layer or embedding at a time.
    Random weights of a layer are drawn whole, in fp32, then sharded and cast; weights from files are sharded first.
    """
    if isinstance(engine, TorchStates):
        return engine.weight_bytes * params.numel
    weight_bytes = engine.model_bytes
    drawn_layer = 4 * params.layer_numel * tp
    if engine.zero_stage == 3:
        return max(drawn_layer, weight_bytes * params.largest)
    built = weight_bytes * params.numel
    is_converted = weight_bytes < 4 or tp > 1
    return built + drawn_layer if is_converted else built
