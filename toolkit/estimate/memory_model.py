"""MemoryModel: the memory of every pipeline stage of a layout, from a config.json alone.

A rank's peak is the larger of two moments. In the backward pass: states, gradients so far, communication buffers,
gathered weights, and the activations of the micro-batches in flight. At the end of the step: states, all gradients, and
the temporaries of reduction and update, when activations are freed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Self

from toolkit.config.layout import Layout, Recompute, recomputes
from toolkit.errors import LayoutError, ModelError
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.flops import with_experts
from toolkit.estimate.framework_profile import FrameworkProfile
from toolkit.estimate.overhead import beside, workspace_bytes
from toolkit.estimate.parameters import ModelParameters
from toolkit.estimate.pipeline_buffers import (
    PipelineBuffers,
    in_flight_micro_batches,
    kept_by_router_losses,
    routing_counters,
)
from toolkit.estimate.profile_memory import stage_breakdown, stage_layers
from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.rank_states import RankStates, rank_states
from toolkit.estimate.recorded.recording import (
    Activations,
    Attention,
    Device,
    Part,
    Precision,
    Setup,
    config_text,
)
from toolkit.estimate.recorded.recordings import activations, parameters, stand_in
from toolkit.estimate.recorded.tiled_mlp import narrow, tile_bytes
from toolkit.estimate.stage_bounds import balanced_bounds
from toolkit.estimate.states import TorchStates
from toolkit.estimate.trainable import without_4bit
from toolkit.estimate.training_step import TrainingStep
from toolkit.hardware import Gpu
from toolkit.models.chunked_head import Chunks
from toolkit.models.config_checks import check_fields
from toolkit.models.families.registry import CONFIG_SCHEMAS
from toolkit.models.shape import ModelShape, text_config
from toolkit.models.support import attention_kinds, misfits
from toolkit.models.support import find as support_of

Framework = DeepSpeedSettings | TorchStates | FrameworkProfile


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one step computes, as far as it affects memory."""

    micro_batch_size: int
    seq_len: int
    accumulation: int = 2
    """Micro-batches that a rank computes for one step; in a pipeline, those that pass through it."""
    attention: Attention = "sdpa"
    recompute: Recompute = "none"
    activation_bytes: int | None = None
    """Bytes of an activation's element; None: those of the framework's weights."""
    autocast: bool = False
    """Whether products run in 16 bits under torch.autocast. DeepSpeed's settings override it."""
    documents: bool = False
    """Documents of a sample do not see each other."""
    device: Device = "cuda"
    """Whose kernels run."""
    trainable: str = ""
    """Which parameters train, as Setup has it; empty: all."""
    loss_chunk: int = 0
    """Tokens whose logits exist at once in Liger's loss; 0: those of all."""
    chunked_loss: bool = False
    """Whether this toolkit's engine computes the loss in chunks, inside the head."""
    imbalance: float = 1.0
    """Rows of the rank whose experts get most of them, over the mean of the ranks; 1: balanced."""
    router_losses: int = 0
    """Losses that balance a mixture's routers: of each, a layer keeps a number for each token and expert."""
    stand_ins: bool = False
    """Whether a setup that is not recorded takes the recording of one that hardly needs less, so that none is made."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryModel:
    """One model, to be estimated in any layout. Compared by identity."""

    shape: ModelShape
    parameters: ModelParameters
    config: str
    """As recordings know it."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Hugging Face config. Raises ModelError for what it cannot read."""
        family, text = text_config(config).get("model_type"), config_text(config)
        is_read = not isinstance(family, str) or family in CONFIG_SCHEMAS
        support = None if is_read else support_of(str(family))
        if support is not None and support.pipeline_refusal is not None:
            reason = f"it has no estimate: {support.pipeline_refusal}"
            raise ModelError.of("model_type", family, reason, f"see dstk families {family}")
        if is_read or support is None:  # a config that is wrong, or of a family that nobody knows, is not recorded
            shape = ModelShape.from_config(config)
        else:
            facts = ModelShape.from_facts(str(family), parameters(text).facts, config)
            shape = with_experts(facts, parameters(text))
        check_fields(config, layers=shape.layers, head_dim=shape.head_dim)
        return cls(shape=shape, parameters=parameters(text), config=text)

    def breakdowns(
        self, layout: Layout, work: Workload, framework: Framework, gpu: Gpu | None = None
    ) -> tuple[MemoryBreakdown, ...]:
        """Estimate every pipeline stage. Raises LayoutError for a layout that the model's shape does not allow."""
        stages = enumerate(self._stages(layout, work, framework))
        return tuple(self._breakdown(layout, work, framework, gpu, *stage) for stage in stages)

    def peak(self, layout: Layout, work: Workload, framework: Framework, gpu: Gpu | None = None) -> MemoryBreakdown:
        """Estimate the stage that needs most memory.

        Of inner stages with the same layers only the first is computed: it has the most micro-batches in flight.
        """
        distinct: dict[tuple[int, ...] | str, tuple[int, range]] = {}
        for stage, layers in enumerate(self._stages(layout, work, framework)):
            kinds = tuple(self.parameters.pattern[index] for index in layers)
            distinct.setdefault("first" if stage == 0 else "last" if stage == layout.pp - 1 else kinds, (stage, layers))
        stages = (self._breakdown(layout, work, framework, gpu, *stage) for stage in distinct.values())
        return max(stages, key=lambda stage: stage.allocated)

    def largest_micro_batch(self, layout: Layout, work: Workload, framework: Framework, gpu: Gpu) -> int:
        """Return the largest micro-batch size that fits on every stage; 0 if not even one sample fits."""

        def fits(size: int) -> bool:
            return self.peak(layout, replace(work, micro_batch_size=size), framework, gpu).fits_in_replay

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
        sizes = {name: getattr(layout, name) for name in ("tp", "pp", "ulysses", "ep")}
        for misfit in misfits(self.shape, **sizes, inner=layout.experts == "inner"):
            remedy = (misfit.axis, misfit.allowed)
            raise LayoutError.of(misfit.axis, getattr(layout, misfit.axis), misfit.reason, remedy)
        if isinstance(framework, FrameworkProfile):
            return stage_layers(framework, self.shape, self.parameters, layout.pp)
        bounds = balanced_bounds(
            self.parameters,
            layout.pp,
            micro_batch_size=work.micro_batch_size,
            seq_len=work.seq_len,
            recompute=work.recompute,
            head_alone=not work.trainable.startswith("lora:"),
        )
        return [range(start, stop) for start, stop in pairwise(bounds)]

    def _breakdown(
        self, layout: Layout, work: Workload, framework: Framework, gpu: Gpu | None, stage: int, layers: range
    ) -> MemoryBreakdown:
        """Compute the two moments of one stage that may be its peak, and break the worse one down."""
        if isinstance(framework, FrameworkProfile):
            return stage_breakdown(framework, self.shape, self.parameters, layout, work, gpu, stage, layers)
        first, last = stage == 0, stage == layout.pp - 1
        rank = rank_states(self.config, self.parameters, framework, layout, work, stage, layers)
        params, states, resident = rank.params, rank.states, rank.states.resident
        part: Part = "whole" if layout.pp == 1 else "first" if first else "last" if last else "middle"
        recorded = self._recorded(layout, work, part, rank.precision)
        kept = activations(*recorded)
        in_flight = in_flight_micro_batches(layout.pp, stage, work.accumulation)
        tile = tile_bytes(self.shape, recorded[1] * recorded[2], rank.itemsize, tp=layout.tp) if layout.tiled_mlp else 0
        peak, fresh, casts = _worst_moment(kept, rank, layers, in_flight, work, layout, tile)
        gathered = states.gathered + casts
        away = max(kept.offloaded(layers)) if layout.offload_activations else 0
        deepspeed = framework if isinstance(framework, DeepSpeedSettings) else None
        buffers = self._pipeline_buffers(layout, work, deepspeed, stage, rank.product_bytes)
        by_kind, logits = _activations_by_kind(kept, layers, in_flight, peak - fresh, away, has_head=last)
        if routers := in_flight * kept_by_router_losses(self.shape, self.parameters, layout, work, layers):
            by_kind["routers"], peak = routers, peak + routers
        # Both beyond the resident bytes: while the last micro-batch computes, and at the end of the step.
        backward = states.accumulated + states.buckets + gathered + buffers.at_peak + peak
        update = max(states.reduction, states.step) + buffers.between
        counters = resident.counters + buffers.counters(params) + routing_counters(self.shape)
        static = resident.total - resident.counters + counters
        workspace = 0 if gpu is None else workspace_bytes(gpu)
        return MemoryBreakdown(
            stage=stage,
            rank=layout.rank(pipe=stage),
            layers=params.layers,
            parameter_count=rank.parameter_count,
            trained_count=params.trained,
            parameters=resident.parameters,
            gradients=resident.gradients + states.accumulated + fresh,
            masters=resident.masters,
            optimizer=resident.optimizer,
            buckets=resident.buckets + states.buckets + buffers.at_peak,
            gathered=gathered,
            model_buffers=resident.model_buffers + counters,
            activations=by_kind,
            logits=logits,
            update=max(0, update - backward),
            host=replace(states.host, activations=away * in_flight),
            nvme=states.nvme,
            host_loading=_loading(framework, params, layout.tp),
            static=static + buffers.between + workspace,
            workspace=workspace,
            step=TrainingStep(
                *(framework, work, recorded, layers, in_flight, states, params, buffers, workspace + routers),
                offloads=layout.offload_activations,
            ),
            **beside(layout, gpu, static + max(backward, update) + workspace),
        )

    def _recorded(self, layout: Layout, work: Workload, part: Part, precision: Precision) -> tuple[Setup, int, int]:
        """What runs for a micro-batch on a rank of a stage, its samples and their positions."""
        s = work.seq_len // layout.ulysses
        _check_attention(self.shape.family, work.attention, precision)
        if layout.sequence_parallel and s % layout.tp:
            given = (("seq_len", work.seq_len), ("tp", layout.tp), ("sequence_parallel", True))
            multiple = layout.tp * layout.ulysses
            raise LayoutError.between(given, "ranks get equal parts", f"choose a multiple of {multiple}")
        shared = layout.ep * (1 if layout.experts == "inner" else layout.tp)  # ranks with different experts
        if work.imbalance > shared > 1:
            reason = f"{shared} ranks share the rows of the experts, and one of them has all of them at {shared}"
            raise LayoutError.of("--imbalance", work.imbalance, reason, f"choose {shared} or less")
        tokens, shape = work.micro_batch_size * s, self.shape
        setup = Setup(
            config=narrow(self.config, 8 * layout.tp) if layout.tiled_mlp else self.config,
            tp=layout.tp,
            sequence_parallel=layout.sequence_parallel and layout.tp > 1,
            recompute=work.recompute,
            attention=work.attention,
            precision=precision,
            documents=work.documents and layout.ulysses == 1,  # then the mask is no layer's
            device=work.device,
            part=part,
            samples="one" if work.micro_batch_size == 1 else "many",
            trainable=without_4bit(work.trainable),
            loss_chunk=min(work.loss_chunk, tokens),
            chunks=Chunks.of(tokens, vocabulary=shape.vocab, hidden=shape.hidden, tp=layout.tp)
            if work.chunked_loss
            else None,
            ep=layout.ep,
            inner=self.shape.experts is not None and layout.experts == "inner",
            imbalance=work.imbalance if self.shape.experts is not None and shared > 1 else 1.0,
        )
        return stand_in(setup, s) if work.stand_ins else setup, work.micro_batch_size, s

    def _pipeline_buffers(
        self, layout: Layout, work: Workload, deepspeed: DeepSpeedSettings | None, stage: int, logit_bytes: int
    ) -> PipelineBuffers:
        shape, tokens = self.shape, work.micro_batch_size * work.seq_len // layout.ulysses
        size = 0 if layout.pp == 1 or deepspeed is None else deepspeed.model_bytes
        return PipelineBuffers(
            hidden=tokens * shape.hidden * size // (layout.tp if layout.sequence_parallel else 1),
            weight_bytes=size,
            is_last=stage == layout.pp - 1,
            micro_batches=work.accumulation,
            exchanged=self._exchanged(work, tokens, layout.ulysses) * logit_bytes if layout.ulysses > 1 else 0,
        )

    def _exchanged(self, work: Workload, tokens: int, ranks: int) -> int:
        """Numbers that a rank of Ulysses keeps of a micro-batch beside its recording."""
        shape = self.shape
        # Of layers whose backward pass has not run: all that are not recomputed, or the one that is.
        outputs = max(1, sum(not recomputes(work.recompute, layer) for layer in range(shape.layers)))
        outputs = 1 if work.recompute == "selective" else outputs
        if not work.documents:
            return outputs * tokens * shape.heads * shape.head_dim
        # A mask of all positions. With one, keys and values are copied for each head, unless a rank has a single one.
        copied = 2 * (shape.heads - shape.kv_heads) if shape.kv_heads > ranks else 0
        mask = work.micro_batch_size * work.seq_len**2
        return mask + outputs * tokens * (shape.heads + copied) * shape.head_dim


