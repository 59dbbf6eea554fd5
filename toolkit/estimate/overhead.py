"""What a GPU's memory holds besides tensors of the model: constants with sources, and a margin. None is fitted to runs.

They stand on lines of their own, so that what is computed can be compared with `torch.cuda.max_memory_allocated`, which
sees none of this but cuBLAS's workspaces.
"""

from toolkit.hardware import Gpu
from toolkit.layout import Layout

_MIB = 2**20

CONTEXT_BYTES = 520 * _MIB
"""CUDA context, kernels of PyTorch and cuBLAS, of a process on an H100 with CUDA 12: what `nvidia-smi` shows after the
first matrix product, less what the allocator has reserved. Known error: 300 to 700 MiB, by driver and GPU."""

CUBLAS_BYTES = {"hopper": 32 * _MIB, "other": 8 * _MIB}
"""A workspace of cuBLAS, which PyTorch allocates (aten/src/ATen/cuda/CUDABlas.cpp: 4096:2:16:8, or 32 MiB)."""
_CUBLAS_HANDLES = 2
"""Each thread has a handle of its own, and autograd runs backward in another thread (CublasHandlePool.cpp)."""

_SIMPLE, _LL, _LL128 = 4 * _MIB, 8 * 512 * 8 * 16, 120 * 640 * 8 * 8
NCCL_CHANNEL_BYTES = _SIMPLE + _LL + _LL128
"""Buffers of one connection in one channel, for its three protocols (NCCL 2.2x, src/include/device.h and init.cc)."""
NCCL_CHANNELS = {"nvlink": 16, "xgmi": 16, "pcie": 2}
"""Channels of a ring. Known error: NCCL chooses them by topology, 2 to 32."""
_GPUS_PER_NODE = 8
_NVLS_BYTES = 16 * 2 * 8 * 128 * 1024
"""For each GPU that a communicator has in one machine, where a switch can add (Hopper and later, more than two GPUs):
16 channels, two directions, 8 steps of 128 KiB (NCCL 2.22 to 2.30, src/transport/nvls.cc, ncclNvlsBufferSetup). Made
when it is first used, that is by all-reduce. NCCL 2.18 to 2.20 took six times as much."""

ALLOCATOR_MARGIN = 0.03
"""Of what is allocated: what PyTorch's allocator reserves beyond it, by rounding and fragmentation. The median in logs
of 2025; stacks of 2021 had 0.21."""


def communicators(layout: Layout) -> list[int]:
    """How many ranks of this rank's machine are in each of its NCCL communicators, itself included.

    The world's is one, and each axis of several ranks that is not the world has one. Neighbours in a tensor- or
    sequence-parallel group are next to each other, those of other axes as far apart as `Layout.rank` has them.
    """
    axes = [(layout.dp, layout.model_size // layout.pp), (layout.tp, 1), (layout.ulysses, 1)]
    axes = [(ranks, stride) for ranks, stride in [*axes, (layout.pp, layout.world_size // layout.pp)] if ranks > 1]
    groups = [*axes, (layout.world_size, 1)] if len(axes) > 1 else axes
    return [min(ranks, max(1, _GPUS_PER_NODE // stride)) for ranks, stride in groups]


def workspace_bytes(gpu: Gpu) -> int:
    """Of cuBLAS, for as long as the process lives."""
    return _CUBLAS_HANDLES * CUBLAS_BYTES["hopper" if _is_hopper(gpu) else "other"]


def nccl_bytes(layout: Layout, gpu: Gpu) -> int:
    """Buffers of all of a rank's communicators."""
    return sum(
        NCCL_CHANNELS[gpu.link] * NCCL_CHANNEL_BYTES
        + (_NVLS_BYTES * local_ranks if _is_hopper(gpu) and gpu.link == "nvlink" and local_ranks > 2 else 0)
        for local_ranks in communicators(layout)
    )


def _is_hopper(gpu: Gpu) -> bool:
    """Or later."""
    return gpu.name.startswith(("H100", "H200", "B200"))
