"""Seconds that data parallelism, the optimizer and offload add to a step."""

from dataclasses import dataclass

from toolkit.config.layout import recomputes
from toolkit.models.weights import held_layer_parameters, routed_parameters
from toolkit.planner import collectives
from toolkit.planner.kernels import MEMORY_SHARE, matmul_seconds, stream_seconds
from toolkit.planner.step_request import StepRequest

LAST_BUCKET = 0.05
"""Share of a reduction that nothing can hide: the last gradients are ready when the backward pass is over."""
TENSORS = 6
"""Weight tensors of a decoder layer: queries, keys and values as one; output; gate and up as one; down; two norms."""
CPU_BYTES_PER_SECOND = 2.5e10
"""A GPU's share of its host's memory bandwidth: 8 channels of DDR4-3200 on two sockets, 200 GB/s a socket, 8 GPUs, and
half of it reached by an update."""
HOST_UPDATE_BYTES = 42
"""A parameter's bytes through the host's memory in an offloaded update, as DeepSpeed's `step` makes it: scaling the
gradient reads and writes 8, DeepSpeedCPUAdam reads 16 and writes 12, and rounding the new weights takes 6."""
COPY_SECONDS = 7e-6
"""Seconds of a copy over PCIe beside its bytes, however small: cudaMemcpy takes 6 to 7 microseconds (README of NVIDIA's
gdrcopy), cudaMemcpyAsync 5 to 7 (Wu et al. 2026, DualPath, section 5.2); what goes through the host's memory, which
are two copies, takes 15 from 1 byte to 256 kB (osu_latency in pull request 8881 of libfabric)."""
HOST_UPDATE_SECONDS = 5e-5
"""Seconds of an offloaded update of one flat group beside its bytes: Python's calls, and three loops (scaling, the
optimizer's, rounding) that all of the host's threads begin and end together. An estimate, not measured."""
HOST_SYNCHRONIZATIONS = 3
"""Times in a step that an offloading rank's host waits for its GPU: for the last gradients, for their norm, and for
the new weights before they are gathered. The GPU has nothing to do meanwhile."""
LAYER_TENSORS = 12
"""Parameters of a Hugging Face decoder layer, which are copied one by one: 9 of Llama, 12 of GPT-2, 16 of OPT."""
GROUPS = 2
"""Flat groups of a rank: with weight decay, and without."""
SUB_GROUP = 1e9
"""Parameters that ZeRO-3 updates at once: `sub_group_size` of the configs that this toolkit writes."""
NVME_BYTES_PER_SECOND = 1.6e9
"""A GPU's share of its node's drives, reading and writing alike: 25 GB/s of a DGX-2 with 16 GPUs (Rajbhandari et al.
2021, ZeRO-Infinity, section 3). Not measured here."""

_SAVED_UPDATE_BYTES = {"lion": 8, "sgd": 8, "adamw8bit": 12, "muon": 8}
"""Bytes an element that an update reads and writes less than with AdamW's two moments, embeddings like all else; SGD
with momentum. Adafactor has no moments, and reads gradients about as often as these."""
_FP32_BYTES = 4
_OPTIMIZER_NVME_BYTES = 32
"""A parameter's bytes that an update reads from and writes to NVMe: 4 of a gradient, of a master and of two moments,
each once in both directions."""
_MUON_PRODUCTS = 15
"""Matrix products of Muon's orthogonalization: three in each of five iterations of Newton-Schulz."""


@dataclass(frozen=True, kw_only=True)
class _Replicated:
    """Weights of one rank that the same ranks have: the routed experts, or all others."""

    trained: float
    """Weights that train."""
    weights: float
    ranks: collectives.RankGroup
    """Ranks that have the same weights, whole or as shards."""

    @property
    def updated_shard(self) -> float:
        """Weights that the rank updates where optimizer states are sharded."""
        return self.trained / self.ranks.size


def data_seconds(request: StepRequest, forward: float, backward: float) -> float:
    """Reducing gradients and gathering weights over the data-parallel ranks, less what runs behind computation.

    Of routed experts, over the replicas that have the same ones: dp / ep ranks, which are ep replicas apart.

    ZeRO-0 reduces all gradients; stages 1 and 2 reduce and scatter them and gather the updated weights, as many bytes;
    stage 3 gathers every layer's weights forward and backward in each micro-batch and reduces its gradients. What does
    not train has no gradient, and is not updated. `forward` and `backward` are seconds of a micro-batch's passes.
    """
    layout = request.layout
    tied = _tied(request)
    if request.replicas == 1:
        return tied
    if request.cluster.cores:  # a core that communicates does not compute
        forward = 0.0
        backward = 0.0
    if layout.zero_stage == 3:
        return tied + _sharded(request, forward, backward)
    overlaps = request.execution.facts["overlaps"]
    # Stage 2 keeps no whole gradients between micro-batches.
    reductions = request.setup.accumulation if layout.zero_stage == 2 else 1
    overlapped_share = overlaps["gradients" if layout.pp == 1 else "pipeline"]
    exposed_reductions = reductions * _exposed(_reduction_seconds(request), overlapped_share * backward)
    exposed_gather = _exposed(_weight_gather_seconds(request), overlaps["gathers"] * forward)
    return tied + exposed_reductions + exposed_gather


