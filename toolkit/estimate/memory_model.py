"""MemoryModel: the memory of every pipeline stage of a layout, from a config.json alone.

A rank's peak is the larger of two moments. In the backward pass: states, gradients so far, communication buffers,
gathered weights, and the activations of the micro-batches in flight. At the end of the step: states, all gradients, and
the temporaries of reduction and update, when activations are freed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self

from toolkit.config.layout import Layout
from toolkit.errors import LayoutError
from toolkit.estimate import activations as activation_memory
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.decoder.context import Attention, WalkSettings
from toolkit.estimate.decoder.sections import Loss
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.deepspeed_states import deepspeed_states
from toolkit.estimate.framework_profile import FrameworkProfile
from toolkit.estimate.overhead import beside, workspace_bytes
from toolkit.estimate.parameters import Architecture, RankParameters
from toolkit.estimate.profile_memory import stage_breakdown, stage_layers
from toolkit.estimate.stage_bounds import balanced_bounds
from toolkit.estimate.states import ModelStates, TorchStates
from toolkit.estimate.style import LayerStyle
from toolkit.hardware import Gpu
from toolkit.models.support import misfits

Framework = DeepSpeedSettings | TorchStates | FrameworkProfile


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one step computes, as far as it affects memory."""

    micro_batch_size: int
    seq_len: int
    accumulation: int = 2
    """Micro-batches that a rank computes for one step; in a pipeline, those that pass through it."""
    attention: Attention = "sdpa"
    recompute: activation_memory.Recomputation = "none"
    loss: Loss = "toolkit"
    """`stock`: Hugging Face's loss inside the model, whose output object keeps the logits."""
    activation_bytes: int | None = None
    """Bytes of an activation's element; None: those of the framework's weights."""
    autocast: bool = False
    """Whether products run in 16 bits under torch.autocast. DeepSpeed's settings override it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryModel:
    """One model, to be estimated in any layout. Compared by identity."""

    architecture: Architecture
    style: LayerStyle

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Hugging Face config. Raises ModelError for what it cannot read."""
        return cls(architecture=Architecture.from_config(config), style=LayerStyle.from_config(config))

    def breakdowns(
        self, layout: Layout, work: Workload, framework: Framework, gpu: Gpu | None = None
    ) -> tuple[MemoryBreakdown, ...]:
        """Estimate every pipeline stage. Raises LayoutError for a layout that the model's shape does not allow."""
        stages = enumerate(self._stages(layout, work, framework))
        return tuple(self._breakdown(layout, work, framework, gpu, *stage) for stage in stages)

    def peak(self, layout: Layout, work: Workload, framework: Framework, gpu: Gpu | None = None) -> MemoryBreakdown:
        """Estimate the stage that needs most memory.

        Of inner stages with the same number of layers only the first is computed: it has the most micro-batches in
        flight.
        """
        distinct: dict[int | str, tuple[int, range]] = {}
        for stage, layers in enumerate(self._stages(layout, work, framework)):
            key = "first" if stage == 0 else "last" if stage == layout.pp - 1 else len(layers)
            distinct.setdefault(key, (stage, layers))
        stages = (self._breakdown(layout, work, framework, gpu, *stage) for stage in distinct.values())
        return max(stages, key=lambda stage: stage.allocated)

    def largest_micro_batch(self, layout: Layout, work: Workload, framework: Framework, gpu: Gpu) -> int:
        """Return the largest micro-batch size that fits on every stage; 0 if not even one sample fits."""

        def fits(size: int) -> bool:
            return self.peak(layout, replace(work, micro_batch_size=size), framework, gpu).fits

        if not fits(1):
            return 0
        size = 1
        while fits(2 * size):
            size *= 2
        low, high = size, 2 * size
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _stages(self, layout: Layout, work: Workload, framework: Framework) -> list[range]:
        for misfit in misfits(self.architecture.shape, tp=layout.tp, pp=layout.pp, ulysses=layout.ulysses):
            remedy = (misfit.axis, misfit.allowed)
            raise LayoutError.of(misfit.axis, getattr(layout, misfit.axis), misfit.reason, remedy)
        if isinstance(framework, FrameworkProfile):
            return stage_layers(framework, self.architecture, layout.pp)
        step = {"micro_batch_size": work.micro_batch_size, "seq_len": work.seq_len}
        bounds = balanced_bounds(self.architecture, layout.pp, **step, recompute=work.recompute)
        return [range(start, stop) for start, stop in pairwise(bounds)]

    def _breakdown(
        self, layout: Layout, work: Workload, framework: Framework, gpu: Gpu | None, stage: int, layers: range
    ) -> MemoryBreakdown:
        """Compute the two moments of one stage that may be its peak, and break the worse one down."""
        if isinstance(framework, FrameworkProfile):
            return stage_breakdown(framework, self.architecture, layout, work, gpu, stage, len(layers))
        first, last = stage == 0, stage == layout.pp - 1
        deepspeed = framework if isinstance(framework, DeepSpeedSettings) else None
        by_decay = deepspeed is None or deepspeed.by_decay
        params = self.architecture.rank_parameters(
            layers=len(layers), first=first, last=last, tp=layout.tp, by_decay=by_decay
        )
        states = _states(framework, params, layout, work)
        resident, ends = states.resident, {"first": first, "last": last}
        itemsize = work.activation_bytes or (2 if deepspeed is None else deepspeed.model_bytes)
        autocast = work.autocast if deepspeed is None else deepspeed.autocast != "none"
        loss: Loss = "stock" if layout.pp > 1 and deepspeed is not None else work.loss
        kept = self._activations(layout, work, itemsize, autocast=autocast, loss=loss)
        in_flight = activation_memory.in_flight_micro_batches(layout.pp, stage, work.accumulation)
        peak, fresh = kept.worst_moment(layers=layers, in_flight=in_flight, gradients_kept=states.fresh_layer, **ends)
        gathered = states.gathered
        if autocast and itemsize == 4:
            casts = 2 * params.matrices
            again = self._cast_again(params, layout) if work.recompute == "full" else casts
            # Kept with the activations of each micro-batch. Under recomputation the casts of the forward pass are freed
            # when the loss begins, and backward makes those of a layer again.
            forward = kept.forward_peak(layers=layers, **ends)
            if forward + casts > peak + again:
                peak, fresh, again = forward, 0, casts
            gathered += again * (in_flight if work.recompute != "full" else 1)
        sent, between, scalars = _pipeline_bytes(layout, work, deepspeed, stage, kept, params)
        by_kind, logits = _activations_by_kind(kept, in_flight, peak - fresh, len(layers), **ends)
        # Both beyond the resident bytes: while the last micro-batch computes, and while gradients are reduced and
        # weights updated.
        backward = states.accumulated + states.buckets + gathered + sent + peak
        update = max(states.reduction, states.step) + between
        static = resident.total + scalars
        workspace = 0 if gpu is None else workspace_bytes(gpu)
        allocated = static + max(backward, update) + workspace
        return MemoryBreakdown(
            stage=stage,
            rank=layout.rank(pipe=stage),
            layers=params.layers,
            parameter_count=params.numel,
            parameters=resident.parameters,
            gradients=resident.gradients + states.accumulated + fresh,
            masters=resident.masters,
            optimizer=resident.optimizer,
            buckets=resident.buckets + states.buckets + sent,
            gathered=gathered,
            model_buffers=resident.model_buffers + resident.counters + scalars,
            activations=by_kind,
            logits=logits,
            update=max(0, update - backward),
            host=states.host,
            host_loading=_loading(framework, params, layout.tp),
            static=static + between + workspace,
            workspace=workspace,
            **beside(layout, gpu, allocated),
        )

    def _cast_again(self, params: RankParameters, layout: Layout) -> int:
        """Bytes of autocast's copies of one layer's weights and of the head's."""
        one = self.architecture.rank_parameters(
            layers=1, first=False, last=False, tp=layout.tp, by_decay=False
        ).matrices
        return 2 * (params.matrices - max(0, params.layers - 1) * one)

    def _activations(
        self, layout: Layout, work: Workload, itemsize: int, *, autocast: bool, loss: Loss
    ) -> activation_memory.ActivationBreakdown:
        """Activations of one micro-batch. In a pipeline `loss` is stock: its buffers keep the logits."""
        settings = WalkSettings(
            shape=self.architecture.shape,
            style=self.style,
            b=work.micro_batch_size,
            s=work.seq_len // layout.ulysses,
            itemsize=itemsize,
            attention=work.attention,
            tp=layout.tp,
            sequence_parallel=layout.sequence_parallel,
            autocast=autocast,
        )
        return activation_memory.activations(settings, recompute=work.recompute, loss=loss)


