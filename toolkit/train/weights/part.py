"""What a rank keeps of a model, as those see it who fill it with weights."""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

OnLayer = Callable[[nn.Module], None]
"""Called with what is filled and cut: every decoder layer, every module outside them with parameters of its own, and at
the end the model. ZeRO-3 shards them there."""


class ModelPart(Protocol):
    """The cuts of tensor and pipeline parallelism."""

    def begin(self, model: PreTrainedModel) -> None:
        """Take out, on the meta device, what other ranks own."""

    def cut_layer(self, layer: nn.Module, fill: Callable[[nn.Module], None]) -> None:
        """Split a decoder layer; `fill` gives values to what stays whole."""

    def cut_rest(self, model: PreTrainedModel, fill: Callable[[nn.Module], None], done: OnLayer) -> None:
        """Split embedding and head, calling `done` with each; `fill` gives values to what stays whole."""


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The children of the outermost module lists, in order: the units in which a model is filled."""
    layers: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                layers.extend(child)
            else:
                visit(child)

    visit(model)
    return layers


def outside_layers(model: nn.Module) -> list[nn.Module]:
    """The other modules that have parameters of their own, children before their parents."""
    inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        if id(module) not in inside and any(parameter is not None for parameter in module._parameters.values()):
            found.append(module)

    visit(model)
    return found


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters only: buffers such as rotary frequencies lose their meaning in 16 bits."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not parameter.is_meta and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.to(dtype)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state dict holds, by name."""
    persistent = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer.detach()