def _reduction_seconds(request: StepRequest) -> float:
    """Seconds to reduce the gradients of one step, or of one micro-batch with ZeRO-2."""
    facts = request.execution.facts
    # Over gloo DeepSpeed sums whole buckets.
    reduces_all = facts.get("reduces_all", False) or bool(request.cluster.cores)
    collective = collectives.all_gather  # a reduce-scatter takes as long
    if reduces_all or request.layout.zero_stage == 0:
        collective = collectives.all_reduce
    seconds = 0.0
    for part in _replicated(request):
        gradient_bytes = facts["gradient_bytes"] * part.trained
        seconds += collective(request.cluster, part.ranks, gradient_bytes, _buckets(request, part))
    return seconds


def _weight_gather_seconds(request: StepRequest) -> float:
    """Seconds to gather the weights that the ranks of ZeRO-1 and ZeRO-2 have updated; 0 with ZeRO-0."""
    if request.layout.zero_stage == 0:
        return 0.0
    execution = request.execution
    seconds = 0.0
    for part in _replicated(request):
        weight_bytes = part.trained * execution.activation_bytes
        seconds += collectives.all_gather(request.cluster, part.ranks, weight_bytes, _buckets(request, part))
    if execution.facts.get("copies_shards"):
        copies = TENSORS * request.most_layers * request.replicas
        seconds += copies * request.cluster.gpu.kernel_seconds
    return seconds


def _buckets(request: StepRequest, part: _Replicated) -> float:
    """Messages in which gradients are reduced, and the weights that they update gathered."""
    facts = request.execution.facts
    buckets: float = facts["gradient_bytes"] * part.trained / facts["bucket"]
    return max(1.0, buckets)


