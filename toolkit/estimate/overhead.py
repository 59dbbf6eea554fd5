"""GPU memory beside the model's tensors: constants with sources, and a margin. None is fitted to runs.

The table has separate lines for them, so that the computed part can be compared with
`torch.cuda.max_memory_allocated`, which includes none of them but cuBLAS's workspaces.
"""

from typing import Any

from toolkit.config.layout import Layout
from toolkit.hardware import Gpu

_MIB = 2**20

CONTEXT_BYTES = 520 * _MIB
"""CUDA context, kernels of PyTorch and cuBLAS, of a process on an H100 with CUDA 12: what `nvidia-smi` shows after the
first matrix product, less what the allocator has reserved. Known error: 300 to 700 MiB, by driver and GPU."""

CUBLAS_BYTES = {"hopper": 32 * _MIB, "other": 8 * _MIB}
"""A workspace of cuBLAS, which PyTorch allocates (aten/src/ATen/cuda/CUDABlas.cpp: 4096:2:16:8, or 32 MiB)."""
_CUBLAS_HANDLES = 2
"""Each thread has a handle of its own, and autograd runs backward in another thread (CublasHandlePool.cpp)."""

_SIMPLE = 4 * _MIB
_LL = 8 * 512 * 8 * 16
_LL128 = 120 * 640 * 8 * 8
NCCL_CHANNEL_BYTES = _SIMPLE + _LL + _LL128
"""Buffers of one connection in one channel, for its three protocols (NCCL 2.2x, src/include/device.h and init.cc)."""
NCCL_CHANNELS = {"nvlink": 16, "xgmi": 16, "pcie": 2, "memory": 0}
"""Channels of a ring. Known error: NCCL chooses them by topology, 2 to 32."""
_MOST_HEADS = 32
"""GPUs of a communicator that reduce through a switch, at most (NCCL_MAX_NVLS_ARITY in NCCL's src/include/device.h)."""
_NVLS_BYTES = 16 * 2 * 8 * 128 * 1024
"""Bytes for each GPU of a communicator that NVLink joins, if a switch can reduce (from Hopper on, three GPUs or more):
16 channels, two directions, 8 steps of 128 KiB (NCCL 2.22 to 2.30, src/transport/nvls.cc, ncclNvlsBufferSetup).
Allocated at the first all-reduce. NCCL 2.18 to 2.20 took six times as much."""
_FROM_HOPPER_ON = ("H100", "H200", "H800", "GH200", "B200", "B300", "GB200", "GB300")
"""GPUs of compute capability 9 or 10, by the beginning of their names."""

ALLOCATOR_MARGIN = 0.03
"""Share of the allocated bytes that PyTorch's allocator reserves besides: rounding and fragmentation. The median in
logs of 2025; software of 2021 had 0.21."""


def communicators(layout: Layout, link_domain: int = 8) -> list[int]:
    """Return, for each NCCL communicator of a rank, the number of its ranks in one link domain, this rank included.

    There is one for the world, and one for each axis of several ranks that is not the whole world. Ranks of a tensor-
    or sequence-parallel group are adjacent; those of other axes have the strides of `Layout.rank`. Ranks that shard
    experts have one, and so have those with the same experts.
    """
    width = layout.tp * layout.ulysses
    axes = [
        (layout.replicas, width),
        (layout.cp, layout.tp),
        (layout.tp, 1),
        (layout.ulysses, 1),
        (layout.pp, layout.world_size // layout.pp),
    ]
    groups = [(ranks, stride) for ranks, stride in axes if ranks > 1]
    if len(groups) > 1:
        groups.append((layout.world_size, 1))
    if layout.ep > 1:
        of_experts = [(layout.ep, width), (layout.replicas // layout.ep, width * layout.ep)]
        groups += [(ranks, stride) for ranks, stride in of_experts if ranks > 1]
    return [min(ranks, max(1, link_domain // stride)) for ranks, stride in groups]


def workspace_bytes(gpu: Gpu) -> int:
    """Bytes of cuBLAS's workspaces, which stay allocated."""
    return _CUBLAS_HANDLES * CUBLAS_BYTES["hopper" if is_hopper(gpu) else "other"]


def nccl_bytes(layout: Layout, gpu: Gpu) -> int:
    """Bytes of the buffers of all communicators of a rank."""
    has_switch = is_hopper(gpu) and gpu.link == "nvlink"
    total = 0
    for local_ranks in communicators(layout, gpu.link_domain):
        total += NCCL_CHANNELS[gpu.link] * NCCL_CHANNEL_BYTES
        if has_switch and local_ranks > 2:
            total += _NVLS_BYTES * min(local_ranks, _MOST_HEADS)
    return total


def is_hopper(gpu: Gpu) -> bool:
    """Whether the GPU is a Hopper or a Blackwell of a data center, for which PyTorch and NCCL take larger buffers."""
    return gpu.name.startswith(_FROM_HOPPER_ON)


def beside(
    layout: Layout, gpu: Gpu | None, allocated: int, *, margin: float | None = None, context: int | None = None
) -> dict[str, Any]:
    """Return fields of a MemoryBreakdown for what PyTorch does not allocate; empty where no GPU was named.

    `margin` and `context` (MiB) take the place of ALLOCATOR_MARGIN and CONTEXT_BYTES for older software.
    """
    if gpu is None:
        return {}
    return {
        "framework": CONTEXT_BYTES if context is None else context * _MIB,
        "nccl": nccl_bytes(layout, gpu),
        "margin": int((ALLOCATOR_MARGIN if margin is None else margin) * allocated),
        "device_bytes": gpu.memory_bytes,
    }
