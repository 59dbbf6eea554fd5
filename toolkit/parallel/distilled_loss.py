"""The loss of distillation: token losses, and the divergence from a teacher whose top tokens are known.

The events of a position are the teacher's top k tokens, and one more for all other tokens; p is the teacher's
distribution over them and q the student's, both with logits divided by the temperature T (Hinton et al. 2015, arXiv
1503.02531, sec. 2). With one event for the rest, the divergence is one of two distributions, never below 0 and never
above that of all tokens, and with k = v it is exactly that.

    L = (1 - α) · token loss + α T² · D,    D = Σ_e p_e log(p_e / q_e)  or, reverse,  Σ_e q_e log(q_e / p_e)

With q_j the student's probability of token j, in event e(j), the derivatives by the logit z_j are

    forward  T ∂D/∂z_j = q_j - p_j of a top token,  q_j (1 - p_e / q_e) of another
    reverse  T ∂D/∂z_j = q_j (log(q_e / p_e) - D)

Dims: n tokens, v vocabulary (rows of this rank), k top tokens of the teacher.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from toolkit.parallel.loss import IGNORE
from toolkit.parallel.tensor.vocabulary import VocabularyShard, columns_of, mask_padding

_SMALLEST = 1e-37
"""What is added to the probability of all other tokens, which may be 0 in fp32."""


@dataclass(frozen=True, kw_only=True)
class TeacherTokens:
    """What is known of the teacher's distribution at each position: ids and log-probabilities in nats, at the
    temperature."""

    ids: torch.Tensor
    """The top tokens, different ones, int64 [..., k]."""
    logps: torch.Tensor
    """Log-probabilities of these and, last, of all others together, fp32 [..., k + 1]."""

    def map(self, function: Any) -> "TeacherTokens":
        """Return a copy with other tensors."""
        return TeacherTokens(ids=function(self.ids), logps=function(self.logps))


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Constants of the loss."""

    weight: float
    temperature: float
    kind: Literal["forward", "reverse"]


@dataclass(frozen=True, kw_only=True)
class DistilledLosses:
    """Losses of tokens in nats, [n] each, 0 where they are ignored."""

    losses: torch.Tensor
    """What is minimized."""
    token_losses: torch.Tensor
    divergences: torch.Tensor
    grad_logits: torch.Tensor | None
    """Derivatives of `losses` by the logits, [n, v]."""


def distilled_losses(
    logits: torch.Tensor,
    targets: torch.Tensor,
    teacher: TeacherTokens,
    divergence: Divergence,
    *,
    shard: VocabularyShard,
    group: dist.ProcessGroup | None,
    wants_gradients: bool,
) -> DistilledLosses:
    """Compute losses of this rank's logits [n, v], in fp32 or more, which it overwrites; the same on all of `group`.

    targets [n], of the full vocabulary or IGNORE; teacher [n, k]. Ranks exchange k + 4 numbers for each token.
    """
    mask_padding(logits, shard)
    largest = logits.amax(dim=-1)
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits.sub_(largest.unsqueeze(-1))
    target_columns, target_here = columns_of(targets, shard)
    columns, here = columns_of(teacher.ids, shard)  # [n, k]
    target_logit = torch.where(target_here, logits.gather(-1, target_columns.unsqueeze(-1)).squeeze(-1), 0.0)
    top = torch.where(here, logits.gather(-1, columns), 0.0) / divergence.temperature
    softmax = logits.exp()  # [n, v]
    others = logits.div_(divergence.temperature).exp_()  # [n, v]
    # The top tokens of a position differ, so that each of their columns becomes exactly 0.
    others.scatter_add_(-1, columns, torch.where(here, -others.gather(-1, columns), 0.0))
    parts = torch.cat([torch.stack([softmax.sum(-1), others.sum(-1), target_logit], dim=-1), top], dim=-1)  # [n, k + 3]
    if group is not None:
        dist.all_reduce(parts, group=group)
    normalizer, rest, target_logit = parts[:, :3].unbind(-1)
    top = parts[:, 3:]
    tempered = rest + top.exp().sum(-1)
    token_losses = normalizer.log() - target_logit
    log_q = torch.cat([top, (rest + _SMALLEST).log().unsqueeze(-1)], dim=-1) - tempered.log().unsqueeze(-1)
    log_p = teacher.logps.to(log_q)
    if teacher.ids.shape[-1] == shard.size:  # there are no others
        log_q = log_q[:, :-1]
        log_p = log_p[:, :-1]
    log_p = log_p - log_p.logsumexp(-1, keepdim=True)  # stored in fp32: gradients take their sum for 1
    q = log_q.exp()
    p = log_p.exp()
    first, ratio = (p, log_p - log_q) if divergence.kind == "forward" else (q, log_q - log_p)
    divergences = (first * ratio).sum(-1)
    has_target = targets != IGNORE
    token_share = 1.0 - divergence.weight
    losses = token_share * token_losses + divergence.weight * divergence.temperature**2 * divergences
    result = [torch.where(has_target, each, 0.0) for each in (losses, token_losses, divergences)]
    grad_logits = None
    if wants_gradients:
        # By logits of top tokens [n, k], and, for each unit of probability, by those of others [n].
        k = teacher.ids.shape[-1]
        factor = has_target.to(softmax) * (divergence.weight * divergence.temperature)
        if divergence.kind == "forward":
            grad_top = q[:, :k] - p[:, :k]
            grad_others = 1.0 - (p[:, k] / q[:, k] if q.shape[-1] > k else 0.0)
        else:
            grad_top = q[:, :k] * (ratio[:, :k] - divergences.unsqueeze(-1))
            grad_others = (ratio[:, k] if q.shape[-1] > k else 0.0) - divergences
        grad_logits = others.mul_((factor * grad_others / tempered).unsqueeze(-1))
        grad_logits.scatter_add_(-1, columns, torch.where(here, factor.unsqueeze(-1) * grad_top, 0.0))
        share = has_target.to(softmax) * token_share
        grad_logits.add_(softmax.mul_((share / normalizer).unsqueeze(-1)))
        grad_logits[torch.arange(len(targets), device=targets.device), target_columns] -= share * target_here
    return DistilledLosses(losses=result[0], token_losses=result[1], divergences=result[2], grad_logits=grad_logits)