def _replicated(request: StepRequest) -> list[_Replicated]:
    """Return the weights of the rank with most of them, by the ranks that have the same."""
    layout = request.layout
    replicas = collectives.group(request.cluster, size=request.replicas, stride=layout.tp)
    dense = _Replicated(trained=request.trained_parameters, weights=request.parameters, ranks=replicas)
    if not request.routed:
        return [dense]
    owners = collectives.group(request.cluster, size=request.replicas // layout.ep, stride=layout.tp * layout.ep)
    return [dense, _Replicated(trained=request.trained_routed, weights=request.routed, ranks=owners)]


def _updated(request: StepRequest) -> float:
    """Weights that one rank updates: all that train, or its shard of them."""
    is_sharded = request.layout.zero_stage > 0
    return sum(part.updated_shard if is_sharded else part.trained for part in _replicated(request))


def _tied(request: StepRequest) -> float:
    """Summing the gradients of tied embeddings over the first and the last stage, after the backward pass."""
    shape = request.shape
    layout = request.layout
    execution = request.execution
    if not shape.tied or layout.stage_ranks[0] == layout.stage_ranks[-1]:
        return 0.0
    together = request.gpus <= request.cluster.gpus_per_node
    ranks = collectives.RankGroup(local=2, nodes=1) if together else collectives.RankGroup(local=1, nodes=2)
    numel = shape.vocab * shape.embed_dim / layout.tp
    return collectives.all_reduce(request.cluster, ranks, numel * execution.facts["gradient_bytes"])


def _exposed(seconds: float, hidden: float) -> float:
    return max(seconds - hidden, seconds * LAST_BUCKET)


def _sharded(request: StepRequest, forward: float, backward: float) -> float:
    """ZeRO-3: each micro-batch gathers for both passes and reduces; one layer's gather cannot hide.

    `sharded` is the share of the links that a framework's gathers of single layers reach. DeepSpeed's copies every
    parameter into place and prefetches few: a third to a half in what DeepSpeed published of 512 A100s on Azure.
    """
    cluster = request.cluster
    execution = request.execution
    accumulation = request.setup.accumulation
    hpz = request.layout.hpz
    layers = request.shape.layers
    first_gather = 0.0
    later_gather = 0.0
    reduction = 0.0
    for part in _replicated(request):
        weight_bytes = part.weights * execution.activation_bytes
        gradient_bytes = part.trained * execution.facts["gradient_bytes"]
        latency = layers * collectives.all_gather(cluster, part.ranks, 1.0)
        first_gather += collectives.all_gather(cluster, part.ranks, weight_bytes) + latency
        # ZeRO++: after the first gather of a step, from a second partition over neighbors.
        near = collectives.group(cluster, size=hpz, stride=1) if hpz > 1 else part.ranks
        later_gather += collectives.all_gather(cluster, near, weight_bytes)
        later_gather += layers * collectives.all_gather(cluster, near, 1.0)
        reduction += collectives.all_gather(cluster, part.ranks, gradient_bytes) + latency
    link_share: float = execution.facts["sharded"]
    first_gather /= link_share
    later_gather /= link_share
    reduction /= link_share
    first_forward = max(first_gather - forward, first_gather / layers)
    later_forward = max(later_gather - forward, later_gather / layers)
    behind_backward = later_gather + reduction
    each_backward = max(behind_backward - backward, behind_backward / layers)
    exposed = accumulation * (each_backward + layers * cluster.sharded_seconds)
    return exposed + first_forward + (accumulation - 1) * later_forward


def optimizer_seconds(request: StepRequest) -> float:
    """Reading and writing weights, gradients and moments of a rank's share, and the norm of the gradients.

    Where the states are offloaded the host reads and writes them (`offload_seconds`); the norm, the engine's fixed
    share of a step and Muon's products stay what they are.
    """
    update_bytes = 0.0
    if request.layout.offload_optimizer == "none":
        bytes_of_element = request.execution.facts["optimizer"] - _SAVED_UPDATE_BYTES.get(request.optimizer, 0)
        update_bytes = bytes_of_element * _updated(request)
    norm_bytes = _FP32_BYTES * sum(part.trained for part in _replicated(request))
    muon = muon_seconds(request) if request.optimizer == "muon" else 0.0
    kernels = stream_seconds(request.cluster.gpu, update_bytes + norm_bytes, 20)
    return kernels + request.cluster.step_overhead_seconds + muon


def muon_seconds(request: StepRequest) -> float:
    """Orthogonalizing a rank's share of the matrices of its stage, and bringing their pieces there and back."""
    shape = request.shape
    routed = routed_parameters(shape)
    seconds = _orthogonalization_seconds(request, held_layer_parameters(shape) - routed, side=shape.hidden)
    if shape.experts is not None:
        seconds += _orthogonalization_seconds(request, routed, side=min(shape.hidden, shape.experts.ffn))
    return seconds


def _orthogonalization_seconds(request: StepRequest, layer_weights: float, *, side: int) -> float:
    """Seconds for the matrices of `layer_weights` weights of each layer, whose smaller side is `side`.

    An iteration on a matrix of n x m, n at most m, computes x x^T, its square, and their product with x: per block of
    n x n weights at most three products of n x n x n. n is taken as the model's width for all, or as the experts'
    intermediate size: too much by a fifth where m = 4n.
    """
    if not layer_weights:
        return 0.0
    cluster = request.cluster
    in_fp32 = request.execution.precision == "fp32"
    ranks = collectives.group(cluster, size=request.replicas * request.layout.tp, stride=1)
    weights = request.most_layers * layer_weights / ranks.size
    product = matmul_seconds(cluster.gpu, side, side, side, "fp32" if in_fp32 else "bf16")
    exchange = collectives.all_to_all(cluster, ranks, (4 if in_fp32 else 2) * weights)
    return _MUON_PRODUCTS * weights / side**2 * product + 2 * exchange


def activation_seconds(request: StepRequest, forward: float, backward: float) -> float:
    """Seconds that offloaded activations of a micro-batch add on the link to the host, beyond the passes of a stage.

    A layer that is not recomputed keeps some 4h + 2q + 2k + 2f numbers a token (q: attention's width, k: that of keys,
    f: the MLP's width, twice that where it is gated): 32h of the 34h bytes of Korthikanti et al. 2022, equation 1.
    Known error: families whose norms keep fp32 have half as much again.
    """
    layout = request.layout
    shape = request.shape
    if not layout.offload_activations:
        return 0.0
    recomputed = sum(recomputes(layout.recompute, layer) for layer in range(shape.layers)) / shape.layers
    hidden_shards = layout.tp if layout.sequence_parallel else 1
    inside = 2 * shape.attention_dim + 2 * shape.kv_dim + (4 if shape.gated else 2) * shape.ffn
    of_others = 4 * shape.hidden / hidden_shards + inside / layout.tp
    numbers_of_token = recomputed * shape.hidden / hidden_shards + (1 - recomputed) * of_others
    moved_bytes = request.most_layers * request.work.tokens * numbers_of_token * request.execution.activation_bytes
    link = moved_bytes / request.cluster.host_bytes_per_second
    return max(0.0, link - forward) + max(0.0, link - backward)


def offload_seconds(request: StepRequest, backward: float) -> float:
    """Gradients down and weights up over the host's link, and the update in its memory (DeepSpeedCPUAdam).

    ZeRO-2 adds up gradients on the GPU, in fp32. ZeRO-3 does so in buffers on the host: the partition of every
    micro-batch's gradients goes up and down once, behind its backward pass of `backward` seconds.

    On NVMe, each byte is read and written once besides: 4 of a gradient, of a master and of two moments; weights are
    read for each pass and written after the update.

    The bytes are the smaller part for a small model: see `offload_overhead`.
    """
    layout = request.layout
    cluster = request.cluster
    if layout.offload_optimizer == "none" and layout.offload_params == "none":
        return 0.0
    accumulation = request.setup.accumulation
    updated = _updated(request)
    link = cluster.host_bytes_per_second
    size = request.execution.activation_bytes
    seconds = updated * size / link + offload_overhead(request)
    if layout.offload_optimizer != "none":
        seconds += updated * _FP32_BYTES / link
        seconds += _host_update_seconds(request, updated)
        if layout.zero_stage == 3:
            up_and_down = updated * 2 * _FP32_BYTES / link
            seconds += accumulation * max(0.0, up_and_down - backward)
    if layout.offload_params != "none":
        shard = sum(part.weights / part.ranks.size for part in _replicated(request))
        passes = 2 * accumulation
        seconds += passes * shard * size / link
        if layout.offload_params == "nvme":
            seconds += (passes + 1) * shard * size / NVME_BYTES_PER_SECOND
    if layout.offload_optimizer == "nvme":
        seconds += updated * _OPTIMIZER_NVME_BYTES / NVME_BYTES_PER_SECOND
    return seconds


def _host_update_seconds(request: StepRequest, updated: float) -> float:
    """Seconds in which the host reads and writes the states of `updated` parameters."""
    cluster = request.cluster
    bytes_per_second = CPU_BYTES_PER_SECOND
    if cluster.cores:  # a CPU's rank has no other memory than its host's
        bytes_per_second = MEMORY_SHARE * cluster.gpu.memory_bytes_per_second
    bytes_of_parameter = HOST_UPDATE_BYTES - _SAVED_UPDATE_BYTES.get(request.optimizer, 0)
    return updated * bytes_of_parameter / bytes_per_second


def offload_overhead(request: StepRequest) -> float:
    """What offloading takes however small the model is: copies one by one, the host's update, and waiting for both.

    Counted in the source of DeepSpeed 0.19.8. A gradient is copied down by parameter, once a step, and its norm by
    itself (stage_1_and_2.py: copy_grads_in_partition, complete_grad_norm_calculation_for_cpu_offload); of ZeRO-2's
    parameters a rank has a share, of ZeRO-3's a piece of each, which also goes up and down in every micro-batch
    (stage3.py: partition_grads). Offloaded parameters come up one by one for both passes of a micro-batch. Each flat
    group is updated and sent up by itself.
    """
    layout = request.layout
    if request.cluster.cores:
        return 0.0
    accumulation = request.setup.accumulation
    tensors = LAYER_TENSORS * request.most_layers
    copies = 0.0
    update = 0.0
    if layout.offload_optimizer != "none":
        gradients = _gradient_tensors(request)
        groups: float = GROUPS
        if layout.zero_stage == 3:
            groups = max(GROUPS, _updated(request) / SUB_GROUP)
            copies = 2 * gradients * (1 + accumulation)
        else:
            copies = 2 * max(1.0, gradients / request.replicas)
        copies += groups + HOST_SYNCHRONIZATIONS
        update = groups * HOST_UPDATE_SECONDS
    if layout.offload_params != "none":
        copies += tensors * (1 + 2 * accumulation)
    return update + copies * COPY_SECONDS


def _gradient_tensors(request: StepRequest) -> int:
    """Gradients of a rank's layers: of all parameters, or of the two matrices of each adapter."""
    adapters = 0 if request.trained is None else len(request.trained.adapters)
    return request.most_layers * (2 * adapters if adapters else LAYER_TENSORS)
