"""What a GPU's memory holds besides PyTorch's tensors: constants with sources, and a margin. None is fitted to runs.

They stand on lines of their own, so that what is computed can be compared with `torch.cuda.max_memory_allocated`, which
sees none of this.
"""

from toolkit.hardware import Gpu
from toolkit.layout import Layout

_MIB = 2**20

CONTEXT_BYTES = 520 * _MIB
"""CUDA context, kernels of PyTorch and cuBLAS, of a process on an H100 with CUDA 12: what `nvidia-smi` shows after the
first matrix product, less what the allocator has reserved. Known error: 300 to 700 MiB, by driver and GPU."""

CUBLAS_BYTES = {"hopper": 32 * _MIB, "other": 8 * _MIB}
"""cuBLAS workspace of one stream, which PyTorch allocates (aten/src/ATen/cuda/CUDABlas.cpp: 4096:2:16:8, or 32 MiB)."""

_SIMPLE, _LL, _LL128 = 4 * _MIB, 8 * 512 * 8 * 16, 120 * 640 * 8 * 8
NCCL_CHANNEL_BYTES = _SIMPLE + _LL + _LL128
"""Buffers of one connection in one channel, for its three protocols (NCCL 2.2x, src/include/device.h and init.cc)."""
NCCL_CHANNELS = {"nvlink": 16, "xgmi": 16, "pcie": 2}
"""Channels of a ring. Known error: NCCL chooses them by topology, 2 to 32."""

ALLOCATOR_MARGIN = 0.03
"""Of what is allocated: what PyTorch's allocator reserves beyond it, by rounding and fragmentation. The median in logs
of 2025; stacks of 2021 had 0.21."""


def communicators(layout: Layout) -> int:
    """NCCL communicators of one rank: the world's, and one for each axis of several ranks that is not the world."""
    axes = [size for size in (layout.dp, layout.tp, layout.pp, layout.ulysses) if size > 1]
    if not axes:
        return 0
    return 1 + (len(axes) if len(axes) > 1 else 0)


def framework_bytes(gpu: Gpu) -> int:
    """Context and workspaces."""
    hopper = gpu.name.startswith(("H100", "H200", "B200"))
    return CONTEXT_BYTES + CUBLAS_BYTES["hopper" if hopper else "other"]


def nccl_bytes(layout: Layout, gpu: Gpu) -> int:
    """Buffers of all of a rank's communicators."""
    return communicators(layout) * NCCL_CHANNELS[gpu.link] * NCCL_CHANNEL_BYTES
