"""StepTime: the seconds of one optimizer step of a layout, by terms that add up to it.

Legend: m micro-batches of a step, p stages, v virtual stages of each, L layers of a stage.

A 1F1B pipeline takes as long as its slowest stage for all m micro-batches, and waits for the other stages once; with v
virtual stages it fills in chunks and waits a v-th of that (Narayanan et al. 2021, section 2.2). Stages may differ.
A schedule of the toolkit's own is simulated, with the time of each pass in each stage and of each message.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from toolkit.config.layout import RECOMPUTE_PERIODS, Recompute, recomputes
from toolkit.config.simulate_schedule import ScheduleCosts
from toolkit.estimate.flops import train_flops_per_token
from toolkit.models.experts import ExpertShape
from toolkit.models.weights import held_layer_parameters, routed_parameters
from toolkit.planner import collectives
from toolkit.planner.bubble import bubble_seconds, waiting_seconds
from toolkit.planner.context_time import context_calls, context_seconds
from toolkit.planner.data_parallel_time import activation_seconds, data_seconds, offload_seconds, optimizer_seconds
from toolkit.planner.execution import Execution
from toolkit.planner.kernels import matmul_seconds, stream_seconds
from toolkit.planner.layer_time import (
    attention_seconds,
    embedding_seconds,
    expert_share,
    head_seconds,
    layer_seconds,
    tiled_mlp_seconds,
    weight_gradient_seconds,
)
from toolkit.planner.passes import Passes
from toolkit.planner.step_request import StepRequest
from toolkit.planner.trained import HOST_SHARES

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


COLLECTIVE_HOST_SECONDS = 3e-5
"""Seconds of the host for one collective: torch.distributed's call from an autograd function, events and stream
waits."""


def predict_step(request: StepRequest) -> StepTime:
    """Predict one optimizer step."""
    setup = request.setup
    cluster = request.cluster
    micro_batches = setup.accumulation
    stages = _stages(request)
    ranks = _of_ranks(request, stages)
    slowest = max(ranks, key=lambda rank: rank.seconds)
    forward_share = 1 - slowest.backward / slowest.seconds
    waiting = _waiting(request, stages, forward_share)
    limiting = slowest
    ranks_per_core = cluster.ranks_per_core(request.gpus)
    if ranks_per_core > 1:
        # Ranks share cores: the work of all takes as long as the cores do, and the pipeline at least its own time.
        alone = micro_batches * slowest.seconds + waiting
        limiting = _sum(ranks).scaled(ranks_per_core / len(ranks))
        waiting = max(0.0, alone - micro_batches * limiting.seconds)
    sending = _pipeline(request)
    data = data_seconds(request, limiting.forward, limiting.backward)
    offloaded_states = offload_seconds(request, limiting.backward)
    offloaded_activations = activation_seconds(request, limiting.forward, limiting.backward)
    forward = micro_batches * limiting.forward + forward_share * waiting + ranks_per_core * sending / 2
    tokens = setup.global_batch_size * setup.seq_len
    return StepTime(
        compute=micro_batches * limiting.compute,
        recompute=micro_batches * limiting.recompute,
        reference=setup.forward_passes * forward,
        host=micro_batches * (limiting.host + ranks_per_core * cluster.micro_batch_overhead_seconds),
        tensor=micro_batches * limiting.tensor,
        context=micro_batches * limiting.context,
        expert=micro_batches * limiting.expert,
        pipeline=ranks_per_core * sending,
        bubble=waiting,
        data=ranks_per_core * data,
        optimizer=ranks_per_core * optimizer_seconds(request),
        offload=ranks_per_core * offloaded_states + micro_batches * offloaded_activations,
        forward=forward,
        tokens=tokens,
        gpus=request.gpus,
        model_flops=_flops_per_token(request) * tokens,
        peak_flops=cluster.gpu.peak_flops(request.execution.unit) or cluster.gpu.fp32_flops,
    )


def _flops_per_token(request: StepRequest) -> float:
    """FLOPs of forward and backward for one token, without recomputation."""
    count = train_flops_per_token if request.trained is None else request.trained.flops_per_token
    return count(request.shape, request.setup.seq_len)


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """Seconds that a stage takes for one micro-batch."""

    compute: float
    recompute: float
    host: float
    tensor: float
    context: float
    expert: float
    backward: float
    """Seconds of the backward pass, already included in the fields above."""
    weight: float
    """Seconds of the backward pass that a schedule may leave for W, already included there."""

    @property
    def seconds(self) -> float:
        return self.compute + self.recompute + self.host + self.tensor + self.context + self.expert

    @property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        return self.seconds - self.backward

    def scaled(self, factor: float) -> "_Stage":
        return _Stage(
            compute=factor * self.compute,
            recompute=factor * self.recompute,
            host=factor * self.host,
            tensor=factor * self.tensor,
            context=factor * self.context,
            expert=factor * self.expert,
            backward=factor * self.backward,
            weight=factor * self.weight,
        )

    def plus(self, end: Passes, idle: Passes, *, weight: float = 0.0) -> "_Stage":
        """Return the stage with the embeddings or the head added: their seconds, and those in which the GPU waits.

        `weight` are seconds of the gradient of the end's weight that a schedule may leave for later.
        """
        waits = idle.forward + idle.backward
        return replace(
            self,
            compute=self.compute + end.forward + end.backward,
            host=self.host + waits,
            backward=self.backward + end.backward + idle.backward,
            weight=self.weight + weight,
        )


def _sum(stages: Sequence[_Stage]) -> _Stage:
    return _Stage(
        compute=sum(stage.compute for stage in stages),
        recompute=sum(stage.recompute for stage in stages),
        host=sum(stage.host for stage in stages),
        tensor=sum(stage.tensor for stage in stages),
        context=sum(stage.context for stage in stages),
        expert=sum(stage.expert for stage in stages),
        backward=sum(stage.backward for stage in stages),
        weight=sum(stage.weight for stage in stages),
    )


def _stages(request: StepRequest) -> list[_Stage]:
    """Every stage of the pipeline: its layers, with the embeddings in the first and the head in the last one."""
    gpu = request.cluster.gpu
    embedding = embedding_seconds(gpu, request.shape, request.work, request.execution, request.trained)
    head = head_seconds(gpu, request.shape, request.work, request.execution, request.trained)
    slowdown = request.cluster.slowdown_of_active_ranks(request.gpus)
    stages = []
    for index, stage in enumerate(_layers(request)):
        if index == 0:
            stage = stage.plus(embedding, _end_idle(request, embedding))
        if index == request.layout.stages - 1:
            stage = stage.plus(head, _end_idle(request, head), weight=_head_weight(request))
        stages.append(stage.scaled(slowdown))
    return stages


def _of_ranks(request: StepRequest, stages: Sequence[_Stage]) -> list[_Stage]:
    """Add up the stages of each pipeline rank."""
    stages_of_rank: list[list[_Stage]] = [[] for _ in range(request.layout.pp)]
    for rank, stage in zip(request.layout.stage_ranks, stages, strict=True):
        stages_of_rank[rank].append(stage)
    return [_sum(of_rank) for of_rank in stages_of_rank]


def _waiting(request: StepRequest, stages: Sequence[_Stage], forward_share: float) -> float:
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
        transfer=[_send_seconds(request)] * (len(stages) - 1),
    )
    return waiting_seconds(layout.table(micro_batches), costs)


def _head_weight(request: StepRequest) -> float:
    """Seconds of the gradient of the head's weight, unless the head computes it with the loss."""
    trained = request.trained
    if request.setup.chunked_loss or (trained is not None and not trained.has_head):
        return 0.0
    shape = request.shape
    vocab = -(-shape.vocab // request.work.tp)
    gpu = request.cluster.gpu
    return matmul_seconds(gpu, shape.embed_dim, vocab, request.work.tokens, request.execution.attention_precision)


def _layers(request: StepRequest) -> Iterator[_Stage]:
    """The decoder layers of each stage, some of which may be recomputed."""
    recompute = request.layout.recompute
    if RECOMPUTE_PERIODS.get(recompute, 1) == 1:
        layer = _layer(request, recompute)
        yield from (layer.scaled(count) for count in request.stages)
        return
    kept = _layer(request, "none")
    recomputed = _layer(request, "full")
    first = 0
    for count in request.stages:
        recomputed_count = sum(recomputes(recompute, layer) for layer in range(first, first + count))
        yield _sum([recomputed.scaled(recomputed_count), kept.scaled(count - recomputed_count)])
        first += count


def _idle(request: StepRequest, host: Passes, busy: Passes) -> Passes:
    """Return the seconds that the GPU waits for Python in the forward and in the backward pass.

    A pass takes what the slower of the GPU and of the host that launches its kernels takes. On a CPU both are one.
    """
    core = request.cluster.gpu.core
    if core is not None:
        forward, backward = core.layer_seconds
        return Passes(forward=forward, backward=backward)
    return Passes(
        forward=max(0.0, host.forward - busy.forward),
        backward=max(0.0, host.backward - busy.backward),
    )


def _end_idle(request: StepRequest, end: Passes) -> Passes:
    """Return the waits in the embeddings or the head, each of which takes a GPU's host as long as a layer."""
    if request.cluster.gpu.core is not None:
        return Passes()  # among a micro-batch's fixed seconds
    forward, backward = request.execution.facts["host"]
    return _idle(request, Passes(forward=forward, backward=backward), busy=end)


def _layer(request: StepRequest, recompute: Recompute) -> _Stage:
    """One decoder layer for one micro-batch, with its collectives, and what is recomputed of it.

    The backward pass counts for the share of the layers that it reaches where some weights are frozen.
    """
    reached = 1.0 if request.trained is None else request.trained.reached
    forward_passes = 2 if recompute == "full" else 1
    compute = _reaching(reached, _layer_compute(request))
    recomputed = _recomputed_seconds(request, recompute, compute.forward, reached)
    accumulated = _accumulation(request)
    tensor = _reaching(reached, _tensor(request))
    context = _reaching(reached, context_seconds(request, _attention(request)))
    exchange = _exchange(request)
    host = _reaching(reached, _host(request, has_exchange=exchange > 0))
    communication = Passes(
        forward=tensor.forward + context.forward + exchange,
        backward=tensor.backward + context.backward + reached * exchange,
    )
    busy = Passes(
        forward=compute.forward + communication.forward,
        backward=compute.backward + recomputed + communication.backward,
    )
    if recompute == "full":
        busy = replace(busy, backward=busy.backward + communication.forward)
        host = replace(host, backward=host.backward + host.forward)
    idle = _idle(request, host, busy)
    if request.cluster.gpu.core is not None and recompute == "full":
        idle = replace(idle, backward=idle.backward + idle.forward)
    return _Stage(
        compute=compute.forward + compute.backward + accumulated,
        recompute=recomputed,
        host=idle.forward + idle.backward,
        tensor=tensor.forward * forward_passes + tensor.backward,
        context=context.forward * forward_passes + context.backward,
        expert=exchange * (forward_passes + reached),
        backward=busy.backward + idle.backward + accumulated,
        weight=reached * _weight_gradients(request) + accumulated,
    )


def _reaching(share: float, passes: Passes) -> Passes:
    """Return the passes with a backward pass that reaches a share of the layers."""
    return replace(passes, backward=share * passes.backward)


def _layer_compute(request: StepRequest) -> Passes:
    """Kernels of a layer that are no collectives, without recomputation."""
    return layer_seconds(request.cluster.gpu, request.shape, request.work, request.execution, request.trained)


def _attention(request: StepRequest) -> Passes:
    """Kernels of a layer's attention between its projections."""
    return attention_seconds(request.cluster.gpu, request.shape, request.work, request.execution)


def _weight_gradients(request: StepRequest) -> float:
    """Kernels of a layer's weight gradients that a schedule may leave for later."""
    return weight_gradient_seconds(request.cluster.gpu, request.shape, request.work, request.execution, request.trained)


def _recomputed_seconds(request: StepRequest, recompute: Recompute, forward: float, reached: float) -> float:
    """Kernels that the backward pass runs again of a layer, whose forward pass takes `forward` seconds."""
    seconds = 0.0
    if recompute == "selective":
        seconds = reached * _attention(request).forward
    elif recompute == "full":
        seconds = forward
    if request.layout.tiled_mlp:
        seconds += reached * tiled_mlp_seconds(
            request.cluster.gpu, request.shape, request.work, request.execution, request.trained
        )
    return seconds


def _host(request: StepRequest, *, has_exchange: bool) -> Passes:
    """Return the seconds that the host takes to launch a layer's kernels and collectives."""
    calls = 0.0
    if request.layout.tp > 1:
        calls += 2 * COLLECTIVE_HOST_SECONDS
    if has_exchange:
        calls += 2 * COLLECTIVE_HOST_SECONDS
    forward_context_calls, backward_context_calls = context_calls(request)
    adapters = 0 if request.trained is None else len(request.trained.adapters)
    facts = request.execution.facts
    forward, backward = facts["host"]
    forward_share, backward_share = HOST_SHARES
    routing_forward, routing_backward = facts["routing_host"]
    with_experts = expert_share(request.shape)
    return Passes(
        forward=forward * (1 + forward_share * adapters)
        + calls
        + forward_context_calls * COLLECTIVE_HOST_SECONDS
        + with_experts * routing_forward,
        backward=backward * (1 + backward_share * adapters)
        + calls
        + backward_context_calls * COLLECTIVE_HOST_SECONDS
        + with_experts * routing_backward,
    )


def _accumulation(request: StepRequest) -> float:
    """Adding a layer's weight gradients to those of the micro-batches before."""
    layout = request.layout
    if request.setup.accumulation == 1 or (layout.zero_stage == 3 and layout.replicas > 1):
        return 0.0
    if request.trained is None:
        routed = routed_parameters(request.shape)
        weights = held_layer_parameters(request.shape) - routed + routed / layout.ep
    else:
        weights = request.trained.layer
    moved_bytes = request.execution.facts["accumulate"] * (weights / layout.tp)
    return stream_seconds(request.cluster.gpu, moved_bytes, 1)


def _tensor(request: StepRequest) -> Passes:
    """Seconds of a layer's collectives on activations [T, h].

    Megatron's tensor parallelism has two all-reduces each way. Sequence parallelism has a gather and a scatter in the
    place of each, and gathers the inputs of both column layers once more backward for their weights' gradients
    (Korthikanti et al. 2022, section 4.2.2), which overlaps with the gradient of the input. Ulysses exchanges queries,
    keys, values and outputs (Jacobs et al. 2023).
    """
    layout = request.layout
    cluster = request.cluster
    work = request.work
    size = work.tokens * request.shape.hidden * request.execution.activation_bytes
    forward = 0.0
    backward = 0.0
    if layout.tp > 1:
        ranks = collectives.group(cluster, size=layout.tp, stride=1)
        if layout.sequence_parallel:
            forward = 4 * collectives.all_gather(cluster, ranks, size)
        else:
            forward = 2 * collectives.all_reduce(cluster, ranks, size)
        backward = forward
    if layout.ulysses > 1:
        ranks = collectives.group(cluster, size=layout.ulysses, stride=layout.tp)
        per_head = work.tokens * request.execution.activation_bytes / layout.tp
        widths = 2 * request.shape.attention_dim + 2 * request.shape.kv_dim
        exchange = collectives.all_to_all(cluster, ranks, per_head * widths) + 3 * cluster.collective_seconds
        forward += exchange
        backward += exchange
    exposed = 1 - request.execution.facts["overlaps"]["tensor"]
    return Passes(forward=forward * exposed, backward=backward * exposed)


def _exchange(request: StepRequest) -> float:
    """Seconds in which a layer's rows go to the ranks of their experts and back, in one direction of a pass.

    Each is one all-to-all of [T k, h]: as many bytes backward. Without DeepEP another one exchanges how many come.
    """
    layout = request.layout
    cluster = request.cluster
    experts = request.shape.experts
    if experts is None or layout.ep == 1:
        return 0.0
    execution = request.execution
    ranks = collectives.group(cluster, size=layout.ep, stride=layout.tp)
    size = request.work.routed_rows * request.shape.hidden * execution.activation_bytes
    if (execution.dispatcher or execution.facts["dispatcher"]) == "deepep":
        once = collectives.all_to_all(
            cluster,
            ranks,
            size,
            share_of_ranks=_merged(experts, layout.ep, execution),
            share_of_nodes=_merged(experts, ranks.nodes, execution),
        )
        counts = 0.0
    else:
        once = collectives.all_to_all(cluster, ranks, size)
        counts = collectives.all_to_all(cluster, ranks, 8 * experts.count)
    return expert_share(request.shape) * (2 * once + counts)


def _merged(experts: ExpertShape, parts: int, execution: Execution) -> float:
    """Parts of the experts that those of a token are in, as a share of the experts that it goes through.

    Drawn at random without repetition, the k experts of a token all miss one of `parts` equal parts with the product
    of the chances that each of them does, one after the other.
    """
    if execution.routing == "consecutive":
        return min(1.0, math.ceil(experts.per_token * parts / experts.count) / experts.per_token)
    outside = experts.count - experts.count // parts
    miss_probability = 1.0
    for drawn in range(experts.per_token):
        miss_probability *= max(0, outside - drawn) / (experts.count - drawn)
    return min(1.0, parts * (1 - miss_probability) / experts.per_token)


def _pipeline(request: StepRequest) -> float:
    """Sending activations down and gradients up: each micro-batch, and each virtual stage, waits for both.

    In a schedule of the toolkit's own messages delay those who receive them, which is in the simulation.
    """
    layout = request.layout
    if layout.pp == 1 or layout.schedule is not None:
        return 0.0
    send = _send_seconds(request)
    steady = 2 * send * request.setup.accumulation * request.execution.virtual_stages
    return steady + 2 * send * (layout.pp - 1)


def _send_seconds(request: StepRequest) -> float:
    """Seconds of one message between neighbor stages: the activations of a micro-batch, or their gradients."""
    layout = request.layout
    cluster = request.cluster
    execution = request.execution
    stride = layout.world_size * execution.context_parallel // layout.pp
    # Scattered over the tensor-parallel ranks, or sequence parallel anyway; some send whole activations from each.
    shards = 1 if execution.facts.get("sends_whole") else layout.tp
    size = request.work.tokens * request.shape.hidden * execution.activation_bytes / shards
    # A pipeline's slowest pair of neighbors counts: between nodes as soon as not all stages are in one.
    return collectives.send(cluster, size, between_nodes=stride * layout.pp > cluster.gpus_per_node)