def _check_attention(family: str, attention: Attention, precision: Precision) -> None:
    """Raise ModelError for attention that transformers does not have for the family."""
    kinds, in_fp32 = attention_kinds(family), precision == "fp32"
    others = " or ".join(kind for kind in kinds if not (in_fp32 and kind == "flash"))
    if attention not in kinds:
        only = f"transformers has only {' and '.join(kinds)} attention for {family}"
        raise ModelError.of("attention", attention, only, f"choose {others}")
    if attention == "flash" and in_fp32:
        why = "its kernels compute in 16 bits, and this model in fp32"
        raise ModelError.of("attention", attention, why, f"choose {others}", "bf16 for it")


def casts_to_come(params: RankParameters) -> list[int]:
    """Bytes of autocast's copies of weights that are not made yet: before the layers, and at the end of each."""
    made = accumulate((2 * size for size in params.layer_matrices), initial=0)
    return [2 * params.matrices - sofar for sofar in made]


def _worst_moment(
    kept: Activations, rank: RankStates, layers: range, in_flight: int, work: Workload, layout: Layout, tile: int
) -> tuple[int, int, int]:
    """Return bytes of activations and fresh gradients at the worst moment, of these gradients, and autocast's copies.

    The copies of weights in 16 bits are kept with the activations of each micro-batch. Under recomputation those of
    the forward pass, which autocast keeps of weights that train, are freed when the loss begins, and backward makes
    those of a layer again.
    """
    params, offloads, fresh_layer = rank.params, layout.offload_activations, rank.states.fresh_layer
    missing = casts_to_come(params) if rank.copies_weights and work.recompute != "full" else ()
    peak, fresh = kept.worst_moment(
        layers,
        in_flight=in_flight,
        gradients_kept=[fresh_layer * numel // max(1, params.trained_layer) for numel in params.trained_layers],
        casts_to_come=missing,
        offloaded=offloads,
        tile=tile,
    )
    if not rank.copies_weights:
        return peak, fresh, 0
    casts, each = 2 * params.matrices, [2 * size for size in params.layer_matrices]
    if work.recompute != "full":
        return peak, fresh, casts * in_flight
    again = casts - sum(each) + max(each, default=0)
    if params.frozen.numel:
        each = [2 * size for size in params.trained_matrices]
        casts = sum(each)
    forward = kept.forward_peak(layers, casts=each, offloaded=offloads)
    if forward > peak + again:
        return forward - casts, 0, casts
    return peak, fresh, again


def _activations_by_kind(
    kept: Activations, layers: range, in_flight: int, peak: int, away: int, *, has_head: bool
) -> tuple[dict[str, int], int]:
    """Return (activations by kind, logits and loss), which add up to the activations' peak.

    `away`: bytes of a micro-batch's layers that are on the host.
    """
    by_kind = {kind: max(0, size) * in_flight for kind, size in kept.layer_kinds(layers).items()}
    shown = sum(by_kind.values())
    by_kind = {kind: size - size * away * in_flight // max(1, shown) for kind, size in by_kind.items()}
    shown = sum(by_kind.values())
    if shown > peak:
        # Gradients grow as layers finish their backward pass: then most layers may keep nothing at the worst moment.
        by_kind = {kind: size * peak // shown for kind, size in by_kind.items()}
    rest = peak - sum(by_kind.values())
    before = (in_flight - 1) * kept.kept(layers) - in_flight * away
    at_head = has_head and before + kept.at_head(layers) == peak
    logits = min(rest, kept.at_head(layers) - kept.trunk(layers)) if at_head else 0
    working = 0 if logits else min(rest, max(0, peak - before - kept.kept(layers)))
    by_kind["working"], by_kind["ends"] = working, rest - logits - working
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
