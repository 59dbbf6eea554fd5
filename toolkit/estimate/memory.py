"""The memory estimate: what every pipeline stage of a layout takes on its GPUs, from a config.json alone.

A rank's peak is the larger of two moments. In the backward pass: states, gradients so far, communication buffers,
gathered weights, and the activations of the micro-batches in flight. At the end of the step: states, all gradients, and
the temporaries of reduction and update, when activations are gone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from toolkit.division import misfits
from toolkit.errors import LayoutError
from toolkit.estimate.activations import ActivationBreakdown, activations
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.overhead import ALLOCATOR_MARGIN, CONTEXT_BYTES, nccl_bytes, workspace_bytes
from toolkit.estimate.parameters import Architecture, Holdings
from toolkit.estimate.pipeline import in_flight_micro_batches, stage_peak
from toolkit.estimate.stages import balanced_bounds, uniform_bounds
from toolkit.estimate.states import (
    Accounting,
    DeepSpeedSettings,
    ModelStates,
    channels_between,
    deepspeed_states,
    pipeline_counters,
)
from toolkit.estimate.style import LayerStyle
from toolkit.hardware import Gpu
from toolkit.layout import Layout

Framework = DeepSpeedSettings | Accounting
Attention = Literal["eager", "sdpa", "flash"]
Recomputation = Literal["none", "selective", "full"]
Loss = Literal["toolkit", "stock"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one step computes, as far as memory can tell."""

    micro_batch_size: int
    seq_len: int
    accumulation: int = 2
    """Micro-batches that a rank computes for one step; in a pipeline, those that pass through it."""
    attention: Attention = "sdpa"
    recompute: Recomputation = "none"
    loss: Loss = "toolkit"
    """`stock`: Hugging Face's loss inside the model, whose output keeps the logits."""
    activation_bytes: int | None = None
    """Bytes of an activation's element; None: as the framework computes."""
    autocast: bool = False
    """Whether products run in 16 bits under torch.autocast. DeepSpeed's settings say so themselves."""
    bounds: tuple[int, ...] | Literal["balanced", "uniform"] = "balanced"
    """The first layer of each pipeline stage, and the number of layers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryModel:
    """One model, ready to be estimated in any layout. Compared by identity."""

    architecture: Architecture
    style: LayerStyle

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Hugging Face config. Raises ModelError for what it cannot read."""
        return cls(architecture=Architecture.from_config(config), style=LayerStyle.from_config(config))

    def breakdowns(
        self, layout: Layout, work: Workload, framework: Framework, gpu: Gpu | None = None
    ) -> tuple[MemoryBreakdown, ...]:
        """Every pipeline stage. Raises LayoutError for a layout that the model does not divide by."""
        bounds = self._bounds(layout, work)
        stages = (self._moments(layout, work, framework, bounds, stage) for stage in range(layout.pp))
        return tuple(_breakdown(moments, layout, framework, gpu) for moments in stages)

    def peak(self, layout: Layout, work: Workload, framework: Framework, gpu: Gpu | None = None) -> MemoryBreakdown:
        """The stage that takes most.

        Of stages in the middle with equally many layers the first has the most micro-batches in flight: no other is
        looked at.
        """
        bounds = self._bounds(layout, work)
        worst: Moments | None = None
        seen: set[int] = set()
        for stage in range(layout.pp):
            if 0 < stage < layout.pp - 1:
                layers = bounds[stage + 1] - bounds[stage]
                if layers in seen:
                    continue
                seen.add(layers)
            found = self._moments(layout, work, framework, bounds, stage)
            if worst is None or found.allocated > worst.allocated:
                worst = found
        assert worst is not None
        return _breakdown(worst, layout, framework, gpu)

    def largest_micro_batch(self, layout: Layout, work: Workload, framework: Framework, gpu: Gpu) -> int:
        """The largest micro-batch size that fits on every stage; 0 where not even one sample does."""

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

    def _bounds(self, layout: Layout, work: Workload) -> tuple[int, ...]:
        shape = self.architecture.shape
        for misfit in misfits(shape, tp=layout.tp, pp=layout.pp, ulysses=layout.ulysses):
            size = getattr(layout, misfit.axis)
            raise LayoutError(f"{misfit.axis}={size}: {misfit.reason}. Set {misfit.axis} to {misfit.allowed}.")
        if isinstance(work.bounds, tuple):
            return work.bounds
        if work.bounds == "uniform":
            return uniform_bounds(shape.layers, layout.pp)
        return balanced_bounds(
            self.architecture,
            layout.pp,
            micro_batch_size=work.micro_batch_size,
            seq_len=work.seq_len,
            recompute=work.recompute,
        )

    def _moments(
        self, layout: Layout, work: Workload, framework: Framework, bounds: tuple[int, ...], stage: int
    ) -> "Moments":
        """The two moments of one stage that may be its worst."""
        first, last = stage == 0, stage == layout.pp - 1
        deepspeed = framework if isinstance(framework, DeepSpeedSettings) else None
        layers = range(bounds[stage], bounds[stage + 1])
        by_decay = deepspeed is None or deepspeed.by_decay
        held = self.architecture.holdings(layers=len(layers), first=first, last=last, tp=layout.tp, by_decay=by_decay)
        states = _states(framework, held, layout, work)
        itemsize = work.activation_bytes or (2 if deepspeed is None else deepspeed.model_bytes)
        in_pipeline = layout.pp > 1 and deepspeed is not None
        autocast = work.autocast if deepspeed is None else deepspeed.autocast != "none"
        kept = self._activations(layout, work, itemsize, autocast=autocast, loss="stock" if in_pipeline else work.loss)
        in_flight = in_flight_micro_batches(layout.pp, stage, work.accumulation)
        fresh = states.fresh_layer
        peak, fresh_gradients = kept.worst_moment(
            layers=layers, first=first, last=last, in_flight=in_flight, gradients_kept=fresh
        )
        sent, between, scalars = 0, 0, 0
        if in_pipeline and deepspeed is not None:
            count = work.accumulation
            whole = stage_peak(
                kept, layers=layers, stage=stage, stages=layout.pp, micro_batches=count, gradients_kept=fresh
            )
            sent = whole - peak
            between = channels_between(
                boundary=kept.boundary, logits=kept.logits_output, last=last, micro_batches=count
            )
            scalars = pipeline_counters(held, weight_bytes=deepspeed.model_bytes, last=last, micro_batches=count)
        gathered = states.gathered
        if autocast and itemsize == 4:
            casts = 2 * held.matrices
            again = self._cast_again(held, layout) if work.recompute == "full" else casts
            # Kept with the activations of each micro-batch. Where layers are computed again, the casts of the forward
            # pass are gone when the loss begins, and backward makes those of a layer anew.
            forward = kept.forward_peak(layers=layers, first=first, last=last)
            if forward + casts > peak + again:
                peak, fresh_gradients, again = forward, 0, casts
            gathered += again * (in_flight if work.recompute != "full" else 1)
        return Moments(
            stage=stage,
            first=first,
            last=last,
            held=held,
            states=states,
            kept=kept,
            in_flight=in_flight,
            activations=peak - fresh_gradients,
            fresh_gradients=fresh_gradients,
            gathered=gathered,
            sent=sent,
            between=between,
            scalars=scalars,
            backward=states.accumulated + states.buckets + gathered + sent + peak,
            update=max(states.reduction, states.step) + between,
        )

    def _cast_again(self, held: Holdings, layout: Layout) -> int:
        """Bytes that autocast casts of one layer's weights and of the head's."""
        one = self.architecture.holdings(layers=1, first=False, last=False, tp=layout.tp, by_decay=False).matrices
        return 2 * (held.matrices - max(0, held.layers - 1) * one)

    def _activations(
        self, layout: Layout, work: Workload, itemsize: int, *, autocast: bool, loss: Loss
    ) -> ActivationBreakdown:
        """Of one micro-batch. In a pipeline `loss` is stock: its buffers keep the logits."""
        return activations(
            self.architecture.shape,
            self.style,
            micro_batch_size=work.micro_batch_size,
            seq_len=work.seq_len // layout.ulysses,
            tp=layout.tp,
            sequence_parallel=layout.sequence_parallel,
            attention=work.attention,
            recompute=work.recompute,
            dtype_bytes=itemsize,
            autocast=autocast,
            loss=loss,
        )


