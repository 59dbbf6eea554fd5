"""Seconds that data parallelism, the optimizer and offload add to a step."""

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


_SAVED = {"lion": 8, "sgd": 8, "adamw8bit": 12, "muon": 8}
"""Bytes an element that an update reads and writes less than with AdamW's two moments, embeddings like all else; SGD
with momentum. Adafactor has no moments, and reads gradients about as often as these."""


def data_seconds(request: StepRequest, forward: float, backward: float) -> float:
    """Reducing gradients and gathering weights over the data-parallel ranks, less what runs behind computation.

    Of routed experts, over the replicas that have the same ones: dp / ep ranks, which are ep replicas apart.

    ZeRO-0 reduces all gradients; stages 1 and 2 reduce and scatter them and gather the updated weights, as many bytes;
    stage 3 gathers every layer's weights forward and backward in each micro-batch and reduces its gradients. What does
    not train has no gradient, and is not updated.
    """
    layout = request.layout
    cluster = request.cluster
    execution = request.execution
    tied = _tied(request)
    if request.replicas == 1:
        return tied
    if cluster.cores:  # a core that communicates does not compute
        forward = backward = 0.0
    if layout.zero_stage == 3:
        return tied + _sharded(request, forward, backward)
    overlaps = execution.facts["overlaps"]
    size = execution.facts["gradient_bytes"]
    reduce = gather = 0.0
    whole = execution.facts.get("reduces_all", False) or bool(cluster.cores)  # gloo: DeepSpeed sums whole buckets
    for numel, _, ranks in _owners(request):
        gradient = size * numel
        weight = numel * execution.activation_bytes
        messages = max(1.0, gradient / execution.facts["bucket"])
        summed = collectives.all_reduce if whole or layout.zero_stage == 0 else collectives.all_gather
        reduce += summed(cluster, ranks, gradient, messages)
        gather += collectives.all_gather(cluster, ranks, weight, messages) if layout.zero_stage else 0.0
    if layout.zero_stage and execution.facts.get("copies_shards"):
        gather += TENSORS * request.most_layers * request.replicas * cluster.gpu.kernel_seconds
    times = request.setup.accumulation if layout.zero_stage == 2 else 1  # stage 2 keeps no whole gradients between them
    overlapped = overlaps["gradients" if layout.pp == 1 else "pipeline"]
    exposed = times * _exposed(reduce, overlapped * backward)
    return tied + exposed + _exposed(gather, overlaps["gathers"] * forward)