def _pipeline_bytes(
    layout: Layout,
    work: Workload,
    deepspeed: DeepSpeedSettings | None,
    stage: int,
    kept: activation_memory.ActivationBreakdown,
    params: RankParameters,
) -> tuple[int, int, int]:
    """Buffers of sent and received tensors beside the activations in flight; of them those between steps; scalars."""
    if layout.pp == 1 or deepspeed is None:
        return 0, 0, 0
    last, count, size = stage == layout.pp - 1, work.accumulation, deepspeed.model_bytes
    return (
        activation_memory.stage_buffers(kept, stage=stage, stages=layout.pp, micro_batches=count),
        activation_memory.channels_between(
            boundary=kept.boundary, logits=kept.logits_output, last=last, micro_batches=count
        ),
        activation_memory.pipeline_counters(params, weight_bytes=size, last=last, micro_batches=count),
    )


def _states(
    framework: DeepSpeedSettings | TorchStates, params: RankParameters, layout: Layout, work: Workload
) -> ModelStates:
    replicas = layout.dp * layout.ulysses
    if isinstance(framework, DeepSpeedSettings):
        return deepspeed_states(framework, params, dp=replicas, accumulation=work.accumulation)
    return framework.states(params, shards=replicas, accumulation=work.accumulation)


def _activations_by_kind(
    kept: activation_memory.ActivationBreakdown, in_flight: int, peak: int, layers: int, *, first: bool, last: bool
) -> tuple[dict[str, int], int]:
    """Return (activations by kind, logits and loss), which add up to the activations' peak."""
    by_kind = {kind: size * layers * in_flight for kind, size in kept.layer_kinds.items()}
    whole = kept.kept(layers=layers, first=first, last=last)
    # If gradients grow as layers finish their backward pass, most layers may keep nothing at the worst moment.
    inside = min(peak, in_flight * (whole - kept.kept(layers=0, first=first, last=last)))
    shown = sum(by_kind.values())
    if shown > inside:
        # Layers of several kinds: the one that keeps most is shown, scaled to what all of them keep.
        by_kind = {kind: size * inside // shown for kind, size in by_kind.items()}
    rest = peak - sum(by_kind.values())
    working = max(0, peak - in_flight * whole)
    at_head = last and in_flight * whole + kept.head_extra == peak
    logits = min(kept.logits, rest) if at_head else 0
    by_kind["working"] = max(0, working - logits)
    by_kind["ends"] = rest - logits - by_kind["working"]
    return by_kind, logits


def _loading(framework: DeepSpeedSettings | TorchStates, params: RankParameters, tp: int) -> int:
    """Host memory while loading: a rank builds its share and moves it; under ZeRO-3 one layer or embedding at a time.

    Random weights of a layer are drawn whole, in fp32, then sharded and cast; weights from files are sharded first.
    """
    if isinstance(framework, TorchStates):
        return framework.weight_bytes * params.numel
    size, drawn = framework.model_bytes, 4 * params.layer_numel * tp
    if framework.zero_stage == 3:
        return max(drawn, size * params.largest)
    return size * params.numel + (drawn if size < 4 or tp > 1 else 0)
