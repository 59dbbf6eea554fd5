"""The peak of a pipeline rank that runs a schedule of the toolkit's own, with all of its stages.

`schedule_peak` walks through the rank's passes; here is what one micro-batch takes in each stage, and how the worst
moment divides by kind of activation.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from toolkit.config.layout import Layout
from toolkit.config.pipeline_schedules import Schedule
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.estimate.deepspeed_settings import DeepSpeedSettings
from toolkit.estimate.rank_breakdown import RankPeak, pipeline_buffers, rank_breakdown
from toolkit.estimate.rank_parameters import RankParameters
from toolkit.estimate.rank_pass import stage_pass
from toolkit.estimate.rank_states import RankStates, rank_states
from toolkit.estimate.recorded.activations import Activations
from toolkit.estimate.recorded.recordings import activations
from toolkit.estimate.schedule_memory import SchedulePeak, StageBytes, schedule_peak
from toolkit.estimate.stage_bounds import stages_of_rank
from toolkit.estimate.states import ModelStates
from toolkit.estimate.training_setup import TrainingSetup
from toolkit.estimate.unrecorded import unrecorded_bytes, unrecorded_in_layer
from toolkit.hardware import Gpu


def scheduled_breakdown(
    setup: TrainingSetup,
    engine: DeepSpeedSettings,
    gpu: Gpu | None,
    pipe: int,
    stage_layers: Sequence[range],
    *,
    stand_ins: bool,
) -> MemoryBreakdown:
    """Break down the peak of pipeline rank `pipe`. `stage_layers`: the decoder layers of each stage.

    `stand_ins`: as in MemoryRequest. Raises LayoutError and ModelError for a pass that cannot run.
    """
    own_layers = {stage: stage_layers[stage] for stage in stages_of_rank(setup.layout, pipe)}
    rank = rank_states(setup, engine, pipe, tuple(index for layers in own_layers.values() for index in layers))
    schedule = _walked_schedule(setup)
    buffers = pipeline_buffers(setup, engine, pipe, rank.product_bytes)
    gradients = _accumulated_gradients(rank.states, rank.params)
    shares = _trained_shares(rank.params, own_layers, ends_last=pipe > 0)
    stages = {
        stage: _ScheduledStage.of(
            setup,
            rank,
            stage,
            layers,
            gradients=int(gradients * shares[stage]),
            hidden=buffers.hidden,
            splits=schedule.splits_backward,
            stand_ins=stand_ins,
        )
        for stage, layers in own_layers.items()
    }
    bytes_of = {stage: scheduled.bytes_of_pass for stage, scheduled in stages.items()}
    worst = schedule_peak(schedule, pipe, bytes_of, hidden=buffers.hidden)
    peak = _rank_peak(rank.states, worst, stages, accumulated=gradients)
    return rank_breakdown(setup, engine, gpu, pipe, rank, buffers, peak)


def _walked_schedule(setup: TrainingSetup) -> Schedule:
    """Return the schedule with so many micro-batches that its peak is that of all: GPipe holds all of them."""
    schedule = setup.layout.table(setup.accumulation)
    if setup.layout.schedule == "gpipe":
        return schedule
    return schedule.shortened()


def _accumulated_gradients(states: ModelStates, params: RankParameters) -> int:
    """Bytes of the gradients of all of a rank's weights while its passes run.

    One micro-batch alone reduces its gradients as they come; several accumulate them first.
    """
    if states.accumulated:
        return states.accumulated
    return states.fresh_layer * params.trained // max(1, params.trained_layer)


def _trained_shares(params: RankParameters, own_layers: Mapping[int, range], *, ends_last: bool) -> dict[int, float]:
    """Return the share of a rank's trained parameters in each of its stages, which have these layers.

    Embeddings and head count to the last of them, or to the first.
    """
    sizes: dict[int, int] = {}
    start = 0
    for stage, layers in own_layers.items():
        sizes[stage] = sum(params.trained_layers[start : start + len(layers)])
        start += len(layers)
    stages = list(own_layers)
    end_stage = stages[-1] if ends_last else stages[0]
    sizes[end_stage] += params.trained - sum(sizes.values())
    return {stage: size / max(1, params.trained) for stage, size in sizes.items()}


@dataclass(frozen=True, kw_only=True)
class _ScheduledStage:
    """A stage of a rank, and what one micro-batch takes there."""

    layers: range
    recorded: Activations
    """Activations of the pass as the schedule runs it, whose backward pass may leave the weights' gradients to W."""
    bytes_of_pass: StageBytes

    @classmethod
    def of(
        cls,
        setup: TrainingSetup,
        rank: RankStates,
        stage: int,
        layers: range,
        *,
        gradients: int,
        hidden: int,
        splits: bool,
        stand_ins: bool,
    ) -> Self:
        """Look up the pass of a stage with these layers, and count what it takes.

        `gradients`: bytes of the sums of the stage's gradients. `hidden`: bytes of the hidden state between two stages.
        `splits`: whether the schedule splits backward passes.
        """
        rank_pass = stage_pass(setup, stage, rank.precision, stand_ins=stand_ins)
        whole = activations(rank_pass, setup.micro_batch_size, setup.rank_positions)
        recorded = whole
        if splits and not stand_ins:
            # A head that computes the loss itself has its gradient at once.
            split_pass = replace(rank_pass, splits="layers" if setup.chunked_loss else "all")
            recorded = activations(split_pass, setup.micro_batch_size, setup.rank_positions)
        beside_recording = sum(unrecorded_bytes(setup, layers, rank).values())
        if _takes_from_own_rank(setup.layout, stage):
            # What a stage of the same rank handed on is an output there, and counted there.
            beside_recording -= hidden
        head = _HeadGradient.of(setup, rank, stage)
        waiting = recorded.left(layers) - whole.left(layers)
        if stand_ins:
            waiting = _linear_layer_bytes(setup, rank, layers) + head.waiting
        largest_gradient = setup.model.parameters.largest_matrix(layers, tp=setup.layout.tp) * rank.itemsize
        unrecorded = unrecorded_in_layer(setup, rank)
        bytes_of_pass = StageBytes(
            forward=recorded.peak_with_loss(layers) + beside_recording,
            kept=recorded.kept(layers) + beside_recording,
            backward=recorded.backward_peak(layers, unrecorded=unrecorded) + beside_recording,
            waiting=waiting,
            # W goes through the layers from the first one, and comes to the head last.
            weights=max(waiting + largest_gradient, head.waiting + head.product),
            gradients=gradients,
        )
        return cls(layers=layers, recorded=recorded, bytes_of_pass=bytes_of_pass)


