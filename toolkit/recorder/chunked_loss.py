"""The chunked loss of other frameworks, as the recorder allocates it; the toolkit's own is counted in
estimate/recorded/chunked_head.py.

The forward pass makes a chunk's logits, puts their gradient in the same memory, and from it the gradients of the hidden
states and of the head's weight, which it keeps for the backward pass (Liger-Kernel, ops/fused_linear_cross_entropy.py).

Dims: n tokens, c tokens of a chunk, h hidden, v vocabulary.
"""

from typing import Any

import torch
from torch import nn


class HiddenStates(nn.Module):
    """Takes the place of an LM head, whose parameters it keeps: the model returns hidden states instead of logits."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the head would multiply."""
        return hidden


class ChunkedLoss(torch.autograd.Function):
    """The loss of hidden states [n, h], in what it allocates. All chunks are alike, so one stands for all."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, tokens: int) -> torch.Tensor:
        """Allocate what a chunk of so many `tokens` takes; there are no values to compute."""
        gradients = [torch.zeros_like(hidden), torch.zeros_like(weight) if weight.requires_grad else None]
        losses = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        chunk = hidden[:1].expand(tokens, -1)
        logits = chunk @ weight.t()  # [c, h] -> [c, v]
        if gradients[1] is not None:
            gradients[1] += logits.t() @ chunk  # [v, c] -> [v, h]
        ctx.save_for_backward(*gradients)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradients that the forward pass made."""
        return (*ctx.saved_tensors, None)
