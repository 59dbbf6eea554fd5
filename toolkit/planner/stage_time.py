"""StageTime: the seconds that a pipeline stage takes for one micro-batch, by terms.

A stage is its decoder layers, with the embeddings in the first and the head with its loss in the last one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from toolkit.config.layout import RECOMPUTE_PERIODS, Recompute, recomputes
from toolkit.models.weights import held_layer_parameters, routed_parameters
from toolkit.planner.activation_transfers import expert_exchange_seconds, tensor_seconds
from toolkit.planner.context_time import context_calls, context_seconds
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
from toolkit.planner.passes import Passes, PassPair
from toolkit.planner.step_request import StepRequest
from toolkit.planner.trained import HOST_SHARES

COLLECTIVE_HOST_SECONDS = 3e-5
"""Seconds of the host for one collective: torch.distributed's call from an autograd function, events and stream
waits."""


@dataclass(frozen=True, kw_only=True)
class StageTime:
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
        """Seconds of both passes: the sum of the terms."""
        return self.compute + self.recompute + self.host + self.tensor + self.context + self.expert

    @property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        return self.seconds - self.backward

    def scaled(self, factor: float) -> "StageTime":
        """Return the stage with each of its seconds multiplied."""
        return StageTime(
            compute=factor * self.compute,
            recompute=factor * self.recompute,
            host=factor * self.host,
            tensor=factor * self.tensor,
            context=factor * self.context,
            expert=factor * self.expert,
            backward=factor * self.backward,
            weight=factor * self.weight,
        )

    def plus(self, end: Passes, idle: Passes, *, weight: float = 0.0) -> "StageTime":
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


def sum_of_stages(stages: Sequence[StageTime]) -> StageTime:
    """Add up stages term by term."""
    return StageTime(
        compute=sum(stage.compute for stage in stages),
        recompute=sum(stage.recompute for stage in stages),
        host=sum(stage.host for stage in stages),
        tensor=sum(stage.tensor for stage in stages),
        context=sum(stage.context for stage in stages),
        expert=sum(stage.expert for stage in stages),
        backward=sum(stage.backward for stage in stages),
        weight=sum(stage.weight for stage in stages),
    )


def stage_times(request: StepRequest) -> list[StageTime]:
    """Return the time of every stage of the pipeline, with the embeddings in the first and the head in the last one."""
    gpu = request.cluster.gpu
    embedding = embedding_seconds(gpu, request.shape, request.work, request.execution, request.trained)
    head = head_seconds(gpu, request.shape, request.work, request.execution, request.trained)
    slowdown = request.cluster.slowdown_of_active_ranks(request.gpus)
    stages = []
    for index, layers in enumerate(_layers_of_stages(request)):
        stage = layers
        if index == 0:
            stage = stage.plus(embedding, _end_idle(request, embedding))
        if index == request.layout.stages - 1:
            stage = stage.plus(head, _end_idle(request, head), weight=_head_weight(request))
        stages.append(stage.scaled(slowdown))
    return stages


def _head_weight(request: StepRequest) -> float:
    """Seconds of the gradient of the head's weight, unless the head computes it with the loss."""
    trained = request.trained
    if request.setup.chunked_loss or (trained is not None and not trained.has_head):
        return 0.0
    shape = request.shape
    vocab = -(-shape.vocab // request.work.tp)
    gpu = request.cluster.gpu
    return matmul_seconds(gpu, shape.embed_dim, vocab, request.work.tokens, request.execution.attention_precision)


def _layers_of_stages(request: StepRequest) -> Iterator[StageTime]:
    """The decoder layers of each stage, some of which may be recomputed."""
    recompute = request.layout.recompute
    if RECOMPUTE_PERIODS.get(recompute, 1) == 1:
        layer = _layer(request, recompute)
        for count in request.stages:
            yield layer.scaled(count)
        return
    not_recomputed = _layer(request, "none")
    recomputed = _layer(request, "full")
    first = 0
    for count in request.stages:
        recomputed_count = sum(recomputes(recompute, layer) for layer in range(first, first + count))
        yield sum_of_stages([recomputed.scaled(recomputed_count), not_recomputed.scaled(count - recomputed_count)])
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


def _layer(request: StepRequest, recompute: Recompute) -> StageTime:
    """One decoder layer for one micro-batch, with its collectives, and what is recomputed of it.

    The backward pass counts for the share of the layers that it reaches where some weights are frozen.
    """
    reached = 1.0 if request.trained is None else request.trained.reached
    forward_passes = 2 if recompute == "full" else 1
    compute = _reaching(reached, _layer_compute(request))
    recomputed = _recomputed_seconds(request, recompute, compute.forward, reached)
    accumulated = _accumulation(request)
    tensor = _reaching(reached, tensor_seconds(request))
    context = _reaching(reached, context_seconds(request, _attention(request)))
    exchange = expert_exchange_seconds(request)
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
    return StageTime(
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
    """Seconds of a layer's kernels that are no collectives, without recomputation."""
    return layer_seconds(request.cluster.gpu, request.shape, request.work, request.execution, request.trained)


def _attention(request: StepRequest) -> Passes:
    """Seconds of a layer's attention between its projections."""
    return attention_seconds(request.cluster.gpu, request.shape, request.work, request.execution)


def _weight_gradients(request: StepRequest) -> float:
    """Seconds of a layer's weight gradients that a schedule may leave for later."""
    return weight_gradient_seconds(request.cluster.gpu, request.shape, request.work, request.execution, request.trained)


def _recomputed_seconds(request: StepRequest, recompute: Recompute, forward: float, reached: float) -> float:
    """Seconds of what the backward pass runs again of a layer, whose forward pass takes `forward` seconds."""
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
    kernels = PassPair(*facts["host"])
    adapter_shares = PassPair(*HOST_SHARES)
    routing = PassPair(*facts["routing_host"])
    with_experts = expert_share(request.shape)
    return Passes(
        forward=kernels.forward * (1 + adapter_shares.forward * adapters)
        + calls
        + forward_context_calls * COLLECTIVE_HOST_SECONDS
        + with_experts * routing.forward,
        backward=kernels.backward * (1 + adapter_shares.backward * adapters)
        + calls
        + backward_context_calls * COLLECTIVE_HOST_SECONDS
        + with_experts * routing.backward,
    )


def _accumulation(request: StepRequest) -> float:
    """Seconds of adding a layer's weight gradients to those of the micro-batches before."""
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
