"""Host memory that snapshots are copied into, kept from one snapshot to the next.

Fresh memory costs a page fault every 4 KiB: copying 480 MB into it took 7 times as long as into memory in use.
What a rank keeps is the largest share that it has written, pinned where tensors come from a GPU.
"""

import torch

_ALIGNMENT = 64


class HostCopies:
    """A stack of copies; all of them are given up together."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def clear(self, nbytes: int, count: int) -> None:
        """Give up all copies, and have room for `count` of together `nbytes`."""
        self._used = 0
        needed = nbytes + count * _ALIGNMENT
        if self._memory.numel() < needed:
            self._memory = torch.empty(0, dtype=torch.uint8)  # first, so that both are never held
            self._memory = _allocate(needed)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of a tensor, valid until `clear`."""
        start = self._used
        self._used += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        held = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return held.copy_(tensor.detach())


def _allocate(nbytes: int) -> torch.Tensor:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # the system pins no more; a rank that raised here would leave the others waiting
            pass
    return torch.empty(nbytes, dtype=torch.uint8)
