"""Seconds that data parallelism, the optimizer and offload add to a step."""

from toolkit.config.layout import recomputes
from toolkit.models.weights import held_layer_parameters, routed_parameters
from toolkit.planner import collectives
from toolkit.planner.kernels import matmul_seconds, stream_seconds
from toolkit.planner.setup import Setup

LAST_BUCKET = 0.05
"""Share of a reduction that nothing can hide: the last gradients are ready when the backward pass is over."""
TENSORS = 6
"""Of a decoder layer: queries, keys and values as one; output; gate and up as one; down; two norms."""
CPU_BYTES_PER_SECOND = 2.5e10
"""A GPU's share of its host's memory bandwidth: 8 channels of DDR4-3200 on two sockets, 200 GB/s a socket, 8 GPUs, and
half of it reached by an update."""
NVME_BYTES_PER_SECOND = 1.6e9
"""A GPU's share of its node's drives, reading and writing alike: 25 GB/s of a DGX-2 with 16 GPUs (Rajbhandari et al.
2021, ZeRO-Infinity, section 3). Not measured here."""


_SAVED = {"lion": 8, "sgd": 8, "adamw8bit": 12, "muon": 8}
"""Bytes an element that an update reads and writes less than with AdamW's two moments, embeddings like all else; SGD
with momentum. Adafactor has no moments, and reads gradients about as often as these."""


def data_seconds(setup: Setup, forward: float, backward: float) -> float:
    """Reducing gradients and gathering weights over the data-parallel ranks, less what runs behind computation.

    Of routed experts, over the replicas that have the same ones: dp / ep ranks, which are ep replicas apart.

    ZeRO-0 reduces all gradients; stages 1 and 2 reduce and scatter them and gather the updated weights, as many bytes;
    stage 3 gathers every layer's weights forward and backward in each micro-batch and reduces its gradients. What does
    not train has no gradient, and is not updated.
    """
    layout, cluster, run = setup.layout, setup.cluster, setup.run
    tied = _tied(setup)
    if setup.replicas == 1:
        return tied
    if cluster.cores:  # a core that communicates does not compute
        forward = backward = 0.0
    if layout.zero_stage == 3:
        return tied + _sharded(setup, forward, backward)
    overlaps, size = run.facts["overlaps"], setup.gradient_bytes or run.facts["gradient_bytes"]
    reduce = gather = 0.0
    whole = run.facts.get("reduces_all", False) or bool(cluster.cores)  # gloo: DeepSpeed sums whole buckets
    for numel, _, ranks in _owners(setup):
        gradient, weight = size * numel, numel * run.activation_bytes
        messages = max(1.0, gradient / run.facts["bucket"])
        summed = collectives.all_reduce if whole or layout.zero_stage == 0 else collectives.all_gather
        reduce += summed(cluster, ranks, gradient, messages)
        gather += collectives.all_gather(cluster, ranks, weight, messages) if layout.zero_stage else 0.0
    if layout.zero_stage and run.facts.get("copies_shards"):
        gather += TENSORS * max(setup.stages) * setup.replicas * cluster.gpu.kernel_seconds
    times = setup.accumulation if layout.zero_stage == 2 else 1  # stage 2 keeps no whole gradients between them
    overlapped = overlaps["gradients" if layout.pp == 1 else "pipeline"]
    exposed = times * _exposed(reduce, overlapped * backward)
    return tied + exposed + _exposed(gather, overlaps["gathers"] * forward)


