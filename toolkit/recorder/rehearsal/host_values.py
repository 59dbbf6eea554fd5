"""Values of small tensors of integers while no other tensor has memory.

Headers of pipeline messages, counts and sizes decide what a rank does next, so they must be real. On the CPU they are
ordinary tensors. On a GPU that does not exist no tensor can be real: there a fake one has its values in a tensor of the
host beside it.
"""

from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_iter, tree_map

_MOST_REAL = 1024
"""Elements of the largest tensor of integers that has values."""
_VALUES = "_host_values"
"""Attribute of a fake tensor of integers on a GPU: its values, on the host."""


def host_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a small tensor of integers, on the host; None for any other."""
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, _VALUES, None)
    return tensor if tensor.numel() <= _MOST_REAL and not tensor.is_floating_point() else None


def is_on_gpu(args: Any, kwargs: Any) -> bool:
    """Whether an operation takes or makes tensors of a GPU: fake ones, which have values beside them."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        return True
    return any(isinstance(value, FakeTensor) for value in tree_iter((args, kwargs)))


def run_with_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on fake tensors of a GPU, and on their values beside them."""

    def on_host(value: Any) -> Any:
        return host_values(value) if isinstance(value, FakeTensor) else value

    host_kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
    with unset_fake_temporarily():
        values = func(*tree_map(on_host, args), **tree_map(on_host, host_kwargs))
    result = func(*tree_map(_without_values, args), **tree_map(_without_values, kwargs))
    for made, held in zip(tree_iter(result), tree_iter(values), strict=True):
        if isinstance(made, FakeTensor) and host_values(held) is not None:
            setattr(made, _VALUES, held)
    return result


def _without_values(value: Any) -> Any:
    """Return a fake tensor in the place of a real one, with which torch would compute on the GPU."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def forget_values(func: Any, args: Any) -> None:
    """Forget the values of what an operation writes, which it computes from numbers that do not exist."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.is_write:
            for tensor in tree_iter(value):
                if isinstance(tensor, FakeTensor) and hasattr(tensor, _VALUES):
                    delattr(tensor, _VALUES)


def fill(tensor: torch.Tensor, values: list[int] | None) -> None:
    """Write `values` into a tensor that has as many; do nothing where there are none, or another number of them."""
    if values is not None and len(values) == tensor.numel():
        tensor.copy_(torch.tensor(values, dtype=tensor.dtype).view(tensor.shape))


def makes_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation makes or takes nothing but small tensors of integers, which have values."""
    if func.namespace != "aten":
        return False
    has_tensors = False
    for value in tree_iter((args, kwargs)):
        if isinstance(value, torch.Tensor):
            if host_values(value) is None and (isinstance(value, FakeTensor) or value.numel() > _MOST_REAL):
                return False
            has_tensors = True
    dtype = kwargs.get("dtype")
    if has_tensors:
        return dtype is None or not dtype.is_floating_point
    device = kwargs.get("device")
    if dtype is None or dtype.is_floating_point or (device is not None and torch.device(device).type == "meta"):
        return False
    size = args[0] if args else None
    return isinstance(size, list | tuple) and prod(size) <= _MOST_REAL
