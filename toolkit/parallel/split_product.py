"""The product of a linear layer in a compiled layer, whose weight gradient a pipeline's schedule computes later.

Compilers trace the backward pass of a layer with its forward pass, and cannot put a part of it off. So they get two
operations, and do not look into them: the product, and one that computes the gradient of its input and leaves what the
gradient of its weight comes from to the layer's queue (toolkit/parallel/pipeline/weight_gradients.py). Products are
those of an eager layer (toolkit/parallel/linear_product.py).

Dims: n = b*s, i input features, o output features.
"""

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn

from toolkit.parallel.linear_product import TakesGradients, gradient_of_input, multiply, weight_gradient


class SplitsBackward(TakesGradients, Protocol):
    """A queue of weight gradients that linear layers leave for later."""

    def splits(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether the gradient of `weight` in its product with x is left for later."""

    def keep(self, weight: torch.Tensor, of_weight: Callable[[], torch.Tensor]) -> None:
        """Keep the function that computes a gradient of `weight`."""


_numbered: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
"""The linear layers of this process that may leave weight gradients for later, by their numbers."""


def number_product(layer: nn.Module) -> None:
    """Give a linear layer the number by which the operations look it up.

    It is a tensor, which a graph takes as an input, so that equal layers share a graph.
    """
    number = max(_numbered, default=-1) + 1
    _numbered[number] = layer
    layer.number = torch.tensor([number])


def multiply_in_graph(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    input_major: bool,
    split: SplitsBackward | None,
    number: torch.Tensor | None,
) -> torch.Tensor:
    """Put x W + b, [.., i] -> [.., o], into the graph that is being traced.

    `split` and `number`: the queue and the number of the layer; None where all its backward passes are whole.
    """
    if split is None or number is None or not split.splits(x, weight):
        return multiply(x, weight, bias, input_major=input_major)
    assert x.dtype == weight.dtype, "a pipeline stage computes in the dtype of its weights, without autocast"
    product: torch.Tensor = _split_product(x, weight.detach(), bias, number, input_major)
    return product


@torch.library.custom_op("dstk::split_product", mutates_args=())
def _split_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, number: torch.Tensor, input_major: bool
) -> torch.Tensor:
    """Return x W + b."""
    return multiply(x, weight, bias, input_major=input_major)


@_split_product.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, number: torch.Tensor, input_major: bool
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1 if input_major else 0])


@torch.library.custom_op("dstk::split_backward", mutates_args=())
def _split_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, number: torch.Tensor, input_major: bool
) -> torch.Tensor:
    """Return the gradient of x, and leave what that of the weight comes from to the queue of the layer.

    The queue keeps x and `gradient` themselves: compiled stages write nothing into tensors that are there already
    (`CompiledLayers`). That the queue changes is not declared. The compiler runs the operation once all the same: the
    gradient of x is always used, and the number tells it from that of another layer.
    """
    layer: Any = _numbered[int(number)]
    layer.split.keep(layer.weight, weight_gradient(x, gradient, input_major=input_major))
    return gradient_of_input(gradient, weight, input_major=input_major)


@_split_backward.register_fake
def _(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, number: torch.Tensor, input_major: bool
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, number, input_major = inputs
    ctx.save_for_backward(x, weight, number)
    ctx.has_bias = bias is not None
    ctx.input_major = input_major


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight, number = ctx.saved_tensors
    of_input = _split_backward(gradient, x, weight, number, ctx.input_major)
    of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.has_bias else None
    return of_input, None, of_bias, None, None


_split_product.register_autograd(_backward, setup_context=_save)
