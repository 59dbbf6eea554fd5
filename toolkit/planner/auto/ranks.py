"""Devices of the ranks of a launch, as the ranks name them, and the cluster that a plan takes for them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from toolkit.hardware import Gpu, find_gpu, host_memory_bytes
from toolkit.hardware import gpu as named_gpu
from toolkit.planner.calibration.file import CPU, stored
from toolkit.planner.cluster import Cluster

UNKNOWN_GPU = "A100-PCIe-40GB"
"""The GPU whose rates stand for a GPU that is not in the catalogue: it is between the newest and the oldest. What fits
is decided by the unknown GPU's own memory."""
_OF_ONE_MACHINE = 8
"""GPUs that a fast link joins, unless it joins those of a rack."""
_CORE_FLOPS = 5e10
"""FLOP/s of one core in every precision, where no calibration says better: a round figure with AVX2."""


@dataclass(frozen=True, kw_only=True)
class RankDevice:
    """The device of one rank, as plain data: ranks send it to each other."""

    host: str
    device: str
    """The name that torch.cuda.get_device_name returns, or `cpu`."""
    memory_bytes: int
    """Memory of the device; for a CPU the memory of the host, which its ranks share."""
    host_memory_bytes: int


def cluster_of(ranks: Sequence[RankDevice]) -> tuple[Cluster, str]:
    """The cluster of these ranks, and what it is in words. Of several kinds of GPUs the slowest counts for all."""
    names = sorted({rank.device for rank in ranks})
    on_cpus = names == [CPU]
    ranks_of_host = Counter(rank.host for rank in ranks)
    most_of_host = max(ranks_of_host.values())
    kinds = [_kind(name, most_of_host) for name in names]
    slowest = min(kinds, key=lambda gpu: gpu.bf16_flops or gpu.fp32_flops)
    cluster = _cluster(slowest)
    words = _in_words(ranks, names, slowest)
    is_one_machine = len(ranks_of_host) == 1
    measured = stored() if len(names) == 1 and (is_one_machine or not on_cpus) else None
    if measured is not None and measured.gpu == slowest.name:
        cluster = measured.of_ranks(len(ranks))
        words += ", with this machine's own constants"
    # The ranks of a host share its memory where that is theirs.
    memory = min(rank.memory_bytes // (ranks_of_host[rank.host] if on_cpus else 1) for rank in ranks)
    cluster = replace(
        cluster,
        gpu=replace(cluster.gpu, memory_bytes=memory),
        gpus_per_node=slowest.link_domain if slowest.link_domain > _OF_ONE_MACHINE else most_of_host,
        host_memory_bytes=float(min(rank.host_memory_bytes for rank in ranks)),
    )
    return cluster, words


def _in_words(ranks: Sequence[RankDevice], names: Sequence[str], slowest: Gpu) -> str:
    """Say what the ranks are, and what they are taken for where that is not the same."""
    if list(names) == [CPU]:
        return f"{len(ranks)} x CPU"
    words = f"{len(ranks)} x {' and '.join(names)}"
    if len(names) > 1:
        return f"{words}, all taken for {slowest.name}"
    if find_gpu(names[0]) is None:
        return f"{words}, which is not in the catalogue: with the rates of {UNKNOWN_GPU}"
    return words


def cluster_named(name: str | None, ranks: int) -> tuple[Cluster, str]:
    """The cluster of a kind of GPU, or `cpu`, where a command plans for ranks elsewhere. Raises RunError."""
    if name == CPU:
        memory = host_memory_bytes()
        return cluster_of([RankDevice(host="", device=CPU, memory_bytes=memory, host_memory_bytes=memory)] * ranks)
    kind = named_gpu(UNKNOWN_GPU if name is None else name)
    return _cluster(kind), f"{ranks} x {kind.name}{'' if name else ' (--gpu names another)'}"


def _cluster(kind: Gpu) -> Cluster:
    """Return the cluster with the figures of data sheets."""
    if kind.name == CPU:
        return Cluster.of(kind, link_latency_seconds=1e-4, network_latency_seconds=2e-4)
    return Cluster.of(kind)


def _kind(name: str, ranks: int) -> Gpu:
    if name != CPU:
        return find_gpu(name) or replace(named_gpu(UNKNOWN_GPU), name=name, device_names=(name,))
    link: Literal["pcie"] = "pcie"
    return Gpu(
        name=CPU,
        memory_bytes=0,
        bf16_flops=_CORE_FLOPS,
        fp16_flops=_CORE_FLOPS,
        tf32_flops=_CORE_FLOPS,
        fp32_flops=_CORE_FLOPS,
        fp8_flops=None,
        fp4_flops=None,
        link=link,
        link_bytes_per_second=2e9,
        multiprocessors=1,
        memory_bytes_per_second=1e10,
        matmul_fraction={},
        link_domain=ranks,
        network_bytes_per_second=1.25e9 / ranks,
        host_bytes_per_second=1e10,
        watts=0,
        source="round figures of one core with AVX2, gloo over shared memory, and 10 Gb/s Ethernet",
        device_names=(),
    )
