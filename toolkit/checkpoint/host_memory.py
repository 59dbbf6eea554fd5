"""Host memory in large blocks: page-aligned, as direct writes need it, and pinned where tensors come from a GPU.

Fresh memory costs a page fault every 4 KiB, which is more than copying into it; huge pages, where the system gives
them, make that one every 2 MiB.
"""

import mmap
from contextlib import suppress

import torch

PAGE_BYTES = 4096


def host_memory(nbytes: int) -> torch.Tensor:
    """Bytes with nothing in particular in them."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            return _aligned(torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True), nbytes)
        except RuntimeError:  # the system pins no more; a rank that raised here would leave the others waiting
            pass
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    block = mmap.mmap(-1, nbytes)
    with suppress(OSError, AttributeError):  # a kernel, or a system, without them
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)


def _aligned(memory: torch.Tensor, nbytes: int) -> torch.Tensor:
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + nbytes]
