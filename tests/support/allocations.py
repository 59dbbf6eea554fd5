"""What a pass through a model keeps and allocates, in bytes: of real tensors, and of fake ones at full size.

    with SavedForBackward(model) as saved:
        loss = model(ids, labels=ids).loss
    saved.bytes

    with LiveBytes() as live:
        loss.backward()
    live.peak_bytes

Both count storages, each once.
"""

import weakref
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from toolkit.model_init import offload_activations


class SavedForBackward:
    """Bytes that autograd keeps of what runs inside, without the parameters and buffers of `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._held: dict[int, torch.Tensor] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        """So far."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._held.values())

    @property
    def tensors(self) -> list[torch.Tensor]:
        """One for each storage."""
        return list(self._held.values())

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if _key(tensor) not in self._own:
            # Holding it also keeps its address from being used again.
            self._held.setdefault(_key(tensor), tensor.detach())
        return tensor


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that were made inside and still live, and the most at any moment.

    Sees what operations return, real or fake, forward and backward; not what a kernel allocates and frees within.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def start_peak(self) -> None:
        """Look for the peak from here on."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor, counts=False)  # made before, or handed in
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor, counts=True)
        return result

    def _watch(self, tensor: torch.Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if counts else 0
        self._known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size


class DeviceBytes(LiveBytes):
    """Where activations are offloaded on a CPU: without what stands for host memory."""

    def __enter__(self) -> Self:
        self._make = offload_activations._Stored.__init__

        def unseen(stored: Any, source: torch.Tensor) -> None:
            with _disable_current_modes():
                self._make(stored, source)

        offload_activations._Stored.__init__ = unseen  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        offload_activations._Stored.__init__ = self._make  # type: ignore[method-assign]


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
