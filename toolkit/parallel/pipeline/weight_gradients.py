"""Weight gradients that linear layers leave for later: a backward pass split into B and W (Qi et al. 2023, section 2).

B is autograd's own backward pass, in which a linear layer hands on the gradient of its input, and puts what its
weight's gradient is computed from into a queue. W empties the queue. Everything that is not a linear layer's weight has
its gradient in B: biases, norms, embeddings, experts, and a head that computes the loss itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from toolkit.parallel.tensor.linear import ParallelLinear, multiply
from toolkit.parallel.tensor.vocabulary import VocabParallelHead

Pending = list[tuple[nn.Parameter, torch.Tensor, torch.Tensor, bool]]
"""Weight, input, gradient of the output, and whether the weight is [in, out]: of each linear layer of a stage."""


class WeightGradients:
    """The weight gradients of one rank that are still to be computed, by stage and micro-batch."""

    def __init__(self) -> None:
        self._pending: dict[tuple[int, int], Pending] = {}
        self._open: Pending | None = None
        self._splits = False

    def connect(self, model: nn.Module) -> None:
        """Let the linear layers of `model` leave their weights' gradients to this queue."""
        for module in model.modules():
            if isinstance(module, ParallelLinear):
                module.multiply = self.multiply
                continue
            deferred = _DEFERRED.get(type(module))
            if deferred is not None:
                module.__class__ = deferred  # as for the head: hooks, references and names stay
                module.weight_gradients = self  # type: ignore[assignment]

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
        self._open = self._pending[stage, micro_batch] = []
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
            weight, x, gradient, input_major = pending.pop()
            with torch.no_grad():
                rows = x.flatten(0, -2)
                slopes = gradient.flatten(0, -2)
                product = rows.t() @ slopes if input_major else slopes.t() @ rows
            del x, gradient, rows, slopes
            torch.autograd.backward(weight, product)

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, input_major: bool
    ) -> torch.Tensor:
        """x W^T + b, or with `input_major` x W + b, whose weight gradient is left for W where the pass is split.

        An input without gradient has no B that could collect: then the backward pass stays whole.
        """
        if not self._splits or not torch.is_grad_enabled() or not (weight.requires_grad and x.requires_grad):
            return multiply(x, weight, bias, input_major=input_major)
        result: torch.Tensor = _Split.apply(x, bias, weight.detach(), _Leaves(self, weight, input_major))
        return result

    def keep(self, weight: Any, x: torch.Tensor, gradient: torch.Tensor, *, input_major: bool) -> None:
        """Put one linear layer into the open queue."""
        assert self._open is not None, "the backward pass of a split forward pass is split"
        self._open.append((weight, x, gradient, input_major))


class _Leaves:
    """The place in which the weight's gradient of one product is left. The weight itself is hidden from autograd.

    Otherwise hooks of the parameter would run in B as well, on a gradient that is not there.
    """

    def __init__(self, queue: WeightGradients, weight: torch.Tensor, input_major: bool) -> None:
        self.queue = queue
        self.weight = weight
        self.input_major = input_major


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, leaves: _Leaves
    ) -> torch.Tensor:
        ctx.leaves = leaves
        ctx.save_for_backward(x, weight)
        return multiply(x, weight, bias, input_major=leaves.input_major)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        leaves = ctx.leaves
        of_input = gradient @ (weight.t() if leaves.input_major else weight)
        of_bias = gradient.flatten(0, -2).sum(dim=0) if ctx.needs_input_grad[1] else None
        leaves.queue.keep(leaves.weight, x, gradient, input_major=leaves.input_major)
        return of_input, of_bias, None, None


class _DeferredLinear(nn.Linear):
    weight_gradients: WeightGradients

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight_gradients.multiply(x, self.weight, self.bias, input_major=False)


class _DeferredHead(VocabParallelHead):
    weight_gradients: WeightGradients

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight_gradients.multiply(x, self.weight, self.bias, input_major=False)


class _DeferredConv1D(Conv1D):  # type: ignore[misc]
    weight_gradients: WeightGradients

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight_gradients.multiply(x, self.weight, self.bias, input_major=True)


_DEFERRED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _DeferredLinear,
    VocabParallelHead: _DeferredHead,
    Conv1D: _DeferredConv1D,
}
"""Classes of linear layers, and what replaces them. A subclass of another library stays: its backward pass is whole."""
