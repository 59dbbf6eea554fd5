"""LiveBytes: what storages hold while code runs on tensors without memory, and the most that they held."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from toolkit.recorder.trace import workspace


class LiveBytes:
    """Counts the storages of operations' results, each once. What the meta device has does not count."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.bytes = 0
        self.peak = 0
        self._seen: set[int] = set()

    def see(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Count what an operation has returned, and what its kernel had allocated meanwhile."""
        if isinstance(result, torch.Tensor):
            self._count(result)
        elif isinstance(result, list | tuple):
            for tensor in tree_iter(result):
                if isinstance(tensor, torch.Tensor):
                    self._count(tensor)
        if self.on_gpu:
            self.peak = max(self.peak, self.bytes + workspace(func, args, kwargs))

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.bytes -= size
