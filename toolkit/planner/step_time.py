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
    Passes,
    attention_seconds,
    embedding_seconds,
    expert_share,
    head_seconds,
    layer_seconds,
    tiled_mlp_seconds,
    weight_gradient_seconds,
)
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
    shape = request.shape
    layout = request.layout
    execution = request.execution
    gpu = request.cluster.gpu
    work = request.work
    m = request.setup.accumulation
    trained = request.trained
    embedding = embedding_seconds(gpu, shape, work, execution, trained)
    head = head_seconds(gpu, shape, work, execution, trained)
    stages = []
    for stage, total in enumerate(_layers(request)):
        if stage == 0:
            total = total.plus(embedding, _end_idle(request, embedding))
        if stage == layout.stages - 1:
            total = total.plus(head, _end_idle(request, head), weight=_head_weight(request))
        stages.append(total.scaled(request.cluster.slowdown_of_active_ranks(request.gpus)))
    of_rank: list[list[_Stage]] = [[] for _ in range(layout.pp)]
    for rank, stage_time in zip(layout.stage_ranks, stages, strict=True):
        of_rank[rank].append(stage_time)
    ranks = list(map(_sum, of_rank))
    slowest = max(ranks, key=lambda rank: rank.seconds)
    forward_share = 1 - slowest.backward / slowest.seconds
    if layout.schedule is None:
        waiting = bubble_seconds([stage.seconds for stage in stages], forward_share, m) / execution.virtual_stages
        pipeline = _pipeline(request)
    else:
        waiting = _scheduled_waiting(request, stages)
        pipeline = 0.0  # messages delay those who receive them, which is in the simulation
    limiting = slowest
    ranks_per_core = request.cluster.ranks_per_core(request.gpus)
    if ranks_per_core > 1:
        # Ranks share cores: the work of all takes as long as the cores do, and the pipeline at least its own time.
        alone = m * slowest.seconds + waiting
        average_per_core = _sum(ranks).scaled(ranks_per_core / len(ranks))
        limiting = average_per_core
        waiting = max(0.0, alone - m * limiting.seconds)
    forward = limiting.seconds - limiting.backward
    backward = limiting.backward
    data = data_seconds(request, forward, backward)
    offload = ranks_per_core * offload_seconds(request, backward) + m * activation_seconds(request, forward, backward)
    tokens = request.setup.global_batch_size * request.setup.seq_len
    count = train_flops_per_token if trained is None else trained.flops_per_token
    flops = count(shape, request.setup.seq_len)
    passed = m * forward + forward_share * waiting + ranks_per_core * pipeline / 2
    return StepTime(
        compute=m * limiting.compute,
        recompute=m * limiting.recompute,
        reference=request.setup.forward_passes * passed,
        host=m * (limiting.host + ranks_per_core * request.cluster.micro_batch_overhead_seconds),
        tensor=m * limiting.tensor,
        context=m * limiting.context,
        expert=m * limiting.expert,
        pipeline=ranks_per_core * pipeline,
        bubble=waiting,
        data=ranks_per_core * data,
        optimizer=ranks_per_core * optimizer_seconds(request),
        offload=offload,
        forward=passed,
        tokens=tokens,
        gpus=request.gpus,
        model_flops=flops * tokens,
        peak_flops=gpu.peak_flops(execution.unit) or gpu.fp32_flops,
    )


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

    def plus(self, end: Passes, idle: Sequence[float], *, weight: float = 0.0) -> "_Stage":
        """Return the stage with the seconds of the embeddings or the head added."""
        return replace(
            self,
            compute=self.compute + end.forward + end.backward,
            host=self.host + sum(idle),
            backward=self.backward + end.backward + idle[1],
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


def _scheduled_waiting(request: StepRequest, stages: Sequence[_Stage]) -> float:
    """Seconds that the busiest rank waits in a step of the layout's schedule."""
    layout = request.layout
    schedule = layout.table(request.setup.accumulation)
    costs = ScheduleCosts(
        forward=[stage.seconds - stage.backward for stage in stages],
        backward=[stage.backward - stage.weight for stage in stages],
        weight=[stage.weight for stage in stages],
        transfer=[_send_seconds(request)] * (len(stages) - 1),
    )
    return waiting_seconds(schedule, costs)


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
    first = 0
    if RECOMPUTE_PERIODS.get(recompute, 1) == 1:
        yield from map(_layer(request, recompute).scaled, request.stages)
        return
    none = _layer(request, "none")
    full = _layer(request, "full")
    for count in request.stages:
        recomputed = sum(recomputes(recompute, layer) for layer in range(first, first + count))
        yield _sum([full.scaled(recomputed), none.scaled(count - recomputed)])
        first += count


def _idle(request: StepRequest, host: Sequence[float], busy: Sequence[float]) -> tuple[float, float]:
    """Return the seconds that the GPU waits for Python in the forward and in the backward pass.

    A pass takes what the slower of the GPU and of the host that launches its kernels takes. On a CPU both are one.
    """
    core = request.cluster.gpu.core
    if core is not None:
        return core.layer_seconds
    return max(0.0, host[0] - busy[0]), max(0.0, host[1] - busy[1])


def _end_idle(request: StepRequest, end: Passes) -> tuple[float, float]:
    """Return the waits in the embeddings or the head, each of which takes a GPU's host as long as a layer."""
    if request.cluster.gpu.core is not None:
        return 0.0, 0.0  # among a micro-batch's fixed seconds
    return _idle(request, request.execution.facts["host"], (end.forward, end.backward))


def _layer(request: StepRequest, recompute: Recompute) -> _Stage:
    """One decoder layer for one micro-batch, with its collectives, and what is recomputed of it."""
    execution = request.execution
    work = request.work
    gpu = request.cluster.gpu
    once = layer_seconds(gpu, request.shape, work, execution, request.trained)
    forward_tensor, backward_tensor = _tensor(request)
    reached = 1.0 if request.trained is None else request.trained.reached
    once = replace(once, backward=reached * once.backward)
    backward_tensor = reached * backward_tensor
    again = 0.0
    if recompute == "selective":
        again = reached * attention_seconds(gpu, request.shape, work, execution).forward
    elif recompute == "full":
        again = once.forward
    if request.layout.tiled_mlp:
        again += reached * tiled_mlp_seconds(gpu, request.shape, work, execution, request.trained)
    accumulated = _accumulation(request)
    times = 2 if recompute == "full" else 1
    tensor = forward_tensor * times + backward_tensor
    context = context_seconds(request, attention_seconds(gpu, request.shape, work, execution))
    context = replace(context, backward=reached * context.backward)
    exchange = _exchange(request)
    host_forward, host_backward = _host(request, has_exchange=exchange > 0)
    host_backward *= reached
    communication_forward = forward_tensor + context.forward + exchange
    communication_backward = backward_tensor + context.backward + reached * exchange
    busy_forward = once.forward + communication_forward
    busy_backward = once.backward + again + communication_backward
    if recompute == "full":
        busy_backward += communication_forward
        host_backward += host_forward
    idle_forward, idle_backward = _idle(request, (host_forward, host_backward), (busy_forward, busy_backward))
    if gpu.core is not None and recompute == "full":
        idle_backward += idle_forward
    return _Stage(
        compute=once.forward + once.backward + accumulated,
        recompute=again,
        host=idle_forward + idle_backward,
        tensor=tensor,
        context=context.forward * times + context.backward,
        expert=exchange * (times + reached),
        backward=busy_backward + idle_backward + accumulated,
        weight=reached * weight_gradient_seconds(gpu, request.shape, work, execution, request.trained) + accumulated,
    )


def _host(request: StepRequest, *, has_exchange: bool) -> tuple[float, float]:
    """Return the seconds that the host takes to launch a layer's kernels and collectives, forward and backward."""
    calls = 0.0
    if request.layout.tp > 1:
        calls += 2 * COLLECTIVE_HOST_SECONDS
    if has_exchange:
        calls += 2 * COLLECTIVE_HOST_SECONDS
    of_context = context_calls(request)
    adapters = 0 if request.trained is None else len(request.trained.adapters)
    facts = request.execution.facts
    forward, backward = facts["host"]
    forward_share, backward_share = HOST_SHARES
    routing_forward, routing_backward = facts["routing_host"]
    experts = expert_share(request.shape)
    return (
        forward * (1 + forward_share * adapters)
        + calls
        + of_context[0] * COLLECTIVE_HOST_SECONDS
        + experts * routing_forward,
        backward * (1 + backward_share * adapters)
        + calls
        + of_context[1] * COLLECTIVE_HOST_SECONDS
        + experts * routing_backward,
    )


def _accumulation(request: StepRequest) -> float:
    """Adding a layer's weight gradients to those of the micro-batches before."""
    routed = routed_parameters(request.shape)
    trained = held_layer_parameters(request.shape) - routed if request.trained is None else request.trained.layer
    weights = (trained + (routed / request.layout.ep if request.trained is None else 0.0)) / request.layout.tp
    if request.setup.accumulation == 1 or (request.layout.zero_stage == 3 and request.layout.replicas > 1):
        return 0.0
    return stream_seconds(request.cluster.gpu, request.execution.facts["accumulate"] * weights, 1)


def _tensor(request: StepRequest) -> tuple[float, float]:
    """Seconds of a layer's collectives, forward and backward, on activations [T, h].

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
    hidden = 1 - request.execution.facts["overlaps"]["tensor"]
    return forward * hidden, backward * hidden


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
    merges = (execution.dispatcher or execution.facts["dispatcher"]) == "deepep"
    merged = (1.0, 1.0)
    if merges:
        merged = (_merged(experts, layout.ep, execution), _merged(experts, ranks.nodes, execution))
    once = collectives.all_to_all(cluster, ranks, size, merged)
    counts = 0.0 if merges else collectives.all_to_all(cluster, ranks, 8 * experts.count)
    return expert_share(request.shape) * (2 * once + counts)


def _merged(experts: ExpertShape, parts: int, execution: Execution) -> float:
    """Parts of the experts that those of a token are in, as a share of the experts that it goes through."""
    if execution.routing == "consecutive":
        return min(1.0, math.ceil(experts.per_token * parts / experts.count) / experts.per_token)
    others = experts.count - experts.count // parts
    none = 1.0
    for taken in range(experts.per_token):
        none *= max(0, others - taken) / (experts.count - taken)
    return min(1.0, parts * (1 - none) / experts.per_token)


def _pipeline(request: StepRequest) -> float:
    """Sending activations down and gradients up: each micro-batch, and each virtual stage, waits for both."""
    layout = request.layout
    if layout.pp == 1:
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
