"""Weight gradients that linear layers defer: a backward pass split into B and W (Qi et al. 2023, section 2).

B is autograd's own backward pass, in which a linear layer hands on the gradient of its input, and defers that of its
weight (toolkit/parallel/linear_product.py) to a queue. W empties the queue. Everything that is not a linear layer's
weight has its gradient in B: biases, norms, embeddings, experts, and a head that computes the loss itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from toolkit.parallel.linear_product import Defer, multiply
from toolkit.parallel.split_product import multiply_in_graph, number_product
from toolkit.parallel.tensor.linear import ParallelLinear
from toolkit.parallel.tensor.vocabulary import VocabParallelHead

Pending = list[tuple[torch.Tensor, Callable[[], torch.Tensor]]]
"""Weight, and what computes its gradient: of each linear layer of a stage."""


class WeightGradients:
    """The weight gradients of one rank that are still to be computed, by stage and micro-batch."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, int], Pending] = {}
        self._open: Pending | None = None
        self._splits = False

    def connect(self, model: nn.Module) -> None:
        """Let the linear layers of `model` defer their weights' gradients to this queue."""
        for module in model.modules():
            if type(module) in _SPLITTING:
                module.__class__ = _SPLITTING[type(module)]  # as for a head with a loss: hooks and names stay
            if isinstance(module, (ParallelLinear, _SplitLinear, _SplitConv1D)):
                module.split = self
                number_product(module)
            elif type(module) is VocabParallelHead:  # not one that computes the loss; heads are not compiled
                module.split = self

    @property
    def count(self) -> int:
        """Stages and micro-batches whose W is still to run."""
        return len(self._pending)

    @contextmanager
    def splitting(self, *, is_split: bool) -> Iterator[None]:
        """Whether what runs forward inside has a split backward pass. Also around B, where layers are recomputed."""
        self._splits = is_split
        try:
            yield
        finally:
            self._splits = False

    @contextmanager
    def collecting(self, stage: int, micro_batch: int) -> Iterator[None]:
        """Keep what the weight gradients of the backward pass inside are computed from."""
        assert (stage, micro_batch) not in self._pending, "a backward pass runs once"
        self._open = []
        self._pending[stage, micro_batch] = self._open
        try:
            yield
        finally:
            self._open = None

    def compute(self, stage: int, micro_batch: int) -> None:
        """Run W: add the gradients of the weights of a stage and micro-batch, and let go of what they come from.

        They go through autograd, so that hooks of parameters run as in a whole backward pass: those of tensor
        parallelism and those of ZeRO.
        """
        pending = self._pending.pop((stage, micro_batch))
        while pending:
            weight, of_weight = pending.pop()
            gradient = of_weight()
            del of_weight
            torch.autograd.backward(weight, gradient)

    def taking(self, x: torch.Tensor, weight: torch.Tensor) -> Defer | None:
        """Return what takes the gradient of `weight` in its product with x, where the backward pass is split."""
        return partial(self.keep, weight) if self.splits(x, weight) else None

    def splits(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether the backward pass of a product is split.

        An input without gradient has no B that could collect: then the backward pass stays whole.
        """
        return self._splits and torch.is_grad_enabled() and weight.requires_grad and x.requires_grad

    def keep(self, weight: torch.Tensor, of_weight: Callable[[], torch.Tensor]) -> None:
        """Keep the function that computes the gradient of `weight`, for the W of the backward pass that is running."""
        assert self._open is not None, "the backward pass of a split forward pass is split"
        self._open.append((weight, of_weight))


class _SplitLinear(nn.Linear):
    split: WeightGradients
    number: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _multiply(self, x, input_major=False)


class _SplitConv1D(Conv1D):  # type: ignore[misc]
    split: WeightGradients
    number: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _multiply(self, x, input_major=True)


def _multiply(layer: _SplitLinear | _SplitConv1D, x: torch.Tensor, *, input_major: bool) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return multiply_in_graph(
            x, layer.weight, layer.bias, input_major=input_major, split=layer.split, number=layer.number
        )
    defer = layer.split.taking(x, layer.weight)
    return multiply(x, layer.weight, layer.bias, input_major=input_major, defer=defer)


_SPLITTING: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: _SplitLinear, Conv1D: _SplitConv1D}
"""Classes of linear layers, and what replaces them. A subclass of another library stays: its backward pass is whole."""
