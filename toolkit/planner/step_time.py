"""StepTime: the seconds of one optimizer step of a layout, by terms that add up to it.

Legend: m micro-batches of a step, p stages, v virtual stages of each, L layers of a stage.

A 1F1B pipeline takes as long as its slowest stage for all m micro-batches, and waits for the other stages once; with v
virtual stages it fills in chunks and waits a v-th of that (Narayanan et al. 2021, section 2.2). Stages may differ.
A schedule of the toolkit's own is simulated, with the time of each pass in each stage and of each message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from toolkit.config.simulate_schedule import ScheduleCosts
from toolkit.estimate.flops import train_flops_per_token
from toolkit.planner.activation_transfers import pipeline_seconds, send_seconds
from toolkit.planner.bubble import bubble_seconds, waiting_seconds
from toolkit.planner.data_parallel_time import activation_seconds, data_seconds, offload_seconds, optimizer_seconds
from toolkit.planner.stage_time import StageTime, stage_times, sum_of_stages
from toolkit.planner.step_request import StepRequest

TERMS = (
    "compute",
    "recompute",
    "reference",
    "host",
    "tensor",
    "context",
    "expert",
    "pipeline",
    "bubble",
    "data",
    "optimizer",
    "offload",
)
"""Fields of StepTime that add up to the step. Each has a color in `TONES` of toolkit/report/step_bars.py, and a row in
`TRACED` of toolkit/report/prediction.py."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step. The terms add up to `seconds`; communication counts where nothing computes meanwhile."""

    compute: float
    """Kernels of forward and backward pass of the slowest stage."""
    recompute: float
    """The forward pass again, or attention or tiled MLPs alone, on the slowest stage."""
    reference: float
    """Forward passes without gradients of an objective: of a reference in memory, and for a mean of completions."""
    host: float
    """The GPU waits for the host that launches its kernels."""
    tensor: float
    """All-reduces, or gathers and scatters, of tensor and sequence parallelism, and the exchanges of Ulysses."""
    context: float
    """Exchange of keys and values between context-parallel ranks, as far as attention does not hide it, and the merging
    of blocks."""
    expert: float
    """Sending tokens to the ranks that have their experts, and the results back."""
    pipeline: float
    """Sending activations and their gradients to neighbor stages."""
    bubble: float
    """The slowest stage waits for the others."""
    data: float
    """Reduction of gradients and gathering of weights, as far as it is not hidden behind computation."""
    optimizer: float
    """The update of a rank's share of the weights, the norm of the gradients, and the engine's own work."""
    offload: float
    """Copies to the host and NVMe and back, and the update on the host, as far as nothing hides them."""
    forward: float
    """A forward pass over the global batch alone, without gradients; no term of the step."""
    tokens: int
    """Tokens of the global batch."""
    gpus: int
    model_flops: float
    """Floating-point operations of the step that do not count recomputation."""
    peak_flops: float
    """Peak FLOP/s of one GPU, in the precision of the layers."""

    @property
    def seconds(self) -> float:
        """Seconds of one step: the sum of all terms."""
        return sum(self.terms.values())

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by term."""
        return {name: getattr(self, name) for name in TERMS}

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens / self.seconds / self.gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: attention counted full, recomputation not at all."""
        return self.model_flops / self.seconds / self.gpus / self.peak_flops


