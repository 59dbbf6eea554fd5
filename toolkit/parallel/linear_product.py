"""The product of a linear layer, whose weight gradient somebody may compute later.

The backward pass of y = x W has two products: one for the gradient of x, on which other layers and other ranks wait,
and one for that of W, which nothing needs before the update. Two parts of the toolkit take the second one out of
autograd's order: pipeline schedules, whose W is an instruction of its own (toolkit/parallel/pipeline/
weight_gradients.py), and tensor parallelism, which sums the gradient of x meanwhile (toolkit/parallel/tensor/
overlapped_gradients.py). Products are those of autograd, to the bit.

Dims: n = b*s, i input features, o output features.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

Defer = Callable[[Callable[[], torch.Tensor]], None]
"""Takes a function that computes a gradient of one weight, for later."""


class TakesGradients(Protocol):
    """What computes gradients of weights later."""

    def taking(self, x: torch.Tensor, weight: torch.Tensor) -> Defer | None:
        """Return what takes the gradient of `weight` in its product with x; None: autograd computes it."""


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    input_major: bool = False,
    defer: Defer | None = None,
) -> torch.Tensor:
    """x W + b, [.., i] -> [.., o]; the backward pass hands the gradient of `weight` to `defer`, if given.

    `weight` is [o, i], or [i, o] if `input_major`.
    """
    if defer is None:
        return F.linear(x, weight.t() if input_major else weight, bias)
    # The weight is hidden from autograd. Otherwise its hooks would run here as well, on a gradient that is not there.
    product: torch.Tensor = _DeferringProduct.apply(x, bias, weight.detach(), input_major, defer)
    return product


class _DeferringProduct(torch.autograd.Function):
    """x W + b. Backward: the gradients of x and b, by the operations of autograd; that of W is deferred."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, input_major: bool, defer: Defer
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.input_major = input_major
        ctx.defer = defer
        return multiply(x, weight, bias, input_major=input_major)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.defer(weight_gradient(x, gradient, input_major=ctx.input_major))
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        of_input = gradient_of_input(gradient, weight, input_major=ctx.input_major)
        return of_input, of_bias, None, None, None


def gradient_of_input(gradient: torch.Tensor, weight: torch.Tensor, *, input_major: bool) -> torch.Tensor:
    """Return the gradient of x in y = x W, [.., i], from that of y, [.., o]."""
    rows = gradient.reshape(-1, gradient.shape[-1])  # [.., o] -> [n, o]
    of_input = rows.mm(weight.t() if input_major else weight)  # [n, o] -> [n, i]
    return of_input.view(*gradient.shape[:-1], of_input.shape[-1])


def weight_gradient(x: torch.Tensor, gradient: torch.Tensor, *, input_major: bool) -> Callable[[], torch.Tensor]:
    """Return a function that computes the gradient of W in y = x W, from x, [.., i], and the gradient of y, [.., o]."""
    rows = gradient.reshape(-1, gradient.shape[-1])  # [.., o] -> [n, o]
    # With its history the input would keep what a stage received, and the gradient of that, until W.
    inputs = x.detach().reshape(-1, x.shape[-1])  # [.., i] -> [n, i]

    def of_weight() -> torch.Tensor:
        return inputs.t().mm(rows) if input_major else rows.t().mm(inputs)

    return of_weight
