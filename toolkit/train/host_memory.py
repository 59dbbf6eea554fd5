"""Host memory: keep what a step frees, for training on the CPU.

glibc gives every freed block of more than 32 MB, and what is free at the top of the heap, back to the kernel. A step
on the CPU frees its activations, logits and gradients and soon takes the same sizes again: the kernel then clears and
maps each page anew, in every step (benchmarks/hf_trainer.py measures how long that takes). PyTorch keeps freed memory
on the GPU for the same reason. The price is fragmentation: a process may hold a third more than without.
"""

import ctypes
import os
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_LARGEST_KEPT_BYTES = 1 << 30
_USER_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory(env: Mapping[str, str] = os.environ) -> bool:
    """Let malloc reuse freed blocks of up to 1 GiB; True where that is so from now on.

    Changes nothing where the C library is not glibc, and nothing where the environment sets malloc's thresholds itself.
    """
    if any(name in env for name in _USER_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Older versions of glibc refuse a threshold above 32 MB, but not to do without mmap.
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES) or mallopt(_M_MMAP_MAX, 0)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, -1))


def release_freed_memory() -> None:
    """Give the pages of freed blocks back to the kernel, for what was just done will not be done again.

    Building a model leaves holes: of each layer a shard stays, between what is freed, and the next layer does not fit
    in. Without this, a rank's resident memory would come to be that of the whole model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
