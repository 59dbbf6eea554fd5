"""Functions of PyTorch that treat fake tensors unlike real ones, replaced while a rank is rehearsed."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from toolkit.recorder.run_pass import run_backward


@contextmanager
def torch_on_fake_tensors(device: torch.device) -> Iterator[None]:
    """Replace the functions of PyTorch that treat fake tensors unlike real ones of the device."""
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(mock.patch.object(dist, "get_backend", return_value="nccl"))
            stack.enter_context(mock.patch.object(FakeTensor, "data", _DATA, create=True))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _applied))
        stack.enter_context(mock.patch.object(torch.autograd, "backward", _backward))
        stack.enter_context(mock.patch.object(torch.Tensor, "backward", _backward_of))
        yield


def _applied(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Apply a function to parameters and buffers, as nn.Module does to real ones; fake ones it would swap."""
    for part in module.modules() if recurse else [module]:
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                applied = function(parameter)
            if torch._has_compatible_shallow_copy_type(parameter, applied):
                if applied is not parameter:
                    parameter.data = applied
            else:  # as peft moves adapters to the meta device
                part._parameters[name] = nn.Parameter(applied, parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = function(buffer)
    return module


def _set_data(tensor: FakeTensor, value: torch.Tensor) -> None:
    """Set the data of a fake tensor, and with it the device, which torch leaves as it was."""
    torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    if isinstance(value, FakeTensor):
        tensor.fake_device = value.fake_device


_DATA = property(torch.Tensor.data.__get__, _set_data)  # type: ignore[attr-defined]
"""The property `data` of fake tensors that move to another device with what they are set to."""


def _backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False, **_: Any
) -> None:
    """Stand in for torch.autograd.backward."""
    roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    if isinstance(grad_tensors, torch.Tensor):
        grad_tensors = (grad_tensors,)
    gradients = [None] * len(roots) if grad_tensors is None else list(grad_tensors)
    for index, root in enumerate(roots):
        if gradients[index] is None and root.requires_grad:
            gradients[index] = torch.ones_like(root)
    keep = create_graph if retain_graph is None else retain_graph
    run_backward(roots, tuple(gradients), retain_graph=keep, create_graph=create_graph)


def _backward_of(
    tensor: torch.Tensor, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, **_: Any
) -> None:
    _backward(tensor, gradient, retain_graph, create_graph)
