"""Trace: every storage that is allocated or freed while a model runs on fake tensors, section by section."""

import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from toolkit.parallel.context import attention
from toolkit.parallel.context.kernels import MOST_SCORES

aten = torch.ops.aten
ATTENTION = (0, 0)
"""The event of a backward pass at which the toolkit's attention runs, when its results are allocated."""


@dataclass
class TracedSection:
    """Allocations and frees while one part of a pass runs, for instance a decoder layer's forward pass."""

    name: str
    events: list[tuple[int, int]] = field(default_factory=list)
    """(number of a storage, its bytes), from 1: bytes are negative where it is freed. Or ATTENTION."""
    kinds: dict[int, str] = field(default_factory=dict)
    """Number of a storage that is allocated here -> the part of the layer that allocates it."""
    casts: set[int] = field(default_factory=set)
    """Storages that are allocated here and are autocast's copies of weights."""


class Trace(TorchDispatchMode):
    """Records the storages that operations return.

    Temporary buffers inside a kernel are invisible; on a GPU, `workspace` adds the known ones.

    Storages that were made before, or are handed in, do not count. Views and results in place allocate nothing.
    """

    def __init__(self, *, on_gpu: bool, parameters: list[torch.Tensor], answer: bool) -> None:
        super().__init__()
        self.on_gpu = on_gpu
        self.answer = answer
        self.sections: list[TracedSection] = []
        self.kind = ""
        self._weights = {tensor.untyped_storage()._cdata for tensor in parameters}
        self._numbers: dict[int, int] = {}
        self._count = 0
        self.begin("")

    def begin(self, name: str) -> None:
        """Begin a section. What cyclic garbage keeps alive counts to the section that made it."""
        gc.collect(1)
        self.sections.append(TracedSection(name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            # "Are all positions consecutive?" and the like: there are no values.
            return self.answer if args[0].dtype == torch.bool else 1
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor, counts=False)
        result = func(*args, **(kwargs or {}))
        from_weight = func is aten._to_copy.default and args[0].untyped_storage()._cdata in self._weights
        is_cast = from_weight and result.itemsize < args[0].itemsize
        # A GPU keeps the mean and deviation of 16-bit rows in fp32, a CPU in the dtype of the weight.
        is_norm = func is aten.native_layer_norm.default
        statistics: tuple[torch.Tensor, ...] = ()
        if is_norm and (self.on_gpu or (args[2] is not None and args[2].itemsize == 4)):
            statistics = result[1:]
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                widened = any(tensor is statistic for statistic in statistics) and tensor.itemsize == 2
                self._watch(tensor, is_cast=is_cast, scale=2 if widened else 1)
        if func is attention.GRADIENTS_OPERATION:
            self._now.events.append(ATTENTION)
        size = workspace(func, args, kwargs or {}) if self.on_gpu else 0
        if size:
            self._count += 1
            self._now.events += [(self._count, size), (self._count, -size)]
        return result

    @property
    def _now(self) -> TracedSection:
        return self.sections[-1]

    def _watch(self, tensor: torch.Tensor, *, counts: bool = True, is_cast: bool = False, scale: int = 1) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._numbers:
            return
        size = scale * storage.nbytes() if counts else 0
        self._count += 1
        self._numbers[key] = self._count
        if size:
            self._now.events.append((self._count, size))
            self._now.kinds[self._count] = self.kind
            if is_cast:
                self._now.casts.add(self._count)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        number = self._numbers.pop(key)
        if size:
            self._now.events.append((number, -size))


def workspace(func: Any, args: Any, kwargs: Mapping[str, Any]) -> int:
    """Bytes that a GPU's kernel allocates beside its result and frees before it returns."""
    if func is aten._softmax_backward_data.default:
        # The product of gradient and result (ATen/native/cuda/SoftMax.cu).
        return int(args[1].nbytes)
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        return _flash_workspace(args[1], args[2])
    if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        # In a rehearsal this kernel stands for what a GPU runs in its place (toolkit/parallel/context/kernels.py).
        has_flash = args[1].itemsize == 2 and kwargs.get("attn_mask") is None
        return _flash_workspace(args[1], args[2]) if has_flash else _scores_workspace(args[1], args[2])
    return 0


def _flash_workspace(query: torch.Tensor, key: torch.Tensor) -> int:
    """The query's gradient in fp32, and for grouped queries the gradients of key and value by query heads, which are
    summed at the end (ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd).
    """
    heads_of_key = query.shape[1] // key.shape[1]
    by_query_head = 2 * heads_of_key * key.nbytes if heads_of_key > 1 else 0
    return int(4 * query.numel() + by_query_head)


def _scores_workspace(query: torch.Tensor, key: torch.Tensor) -> int:
    """The weights of a part of the scores and their gradients, in fp32 and as they are multiplied; the gradient of the
    key by query heads, and its sum over them; and in 16 bits the gradients of key and value in fp32
    (toolkit/parallel/context/kernels.py).
    """
    scores = min(MOST_SCORES, query.shape[:3].numel() * key.shape[2])
    of_key = query.shape[1] // key.shape[1] * key.nbytes + 4 * key.numel()
    if query.itemsize > 2:
        return int(8 * scores + of_key)
    return int(12 * scores + of_key + 8 * key.numel())
