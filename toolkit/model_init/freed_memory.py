"""Host memory: keep freed memory for reuse while training on the CPU.

glibc returns every freed block of more than 32 MB, and free memory at the top of the heap, to the kernel. A CPU step
frees its activations, logits and gradients and soon allocates the same sizes again: the kernel then clears and maps
each page again, in every step (benchmarks/hf_trainer.py measures how long that takes). PyTorch's caching allocator
keeps freed GPU memory for the same reason. The price is fragmentation: a process may use a third more memory.
"""

import ctypes
import os

# The numbers of malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_LARGEST_KEPT_BYTES = 1 << 30
_USER_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Let malloc reuse freed blocks of up to 1 GiB. Return whether it does from now on.

    Does nothing if the C library is not glibc, or if the environment sets malloc's thresholds.
    """
    if any(name in os.environ for name in _USER_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Older versions of glibc refuse a threshold above 32 MB, but accept that mmap is not used at all.
    is_kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES) or mallopt(_M_MMAP_MAX, 0)
    return bool(is_kept and mallopt(_M_TRIM_THRESHOLD, -1))


def release_freed_memory() -> None:
    """Return the pages of freed blocks to the kernel, after work that is not repeated.

    Building a model fragments the heap: a shard of each layer stays between freed blocks, and the next layer does not
    fit into them. Without this call, a rank's resident memory would grow to that of the full model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
