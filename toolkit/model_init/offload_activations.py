"""Activations in host memory: what the backward pass needs of a decoder layer leaves the device and comes back in time.

Every decoder layer runs under saved-tensor hooks. When it ends, the storages that autograd saved are copied to pinned
memory on a stream of their own, while the next layer computes; behind that the device's copies are dropped. In the
backward pass the first use of anything of a layer waits for what is on its way, and starts the copies of the layer
before. Under recomputation a layer saves its input alone, and a compiled layer what its backward graph takes. On a CPU
the same copies are made, one after the other.

Only bytes are moved, so results are the same to the bit. What stays: parameters and their views, what several layers
read (masks, rotary tables), small tensors, and all of the last layer, whose backward pass comes first.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from toolkit.model_init.model_modules import decoder_layers
from toolkit.parallel.model_structure import hidden_argument
from toolkit.parallel.pipeline.stage import NonLocalLayer

TRANSFERS = "host_transfers"
"""Name of the attribute of a layer that has the HostTransfers of its model."""
SMALLEST_BYTES = 4096
"""A storage below this size is not worth a copy of its own."""
_CASTS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0")


def offload_activations(model: PreTrainedModel) -> None:
    """Keep what the decoder layers of `model` save for their backward pass in host memory."""
    layers = decoder_layers(model)
    local_layers = [layer for layer in layers if not isinstance(layer, NonLocalLayer)]
    if not local_layers:
        return
    transfers = HostTransfers(first=local_layers[0], resident=layers[-1])
    # Python looks `__call__` up on the class, so only another class can run a layer with all its hooks inside; a module
    # around the layer would change the names of its parameters. Layers of one class share one, and so a compiled graph.
    classes = {family: _offloaded_class(family, transfers) for family in dict.fromkeys(map(type, local_layers))}
    for layer in local_layers:
        layer.__class__ = classes[type(layer)]


def _offloaded_class(family: type[nn.Module], transfers: "HostTransfers") -> type[nn.Module]:
    """Return a subclass of a decoder layer's class that runs the layer under saved-tensor hooks."""

    def call(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return family.__call__(module, *arguments, **keywords)
        hidden = hidden_argument(arguments, keywords)
        shared = (value for value in tree_leaves((arguments, keywords)) if value is not hidden)
        storages = _storages((*module.parameters(), *module.buffers(), *shared))
        before = None if module is transfers.first else transfers.last
        saved = _LayerPass(transfers, before, storages, stays=module is transfers.resident)
        transfers.last = saved
        try:
            with saved_tensors_hooks(saved.pack, _unpack):
                return family.__call__(module, *arguments, **keywords)
        finally:  # a pipeline stage leaves its last layer by an exception
            saved.leave()

    return type(f"{family.__name__}Offloaded", (family,), {"__call__": call, TRANSFERS: transfers})


def _storages(values: Iterable[Any]) -> set[int]:
    """Identities of the storages of all tensors among `values`."""
    return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


class HostTransfers:
    """The transfers of one model's activations to the host and back."""

    bytes_sent = 0
    """Bytes that were sent to the host, since the beginning."""

    def __init__(self, *, first: nn.Module, resident: nn.Module) -> None:
        """`first` and `resident`: the first layer on this rank, and the model's last, whose activations all stay."""
        self.first = first
        self.resident = resident
        self.last: _LayerPass | None = None
        """The pass of the latest layer in a forward pass; None before the first."""
        self.leaving: _LayerPass | None = None
        """The layer's pass whose storages are on their way to the host; None where there is none."""
        self._streams: dict[str, Any] = {}

    def copies(self, direction: str, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which copies run on the stream of a direction, behind all that is queued now."""
        if device.type != "cuda":
            return nullcontext()
        if direction not in self._streams:
            self._streams[direction] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._streams[direction].wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._streams[direction])


class _Stored:
    """One storage: on the device until it has left, in host memory, and on the device again once it is fetched."""

    def __init__(self, source: torch.Tensor) -> None:
        self.device: torch.Tensor | None = source
        self.host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)


class _LayerPass:
    """Tensors that one layer saved in the forward pass of a micro-batch.

    `resident`: identities of storages that stay on the device, and `stays`: whether all of them do.
    """

    def __init__(
        self, transfers: HostTransfers, before: "_LayerPass | None", resident: set[int], *, stays: bool
    ) -> None:
        self._transfers = transfers
        self._before = before
        self._resident = resident
        self._stays = stays
        self._stored: dict[int, _Stored] = {}
        self._device = torch.device("cpu")
        self._events: dict[str, torch.cuda.Event] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd saves in the place of a tensor."""
        if self._stays:
            return self, tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if not _is_plain(tensor) or storage.nbytes() < SMALLEST_BYTES or key in self._resident:
            return tensor
        if isinstance(tensor._base, nn.Parameter) or _is_cast_of_weight(tensor):
            return tensor
        if key not in self._stored:  # what has not left is held, so that no other storage gets the same identity
            self._device = tensor.device
            self._stored[key] = _Stored(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        return self, self._stored[key], tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def leave(self) -> None:
        """The layer has run: begin to copy what it saved, and drop what the layer before it saved."""
        if self._transfers.leaving is not None:
            self._transfers.leaving.drop()
        self._transfers.leaving = self
        self._resident = set()
        with self._transfers.copies("to the host", self._device):
            for stored in self._stored.values():
                assert stored.device is not None
                stored.host.copy_(stored.device, non_blocking=True)
                self._transfers.bytes_sent += stored.host.numel()
            self._record("left")

    def drop(self) -> None:
        """Let go of the device's copies once they have left: what takes their memory next runs behind that."""
        self._wait("left")
        for stored in self._stored.values():
            stored.device = None

    def fetch(self) -> None:
        """Begin to copy everything back to the device; what has not been dropped is still there."""
        self._wait("left")
        coming = [stored for stored in self._stored.values() if stored.device is None]
        self._stored = {}
        for stored in coming:  # in the memory of the stream that computes, which frees it
            stored.device = torch.empty_like(stored.host, device=self._device)
        with self._transfers.copies("from the host", self._device):
            for stored in coming:
                assert stored.device is not None
                stored.device.copy_(stored.host, non_blocking=True)
            self._record("arrived")

    def arrive(self) -> None:
        """The backward pass needs this layer now, and the layer before it next."""
        if self._stored:
            self.fetch()
        self._wait("arrived")
        before = self._before
        self._before = None
        if before is not None:
            before.fetch()

    def _record(self, name: str) -> None:
        if self._device.type == "cuda":
            self._events[name] = torch.cuda.current_stream(self._device).record_event()

    def _wait(self, name: str) -> None:
        event = self._events.pop(name, None)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    layer, stored, *view = saved
    layer.arrive()
    if isinstance(stored, torch.Tensor):
        return stored
    dtype, place = view
    return torch.empty(0, dtype=dtype, device=stored.device.device).set_(stored.device.untyped_storage(), *place)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor's storage are all that it has: not so of subclasses."""
    return type(tensor) is torch.Tensor


def _is_cast_of_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor is autocast's copy of a weight, which many micro-batches share, or a view of it."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _CASTS:
        node = node.next_functions[0][0]
    return node is not None and hasattr(node, "variable")
