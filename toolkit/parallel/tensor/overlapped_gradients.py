"""Weight gradients of column-parallel layers, computed while the gradient of their input is summed over the ranks.

The layers of a block share their input x, whose gradient tensor-parallel ranks sum. Each of them computes its part of
that and defers the gradient of its weight (toolkit/parallel/linear_product.py). Behind the last one the sum is started,
all weight gradients are computed, and the sum is awaited. The idea is that of Megatron-LM's
LinearWithGradAccumulationAndAsyncCommunication, which does it within one layer.

Products, and the order in which the gradients of x are added, are those of autograd, to the bit. The function at the
entrance of the block, whose backward pass sums, takes the weights as inputs and returns their gradients: autograd
accumulates them, and runs all hooks on them, as it does anywhere else.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from toolkit.parallel.linear_product import Defer


class OverlappedGradients:
    """The gradients of `weights` that one backward pass defers for the time of a sum."""

    is_awaited = False
    """Whether a collective has these weights as inputs, whose backward pass computes their gradients."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self.weights = tuple(weights)
        self._left: list[list[Callable[[], torch.Tensor]]] = [[] for _ in self.weights]

    @classmethod
    def of(
        cls, x: torch.Tensor, weights: Iterable[torch.Tensor], group: dist.ProcessGroup
    ) -> "OverlappedGradients | None":
        """Prepare for layers that multiply x, whose gradient is summed over `group`; None where they can defer none.

        A frozen weight has none. Under ZeRO-3 a weight is only there around its layer's backward pass, and autocast
        keeps the casts of weights to itself.
        """
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return None
        if group.size() == 1 or not (torch.is_grad_enabled() and x.requires_grad):
            return None
        trained = [weight for weight in weights if weight.requires_grad and not hasattr(weight, "ds_id")]
        return cls(trained) if trained else None

    def taking(self, x: torch.Tensor, weight: torch.Tensor) -> Defer | None:
        """Return what takes the gradient of `weight` in its product with x; None: autograd computes it."""
        if not (self.is_awaited and torch.is_grad_enabled() and x.requires_grad):
            return None
        for index, each in enumerate(self.weights):
            if each is weight:
                return self._left[index].append
        return None

    def compute(self) -> list[torch.Tensor | None]:
        """Return the gradients of all weights that were deferred since the last call; None for a weight without one."""
        return [_total(computations) for computations in self._left]


def _total(computations: list[Callable[[], torch.Tensor]]) -> torch.Tensor | None:
    total = None
    while computations:
        gradient = computations.pop(0)()
        total = gradient if total is None else total + gradient
    return total
