"""The peak of a pipeline stage under another framework's profile: its states, and the worst of its activations."""

from dataclasses import dataclass
from typing import Literal

from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.framework_profile import FrameworkProfile
from toolkit.estimate.overhead import beside, is_hopper, workspace_bytes
from toolkit.estimate.profile_activations import ProfileActivations, activations, check, local_kernel_bytes
from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.rank_states import stage_parameters
from toolkit.estimate.states import ModelStates
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.hardware import Gpu

_MIB = 2**20


def profile_breakdown(
    setup: TrainingSetup, profile: FrameworkProfile, gpu: Gpu | None, stage: int, layers: range
) -> MemoryBreakdown:
    """One stage: the worst of the loss, the last layer's and the first layer's backward pass, and the update.

    Raises LayoutError for what the framework's profile does not say.
    """
    check(setup, profile)
    layout = setup.layout
    params = stage_parameters(setup.model.parameters, layout, stage, layers, by_decay=False)
    shards = layout.dp * profile.context_parallel
    states = profile.states(params, shards=shards, accumulation=setup.accumulation, zero_stage=layout.zero_stage)
    resident = states.resident
    chunk = activations(setup, profile, stage, len(layers))
    worst = _worst_moment(chunk, states, params, is_last=stage == layout.pp - 1)
    other_chunks = _bytes_of_other_chunks(profile, chunk)
    between = _between(setup, profile, chunk, stage)
    buckets = 0 if worst.name == "head" else states.buckets  # FSDP's gradients; the others' buckets stay
    gradients = states.accumulated + worst.gradients
    backward = gradients + buckets + states.gathered + other_chunks + worst.activations
    update = max(states.step, states.reduction)
    workspace = _workspaces(profile, gpu) + local_kernel_bytes(setup, profile)
    static = resident.total + between + workspace
    at_head = chunk.head if worst.name == "head" else 0
    return MemoryBreakdown(
        stage=stage,
        rank=layout.rank(pipe=stage),
        layers=len(layers),
        parameter_count=params.numel,
        trained_count=params.trained,
        parameters=resident.parameters,
        gradients=resident.gradients + gradients,
        masters=resident.masters,
        optimizer=resident.optimizer,
        buckets=resident.buckets + buckets + between,
        gathered=states.gathered,
        model_buffers=resident.model_buffers + resident.counters,
        activations={
            "layers": other_chunks + min(worst.activations, chunk.layers),
            "ends": max(0, worst.activations - chunk.layers - at_head),
        },
        logits=at_head,
        update=max(0, update - backward),
        host=states.host,
        nvme=states.nvme,
        host_loading=4 * params.numel,
        static=static,
        workspace=workspace,
        band=profile.facts["band"],
        cached=_cached_bytes(profile, states),
        **beside(
            layout,
            gpu,
            static + max(backward, update),
            margin=profile.facts.get("margin"),
            context=profile.facts.get("context_mib"),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class _Moment:
    """A moment of the backward pass of a chunk, in bytes."""

    name: Literal["head", "layer", "lowest"]
    """The place of the moment: at the loss, in the last layer, or in the first one."""
    activations: int
    gradients: int
    """Gradients of weights that this pass has allocated so far."""


def _worst_moment(chunk: ProfileActivations, states: ModelStates, params: RankParameters, *, is_last: bool) -> _Moment:
    """Return the moment of the backward pass at which most is live."""
    grown = max(0, params.layers - 1) * states.fresh_layer
    outside = (params.numel - sum(params.layer_numels)) * states.fresh_layer // max(1, params.layer_numel)
    kept = chunk.layers + chunk.ends
    moments = (
        _Moment(name="head", activations=kept + chunk.head, gradients=0),
        _Moment(name="layer", activations=kept + chunk.backward, gradients=outside if is_last else 0),
        _Moment(name="lowest", activations=chunk.lowest, gradients=grown + outside),
    )
    return max(moments, key=lambda moment: moment.activations + moment.gradients)


def _bytes_of_other_chunks(profile: FrameworkProfile, chunk: ProfileActivations) -> int:
    """Bytes of the chunks that are in flight beside the one at work: of virtual stages, those of layers alone."""
    each = chunk.layers
    if profile.virtual_stages == 1:
        each += chunk.ends
    return (chunk.in_flight - 1) * each


def _cached_bytes(profile: FrameworkProfile, states: ModelStates) -> int:
    """Bytes that PyTorch's allocator keeps for pools of streams that no other tensor uses.

    FSDP2 gathers into one, and reduces from another (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    """
    cached = states.step if profile.facts.get("caches_update") else 0
    if states.gathered:
        cached += states.gathered + states.complete
    return cached


def _between(setup: TrainingSetup, profile: FrameworkProfile, chunk: ProfileActivations, stage: int) -> int:
    """Bytes that a pipeline keeps between two steps: the last input with its gradient, or DeepSpeed's slots.

    Megatron-DeepSpeed sends hidden states in parts, one a tensor-parallel rank; its first stage's slots have tokens,
    positions and mask, its last stage's the logits in fp32, the input and its gradient (pipe/engine.py).
    """
    layout = setup.layout
    is_first = stage == 0
    if not profile.facts.get("slots") or layout.pp == 1:
        return 0 if is_first else int(profile.facts.get("boundaries", 0)) * chunk.boundary
    tokens = setup.micro_batch_size * setup.seq_len
    logits = tokens * -(-setup.model.shape.vocab // layout.tp)
    total = 2 * setup.seq_len**2
    if not is_first:
        total += chunk.boundary // layout.tp
    if stage < layout.pp - 1:
        total += chunk.boundary
    if is_first:
        slots = max(2, min(layout.pp + 1, setup.accumulation))
        return total + slots * (16 * tokens + setup.seq_len**2)
    if stage == layout.pp - 1:
        slots = min(2, setup.accumulation)
        total += slots * (4 * logits + 12 * tokens + 2 * chunk.boundary)
    return total


def _workspaces(profile: FrameworkProfile, gpu: Gpu | None) -> int:
    """Workspaces of cuBLAS in two threads, and of TransformerEngine for matrix products."""
    if gpu is None:
        return 0
    cublas = workspace_bytes(gpu) if profile.cublas_mib is None else 2 * profile.cublas_mib * _MIB
    if not profile.transformer_engine:
        return cublas
    mib_of_kind = profile.facts.get("workspaces", {})
    kind = "hopper" if is_hopper(gpu) else "other"
    return cublas + int(mib_of_kind.get(kind, 0)) * _MIB
