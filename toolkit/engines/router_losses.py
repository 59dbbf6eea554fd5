"""The losses that keep routers balanced, of the tokens that are no padding.

Dims: t = b * s tokens of a micro-batch (where ranks share sequences, of this rank's part of them), e experts, k experts
for each token. A loss is linear in the probabilities once the counts are known, and counts have no gradient. So ranks
that share sequences sum the counts, and each takes its part of the loss from its own probabilities.
"""

from collections.abc import Callable

import torch

from toolkit.engines.router_records import RouterOutput

SumOverSequence = Callable[[torch.Tensor], torch.Tensor]
"""Sums, without a gradient, over the ranks that share the sequences."""


def count_assignments(experts: torch.Tensor, mask: torch.Tensor | None, count: int) -> torch.Tensor:
    """Count the tokens of each expert, [e], given the experts [t, k] of each token; `mask` [t] is 0 for padding."""
    weights = torch.ones_like(experts, dtype=torch.float32) if mask is None else mask[:, None].expand_as(experts)
    return torch.zeros(count, device=experts.device).scatter_add_(0, experts.reshape(-1), weights.reshape(-1))


def pooled_sums(output: RouterOutput, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the sums of Hugging Face's `load_balancing_loss_func` over one layer: probabilities [e], assignments [e].

    As there, an assignment is to the experts with the largest probabilities, also where the family adds a bias first.
    """
    probabilities = output.logits.float().softmax(dim=-1)
    chosen = probabilities.topk(output.experts.shape[-1], dim=-1).indices
    counted = count_assignments(chosen, mask, probabilities.shape[-1])
    if mask is not None:
        probabilities = probabilities * mask[:, None]
    return torch.cat([probabilities.sum(0), counted])


def pooled_loss(probabilities: torch.Tensor, shares: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return e Σ_e shares_e (probabilities_e / rows), Hugging Face's formula where `shares` are assignments / rows."""
    return len(probabilities) * (shares * (probabilities / rows)).sum()


def sequence_loss(
    output: RouterOutput, mask: torch.Tensor | None, lengths: torch.Tensor, sums: SumOverSequence, *, sigmoid: bool
) -> torch.Tensor:
    """Return the balance loss of one layer, the mean over sequences (DeepSeek-V3, equations 17 to 20, without alpha).

    `lengths` [b] counts the tokens of each sequence. Σ_e f_e P_e, where f_e = e / (k T) times the assignments, and P_e
    the mean over T tokens of the scores, which are normalized to a sum of 1.
    """
    samples = len(lengths)
    k = output.experts.shape[-1]
    count = output.logits.shape[-1]
    logits = output.logits.float()
    scores = logits.sigmoid() if sigmoid else logits.softmax(dim=-1)
    if sigmoid:
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    is_token = torch.ones(len(scores), device=scores.device) if mask is None else mask
    scores = (scores * is_token[:, None]).view(samples, -1, count).sum(1)  # [t, e] -> [b, e]
    sample_of_token = torch.arange(samples, device=is_token.device).repeat_interleave(len(is_token) // samples)
    places = output.experts + count * sample_of_token[:, None]
    assignments = sums(count_assignments(places, mask, samples * count)).view(samples, count)
    tokens = lengths[:, None].float()
    return (count / k * (assignments / tokens) * (scores / tokens)).sum() / samples


def z_loss(output: RouterOutput, mask: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """Return the router z-loss of one layer: the mean over `rows` tokens of (log Σ_e exp logit_e)² (ST-MoE, eq. 5)."""
    squares = output.logits.float().logsumexp(dim=-1).square()
    return (squares if mask is None else squares * mask).sum() / rows
