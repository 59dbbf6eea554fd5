"""Tiled MLPs: a decoder layer's MLP computes a tile of its tokens at a time: its wide tensors never exist whole.

The forward pass saves the MLP's input alone; the backward pass computes each tile again, with its gradients (Bekman et
al. 2025, "Arctic Long Sequence Training", section 3.1). Weights are inputs of the function: their gradients are summed
over the tiles in fp32 and handed to autograd once, so that every engine reduces them once, and hooks on them run once.
Under ZeRO-3 the MLP is one unit that is gathered before it runs and before its backward pass, not for every tile.

Dims: b samples, s positions, h hidden.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from toolkit.errors import ModelError
from toolkit.model_init.model_modules import decoder_layers
from toolkit.parallel.experts.sharding import experts_in
from toolkit.parallel.pipeline.stage import NonLocalLayer
from toolkit.parallel.tensor.adapter_layers import AdapterDropout

_ADDS_IN_PLACE = ("falcon",)
"""Families whose decoder layers add to the output of the MLP in place."""
_Place = tuple[nn.Module, str, nn.Parameter]
"""A module and the name of a parameter of it."""


def tile_mlps(model: PreTrainedModel) -> None:
    """Compute the MLPs of `model` in tiles. Raises ModelError for a model whose MLPs would then differ."""
    layers = [layer for layer in decoder_layers(model) if not isinstance(layer, NonLocalLayer)]
    reason = next(filter(None, map(_obstacle, layers)), None)
    if any(True for _ in experts_in(model)):
        reason = "experts choose tokens of a whole micro-batch"
    if reason is not None:
        settings = (("parallel.tiled_mlp", True), ("model_type", model.config.model_type))
        raise ModelError.between(settings, reason, ("parallel.tiled_mlp", False))
    for layer in layers:
        mlp = layer.get_submodule("mlp")
        _tile(mlp)
        if model.config.model_type in _ADDS_IN_PLACE:
            _copy_output(mlp)


def _obstacle(layer: nn.Module) -> str | None:
    mlp = getattr(layer, "mlp", None)
    if not isinstance(mlp, nn.Module):
        return "its layers have no module named mlp"
    parameters = inspect.signature(type(mlp).forward).parameters.values()
    required = [parameter for parameter in parameters if parameter.default is parameter.empty]
    if len(required) != 2:
        return "its MLP takes more than the hidden state"
    for module in mlp.modules():
        if isinstance(module, AdapterDropout) or (isinstance(module, nn.Dropout) and module.p > 0):
            return "dropout would draw other numbers for each tile"
    return None


def _tile(mlp: nn.Module) -> None:
    plain = mlp.forward
    mlp._z3_leaf = True  # type: ignore[assignment]  # DeepSpeed's mark of a unit of ZeRO-3

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return torch.cat([plain(tile.contiguous()) for tile in _tiles(hidden)], dim=-2)
        trained = [
            (module, name, parameter)
            for module in mlp.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        weights = (parameter for _, _, parameter in trained)
        result: torch.Tensor = _TiledMlp.apply(plain, trained, hidden, *weights)  # type: ignore[no-untyped-call]
        return result

    mlp.forward = forward
    mlp.register_forward_pre_hook(_require_gradient)


def _require_gradient(mlp: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
    """Have the input of a unit of ZeRO-3 require a gradient, which that of the first layer does not beside adapters.

    DeepSpeed releases the unit's weights in a full backward hook, and PyTorch calls that before the unit's backward
    pass where no input requires a gradient.
    """
    hidden = arguments[0]
    is_sharded = any(hasattr(parameter, "ds_id") for parameter in mlp.parameters())
    if not is_sharded or hidden.requires_grad or not torch.is_grad_enabled():
        return None
    return (hidden.detach().requires_grad_(), *arguments[1:])


def _copy_output(mlp: nn.Module) -> None:
    """Let the MLP return a copy of its output. Call this after `_tile`.

    DeepSpeed reduces the gradients of a unit of ZeRO-3 in a full backward hook. With such a hook PyTorch returns a view
    of the output, and raises an error where a layer adds to it in place.
    """
    family = type(mlp)

    def call(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        output: torch.Tensor = family.__call__(module, *arguments, **keywords)
        return output.clone() if output.requires_grad else output

    # Hooks run inside `__call__`, which Python looks up on the class: only another class can copy what they return.
    mlp.__class__ = type(f"{family.__name__}Copied", (family,), {"__call__": call})


def _tiles(hidden: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split [b, s, h] along s into tiles of some h tokens, as the paper does: then they weigh what a weight does."""
    tokens = hidden.numel() // hidden.shape[-1]
    return hidden.chunk(min(hidden.shape[-2], -(-tokens // hidden.shape[-1])), dim=-2)


class _TiledMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plain: Callable[[torch.Tensor], torch.Tensor],
        trained: Sequence[_Place],
        hidden: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.plain = plain
        ctx.trained = trained
        device = hidden.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.save_for_backward(hidden)
        return torch.cat([plain(tile.contiguous()) for tile in _tiles(hidden)], dim=-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (hidden,) = ctx.saved_tensors
        copies = [place[2].detach().requires_grad_() for place in ctx.trained]
        sums = [torch.zeros_like(copy, dtype=torch.float32) for copy in copies]
        parts = []
        tiles = _tiles(hidden)
        for tile, of_output in zip(tiles, gradient.chunk(len(tiles), dim=-2), strict=True):
            input_of_tile = tile.contiguous().detach().requires_grad_()
            with torch.enable_grad(), torch.autocast(*ctx.autocast), _replaced(ctx.trained, copies):
                output = ctx.plain(input_of_tile)
            of_input, *of_weights = torch.autograd.grad(output, (input_of_tile, *copies), of_output)
            parts.append(of_input)
            for total, part in zip(sums, of_weights, strict=True):
                total += part
        of_weights = [total.to(copy.dtype) for total, copy in zip(sums, copies, strict=True)]
        return None, None, torch.cat(parts, dim=-2), *of_weights


@contextmanager
def _replaced(places: Sequence[_Place], copies: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let modules compute with copies of their parameters, on which nobody has hooks."""
    for (module, name, _), copy in zip(places, copies, strict=True):
        module._parameters[name] = copy  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