def _owners(request: StepRequest) -> list[tuple[float, float, collectives.RankGroup]]:
    """Weights that train, weights, and the ranks that have the same: of routed experts, and of all others."""
    layout = request.layout
    ep = layout.ep
    every = collectives.group(request.cluster, size=request.replicas, stride=layout.tp)
    alike = collectives.group(request.cluster, size=request.replicas // ep, stride=layout.tp * ep)
    dense = (request.trained_parameters, request.parameters, every)
    if not request.routed:
        return [dense]
    return [dense, (request.trained_routed, request.routed, alike)]


def _owned(request: StepRequest) -> tuple[float, float]:
    """Weights that a rank updates, and weights of which it has gradients."""
    owners = _owners(request)
    is_sharded = request.layout.zero_stage > 0
    updated = sum(trained / (ranks.size if is_sharded else 1) for trained, _, ranks in owners)
    with_gradients = sum(trained for trained, _, _ in owners)
    return updated, with_gradients


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
    layers = request.shape.layers
    size = execution.facts["gradient_bytes"]
    gather = again = reduce = 0.0
    for trained, numel, ranks in _owners(request):
        overhead = layers * collectives.all_gather(cluster, ranks, 1.0)
        gather += collectives.all_gather(cluster, ranks, numel * execution.activation_bytes) + overhead
        # ZeRO++: after the first gather of a step, from a second partition over neighbors.
        near = collectives.group(cluster, size=request.layout.hpz, stride=1) if request.layout.hpz > 1 else ranks
        again += collectives.all_gather(cluster, near, numel * execution.activation_bytes)
        again += layers * collectives.all_gather(cluster, near, 1.0)
        reduce += collectives.all_gather(cluster, ranks, trained * size) + overhead
    share: float = execution.facts["sharded"]
    gather /= share
    again /= share
    reduce /= share
    first = max(gather - forward, gather / layers)
    later = max(again - forward, again / layers)
    back = max(again + reduce - backward, (again + reduce) / layers)
    exposed = request.setup.accumulation * (back + layers * cluster.sharded_seconds)
    return exposed + first + (request.setup.accumulation - 1) * later


def optimizer_seconds(request: StepRequest) -> float:
    """Reading and writing weights, gradients and moments of a rank's share, and the norm of the gradients.

    Where the states are offloaded the host reads and writes them (`offload_seconds`); the norm, the engine's fixed
    share of a step and Muon's products stay what they are.
    """
    share, numel = _owned(request)
    update = 0.0
    if request.layout.offload_optimizer == "none":
        update = (request.execution.facts["optimizer"] - _SAVED.get(request.optimizer, 0)) * share
    return (
        stream_seconds(request.cluster.gpu, update + 4 * numel, 20)
        + request.cluster.step_overhead_seconds
        + (muon_seconds(request) if request.optimizer == "muon" else 0.0)
    )


def muon_seconds(request: StepRequest) -> float:
    """Orthogonalizing a rank's share of the matrices of its stage, and bringing their pieces there and back.

    An iteration on a matrix of n x m, n at most m, computes x x^T, its square, and their product with x: per block of
    n x n weights at most three products of n x n x n. n is taken as the model's width for all, or as the experts'
    intermediate size: too much by a fifth where m = 4n.
    """
    shape = request.shape
    layout = request.layout
    cluster = request.cluster
    execution = request.execution
    ranks = collectives.group(cluster, size=request.replicas * layout.tp, stride=1)
    routed = routed_parameters(shape)
    width = 4 if execution.precision == "fp32" else 2
    seconds = 0.0
    for weights, side in (
        (held_layer_parameters(shape) - routed, shape.hidden),
        (routed, min(shape.hidden, shape.experts.ffn) if shape.experts else 0),
    ):
        if weights:
            share = request.most_layers * weights / ranks.size
            product = matmul_seconds(cluster.gpu, side, side, side, "fp32" if width == 4 else "bf16")
            seconds += 15 * share / side**2 * product + 2 * collectives.all_to_all(cluster, ranks, width * share)
    return seconds


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
    again = sum(recomputes(layout.recompute, layer) for layer in range(shape.layers)) / shape.layers
    between = layout.tp if layout.sequence_parallel else 1
    inside = 2 * shape.attention_dim + 2 * shape.kv_dim + (4 if shape.gated else 2) * shape.ffn
    stored = again * shape.hidden / between + (1 - again) * (4 * shape.hidden / between + inside / layout.tp)
    moved = request.most_layers * request.work.tokens * stored * request.execution.activation_bytes
    link = moved / request.cluster.host_bytes_per_second
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
    share, _ = _owned(request)
    link = cluster.host_bytes_per_second
    size = request.execution.activation_bytes
    seconds = share * size / link + offload_overhead(request)
    if layout.offload_optimizer != "none":
        # A CPU's rank has no other memory than its host's.
        rate = MEMORY_SHARE * cluster.gpu.memory_bytes_per_second if cluster.cores else CPU_BYTES_PER_SECOND
        seconds += share * 4 / link
        seconds += share * (HOST_UPDATE_BYTES - _SAVED.get(request.optimizer, 0)) / rate
        if layout.zero_stage == 3:
            seconds += request.setup.accumulation * max(0.0, share * 8 / link - backward)
    if layout.offload_params != "none":
        weights = sum(numel / ranks.size for _, numel, ranks in _owners(request))
        seconds += 2 * request.setup.accumulation * weights * size / link
        if layout.offload_params == "nvme":
            seconds += (2 * request.setup.accumulation + 1) * weights * size / NVME_BYTES_PER_SECOND
    if layout.offload_optimizer == "nvme":
        seconds += share * 32 / NVME_BYTES_PER_SECOND
    return seconds


def offload_overhead(request: StepRequest) -> float:
    """What offloading takes however small the model is: copies one by one, the host's update, and waiting for both.

    Counted in the source of DeepSpeed 0.19.8. A gradient is copied down by parameter, once a step, and its norm by
    itself (stage_1_and_2.py: copy_grads_in_partition, complete_grad_norm_calculation_for_cpu_offload); of ZeRO-2's
    parameters a rank has a share, of ZeRO-3's a piece of each, which also goes up and down in every micro-batch
    (stage3.py: partition_grads). Offloaded parameters come up one by one for both passes of a micro-batch. Each flat
    group is updated and sent up by itself.
    """
    layout = request.layout
    cluster = request.cluster
    if cluster.cores:
        return 0.0
    share, _ = _owned(request)
    layers = request.most_layers
    tensors = LAYER_TENSORS * layers
    copies = 0.0
    seconds = 0.0
    if layout.offload_optimizer != "none":
        adapted = 0 if request.trained is None else len(request.trained.adapters)
        gradients = 2 * adapted * layers if adapted else tensors  # an adapter of LoRA has two matrices
        if layout.zero_stage == 3:
            groups = max(GROUPS, share / SUB_GROUP)
            copies = 2 * gradients * (1 + request.setup.accumulation)
        else:
            groups = GROUPS
            copies = 2 * max(1.0, gradients / request.replicas)
        copies += groups + HOST_SYNCHRONIZATIONS
        seconds = groups * HOST_UPDATE_SECONDS
    if layout.offload_params != "none":
        copies += tensors * (1 + 2 * request.setup.accumulation)
    return seconds + copies * COPY_SECONDS
