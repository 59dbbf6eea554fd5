"""How much DeepSpeed should send at a time: bucket sizes from the model and from the link between ranks.

A bucket wants to be small, so that sending it overlaps with the computation of the next one and takes little memory,
and large, so that the time until the first byte arrives does not count.
"""

import math
from dataclasses import dataclass

from toolkit.hardware import Gpu
from toolkit.layout import Layout
from toolkit.shape import ModelShape, layer_matmul_parameters, matmul_parameters
from toolkit.units import format_bytes, format_count

SMALLEST_ELEMENTS = 1 << 20
LARGEST_ELEMENTS = 500_000_000

_STEP_ELEMENTS = 100_000
"""Sizes are rounded up to these: the model behind them is no finer."""

_SHARE_OF_TRANSFER = 0.9
"""Of the time of one collective, in which bytes move; the rest is latency."""
_BUCKETS_OF_A_MODEL = 4
"""With fewer, there is little left to overlap with."""

# Seconds, as NCCL's own tuner assumes them for rings and its "Simple" protocol (src/graph/tuning.cc, 2.18 to 2.21).
_START_SECONDS = 8.4e-6
_HOP_SECONDS = {"nvlink": 3.4e-6, "xgmi": 3.4e-6, "pcie": 5.7e-6}
_NETWORK_HOP_SECONDS = 14e-6


@dataclass(frozen=True, kw_only=True)
class Link:
    """How the ranks that share a model's states reach each other: the slowest part decides."""

    name: str
    ranks: int
    bytes_per_second: float
    """Of one rank, in one direction."""
    latency_seconds: float
    """From the start of a ring collective over all ranks until it would end if it carried nothing."""


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Sizes in elements."""

    reduce: int
    allgather: int
    prefetch: int
    reason: str


def link_of(gpu: Gpu, layout: Layout, *, gpus_per_node: int, network_bytes_per_second: float) -> Link:
    """The link of one data-parallel group of `layout` on nodes of `gpus_per_node` such GPUs.

    Rank order puts tp (and Ulysses) innermost and stages outermost, so the dp ranks of a stage lie on
    ceil(dp x tp / gpus_per_node) neighbouring nodes. NCCL's model of a ring of n ranks on m nodes has n - m hops inside
    nodes and m - 1 between them.
    """
    ranks = layout.dp
    nodes = min(ranks, math.ceil(ranks * layout.tp * layout.ulysses / gpus_per_node))
    inside = (ranks - nodes) * _HOP_SECONDS[gpu.link]
    between = (nodes - 1) * _NETWORK_HOP_SECONDS
    several = nodes > 1
    return Link(
        name=f"{nodes} nodes of {gpu.name}" if several else f"{gpu.link} of {gpu.name}",
        ranks=ranks,
        bytes_per_second=min(gpu.link_bytes_per_second, network_bytes_per_second)
        if several
        else gpu.link_bytes_per_second,
        latency_seconds=_START_SECONDS + inside + between,
    )


def smallest_bytes(link: Link) -> int:
    """The least that is worth one collective on `link`.

    A ring reduce-scatter (or all-gather) of B bytes over n ranks sends B (n - 1) / n bytes through each rank's link:

        T = latency + B (n - 1) / (n bandwidth)

    Bytes move for a share e of T where B = e / (1 - e) x latency x bandwidth x n / (n - 1). With e = 0.9 that is nine
    times the product of latency and bandwidth. (Patarasuk and Yuan 2009 for the ring; the latencies are those of NCCL's
    tuner.) Known error: real links reach 70 to 90% of their data sheet, so the result is up to 1.4 times too large.
    """
    if link.ranks == 1:
        return 0
    share = _SHARE_OF_TRANSFER / (1 - _SHARE_OF_TRANSFER)
    return math.ceil(share * link.latency_seconds * link.bytes_per_second * link.ranks / (link.ranks - 1))


def derive(
    shape: ModelShape, layout: Layout, link: Link, *, gradient_bytes: int = 4, parameter_bytes: int = 2
) -> Buckets:
    """Buckets for one rank of `layout`.

    One decoder layer, so that a layer's communication overlaps with its neighbour's computation; more where the link
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
    reduce = elements(gradient_bytes)
    return Buckets(
        reduce=reduce,
        allgather=gather,
        prefetch=gather,
        reason=(
            f"a decoder layer has {format_count(layer)} parameters a rank, and {link.name} needs "
            f"{format_bytes(needed)} to spend 90% of a collective on bytes"
        ),
    )


def of_a_layer(hidden_size: int) -> Buckets:
    """Buckets of one decoder layer where nothing is known about the link.

    A layer of width h has about 12 h^2 parameters (Megatron-LM, Narayanan et al. 2021, eq. 2).
    """
    size = min(max(12 * hidden_size**2, SMALLEST_ELEMENTS), LARGEST_ELEMENTS)
    return Buckets(
        reduce=size, allgather=size, prefetch=size, reason="one decoder layer: 12 x hidden², at least 2²⁰, at most 5e8"
    )


def largest_partition(shape: ModelShape, dp: int) -> int:
    """Elements of the largest parameter's share of a rank, rounded up to 2²⁰: what one buffer of NVMe offload holds."""
    fused = shape.hidden * (shape.attention_dim + 2 * shape.kv_dim)
    parameters = (shape.vocab * shape.embed_dim, shape.hidden * shape.ffn, fused)
    mebi = 1 << 20
    return math.ceil(math.ceil(max(parameters) / dp) / mebi) * mebi
