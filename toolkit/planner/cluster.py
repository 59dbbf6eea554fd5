"""Cluster: the GPUs of a job and what joins them, as the time model sees it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from toolkit.hardware import Gpu


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal machines with equal GPUs. Bandwidths in bytes per second and direction, latencies in seconds."""

    gpu: Gpu
    gpus_per_node: int
    """GPUs that the fast link joins; all communication beyond takes the network."""
    link_bytes_per_second: float
    """Bandwidth of one GPU inside a node."""
    link_latency_seconds: float
    """Latency of one hop inside a node."""
    network_bytes_per_second: float
    """One GPU's share of the bandwidth of its node's network cards: all rails together, over the node's GPUs."""
    network_latency_seconds: float
    """Latency of one hop between nodes."""
    host_bytes_per_second: float
    """Bandwidth between a GPU and the memory of its host."""
    host_memory_bytes: float
    """Host memory of a node that offloaded states may take."""
    collective_seconds: float = 8e-6
    """Seconds of a collective besides its hops: the kernel's launch, and waiting for the slowest rank."""
    send_seconds: float = 3e-4
    """Seconds of a pipeline's send or receive besides the transfer: Python's calls, and waiting for the stream before
    the next micro-batch starts, as Megatron-LM and DeepSpeed's engine do. Set on the development half of published
    runs. `dstk calibrate` measures it for CPU ranks, and with it `step_overhead_seconds`,
    `micro_batch_overhead_seconds`, `sharded_seconds`, `cores` and `slowdown`."""
    step_overhead_seconds: float = 1e-3
    """The engine's fixed share of a step: norm, learning rate, the optimizer's calls."""
    micro_batch_overhead_seconds: float = 0.0
    """The engine's fixed share of each micro-batch; 0 for GPUs, which compute while it passes."""
    sharded_seconds: float = 0.0
    """Seconds of ZeRO-3's hooks for a layer and micro-batch on CPUs; 0 for GPUs."""
    cores: float = 0
    """Cores that CPU ranks share, at one thread each; 0 for GPUs, each of which computes by itself."""
    slowdown: float = 1.0
    """Factor by which a CPU's rank is slower when all cores are busy: ranks share memory, caches and clock."""

    def slowdown_of_active_ranks(self, ranks: int) -> float:
        """Return the factor by which a rank slows down when `ranks` ranks compute, each on a core of its own."""
        if self.cores < 2:
            return 1.0
        return 1 + (self.slowdown - 1) * (min(ranks, self.cores) - 1) / (self.cores - 1)

    def ranks_per_core(self, ranks: int) -> float:
        """Return the number of ranks per core, at least 1; always 1 for GPUs."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

    @classmethod
    def of(cls, gpu: Gpu, **facts: float) -> Self:
        """The maker's reference system around `gpu`; `facts` replace what is known better."""
        domain = int(facts.pop("gpus_per_node", 0)) or gpu.link_domain
        defaults = {
            "link_bytes_per_second": gpu.link_bytes_per_second,
            "link_latency_seconds": LINK_SECONDS[gpu.link],
            "network_bytes_per_second": gpu.network_bytes_per_second,
            "network_latency_seconds": NETWORK_SECONDS,
            "host_bytes_per_second": gpu.host_bytes_per_second,
            "host_memory_bytes": HOST_MEMORY_BYTES,
        }
        return cls(gpu=gpu, gpus_per_node=domain, **(defaults | facts))


FORMER_NAMES = {
    "link_seconds": "link_latency_seconds",
    "network_seconds": "network_latency_seconds",
    "step_seconds": "step_overhead_seconds",
    "micro_batch_seconds": "micro_batch_overhead_seconds",
}
"""Names that fields of Cluster had in files of version 0.2, and those that they have now."""


def with_present_names(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a file with the former names of fields replaced by the present ones."""
    return {FORMER_NAMES.get(name, name): value for name, value in facts.items()}


HOST_MEMORY_BYTES = 2e12
"""NVIDIA's DGX A100 and DGX H100 have 2 TB."""
LINK_SECONDS = {"nvlink": 2.0e-6, "xgmi": 3.0e-6, "pcie": 6.0e-6, "memory": 1.0e-4}
"""Latency of one hop of NCCL's ring with its Simple protocol. NCCL's tuning tables (src/graph/tuning.cc: hwLat, in
microseconds) have 3.4 for NVLink and 5.7 for PCIe with LL128 and Simple between 2 and 6; rounded."""
NETWORK_SECONDS = 1.0e-5
"""A hop between nodes over InfiniBand or RoCE: 14 microseconds with Simple in the same tables, less with LL128."""
