"""Seconds in which activations travel: between the ranks that share a layer or its experts, and between stages.

Legend: T tokens of a micro-batch on a rank, h hidden, k experts of a token.
"""

import math

from toolkit.models.experts import ExpertShape
from toolkit.planner import collectives
from toolkit.planner.execution import Execution
from toolkit.planner.layer_time import expert_share
from toolkit.planner.passes import Passes
from toolkit.planner.step_request import StepRequest


def tensor_seconds(request: StepRequest) -> Passes:
    """Seconds of a layer's collectives on activations [T, h], as far as nothing computes meanwhile.

    Megatron's tensor parallelism has two all-reduces each way. Sequence parallelism has a gather and a scatter in the
    place of each, and gathers the inputs of both column layers once more backward for their weights' gradients
    (Korthikanti et al. 2022, section 4.2.2), which overlaps with the gradient of the input. Ulysses exchanges queries,
    keys, values and outputs (Jacobs et al. 2023).
    """
    exchanged = _ulysses_exchange(request)
    shared = _tensor_parallel_collectives(request)
    exposed = 1 - request.execution.facts["overlaps"]["tensor"]
    return Passes(forward=(shared + exchanged) * exposed, backward=(shared + exchanged) * exposed)


def _tensor_parallel_collectives(request: StepRequest) -> float:
    """Seconds of the collectives of tensor and sequence parallelism in one direction of a layer's pass."""
    layout = request.layout
    cluster = request.cluster
    if layout.tp == 1:
        return 0.0
    size = request.work.tokens * request.shape.hidden * request.execution.activation_bytes
    ranks = collectives.group(cluster, size=layout.tp, stride=1)
    if layout.sequence_parallel:
        return 4 * collectives.all_gather(cluster, ranks, size)
    return 2 * collectives.all_reduce(cluster, ranks, size)


def _ulysses_exchange(request: StepRequest) -> float:
    """Seconds of Ulysses' all-to-alls of queries, keys, values and outputs in one direction of a layer's pass."""
    layout = request.layout
    cluster = request.cluster
    if layout.ulysses == 1:
        return 0.0
    ranks = collectives.group(cluster, size=layout.ulysses, stride=layout.tp)
    feature_bytes = request.work.tokens * request.execution.activation_bytes / layout.tp
    widths = 2 * request.shape.attention_dim + 2 * request.shape.kv_dim
    # Four messages, of which one has its latency in the all-to-all.
    return collectives.all_to_all(cluster, ranks, feature_bytes * widths) + 3 * cluster.collective_seconds


def expert_exchange_seconds(request: StepRequest) -> float:
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
        rows = collectives.all_to_all(
            cluster,
            ranks,
            size,
            share_of_ranks=_merged(experts, layout.ep, execution),
            share_of_nodes=_merged(experts, ranks.nodes, execution),
        )
        counts = 0.0
    else:
        rows = collectives.all_to_all(cluster, ranks, size)
        counts = collectives.all_to_all(cluster, ranks, 8 * experts.count)
    return expert_share(request.shape) * (2 * rows + counts)


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


def pipeline_seconds(request: StepRequest) -> float:
    """Seconds of sending activations down and gradients up: each micro-batch, and each virtual stage, waits for both.

    In a schedule of the toolkit's own messages delay those who receive them, which is in the simulation.
    """
    layout = request.layout
    if layout.pp == 1 or layout.schedule is not None:
        return 0.0
    send = send_seconds(request)
    steady = 2 * send * request.setup.accumulation * request.execution.virtual_stages
    return steady + 2 * send * (layout.pp - 1)


def send_seconds(request: StepRequest) -> float:
    """Seconds of one message between neighbor stages: the activations of a micro-batch, or their gradients."""
    layout = request.layout
    cluster = request.cluster
    execution = request.execution
    # Activations are scattered over the tensor-parallel ranks, or sequence parallel anyway; some frameworks send whole
    # ones from each rank.
    shards = 1 if execution.facts.get("sends_whole") else layout.tp
    size = request.work.tokens * request.shape.hidden * execution.activation_bytes / shards
    # A pipeline's slowest pair of neighbors counts: between nodes as soon as not all stages are in one.
    stride = layout.world_size * execution.context_parallel // layout.pp
    return collectives.send(cluster, size, between_nodes=stride * layout.pp > cluster.gpus_per_node)
