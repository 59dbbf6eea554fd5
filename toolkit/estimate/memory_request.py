"""MemoryRequest: the memory of every pipeline stage of a training setup, from a config.json alone.

A rank's peak is the larger of two moments. In the backward pass: states, gradients so far, communication buffers,
gathered weights, and the activations of the micro-batches in flight. At the end of the step: states, all gradients, and
the temporaries of reduction and update, when activations are freed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from toolkit.config.context_exchange import key_value_width
from toolkit.config.distill_section import BATCHES_A_COMMIT
from toolkit.config.layout import Layout, recomputes
from toolkit.config.stage_balance import GPU_FLOPS_PER_BYTE
from toolkit.errors import LayoutError, ModelError
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.computation import Attention
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.framework_profile import FrameworkProfile
from toolkit.estimate.overhead import beside, workspace_bytes
from toolkit.estimate.pipeline_buffers import (
    PipelineBuffers,
    in_flight_micro_batches,
    kept_by_router_losses,
    routing_counters,
)
from toolkit.estimate.profile_memory import stage_breakdown, stage_layers
from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.rank_states import RankStates, rank_states
from toolkit.estimate.recorded.recording import Activations, Precision, RankPass, StagePart
from toolkit.estimate.recorded.recordings import activations, stand_in
from toolkit.estimate.recorded.tiled_mlp import narrow, tile_bytes
from toolkit.estimate.schedule_memory import SchedulePeak, StageBytes, schedule_peak
from toolkit.estimate.stage_bounds import bounds_of
from toolkit.estimate.states import TorchStates
from toolkit.estimate.trainable import vectors_alone, without_4bit
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.estimate.training_step import TrainingStep
from toolkit.hardware import Gpu
from toolkit.models.chunked_head import Chunks, chunk_tokens
from toolkit.models.support import attention_kinds, misfits

Framework = DeepSpeedSettings | TorchStates | FrameworkProfile
"""What keeps model states, and in which precision it computes: an engine of Hugging Face's layers, or a profile."""


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """A training setup, what keeps its model states, and the GPU that it is to fit on."""

    setup: TrainingSetup
    framework: Framework
    gpu: Gpu | None = None
    """The GPU; None: only what PyTorch allocates is estimated."""
    stand_ins: bool = False
    """Whether a pass that is not recorded takes the recording of one that hardly needs less, so that none is made."""
    flops_per_byte: float = GPU_FLOPS_PER_BYTE
    """FLOPs in the time of a byte of memory traffic: training on CPUs chooses other stages."""

    @property
    def bounds(self) -> tuple[int, ...]:
        """The stage bounds that training chooses: stage k has layers [bounds[k], bounds[k + 1])."""
        return bounds_of(self.setup, flops_per_byte=self.flops_per_byte)

    def stages(self) -> tuple[MemoryBreakdown, ...]:
        """Estimate every pipeline stage, or every rank of a pipeline whose ranks have several.

        Raises LayoutError for a layout that the model's shape does not allow.
        """
        layers = self._stage_layers()
        if self.setup.layout.schedule is not None:
            breakdowns = [self._scheduled_breakdown(rank, layers) for rank in range(self.setup.layout.pp)]
        else:
            breakdowns = [self._breakdown(stage, own_layers) for stage, own_layers in enumerate(layers)]
        return tuple(self._after_teacher(breakdowns))

    def peak(self) -> MemoryBreakdown:
        """Estimate the stage that needs most memory.

        Of inner stages with the same layers only the first is computed: it has the most micro-batches in flight.
        """
        if self.setup.layout.schedule is not None:
            return max(self.stages(), key=lambda breakdown: breakdown.allocated)
        pattern = self.setup.model.parameters.pattern
        last = self.setup.layout.pp - 1
        distinct: dict[tuple[int, ...] | str, tuple[int, range]] = {}
        for stage, layers in enumerate(self._stage_layers()):
            if stage == 0:
                distinct["first"] = stage, layers
            elif stage == last:
                distinct["last"] = stage, layers
            else:
                kinds = tuple(pattern[index] for index in layers)
                distinct.setdefault(kinds, (stage, layers))
        breakdowns = [self._breakdown(stage, layers) for stage, layers in distinct.values()]
        return max(self._after_teacher(breakdowns), key=lambda breakdown: breakdown.allocated)

    def largest_micro_batch(self) -> int:
        """Return the largest micro-batch size that fits on every stage of the GPU; 0 if not even one sample fits."""

        def fits(size: int) -> bool:
            return replace(self, setup=replace(self.setup, micro_batch_size=size)).peak().fits_in_replay

        if not fits(1):
            return 0
        size = 1
        while fits(2 * size):
            size *= 2
        low = size
        high = 2 * size
        while high - low > 1:
            middle = (low + high) // 2
            if fits(middle):
                low = middle
            else:
                high = middle
        return low

    def _stage_layers(self) -> list[range]:
        """Return the decoder layers of each stage. Raises LayoutError where the model cannot be split so."""
        setup = self.setup
        layout = setup.layout
        for misfit in misfits(
            setup.model.shape,
            tp=layout.tp,
            pp=layout.pp,
            chunks=layout.chunks,
            ulysses=layout.ulysses,
            ep=layout.ep,
            inner=layout.experts == "inner",
        ):
            remedy = (misfit.axis, misfit.allowed)
            raise LayoutError.of(misfit.axis, getattr(layout, misfit.axis), misfit.reason, remedy)
        if isinstance(self.framework, FrameworkProfile):
            layout.refuse_schedule("another framework's schedule is part of its profile")
            return stage_layers(self.framework, setup.model, layout.pp)
        return [range(start, stop) for start, stop in pairwise(self.bounds)]

    def _breakdown(self, stage: int, layers: range) -> MemoryBreakdown:
        """Compute the two moments of one stage that may be its peak, and break the worse one down."""
        if isinstance(self.framework, FrameworkProfile):
            return stage_breakdown(self.setup, self.framework, self.gpu, stage, layers)
        setup = self.setup
        layout = setup.layout
        rank = rank_states(setup, self.framework, stage, layers)
        states = rank.states
        rank_pass = self._rank_pass(_part_of(stage, layout.pp), rank.precision)
        recorded = activations(rank_pass, setup.micro_batch_size, setup.rank_positions)
        in_flight = in_flight_micro_batches(layout.pp, stage, setup.accumulation)
        in_layer = _in_layer(setup, rank)
        worst = _worst_moment(setup, recorded, rank, layers, in_flight=in_flight, in_layer=in_layer)
        gathered = states.gathered + worst.casts
        on_host = max(recorded.offloaded(layers)) if layout.offload_activations else 0
        buffers = _pipeline_buffers(setup, self.framework, stage, rank.product_bytes)
        shares = _activation_shares(
            recorded,
            layers,
            in_flight=in_flight,
            peak=worst.activations,
            on_host=on_host,
            has_head=stage == layout.pp - 1,
        )
        unrecorded = _unrecorded(setup, layers, rank, in_flight=in_flight)
        unrecorded_bytes = sum(unrecorded.values())
        live = worst.activations + worst.fresh_gradients + unrecorded_bytes
        last_gradient = states.accumulated + states.last_gradient + gathered + buffers.at_peak
        peak = _Peak(
            gradients=states.accumulated + worst.fresh_gradients,
            buckets=states.buckets + buffers.at_peak,
            gathered=gathered,
            activations=shares.shown(unrecorded),
            logits=shares.logits,
            backward=states.accumulated + states.buckets + gathered + buffers.at_peak + live,
            update=max(last_gradient, max(states.reduction, states.step) + buffers.between),
        )
        breakdown = self._broken_down(stage, rank, buffers, peak)
        return replace(
            breakdown,
            host=replace(states.host, activations=on_host * in_flight),
            static=breakdown.static + buffers.between,
            step=TrainingStep(
                setup=setup,
                engine=self.framework,
                rank_pass=rank_pass,
                layers=layers,
                in_flight=in_flight,
                states=states,
                params=rank.params,
                buffers=buffers,
                in_layer=in_layer,
                workspace=breakdown.workspace + unrecorded_bytes,
            ),
        )

    def _broken_down(self, pipe: int, rank: RankStates, buffers: PipelineBuffers, peak: "_Peak") -> MemoryBreakdown:
        """Break down the peak of a pipeline rank: what stays between steps, and what one of two moments adds."""
        setup = self.setup
        layout = setup.layout
        engine = self.framework
        assert isinstance(engine, DeepSpeedSettings | TorchStates)
        params = rank.params
        resident = rank.states.resident
        counters = resident.counters + buffers.counters(params) + routing_counters(setup.model.shape)
        static = resident.total - resident.counters + counters
        workspace = 0 if self.gpu is None else workspace_bytes(self.gpu)
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
            host_loading=_loading(engine, params, layout.tp),
            static=static + workspace,
            workspace=workspace,
            **beside(layout, self.gpu, static + max(peak.backward, peak.update) + workspace),
        )

    def _scheduled_breakdown(self, pipe: int, stage_layers: Sequence[range]) -> MemoryBreakdown:
        """Break down the peak of a pipeline rank that runs a schedule of the toolkit's own."""
        setup = self.setup
        layout = setup.layout
        engine = self.framework
        assert isinstance(engine, DeepSpeedSettings)
        own_stages = [stage for stage, rank in enumerate(layout.stage_ranks) if rank == pipe]
        layers = tuple(index for stage in own_stages for index in stage_layers[stage])
        rank = rank_states(setup, engine, pipe, layers)
        params = rank.params
        states = rank.states
        schedule = layout.table(setup.accumulation)
        if layout.schedule != "gpipe":  # which holds all micro-batches
            schedule = schedule.shortened()
        buffers = _pipeline_buffers(setup, engine, pipe, rank.product_bytes)
        # One micro-batch alone reduces its gradients as they come; several accumulate them first.
        accumulated = states.accumulated or states.fresh_layer * params.trained // max(1, params.trained_layer)
        shares = _trained_shares(params, [len(stage_layers[stage]) for stage in own_stages], ends_last=pipe > 0)
        passes: dict[int, Activations] = {}
        bytes_of: dict[int, StageBytes] = {}
        for stage, share in zip(own_stages, shares, strict=True):
            stage_pass = self._stage_pass(stage, rank, splits=schedule.splits_backward)
            in_stage = self._stage_bytes(stage, stage_layers[stage], rank, stage_pass, hidden=buffers.hidden)
            passes[stage] = stage_pass.recorded
            bytes_of[stage] = replace(in_stage, gradients=int(accumulated * share))
        worst = schedule_peak(schedule, pipe, bytes_of, hidden=buffers.hidden)
        last_gradient = accumulated + states.last_gradient + states.gathered + worst.messages
        peak = _Peak(
            gradients=worst.gradients,
            buckets=states.buckets + worst.messages,
            gathered=states.gathered,
            activations=_kinds_at(worst, passes, stage_layers, bytes_of),
            logits=0,
            backward=worst.gradients + states.buckets + states.gathered + worst.live,
            update=max(last_gradient, states.reduction, states.step),
        )
        return self._broken_down(pipe, rank, buffers, peak)

    def _after_teacher(self, breakdowns: Sequence[MemoryBreakdown]) -> Iterator[MemoryBreakdown]:
        """Yield the breakdowns of ranks, with what the teacher of a distillation takes before the student is built."""
        if self.setup.teacher is None or isinstance(self.framework, FrameworkProfile):
            yield from breakdowns
            return
        teacher_request = replace(self, setup=self.setup.of_teacher())
        stage_layers = teacher_request._stage_layers()
        for breakdown in breakdowns:
            pass_bytes = teacher_request._teacher_pass(breakdown.stage, stage_layers, top_k=self.setup.teacher.top_k)
            with_teacher = replace(breakdown, teacher_pass=pass_bytes + breakdown.workspace)
            if with_teacher.teacher:
                # What does not come from PyTorch's allocator depends on how much it allocates.
                with_teacher = replace(with_teacher, **beside(self.setup.layout, self.gpu, with_teacher.allocated))
            yield with_teacher

    def _teacher_pass(self, pipe: int, stage_layers: Sequence[range], *, top_k: int) -> int:
        """Return the bytes of a pipeline rank at the peak of a teacher's pass, whose setup this is.

        States, weights that are gathered or cast, what several micro-batches leave until it is written, and one of two
        moments: a layer at work, or a chunk of logits, in the dtype of the products and in fp32. Source:
        `top_tokens` (toolkit/engines/full_forward.py), `TopTokens` (toolkit/parallel/distilled_loss.py), and
        AllGatherCoalescedHandle (deepspeed/runtime/zero/partition_parameters.py). Known error:
        a copy of logits where ranks have tokens that the student lacks, and what a pipeline's stages receive, are not
        counted.
        """
        setup = self.setup
        layout = setup.layout
        engine = self.framework
        assert isinstance(engine, DeepSpeedSettings | TorchStates)
        own_stages = [stage for stage, rank in enumerate(layout.stage_ranks) if rank == pipe]
        layers = tuple(index for stage in own_stages for index in stage_layers[stage])
        rank = rank_states(setup, engine, pipe, layers, model=vectors_alone(setup.model.parameters))
        working = max(self._teacher_working(stage, stage_layers[stage], rank) for stage in own_stages)
        cast = 2 * rank.params.largest if rank.copies_weights else 0
        arriving = 0
        if isinstance(engine, DeepSpeedSettings) and engine.zero_stage == 3 and layout.replicas > 1:
            # Parameters are gathered into one tensor, a prefetch bucket at a time, and then each into its own.
            arriving = engine.model_bytes * min(engine.prefetch_bucket_size, rank.params.numel)
        # Ids, labels and places in the text, and positions of documents.
        batch_bytes = 8 * (3 + setup.computation.documents)
        stored_bytes = 8 * top_k + 4 * (top_k + 1) if layout.stage_ranks[-1] == pipe else 0
        kept_for_commit = BATCHES_A_COMMIT * setup.rank_tokens * (batch_bytes + stored_bytes)
        return rank.states.resident.total + rank.states.gathered + arriving + cast + working + kept_for_commit

    def _teacher_working(self, stage: int, layers: range, rank: RankStates) -> int:
        """Return the bytes of a stage with these layers at work in a teacher's forward pass, whose setup this is.

        They are those of a layer, or of a chunk of logits.
        """
        setup = self.setup
        layout = setup.layout
        # A layer that is recomputed keeps nothing in its forward pass, as without gradients.
        forward_only = replace(self, setup=replace(setup, layout=replace(layout, recompute="full")))
        rank_pass = forward_only._rank_pass(_part_of(stage, layout.stages), rank.precision)
        recorded = activations(replace(rank_pass, chunks=None), setup.micro_batch_size, setup.rank_positions)
        in_layers = recorded.without_gradients(layers)
        if stage < layout.stages - 1:
            return in_layers
        return max(in_layers, recorded.embedding.delta + _teacher_logits(setup, rank))

    def _stage_pass(self, stage: int, rank: RankStates, *, splits: bool) -> "_StagePass":
        """Return the pass of a stage of a schedule, whose backward pass is split or not."""
        setup = self.setup
        rank_pass = self._rank_pass(_part_of(stage, setup.layout.stages), rank.precision)
        whole = activations(rank_pass, setup.micro_batch_size, setup.rank_positions)
        if not splits or self.stand_ins:
            return _StagePass(recorded=whole, whole=whole)
        # A head that computes the loss itself has its gradient at once.
        split = replace(rank_pass, splits="layers" if setup.chunked_loss else "all")
        recorded = activations(split, setup.micro_batch_size, setup.rank_positions)
        return _StagePass(recorded=recorded, whole=whole)

    def _stage_bytes(
        self, stage: int, layers: range, rank: RankStates, stage_pass: "_StagePass", *, hidden: int
    ) -> StageBytes:
        """Return what one micro-batch of a stage takes. `hidden`: bytes of the hidden state between two stages."""
        setup = self.setup
        layout = setup.layout
        recorded = stage_pass.recorded
        unrecorded = kept_by_router_losses(setup, layers) + _outputs_of_heads(setup, layers, rank.product_bytes)
        # What a stage of the same rank handed on is an output there, and counted there.
        is_handed_on = stage > 0 and layout.stage_ranks[stage - 1] == layout.stage_ranks[stage]
        shared = hidden if is_handed_on else 0
        parameters = setup.model.parameters
        # W goes through the layers from the first one, and comes to the head last.
        head_waiting = 0
        head_product = 0
        if stage == layout.stages - 1 and not setup.chunked_loss:
            shape = setup.model.shape
            rows = -(-shape.vocab // layout.tp)
            head_waiting = setup.rank_tokens * (shape.hidden + rows) * rank.itemsize
            head_product = rows * shape.hidden * rank.itemsize
        waiting = recorded.left(layers) - stage_pass.whole.left(layers)
        if self.stand_ins:
            # Without a recording, inputs that linear layers share are counted for each.
            widths = parameters.product_widths(layers, tp=layout.tp)
            waiting = setup.rank_tokens * rank.itemsize * widths + head_waiting
        product = parameters.largest_matrix(layers, tp=layout.tp) * rank.itemsize
        return StageBytes(
            forward=recorded.peak_with_loss(layers) + unrecorded - shared,
            kept=recorded.kept(layers) + unrecorded - shared,
            backward=recorded.backward_peak(layers, in_layer=_in_layer(setup, rank)) + unrecorded - shared,
            waiting=waiting,
            weights=max(waiting + product, head_waiting + head_product),
        )

    def _rank_pass(self, part: StagePart, precision: Precision) -> RankPass:
        """Return the pass over a micro-batch on a rank of a stage. Raises LayoutError and ModelError."""
        setup = self.setup
        layout = setup.layout
        shape = setup.model.shape
        computation = setup.computation
        owners = setup.expert_owners
        positions = setup.rank_positions
        _check_attention(shape.family, computation.attention, precision)
        if layout.sequence_parallel and positions % layout.tp:
            settings = (("seq_len", setup.seq_len), ("tp", layout.tp), ("sequence_parallel", True))
            multiple = layout.tp * layout.ulysses * layout.cp
            raise LayoutError.between(settings, "ranks get equal parts", f"choose a multiple of {multiple}")
        if computation.imbalance > owners > 1:
            reason = f"{owners} ranks share the rows of the experts, and one of them has all of them at {owners}"
            raise LayoutError.of("--imbalance", computation.imbalance, reason, f"choose {owners} or less")
        chunks = None
        if setup.chunked_loss:
            chunks = Chunks.of(setup.rank_tokens, vocabulary=shape.vocab, hidden=shape.hidden, tp=layout.tp)
        rank_pass = RankPass(
            config=narrow(setup.model.config, 8 * layout.tp) if layout.tiled_mlp else setup.model.config,
            layout=Layout(
                dp=layout.ep,
                ep=layout.ep,
                tp=layout.tp,
                sequence_parallel=layout.sequence_parallel,
                recompute=layout.recompute,
                experts="whole" if shape.experts is None else layout.experts,
            ),
            computation=replace(
                computation,
                # Under Ulysses the mask is no layer's, and the toolkit's own attention has none.
                documents=computation.documents and layout.ulysses == layout.cp == 1 and not setup.blocks,
                trainable=without_4bit(computation.trainable),
                loss_chunk=min(computation.loss_chunk, setup.rank_tokens),
                imbalance=computation.imbalance if shape.experts is not None and owners > 1 else 1.0,
            ),
            precision=precision,
            part=part,
            samples="one" if setup.micro_batch_size == 1 else "many",
            chunks=chunks,
        )
        return stand_in(rank_pass, positions) if self.stand_ins else rank_pass


@dataclass(frozen=True, kw_only=True)
class _Peak:
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


@dataclass(frozen=True, kw_only=True)
class _StagePass:
    """What one micro-batch allocates in a stage of a schedule."""

    recorded: Activations
    """Activations of the pass as the schedule runs it, whose backward pass may leave the weights' gradients to W."""
    whole: Activations
    """Activations of the same pass with a whole backward pass."""


def _teacher_logits(setup: TrainingSetup, rank: RankStates) -> int:
    """Bytes of the logits of a teacher at their worst moment, in fp32 beside those of the product, and of its input."""
    shape = setup.model.shape
    tokens = setup.rank_tokens
    rows = -(-shape.vocab // setup.layout.tp)
    chunk = chunk_tokens(tokens, rows) if setup.chunked_loss else tokens
    # A chunk in fp32 is overwritten; full logits are the model's output, and copied.
    is_copied = rank.product_bytes < 4 or not setup.chunked_loss
    return tokens * shape.hidden * rank.itemsize + chunk * rows * (4 + is_copied * rank.product_bytes)


def _part_of(stage: int, stages: int) -> StagePart:
    """Return the part of the model that one of so many stages is."""
    if stages == 1:
        return "whole"
    if stage == 0:
        return "first"
    return "last" if stage == stages - 1 else "middle"


def _trained_shares(params: RankParameters, counts: Sequence[int], *, ends_last: bool) -> list[float]:
    """Return the share of a rank's trained parameters in each of its stages, which have so many layers.

    Embeddings and head count to the last of them, or to the first.
    """
    sizes = []
    start = 0
    for count in counts:
        sizes.append(sum(params.trained_layers[start : start + count]))
        start += count
    sizes[-1 if ends_last else 0] += params.trained - sum(sizes)
    return [size / max(1, params.trained) for size in sizes]


def _kinds_at(
    peak: SchedulePeak,
    passes: Mapping[int, Activations],
    stage_layers: Sequence[range],
    bytes_of: Mapping[int, StageBytes],
) -> dict[str, int]:
    """Return what is live at a schedule's peak by kind, without messages."""
    total = peak.live - peak.messages
    kind, at_work = peak.at_work
    counts = Counter(peak.kept)
    waiting = sum(count * bytes_of[stage].waiting for stage, count in peak.waiting.items())
    working = 0
    if kind == "W":
        waiting += bytes_of[at_work].weights
    else:
        counts[at_work] += 1
        most = bytes_of[at_work].forward if kind == "F" else bytes_of[at_work].backward
        working = max(0, most - bytes_of[at_work].kept)
    by_kind: Counter[str] = Counter()
    for stage, count in counts.items():
        for part, size in passes[stage].layer_kinds(stage_layers[stage]).items():
            by_kind[part] += count * max(0, size)
    shown = sum(by_kind.values())
    room = total - waiting - working
    if shown > room:
        by_kind = Counter({part: size * room // shown for part, size in by_kind.items()})
    ends = room - sum(by_kind.values())
    return {**by_kind, "waiting": waiting, "working": working, "ends": ends}


def _pipeline_buffers(
    setup: TrainingSetup, engine: DeepSpeedSettings | TorchStates, stage: int, product_bytes: int
) -> PipelineBuffers:
    """Return the buffers of a stage; only DeepSpeed's engine has any of a pipeline."""
    layout = setup.layout
    weight_bytes = 0
    if layout.pp > 1 and isinstance(engine, DeepSpeedSettings):
        weight_bytes = engine.model_bytes
    shards = layout.tp if layout.sequence_parallel else 1
    return PipelineBuffers(
        hidden=setup.rank_tokens * setup.model.shape.hidden * weight_bytes // shards,
        weight_bytes=weight_bytes,
        is_last=layout.stage_ranks[-1] == stage,
        micro_batches=setup.accumulation,
        exchanged=_exchanged(setup) * product_bytes if layout.ulysses > 1 else 0,
    )


def _in_layer(setup: TrainingSetup, rank: RankStates) -> int:
    """Bytes in the backward pass of a layer that its recording lacks: of attention, or of a tile of the MLP."""
    layout = setup.layout
    of_attention = 0
    of_tile = 0
    if layout.cp > 1 or setup.blocks:
        of_attention = _keys_and_values(setup, rank.product_bytes)
    if layout.tiled_mlp:
        of_tile = tile_bytes(setup.model.shape, setup.rank_tokens, rank.itemsize, tp=layout.tp)
    return max(of_attention, of_tile)


def _keys_and_values(setup: TrainingSetup, itemsize: int) -> int:
    """Bytes of keys and values in the backward pass of a layer's attention on a rank.

    On one rank: their gradients in fp32. Gathered: those of whole sequences, and their gradients in fp32. In a ring:
    those at hand and those that arrive, their gradients, of the rank's own as well, in fp32, and the gradients that are
    sent and that arrive. Known error: they are added to the peak of the layer, which may be another moment than
    attention.
    """
    shape = setup.model.shape
    layout = setup.layout
    tokens = setup.rank_tokens
    whole = tokens * layout.cp
    width = 2 * key_value_width(shape, layout.cp_ulysses * layout.tp)
    if layout.cp == 1:
        return tokens * width * 4
    recomputed = 0
    if layout.cp_ulysses > 1 and layout.recompute != "none":
        recomputed = _outputs_of_layer(setup, itemsize)
    if setup.exchange(itemsize) == "gather":
        return recomputed + whole * width * (itemsize + 4)
    return recomputed + layout.cp_ulysses * tokens * width * (4 * itemsize + 8)


def _unrecorded(setup: TrainingSetup, layers: range, rank: RankStates, *, in_flight: int) -> dict[str, int]:
    """Return the bytes of activations that the recording of a stage lacks, by kind, of `in_flight` micro-batches."""
    return {
        "routers": in_flight * kept_by_router_losses(setup, layers),
        "attention": in_flight * _outputs_of_heads(setup, layers, rank.product_bytes),
    }


def _outputs_of_heads(setup: TrainingSetup, layers: Sequence[int], itemsize: int) -> int:
    """Bytes that layers keep of a micro-batch where context-parallel ranks exchange heads: outputs of attention as they
    were computed, beside those that came back to the rank. 0 in layers that are recomputed."""
    layout = setup.layout
    if layout.cp_ulysses == 1 or layout.recompute == "selective":
        return 0
    keeping = sum(not recomputes(layout.recompute, layer) for layer in layers)
    return keeping * _outputs_of_layer(setup, itemsize)


def _outputs_of_layer(setup: TrainingSetup, itemsize: int) -> int:
    """Bytes of the outputs of a layer's attention on a rank."""
    shape = setup.model.shape
    return setup.rank_tokens * shape.heads * shape.head_dim * itemsize // setup.layout.tp


def _exchanged(setup: TrainingSetup) -> int:
    """Numbers that a rank of Ulysses keeps of a micro-batch beside its recording."""
    shape = setup.model.shape
    tokens = setup.rank_tokens
    recompute = setup.layout.recompute
    # Of layers whose backward pass has not run: all that are not recomputed, or the one that is.
    outputs = max(1, sum(not recomputes(recompute, layer) for layer in range(shape.layers)))
    if recompute == "selective":
        outputs = 1
    if not setup.computation.documents:
        return outputs * tokens * shape.heads * shape.head_dim
    # A mask of all positions. With one, keys and values are copied for each head, unless a rank has a single one.
    copied = 2 * (shape.heads - shape.kv_heads) if shape.kv_heads > setup.layout.ulysses else 0
    mask = setup.micro_batch_size * setup.seq_len**2
    return mask + outputs * tokens * (shape.heads + copied) * shape.head_dim


def _check_attention(family: str, attention: Attention, precision: Precision) -> None:
    """Raise ModelError for attention that transformers does not have for the family."""
    kinds = attention_kinds(family)
    in_fp32 = precision == "fp32"
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


@dataclass(frozen=True, kw_only=True)
class _WorstMoment:
    """What is live at the worst moment of the passes of a stage, beside model states and buffers, in bytes."""

    activations: int
    fresh_gradients: int
    """Gradients of weights that the backward pass has allocated so far."""
    casts: int
    """Autocast's copies of weights in 16 bits."""


def _worst_moment(
    setup: TrainingSetup, recorded: Activations, rank: RankStates, layers: range, *, in_flight: int, in_layer: int
) -> _WorstMoment:
    """Find the worst moment of a stage with these layers, of which a backward or the forward pass may have it.

    Autocast keeps its copies of weights with the activations of each micro-batch. Under recomputation those of the
    forward pass, which it keeps of weights that train, are freed when the loss begins, and backward makes those of a
    layer again. `in_layer`: bytes in the backward pass of a layer, which the recording lacks.
    """
    params = rank.params
    offloads = setup.layout.offload_activations
    recomputes_all = setup.layout.recompute == "full"
    fresh_layer = rank.states.fresh_layer
    missing = casts_to_come(params) if rank.copies_weights and not recomputes_all else []
    worst = recorded.worst_moment(
        layers,
        in_flight=in_flight,
        gradients_kept=[fresh_layer * numel // max(1, params.trained_layer) for numel in params.trained_layers],
        casts_to_come=missing,
        offloaded=offloads,
        in_layer=in_layer,
    )
    casts = 2 * params.matrices
    layer_casts = [2 * size for size in params.layer_matrices]
    if not rank.copies_weights:
        casts_in_backward = 0
    elif not recomputes_all:
        casts_in_backward = casts * in_flight
    else:
        casts_in_backward = casts - sum(layer_casts) + max(layer_casts, default=0)
    in_backward = _WorstMoment(activations=worst.activations, fresh_gradients=worst.gradients, casts=casts_in_backward)
    if not rank.copies_weights or not recomputes_all:
        return in_backward
    if params.frozen.numel:
        layer_casts = [2 * size for size in params.trained_matrices]
        casts = sum(layer_casts)
    forward = recorded.forward_peak(layers, casts=layer_casts, offloaded=offloads)
    if forward > worst.total + casts_in_backward:
        return _WorstMoment(activations=forward - casts, fresh_gradients=0, casts=casts)
    return in_backward


@dataclass(frozen=True, kw_only=True)
class _ActivationShares:
    """How the activations at the worst moment divide, in bytes."""

    by_kind: Mapping[str, int]
    """What decoder layers keep, by the part of the layer."""
    logits: int
    """Logits and loss, where the moment is at the head."""
    working: int
    """What is live only while one layer computes."""
    ends: int
    """All else: embedding, tables and final norm."""

    def shown(self, unrecorded: Mapping[str, int]) -> dict[str, int]:
        """Return them by kind as a MemoryBreakdown has them, with what the recording lacks, and without the logits."""
        by_kind = {**self.by_kind, "working": self.working, "ends": self.ends}
        for kind, size in unrecorded.items():
            if size:
                by_kind[kind] = by_kind.get(kind, 0) + size
        return by_kind


def _activation_shares(
    recorded: Activations, layers: range, *, in_flight: int, peak: int, on_host: int, has_head: bool
) -> _ActivationShares:
    """Divide the activations at the worst moment of a stage, `peak` bytes of `in_flight` micro-batches.

    `on_host`: bytes of a micro-batch's layers that are on the host. `has_head`: whether the stage has the LM head.
    """
    by_kind = {kind: max(0, size) * in_flight for kind, size in recorded.layer_kinds(layers).items()}
    recorded_bytes = max(1, sum(by_kind.values()))
    by_kind = {kind: size - size * on_host * in_flight // recorded_bytes for kind, size in by_kind.items()}
    on_device = sum(by_kind.values())
    if on_device > peak:
        # Gradients grow as layers finish their backward pass: then most layers may keep nothing at the worst moment.
        by_kind = {kind: size * peak // on_device for kind, size in by_kind.items()}
    rest = peak - sum(by_kind.values())
    others = (in_flight - 1) * recorded.kept(layers) - in_flight * on_host
    logits = 0
    if has_head and others + recorded.at_head(layers) == peak:
        logits = min(rest, recorded.at_head(layers) - recorded.trunk(layers))
    working = 0
    if not logits:
        working = min(rest, max(0, peak - others - recorded.kept(layers)))
    return _ActivationShares(by_kind=by_kind, logits=logits, working=working, ends=rest - logits - working)


def _loading(framework: DeepSpeedSettings | TorchStates, params: RankParameters, tp: int) -> int:
    """Return the bytes in host memory while the model is built, before it moves to the device.

    A rank builds all of its share at once; under ZeRO-3 one layer or embedding at a time.
    Random weights of a layer are drawn whole, in fp32, then sharded and cast; weights from files are sharded first.
    """
    if isinstance(framework, TorchStates):
        return framework.weight_bytes * params.numel
    size = framework.model_bytes
    drawn = 4 * params.layer_numel * tp
    if framework.zero_stage == 3:
        return max(drawn, size * params.largest)
    return size * params.numel + (drawn if size < 4 or tp > 1 else 0)
