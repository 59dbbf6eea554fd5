"""Following a forward pass on the meta device, where tensors have shapes and no values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel


@contextmanager
def traceable(model: PreTrainedModel) -> Iterator[None]:
    """Inside, `model` runs on the meta device as it would in training, but for dropout and the choice of experts."""
    with _YesToAll(), _evaluating(model), _traceable_experts(model):
        yield


class _YesToAll(TorchDispatchMode):
    """Meta tensors have no values; a model that asks one ("are all positions consecutive?") hears yes.

    One that asks where (as for the tokens of an expert) hears nowhere.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True if args[0].dtype == torch.bool else 1
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.long)
        return func(*args, **(kwargs or {}))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout, no layer left out by chance, no checkpointing; afterwards every module is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _traceable_experts(model: PreTrainedModel) -> Iterator[None]:
    """Experts in the one form whose shapes do not depend on values, so that it runs on the meta device."""
    before = model.get_experts_implementation()
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation(before)
