"""Seconds that data parallelism, the optimizer and offload add to a step."""

from toolkit.planner import collectives
from toolkit.planner.kernels import stream_seconds
from toolkit.planner.setup import Setup

LAST_BUCKET = 0.05
"""Share of a reduction that nothing can hide: the last gradients are ready when the backward pass is over."""
TENSORS = 6
"""Of a decoder layer: queries, keys and values as one; output; gate and up as one; down; two norms."""
CPU_BYTES_PER_SECOND = 2.5e10
"""A GPU's share of its host's memory bandwidth: 8 channels of DDR4-3200 on two sockets, 200 GB/s a socket, 8 GPUs, and
half of it reached by an update."""


def data_seconds(setup: Setup, forward: float, backward: float) -> float:
    """Reducing gradients and gathering weights over the data-parallel ranks, less what runs behind computation.

    ZeRO-0 reduces all gradients; stages 1 and 2 reduce and scatter them and gather the updated weights, as many bytes;
    stage 3 gathers every layer's weights forward and backward in each micro-batch and reduces its gradients. What does
    not train has no gradient, and is not updated.
    """
    layout, cluster, run = setup.layout, setup.cluster, setup.run
    tied = _tied(setup)
    if setup.replicas == 1:
        return tied
    ranks = collectives.group(cluster, size=setup.replicas, stride=layout.tp)
    numel, overlaps = setup.trained_parameters, run.facts["overlaps"]
    if cluster.cores:  # a core that communicates does not compute
        forward = backward = 0.0
    gradient = (setup.gradient_bytes or run.facts["gradient_bytes"]) * numel
    if layout.zero_stage == 3:
        return tied + _sharded(setup, forward, backward, ranks, gradient)
    weight = numel * run.activation_bytes
    messages = max(1.0, gradient / run.facts["bucket"])
    if layout.zero_stage == 0:
        reduce, gather = collectives.all_reduce(cluster, ranks, gradient, messages), 0.0
    else:
        whole = run.facts.get("reduces_all", False) or bool(cluster.cores)  # gloo: DeepSpeed sums whole buckets
        reduce = (collectives.all_reduce if whole else collectives.all_gather)(cluster, ranks, gradient, messages)
        gather = collectives.all_gather(cluster, ranks, weight, messages)
        if run.facts.get("copies_shards"):
            gather += TENSORS * max(setup.stages) * setup.replicas * cluster.gpu.kernel_seconds
    times = setup.accumulation if layout.zero_stage == 2 else 1  # stage 2 keeps no whole gradients between them
    overlapped = overlaps["gradients" if layout.pp == 1 else "pipeline"]
    exposed = times * _exposed(reduce, overlapped * backward)
    return tied + exposed + _exposed(gather, overlaps["gathers"] * forward)


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


def _sharded(setup: Setup, forward: float, backward: float, ranks: collectives.Group, gradient: float) -> float:
    """ZeRO-3: each micro-batch gathers for both passes and reduces; one layer's gather cannot hide.

    `sharded` is the share of the links that a framework's gathers of single layers reach. DeepSpeed's copies every
    parameter into place and prefetches few: a third to a half in what DeepSpeed published of 512 A100s on Azure.
    """
    cluster, run = setup.cluster, setup.run
    layers = setup.shape.layers
    overhead = 2 * layers * collectives.all_gather(cluster, ranks, 1.0)
    gather = collectives.all_gather(cluster, ranks, setup.parameters * run.activation_bytes) + overhead / 2
    reduce = collectives.all_gather(cluster, ranks, gradient) + overhead / 2
    share: float = run.facts["sharded"]
    gather, reduce = gather / share, reduce / share
    exposed = max(gather - forward, gather / layers) + max(gather + reduce - backward, (gather + reduce) / layers)
    return setup.accumulation * (exposed + layers * cluster.sharded_seconds)


def optimizer_seconds(setup: Setup) -> float:
    """Reading and writing weights, gradients and moments of a rank's share, and the norm of the gradients."""
    layout = setup.layout
    numel = setup.trained_parameters
    share = numel / setup.replicas if layout.zero_stage else numel
    if layout.offload_optimizer != "none":
        return 0.0
    return (
        stream_seconds(setup.cluster.gpu, setup.run.facts["optimizer"] * share + 4 * numel, 20)
        + setup.cluster.step_seconds
    )


def offload_seconds(setup: Setup) -> float:
    """Gradients down and weights up over the host's link, and the update in its memory (DeepSpeedCPUAdam)."""
    layout, cluster = setup.layout, setup.cluster
    if layout.offload_optimizer == "none" and layout.offload_params == "none":
        return 0.0
    share = setup.trained_parameters / setup.replicas
    moved = share * (4 + 2) / cluster.host_bytes_per_second
    update = share * 28 / CPU_BYTES_PER_SECOND if layout.offload_optimizer != "none" else 0.0
    if layout.offload_params != "none":
        weights = setup.parameters / setup.replicas
        moved += 2 * setup.accumulation * weights * 2 / cluster.host_bytes_per_second
    return moved + update
