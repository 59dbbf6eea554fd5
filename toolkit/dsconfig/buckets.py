"""Bucket sizes from the model and from the link between ranks.

A bucket should be small, so that its communication overlaps with computation and takes little memory, and large, so
that latency does not dominate.
"""

import math
from dataclasses import dataclass

from toolkit.config.layout import Layout
from toolkit.hardware import Gpu
from toolkit.models.shape import ModelShape
from toolkit.models.weights import layer_matmul_parameters, matmul_parameters
from toolkit.units import format_bytes, format_count

SMALLEST_ELEMENTS = 1 << 20
LARGEST_ELEMENTS = 500_000_000

_STEP_ELEMENTS = 100_000
"""Sizes are rounded up to a multiple of this: the time model is not more precise."""

_SHARE_OF_TRANSFER = 0.9
"""Fraction of a collective's time in which bytes move; the rest is latency."""
_BUCKETS_OF_A_MODEL = 4
"""Buckets that a model should have at least: with fewer, there is little to overlap with."""

# Seconds, as NCCL's own tuner assumes them for rings and its "Simple" protocol (src/graph/tuning.cc, 2.18 to 2.21).
_START_SECONDS = 8.4e-6
_HOP_SECONDS = {"nvlink": 3.4e-6, "xgmi": 3.4e-6, "pcie": 5.7e-6}
_NETWORK_HOP_SECONDS = 14e-6


@dataclass(frozen=True, kw_only=True)
class SlowestLink:
    """The slowest link between the ranks of one data-parallel group."""

    name: str
    ranks: int
    bytes_per_second: float
    """Bandwidth of a rank, in one direction."""
    latency_seconds: float
    """Time of a ring collective over all ranks without payload."""


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Sizes of buckets, in elements."""

    reduce: int
    allgather: int
    prefetch: int
    reason: str


def link_of(gpu: Gpu, layout: Layout, *, gpus_per_node: int, network_bytes_per_second: float) -> SlowestLink:
    """Return the link of one data-parallel group of `layout` on nodes of `gpus_per_node` such GPUs.

    Rank order puts tp (and Ulysses) innermost and stages outermost, so the dp ranks of a stage lie on
    ceil(dp x tp / gpus_per_node) neighboring nodes. NCCL's model of a ring of n ranks on m nodes has n - m hops inside
    nodes and m - 1 between them.
    """
    ranks = layout.replicas
    nodes = min(ranks, math.ceil(ranks * layout.tp * layout.ulysses / gpus_per_node))
    inside = (ranks - nodes) * _HOP_SECONDS[gpu.link]
    between = (nodes - 1) * _NETWORK_HOP_SECONDS
    name = f"{gpu.link} of {gpu.name}"
    bytes_per_second = gpu.link_bytes_per_second
    if nodes > 1:
        name = f"{nodes} nodes of {gpu.name}"
        bytes_per_second = min(bytes_per_second, network_bytes_per_second)
    latency = _START_SECONDS + inside + between
    return SlowestLink(name=name, ranks=ranks, bytes_per_second=bytes_per_second, latency_seconds=latency)


def smallest_bytes(link: SlowestLink) -> int:
    """Return the smallest number of bytes that is worth one collective on `link`.

    A ring reduce-scatter (or all-gather) of B bytes over n ranks sends B (n - 1) / n bytes through each rank's link:

        T = latency + B (n - 1) / (n bandwidth)

    Bytes move for a fraction e of T if B = e / (1 - e) x latency x bandwidth x n / (n - 1). With e = 0.9 that is nine
    times the product of latency and bandwidth. (Patarasuk and Yuan 2009 for the ring; the latencies are those of NCCL's
    tuner.) Known error: real links reach 70 to 90% of their data sheet, so the result is up to 1.4 times too large.
    """
    if link.ranks == 1:
        return 0
    share = _SHARE_OF_TRANSFER / (1 - _SHARE_OF_TRANSFER)
    return math.ceil(share * link.latency_seconds * link.bytes_per_second * link.ranks / (link.ranks - 1))


def derive(
    shape: ModelShape, layout: Layout, link: SlowestLink, *, gradient_bytes: int = 4, parameter_bytes: int = 2
) -> Buckets:
    """Return the buckets of one rank of `layout`.

    One decoder layer, so that a layer's communication overlaps with its neighbor's computation; more where the link
    needs more (`smallest_bytes`); never more than a quarter of the rank's parameters.
    """
    layer = layer_matmul_parameters(shape) // layout.tp
    whole = matmul_parameters(shape) // (layout.tp * layout.pp)
    needed = smallest_bytes(link)

    def elements(bytes_each: int) -> int:
        wanted = max(layer, math.ceil(needed / bytes_each))
        most = min(max(layer, whole // _BUCKETS_OF_A_MODEL), LARGEST_ELEMENTS)
        return math.ceil(max(min(wanted, most), SMALLEST_ELEMENTS) / _STEP_ELEMENTS) * _STEP_ELEMENTS

    gather = elements(parameter_bytes)
    needs = f"{link.name} needs {format_bytes(needed)} to spend 90% of a collective on bytes"
    reason = f"a decoder layer has {format_count(layer)} parameters a rank, and {needs}"
    return Buckets(reduce=elements(gradient_bytes), allgather=gather, prefetch=gather, reason=reason)


def of_a_layer(hidden_size: int) -> Buckets:
    """Return buckets of one decoder layer, if nothing is known about the link.

    A layer of width h has about 12 h^2 parameters (Megatron-LM, Narayanan et al. 2021, eq. 2).
    """
    size = min(max(12 * hidden_size**2, SMALLEST_ELEMENTS), LARGEST_ELEMENTS)
    reason = "one decoder layer: 12 x hidden², at least 2²⁰, at most 5e8"
    return Buckets(reduce=size, allgather=size, prefetch=size, reason=reason)


def largest_partition(shape: ModelShape, dp: int) -> int:
    """Return the elements of a rank's shard of the largest parameter, rounded up to 2²⁰: one buffer of NVMe offload."""
    mebi = 1 << 20
    # Some families have the gate and up-projection in one, and mixtures those of all experts.
    mlp = 2 * shape.hidden * max(shape.ffn, shape.experts.count * shape.experts.ffn if shape.experts else 0)
    return math.ceil(math.ceil(max(largest_parameter(shape), mlp) / dp) / mebi) * mebi


def largest_parameter(shape: ModelShape) -> int:
    """Return the elements of the largest parameter."""
    fused = shape.hidden * (shape.attention_dim + 2 * shape.kv_dim)
    return max(shape.vocab * shape.embed_dim, shape.hidden * shape.ffn, fused)
