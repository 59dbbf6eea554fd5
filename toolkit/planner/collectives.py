"""Seconds of collectives by the alpha-beta model: latency of the hops, and bytes over the slowest link.

Ring: n ranks take n - 1 steps, each of which sends a 1/n of the buffer, so an all-gather or a reduce-scatter of S bytes
moves S(n-1)/n over every link, and an all-reduce twice that (Thakur et al. 2005). Tree: the latency grows with log n
instead of n; NCCL takes whichever is faster (its "double binary trees" since 2.4).

Nodes are the unit: of a group with k ranks a node and m nodes, the rings of all groups of a node share its network
cards, so that a group has k of the node's gpus_per_node shares. Inside a node a ring has the whole link of a GPU.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from toolkit.planner.cluster import Cluster

LINK_SHARE = 0.78
"""Share of a link that NCCL's rings move: NVLink's packets have headers and NCCL moves 16 bytes of flags; nccl-tests
report bus bandwidths of 230 to 235 GB/s on an A100's 300 and of 350 to 360 on an H100's 450 without NVLS."""
NETWORK_SHARE = 0.85
"""Share of the network cards: nccl-tests' 185 to 195 GB/s on nodes with 8 cards of 25, less among many nodes."""


class _Protocol(NamedTuple):
    """How a library moves messages inside a node."""

    hop_seconds: float
    """Seconds of a hop beside the link's latency."""
    bandwidth_share: float
    """Share of the link's bandwidth that is left for the message."""


_NCCL = (_Protocol(0.0, 0.28), _Protocol(6e-6, 1.0))
"""NCCL's protocols LL and Simple. LL sends
a flag with every 4 bytes, Simple waits for a fence in every hop, so that small and large messages take different ones.
Set on an nccl-tests log of all-reduces over 8 A100s (Oracle's tutorial for GPU clusters): 38 microseconds for 128 KiB,
77 for 1 MiB, 135 for 4 MiB, 245 for 16 MiB, 590 for 64 MiB, 2,122 for 256 MiB; all within 20 %. Between nodes the
latency of the network hides the difference."""
_GLOO = (_Protocol(0.0, 1.0),)


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Ranks of a collective: `local` on each of `nodes` machines."""

    local: int
    nodes: int

    @property
    def size(self) -> int:
        """The number of ranks on all machines."""
        return self.local * self.nodes


def group(cluster: Cluster, *, size: int, stride: int) -> RankGroup:
    """A group of `size` ranks, each `stride` ranks after the one before."""
    reach = max(1, cluster.gpus_per_node // stride)
    local = min(size, reach)
    while size % local:
        local -= 1
    return RankGroup(local=local, nodes=size // local)


@lru_cache(maxsize=65536)
def all_reduce(cluster: Cluster, ranks: RankGroup, size: float, messages: float = 1) -> float:
    """Seconds to sum `size` bytes over all ranks, in so many messages."""
    n = ranks.size
    m = ranks.nodes
    if n == 1 or size <= 0:
        return 0.0
    hops = 2 * (ranks.local - 1)
    if m == 1:
        return _inside(cluster, ranks, hops, 2 * size * (n - 1) / n, messages)
    ring = 2 * m * cluster.network_latency_seconds + 2 * (n - m) * cluster.link_latency_seconds
    tree = hops * cluster.link_latency_seconds + 2 * math.log2(m) * cluster.network_latency_seconds
    latency = messages * (cluster.collective_seconds + min(ring, tree))
    return latency + 2 * size * (n - 1) / n / _bandwidth(cluster, ranks)


@lru_cache(maxsize=65536)
def all_gather(cluster: Cluster, ranks: RankGroup, size: float, messages: float = 1) -> float:
    """Seconds to gather `size` bytes on each rank, or to reduce and scatter as many. Always a ring: NCCL's trees only
    reduce to all (and PAT, since 2.23, gathers small messages of one rank a node)."""
    n = ranks.size
    m = ranks.nodes
    if n == 1 or size <= 0:
        return 0.0
    if m == 1:
        return _inside(cluster, ranks, n - 1, size * (n - 1) / n, messages)
    latency = m * cluster.network_latency_seconds + (n - m) * cluster.link_latency_seconds
    return messages * (cluster.collective_seconds + latency) + size * (n - 1) / n / _bandwidth(cluster, ranks)


def all_to_all(
    cluster: Cluster, ranks: RankGroup, size: float, *, share_of_ranks: float = 1.0, share_of_nodes: float = 1.0
) -> float:
    """Seconds in which each rank sends `size` bytes in equal parts to all ranks, one of them itself.

    `share_of_ranks` is the share of the bytes that is left where one copy goes to each rank that needs several,
    `share_of_nodes` where one copy goes to each node. What comes over the network is then passed on inside the node.
    """
    if ranks.size == 1:
        return 0.0
    passes_on = share_of_nodes < 1
    inside_bytes = size * (ranks.local - 1) / (ranks.local if passes_on else ranks.size)
    outside_bytes = share_of_nodes * size * (ranks.size - ranks.local) / ranks.size
    inside = share_of_ranks * inside_bytes / (LINK_SHARE * cluster.link_bytes_per_second)
    outside = outside_bytes / (NETWORK_SHARE * cluster.network_bytes_per_second)
    latency = cluster.link_latency_seconds if ranks.nodes == 1 else cluster.network_latency_seconds
    return cluster.collective_seconds + latency * math.log2(ranks.size) + max(inside, outside)


def shift(cluster: Cluster, ranks: RankGroup, size: float) -> float:
    """Seconds in which each rank of a ring sends `size` bytes to the next one, over its own card between nodes."""
    if ranks.size == 1 or size <= 0:
        return 0.0
    if ranks.nodes == 1:
        bandwidth = LINK_SHARE * cluster.link_bytes_per_second
        return cluster.collective_seconds + cluster.link_latency_seconds + size / bandwidth
    bandwidth = NETWORK_SHARE * cluster.network_bytes_per_second
    return cluster.collective_seconds + cluster.network_latency_seconds + size / bandwidth


def send(cluster: Cluster, size: float, *, between_nodes: bool) -> float:
    """Seconds until a neighbor stage has `size` bytes and goes on."""
    if between_nodes:
        return (
            cluster.send_seconds
            + cluster.network_latency_seconds
            + size / (NETWORK_SHARE * cluster.network_bytes_per_second)
        )
    return cluster.send_seconds + cluster.link_latency_seconds + size / (LINK_SHARE * cluster.link_bytes_per_second)


def _inside(cluster: Cluster, ranks: RankGroup, hops: int, size: float, messages: float) -> float:
    """Seconds to send `size` bytes over so many hops inside a node, by the faster of NCCL's protocols; gloo has one."""
    bandwidth = _bandwidth(cluster, ranks)
    seconds = []
    for protocol in _GLOO if cluster.cores else _NCCL:
        hop = cluster.link_latency_seconds + protocol.hop_seconds
        latency = messages * (cluster.collective_seconds + hops * hop)
        seconds.append(latency + size / (protocol.bandwidth_share * bandwidth))
    return min(seconds)


def _bandwidth(cluster: Cluster, ranks: RankGroup) -> float:
    """Return the bandwidth of a ring: its slowest link. Switched links (NVLink) give a group all of a GPU's."""
    inside = LINK_SHARE * cluster.link_bytes_per_second
    if ranks.nodes == 1:
        return inside
    outside = NETWORK_SHARE * cluster.network_bytes_per_second * ranks.local
    return min(inside, outside) if ranks.local > 1 else outside