@dataclass(kw_only=True, slots=True)
class Moments:
    """What one stage takes at the two moments that may be its worst, before it is told apart."""

    stage: int
    first: bool
    last: bool
    held: Holdings
    states: ModelStates
    kept: ActivationBreakdown
    in_flight: int
    activations: int
    fresh_gradients: int
    """Of this backward pass alone, while it goes on."""
    gathered: int
    sent: int
    """What the pipeline has sent and received, beside the activations in flight."""
    between: int
    """What is left of that between two steps."""
    scalars: int
    backward: int
    """Beyond what is held between steps, while the last micro-batch computes."""
    update: int
    """The same while gradients are reduced and weights updated."""

    @property
    def static(self) -> int:
        """Between two steps, without what the pipeline has sent."""
        return self.states.held.total + self.scalars

    @property
    def allocated(self) -> int:
        """At the worst of the two."""
        return self.static + max(self.backward, self.update)


def _breakdown(m: Moments, layout: Layout, framework: Framework, gpu: Gpu | None) -> MemoryBreakdown:
    by_kind, logits = _kinds(m)
    held, workspace = m.states.held, 0 if gpu is None else workspace_bytes(gpu)
    return MemoryBreakdown(
        stage=m.stage,
        rank=layout.rank(pipe=m.stage),
        layers=m.held.layers,
        parameter_count=m.held.numel,
        parameters=held.parameters,
        gradients=held.gradients + m.states.accumulated + m.fresh_gradients,
        masters=held.masters,
        optimizer=held.optimizer,
        buckets=held.buckets + m.states.buckets + m.sent,
        gathered=m.gathered,
        model_buffers=held.model_buffers + held.counters + m.scalars,
        activations=by_kind,
        logits=logits,
        update=max(0, m.update - m.backward),
        host=m.states.host,
        host_loading=_loading(framework, m.held, layout.tp),
        static=m.static + m.between + workspace,
        workspace=workspace,
        framework=0 if gpu is None else CONTEXT_BYTES,
        nccl=0 if gpu is None else nccl_bytes(layout, gpu),
        margin=0 if gpu is None else int(ALLOCATOR_MARGIN * (m.allocated + workspace)),
        device_bytes=0 if gpu is None else gpu.memory_bytes,
    )


