"""The loss: the sum of the token losses of the global batch, divided by its number of target tokens.

Each micro-batch contributes a sum, never a mean, so the result does not depend on how the batch is split.

Dims: b samples, s positions, v vocabulary.
"""

import torch
import torch.nn.functional as F

IGNORE = -100
"""Label of positions without a loss."""


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum the token losses in nats, fp32, a scalar.

    logits [b, s, v] in any floating dtype; labels [b, s], already shifted: the next token of each position, or IGNORE.
    """
    flat = logits.reshape(-1, logits.shape[-1]).float()  # [b, s, v] -> [b*s, v]
    return F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORE, reduction="sum")


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token in nats, fp32 [b, s], 0 where it is ignored; arguments as in `token_loss_sum`."""
    flat = logits.reshape(-1, logits.shape[-1]).float()  # [b, s, v] -> [b*s, v]
    losses = F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORE, reduction="none")
    return losses.view(labels.shape)  # [b*s] -> [b, s]


def sample_loss_sums(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum the token losses of each sample, [b]; arguments as in `token_loss_sum`."""
    return token_losses(logits, labels).sum(dim=1)