def predict_step(request: StepRequest) -> StepTime:
    """Predict one optimizer step."""
    setup = request.setup
    cluster = request.cluster
    micro_batches = setup.accumulation
    pipeline = _PipelineTime.of(request)
    limiting = pipeline.limiting
    ranks_per_core = cluster.ranks_per_core(request.gpus)
    sending = pipeline_seconds(request)
    forward = micro_batches * limiting.forward + pipeline.waiting_forward + ranks_per_core * sending / 2
    tokens = setup.global_batch_size * setup.seq_len
    offloaded_states = offload_seconds(request, limiting.backward)
    offloaded_activations = activation_seconds(request, limiting.forward, limiting.backward)
    return StepTime(
        compute=micro_batches * limiting.compute,
        recompute=micro_batches * limiting.recompute,
        reference=setup.forward_passes * forward,
        host=micro_batches * (limiting.host + ranks_per_core * cluster.micro_batch_overhead_seconds),
        tensor=micro_batches * limiting.tensor,
        context=micro_batches * limiting.context,
        expert=micro_batches * limiting.expert,
        pipeline=ranks_per_core * sending,
        bubble=pipeline.waiting,
        data=ranks_per_core * data_seconds(request, limiting.forward, limiting.backward),
        optimizer=ranks_per_core * optimizer_seconds(request),
        offload=ranks_per_core * offloaded_states + micro_batches * offloaded_activations,
        forward=forward,
        tokens=tokens,
        gpus=request.gpus,
        model_flops=_flops_per_token(request) * tokens,
        peak_flops=cluster.gpu.peak_flops(request.execution.unit) or cluster.gpu.fp32_flops,
    )


@dataclass(frozen=True, kw_only=True)
class _PipelineTime:
    """What limits the step of a pipeline, and how long that waits for others."""

    limiting: StageTime
    """A micro-batch on the slowest rank; or, where ranks share cores, on the cores that they share."""
    waiting: float
    """Seconds of a step in which it waits."""
    waiting_forward: float
    """Seconds of that waiting which belong to forward passes."""

    @classmethod
    def of(cls, request: StepRequest) -> Self:
        """Find the slowest rank."""
        stages = stage_times(request)
        ranks = _rank_times(request, stages)
        slowest = max(ranks, key=lambda rank: rank.seconds)
        forward_share = 1 - slowest.backward / slowest.seconds
        waiting = _waiting(request, stages, forward_share)
        limiting = slowest
        ranks_per_core = request.cluster.ranks_per_core(request.gpus)
        if ranks_per_core > 1:
            # Ranks share cores: the work of all takes as long as the cores do, and the pipeline at least its own time.
            micro_batches = request.setup.accumulation
            alone = micro_batches * slowest.seconds + waiting
            limiting = sum_of_stages(ranks).scaled(ranks_per_core / len(ranks))
            waiting = max(0.0, alone - micro_batches * limiting.seconds)
        return cls(limiting=limiting, waiting=waiting, waiting_forward=forward_share * waiting)


def _flops_per_token(request: StepRequest) -> float:
    """FLOPs of forward and backward for one token, without recomputation."""
    count = train_flops_per_token if request.trained is None else request.trained.flops_per_token
    return count(request.shape, request.setup.seq_len)


def _rank_times(request: StepRequest, stages: Sequence[StageTime]) -> list[StageTime]:
    """Add up the stages of each pipeline rank."""
    stages_of_rank: list[list[StageTime]] = [[] for _ in range(request.layout.pp)]
    for rank, stage in zip(request.layout.stage_ranks, stages, strict=True):
        stages_of_rank[rank].append(stage)
    return [sum_of_stages(of_rank) for of_rank in stages_of_rank]


def _waiting(request: StepRequest, stages: Sequence[StageTime], forward_share: float) -> float:
    """Seconds of a step in which the busiest rank waits for others; `forward_share` is that of its forward passes."""
    layout = request.layout
    micro_batches = request.setup.accumulation
    if layout.schedule is None:
        bubble = bubble_seconds([stage.seconds for stage in stages], forward_share, micro_batches)
        return bubble / request.execution.virtual_stages
    costs = ScheduleCosts(
        forward=[stage.forward for stage in stages],
        backward=[stage.backward - stage.weight for stage in stages],
        weight=[stage.weight for stage in stages],
        transfer=[send_seconds(request)] * (len(stages) - 1),
    )
    return waiting_seconds(layout.table(micro_batches), costs)