def _states(framework: Framework, held: Holdings, layout: Layout, work: Workload) -> ModelStates:
    replicas = layout.dp * layout.ulysses
    if isinstance(framework, Accounting):
        return framework.states(held, shards=replicas, accumulation=work.accumulation)
    return deepspeed_states(framework, held, dp=replicas, accumulation=work.accumulation)


def _kinds(m: Moments) -> tuple[dict[str, int], int]:
    """(activations by kind, logits and loss), which add up to the activations' peak."""
    kept, in_flight, layers = m.kept, m.in_flight, m.held.layers
    by_kind = {kind: size * layers * in_flight for kind, size in kept.layer_kinds.items()}
    whole = kept.kept(layers=layers, first=m.first, last=m.last)
    # Where gradients grow as layers are done with, the worst moment may be one when most layers keep nothing any more.
    inside = min(m.activations, in_flight * (whole - kept.kept(layers=0, first=m.first, last=m.last)))
    shown = sum(by_kind.values())
    if shown > inside:
        # Layers of several kinds: the most demanding one is shown, scaled to what all of them keep.
        by_kind = {kind: size * inside // shown for kind, size in by_kind.items()}
    rest = m.activations - sum(by_kind.values())
    working = max(0, m.activations - in_flight * whole)
    at_head = m.last and in_flight * whole + kept.head_extra == m.activations
    logits = min(kept.logits, rest) if at_head else 0
    by_kind["working"] = max(0, working - logits)
    by_kind["ends"] = rest - logits - by_kind["working"]
    return by_kind, logits


def _loading(framework: Framework, held: Holdings, tp: int) -> int:
    """A rank builds its own share on the host and moves it; under ZeRO-3 a layer or an embedding at a time.

    Random weights of a layer are drawn whole, in fp32, and then cut and cast; weights that are read are cut before.
    """
    if isinstance(framework, Accounting):
        return 4 * held.numel
    size, drawn = framework.model_bytes, 4 * held.layer_numel * tp
    if framework.zero_stage == 3:
        return max(drawn, size * held.largest)
    return size * held.numel + (drawn if size < 4 or tp > 1 else 0)