def _takes_from_own_rank(layout: Layout, stage: int) -> bool:
    """Whether the stage before is on the same rank."""
    return stage > 0 and layout.stage_ranks[stage - 1] == layout.stage_ranks[stage]


@dataclass(frozen=True, kw_only=True)
class _HeadGradient:
    """Bytes of a split backward pass at the LM head; 0 for a stage without one, and where the loss is in chunks."""

    waiting: int = 0
    """The head's input and the gradient of the logits, which wait for W."""
    product: int = 0
    """The gradient of the head's weight."""

    @classmethod
    def of(cls, setup: TrainingSetup, rank: RankStates, stage: int) -> Self:
        """Count what the head of a stage leaves to W."""
        layout = setup.layout
        if stage < layout.stages - 1 or setup.chunked_loss:
            return cls()
        shape = setup.model.shape
        rows = -(-shape.vocab // layout.tp)
        return cls(
            waiting=setup.rank_tokens * (shape.hidden + rows) * rank.itemsize,
            product=rows * shape.hidden * rank.itemsize,
        )


def _linear_layer_bytes(setup: TrainingSetup, rank: RankStates, layers: range) -> int:
    """Bytes of the inputs and output gradients of all linear layers, which a split backward pass leaves to W.

    Inputs that several linear layers share are counted for each.
    """
    widths = setup.model.parameters.product_widths(layers, tp=setup.layout.tp)
    return setup.rank_tokens * rank.itemsize * widths


def _rank_peak(
    states: ModelStates, worst: SchedulePeak, stages: Mapping[int, _ScheduledStage], *, accumulated: int
) -> RankPeak:
    """Add the rank's states to the worst moment of its passes, and to the end of the step.

    `accumulated`: bytes of the gradients of all of the rank's weights.
    """
    last_gradient = accumulated + states.last_gradient + states.gathered + worst.messages
    return RankPeak(
        gradients=worst.gradients,
        buckets=states.buckets + worst.messages,
        gathered=states.gathered,
        activations=_activations_by_kind(worst, stages),
        logits=0,
        backward=worst.gradients + states.buckets + states.gathered + worst.live,
        update=max(last_gradient, states.reduction, states.step),
    )


def _activations_by_kind(peak: SchedulePeak, stages: Mapping[int, _ScheduledStage]) -> dict[str, int]:
    """Return the bytes that are live at a schedule's peak by kind of activation, without messages.

    `waiting`: what waits for W. `working`: what is live only in the pass that runs. `ends`: embeddings and head.
    """
    kind, stage_at_work = peak.at_work
    at_work = stages[stage_at_work].bytes_of_pass
    kept_micro_batches = Counter(peak.kept)
    waiting = sum(count * stages[stage].bytes_of_pass.waiting for stage, count in peak.waiting.items())
    working = 0
    if kind == "W":
        waiting += at_work.weights
    else:
        kept_micro_batches[stage_at_work] += 1
        most = at_work.forward if kind == "F" else at_work.backward
        working = max(0, most - at_work.kept)
    in_layers = _layer_bytes_by_kind(kept_micro_batches, stages)
    kept = peak.live - peak.messages - waiting - working
    counted = sum(in_layers.values())
    if counted > kept:
        in_layers = {part: size * kept // counted for part, size in in_layers.items()}
    ends = kept - sum(in_layers.values())
    return {**in_layers, "waiting": waiting, "working": working, "ends": ends}


def _layer_bytes_by_kind(micro_batches: Mapping[int, int], stages: Mapping[int, _ScheduledStage]) -> dict[str, int]:
    """Return the bytes that layers keep of so many micro-batches of each stage, by the part of the layer."""
    by_kind: Counter[str] = Counter()
    for stage, count in micro_batches.items():
        scheduled = stages[stage]
        for part, size in scheduled.recorded.layer_kinds(scheduled.layers).items():
            by_kind[part] += count * max(0, size)
    return dict(by_kind)