def _owners(setup: Setup) -> list[tuple[float, float, collectives.Group]]:
    """Weights that train, weights, and the ranks that have the same: of routed experts, and of all others."""
    layout, ep = setup.layout, setup.layout.ep
    every = collectives.group(setup.cluster, size=setup.replicas, stride=layout.tp)
    alike = collectives.group(setup.cluster, size=setup.replicas // ep, stride=layout.tp * ep)
    dense = (setup.trained_parameters, setup.parameters, every)
    return [dense, (setup.trained_routed, setup.routed, alike)] if setup.routed else [dense]


def _owned(setup: Setup) -> tuple[float, float]:
    """Weights that a rank updates, and weights of which it has gradients."""
    found = _owners(setup)
    sharded = setup.layout.zero_stage > 0
    return sum(numel / (ranks.size if sharded else 1) for numel, _, ranks in found), sum(n for n, _, _ in found)


def _tied(setup: Setup) -> float:
    """Summing the gradients of tied embeddings over the first and the last stage, after the backward pass."""
    shape, layout, run = setup.shape, setup.layout, setup.run
    if layout.pp == 1 or not shape.tied:
        return 0.0
    together = setup.gpus <= setup.cluster.gpus_per_node
    ranks = collectives.Group(local=2 if together else 1, nodes=1 if together else 2)
    numel = shape.vocab * shape.embed_dim / layout.tp
    return collectives.all_reduce(setup.cluster, ranks, numel * (setup.gradient_bytes or run.facts["gradient_bytes"]))


def _exposed(seconds: float, hidden: float) -> float:
    return max(seconds - hidden, seconds * LAST_BUCKET)


def _sharded(setup: Setup, forward: float, backward: float) -> float:
    """ZeRO-3: each micro-batch gathers for both passes and reduces; one layer's gather cannot hide.

    `sharded` is the share of the links that a framework's gathers of single layers reach. DeepSpeed's copies every
    parameter into place and prefetches few: a third to a half in what DeepSpeed published of 512 A100s on Azure.
    """
    cluster, run = setup.cluster, setup.run
    layers = setup.shape.layers
    size = setup.gradient_bytes or run.facts["gradient_bytes"]
    gather = again = reduce = 0.0
    for trained, numel, ranks in _owners(setup):
        overhead = layers * collectives.all_gather(cluster, ranks, 1.0)
        gather += collectives.all_gather(cluster, ranks, numel * run.activation_bytes) + overhead
        # ZeRO++: after the first gather of a step, from a second partition over neighbors.
        near = collectives.group(cluster, size=setup.layout.hpz, stride=1) if setup.layout.hpz > 1 else ranks
        again += collectives.all_gather(cluster, near, numel * run.activation_bytes)
        again += layers * collectives.all_gather(cluster, near, 1.0)
        reduce += collectives.all_gather(cluster, ranks, trained * size) + overhead
    share: float = run.facts["sharded"]
    gather, again, reduce = gather / share, again / share, reduce / share
    first, later = (max(seconds - forward, seconds / layers) for seconds in (gather, again))
    back = max(again + reduce - backward, (again + reduce) / layers)
    exposed = setup.accumulation * (back + layers * cluster.sharded_seconds)
    return exposed + first + (setup.accumulation - 1) * later


def optimizer_seconds(setup: Setup) -> float:
    """Reading and writing weights, gradients and moments of a rank's share, and the norm of the gradients."""
    layout = setup.layout
    share, numel = _owned(setup)
    if layout.offload_optimizer != "none":
        return 0.0
    update = (setup.run.facts["optimizer"] - _SAVED.get(setup.optimizer, 0)) * share
    return (
        stream_seconds(setup.cluster.gpu, update + 4 * numel, 20)
        + setup.cluster.step_seconds
        + (muon_seconds(setup) if setup.optimizer == "muon" else 0.0)
    )


def muon_seconds(setup: Setup) -> float:
    """Orthogonalizing a rank's share of the matrices of its stage, and bringing their pieces there and back.

    An iteration on a matrix of n x m, n at most m, computes x x^T, its square, and their product with x: per block of
    n x n weights at most three products of n x n x n. n is taken as the model's width for all, or as the experts'
    intermediate size: too much by a fifth where m = 4n.
    """
    shape, layout, cluster, run = setup.shape, setup.layout, setup.cluster, setup.run
    ranks = collectives.group(cluster, size=setup.replicas * layout.tp, stride=1)
    routed = routed_parameters(shape)
    width = 4 if run.precision == "fp32" else 2
    seconds = 0.0
    for weights, side in (
        (held_layer_parameters(shape) - routed, shape.hidden),
        (routed, min(shape.hidden, shape.experts.ffn) if shape.experts else 0),
    ):
        if weights:
            share = max(setup.stages) * weights / ranks.size
            product = matmul_seconds(cluster.gpu, side, side, side, "fp32" if width == 4 else "bf16")
            seconds += 15 * share / side**2 * product + 2 * collectives.all_to_all(cluster, ranks, width * share)
    return seconds


def activation_seconds(setup: Setup, forward: float, backward: float) -> float:
    """What offloaded activations of a micro-batch take on the link to the host, each way, beyond a pass of a stage.

    A layer that is not recomputed keeps some 4h + 2q + 2k + 2f numbers a token (q: attention's width, k: that of keys,
    f: the MLP's width, twice that where it is gated): 32h of the 34h bytes of Korthikanti et al. 2022, equation 1.
    Known error: families whose norms keep fp32 have half as much again.
    """
    layout, shape = setup.layout, setup.shape
    if not layout.offload_activations:
        return 0.0
    again = sum(recomputes(layout.recompute, layer) for layer in range(shape.layers)) / shape.layers
    between = layout.tp if layout.sequence_parallel else 1
    inside = 2 * shape.attention_dim + 2 * shape.kv_dim + (4 if shape.gated else 2) * shape.ffn
    kept = again * shape.hidden / between + (1 - again) * (4 * shape.hidden / between + inside / layout.tp)
    moved = max(setup.stages) * setup.work.tokens * kept * setup.run.activation_bytes
    link = moved / setup.cluster.host_bytes_per_second
    return max(0.0, link - forward) + max(0.0, link - backward)


def offload_seconds(setup: Setup) -> float:
    """Gradients down and weights up over the host's link, and the update in its memory (DeepSpeedCPUAdam).

    On NVMe, each byte is read and written once besides: 4 of a gradient, of a master and of two moments; weights are
    read for each pass and written after the update.
    """
    layout, cluster = setup.layout, setup.cluster
    if layout.offload_optimizer == "none" and layout.offload_params == "none":
        return 0.0
    share, _ = _owned(setup)
    moved = share * (4 + 2) / cluster.host_bytes_per_second
    update = share * 28 / CPU_BYTES_PER_SECOND if layout.offload_optimizer != "none" else 0.0
    if layout.offload_params != "none":
        weights = sum(numel / ranks.size for _, numel, ranks in _owners(setup))
        moved += 2 * setup.accumulation * weights * 2 / cluster.host_bytes_per_second
        if layout.offload_params == "nvme":
            moved += (2 * setup.accumulation + 1) * weights * 2 / NVME_BYTES_PER_SECOND
    if layout.offload_optimizer == "nvme":
        moved += share * 32 / NVME_BYTES_PER_SECOND
    return moved + update