class DistilledLoss(torch.autograd.Function):
    """(logits [n, v], targets [n], teacher, weights [n], …) -> (weighted sum of losses, token losses, divergences)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        teacher: TeacherTokens,
        weights: torch.Tensor | None,
        divergence: Divergence,
        shard: VocabularyShard,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        exact = logits.detach().to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        wants_gradients = ctx.needs_input_grad[0]
        each = distilled_losses(
            exact, targets, teacher, divergence, shard=shard, group=group, wants_gradients=wants_gradients
        )
        if each.grad_logits is not None:
            grad_logits = each.grad_logits if weights is None else each.grad_logits.mul_(weights.unsqueeze(-1))
            ctx.save_for_backward(grad_logits)
        ctx.dtype = logits.dtype
        ctx.mark_non_differentiable(each.token_losses, each.divergences)
        losses = each.losses if weights is None else each.losses * weights
        return losses.sum(), each.token_losses, each.divergences

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (grad_logits,) = ctx.saved_tensors
        return (grad_logits * gradients[0]).to(ctx.dtype), None, None, None, None, None, None


def plain_distilled_losses(
    logits: torch.Tensor, targets: torch.Tensor, teacher: TeacherTokens, divergence: Divergence
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return losses, token losses and divergences [n] of full logits [n, v] by autograd: what others are held to."""
    has_target = targets != IGNORE
    token_losses = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    log_q = (logits / divergence.temperature).log_softmax(dim=-1)
    is_top = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, teacher.ids, True)
    events = [log_q.gather(-1, teacher.ids)]
    log_p = teacher.logps.to(log_q)
    if teacher.ids.shape[-1] < logits.shape[-1]:
        events.append(log_q.masked_fill(is_top, float("-inf")).logsumexp(dim=-1, keepdim=True))
    else:
        log_p = log_p[:, :-1]
    log_events = torch.cat(events, dim=-1)
    log_p = log_p - log_p.logsumexp(-1, keepdim=True)
    left, right = (log_p, log_events) if divergence.kind == "forward" else (log_events, log_p)
    divergences = torch.where(has_target, (left.exp() * (left - right)).sum(-1), 0.0)
    losses = (1.0 - divergence.weight) * token_losses + divergence.weight * divergence.temperature**2 * divergences
    return losses, token_losses, divergences


class TopTokens:
    """Collects a teacher's top tokens from logits of this rank, chunk by chunk, without gradients."""

    def __init__(self, top_k: int, temperature: float, *, vocabulary: int) -> None:
        """`vocabulary`: tokens of the student; any others of the teacher are among the rest."""
        self._top_k = top_k
        self._temperature = temperature
        self._vocabulary = vocabulary
        self._chunks: list[TeacherTokens] = []

    def add(self, logits: torch.Tensor, shard: VocabularyShard, group: dist.ProcessGroup | None) -> None:
        """Take logits [n, v] of this rank, in fp32 or more, which it overwrites."""
        mask_padding(logits, shard)
        logits.div_(self._temperature)
        largest = logits.amax(dim=-1, keepdim=True)
        if group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits.sub_(largest)
        known = max(0, min(shard.rows, self._vocabulary - shard.start))
        candidates = logits.clone() if known < shard.rows else logits
        candidates[:, known:] = float("-inf")
        values, columns = candidates.topk(min(self._top_k, shard.rows), dim=-1)  # [n, k']
        ids = columns + shard.start
        if group is not None:
            values = _gathered(values, group)
            ids = _gathered(ids, group)
        top, order = values.topk(self._top_k, dim=-1)  # [n, k]
        ids = ids.gather(-1, order)
        here_columns, here = columns_of(ids, shard)
        others = logits.exp_()
        others.scatter_add_(-1, here_columns, torch.where(here, -others.gather(-1, here_columns), 0.0))
        rest = others.sum(dim=-1, keepdim=True)
        if group is not None:
            dist.all_reduce(rest, group=group)
        normalizer = rest + top.exp().sum(dim=-1, keepdim=True)
        logps = torch.cat([top, (rest + _SMALLEST).log()], dim=-1) - normalizer.log()
        self._chunks.append(TeacherTokens(ids=ids, logps=logps.float()))

    def add_logits(
        self, logits: torch.Tensor, shard: VocabularyShard | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        """Take logits [b, s, v] of this rank in any dtype, which stay as they are."""
        flat = logits.flatten(0, -2)
        rows = flat.shape[-1]
        exact = torch.promote_types(flat.dtype, torch.float32)
        self.add(flat.to(exact, copy=True), shard or VocabularyShard(size=rows, start=0, rows=rows), group)

    def take(self) -> TeacherTokens:
        """Return what was collected since, [n, k]."""
        chunks = self._chunks
        self._chunks = []
        return TeacherTokens(
            ids=torch.cat([chunk.ids for chunk in chunks]), logps=torch.cat([chunk.logps for chunk in chunks])
        )


def _gathered(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Join the parts [n, k'] of all ranks, [n, t k']."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
