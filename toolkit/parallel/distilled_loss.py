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
from typing import Any, Literal, Self

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
    """Which divergence from the teacher is minimized, and how much of the loss it is."""

    weight: float
    """α: the share of the divergence in the loss; the token loss has the rest."""
    temperature: float
    """T, by which the logits of both models are divided."""
    kind: Literal["forward", "reverse"]
    """Forward: that of the student from the teacher, KL(p‖q); reverse: KL(q‖p)."""


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
    student = _student_of(logits, targets, teacher.ids, divergence.temperature, shard=shard, group=group)
    events = _events_of(student, teacher, divergence, has_rest=teacher.ids.shape[-1] < shard.size)
    token_losses = student.normalizer.log() - student.target_logits
    token_share = 1.0 - divergence.weight
    divergence_share = divergence.weight * divergence.temperature**2
    losses = token_share * token_losses + divergence_share * events.divergences
    has_target = targets != IGNORE
    grad_logits = None
    if wants_gradients:
        grad_logits = _grad_logits(student, events, divergence, has_target)
    return DistilledLosses(
        losses=torch.where(has_target, losses, 0.0),
        token_losses=torch.where(has_target, token_losses, 0.0),
        divergences=torch.where(has_target, events.divergences, 0.0),
        grad_logits=grad_logits,
    )


@dataclass(frozen=True, kw_only=True)
class _VocabularyColumns:
    """Columns of this rank's logits that hold given tokens; column 0 for those that another rank holds."""

    columns: torch.Tensor
    """int64, in the shape of the tokens."""
    is_here: torch.Tensor
    """Whether this rank holds the token, bool."""

    @classmethod
    def of(cls, tokens: torch.Tensor, shard: VocabularyShard) -> Self:
        columns, is_here = columns_of(tokens, shard)
        return cls(columns=columns, is_here=is_here)

    def logits_of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, k] of tokens [n, k]; 0 for those of another rank."""
        return torch.where(self.is_here, logits.gather(-1, self.columns), 0.0)

    def clear(self, values: torch.Tensor) -> None:
        """Set values [n, v] of tokens [n, k] to exactly 0: the tokens of a position differ."""
        values.scatter_add_(-1, self.columns, torch.where(self.is_here, -values.gather(-1, self.columns), 0.0))


@dataclass(frozen=True, kw_only=True)
class _Student:
    """What the student says. Logits are those less the largest one of their position, on all ranks."""

    exps: torch.Tensor
    """exp(logit) of this rank's tokens, [n, v]."""
    tempered_others: torch.Tensor
    """exp(logit / T) of this rank's tokens, 0 for the teacher's top ones, [n, v]."""
    normalizer: torch.Tensor
    """Sum of exp(logit) over all tokens, [n]."""
    target_logits: torch.Tensor
    """[n]."""
    tempered_top: torch.Tensor
    """logit / T of the teacher's top tokens, [n, k]."""
    tempered_rest: torch.Tensor
    """Sum of exp(logit / T) over all other tokens, [n]."""
    tempered_normalizer: torch.Tensor
    """Sum of exp(logit / T) over all tokens, [n]."""
    target: _VocabularyColumns
    """The column of each target, [n]."""
    top: _VocabularyColumns
    """The columns of the teacher's top tokens, [n, k]."""


def _student_of(
    logits: torch.Tensor,
    targets: torch.Tensor,
    top_ids: torch.Tensor,
    temperature: float,
    *,
    shard: VocabularyShard,
    group: dist.ProcessGroup | None,
) -> _Student:
    """Return what logits [n, v] say of targets [n] and of top tokens [n, k]; overwrites the logits."""
    mask_padding(logits, shard)
    subtract_largest(logits, group)
    target = _VocabularyColumns.of(targets, shard)
    top = _VocabularyColumns.of(top_ids, shard)
    target_logits = logits.gather(-1, target.columns.unsqueeze(-1)).squeeze(-1)  # [n, v] -> [n]
    target_logits = torch.where(target.is_here, target_logits, 0.0)
    tempered_top = top.logits_of(logits) / temperature
    exps = logits.exp()
    tempered_others = logits.div_(temperature).exp_()
    top.clear(tempered_others)
    sums = torch.stack([exps.sum(-1), tempered_others.sum(-1), target_logits], dim=-1)  # [n, 3]
    of_all_ranks = torch.cat([sums, tempered_top], dim=-1)  # [n, k + 3]
    if group is not None:
        dist.all_reduce(of_all_ranks, group=group)
    normalizer, tempered_rest, target_logits = of_all_ranks[:, :3].unbind(-1)
    tempered_top = of_all_ranks[:, 3:]
    return _Student(
        exps=exps,
        tempered_others=tempered_others,
        normalizer=normalizer,
        target_logits=target_logits,
        tempered_top=tempered_top,
        tempered_rest=tempered_rest,
        tempered_normalizer=tempered_rest + tempered_top.exp().sum(-1),
        target=target,
        top=top,
    )


@dataclass(frozen=True, kw_only=True)
class _Events:
    """Both distributions over the events of each position, [n, e]; e = k + 1, or k where there are no other tokens."""

    q: torch.Tensor
    """Probabilities of the student."""
    p: torch.Tensor
    """Probabilities of the teacher."""
    log_ratio: torch.Tensor
    """log(p / q); of the reverse divergence log(q / p)."""
    divergences: torch.Tensor
    """D, [n]."""
    top_k: int

    @property
    def has_rest(self) -> bool:
        """Whether the last event is all other tokens."""
        return self.q.shape[-1] > self.top_k


def _events_of(student: _Student, teacher: TeacherTokens, divergence: Divergence, *, has_rest: bool) -> _Events:
    top_k = teacher.ids.shape[-1]
    log_rest = (student.tempered_rest + _SMALLEST).log().unsqueeze(-1)
    log_q = torch.cat([student.tempered_top, log_rest], dim=-1) - student.tempered_normalizer.log().unsqueeze(-1)
    log_p = teacher.logps.to(log_q)
    if not has_rest:
        log_q = log_q[:, :top_k]
        log_p = log_p[:, :top_k]
    log_p = log_p - log_p.logsumexp(-1, keepdim=True)  # stored in fp32: gradients take their sum for 1
    q = log_q.exp()
    p = log_p.exp()
    if divergence.kind == "forward":
        log_ratio = log_p - log_q
        divergences = (p * log_ratio).sum(-1)
    else:
        log_ratio = log_q - log_p
        divergences = (q * log_ratio).sum(-1)
    return _Events(q=q, p=p, log_ratio=log_ratio, divergences=divergences, top_k=top_k)


def _grad_logits(student: _Student, events: _Events, divergence: Divergence, has_target: torch.Tensor) -> torch.Tensor:
    """Return the derivatives of the losses by this rank's logits, [n, v]; overwrites `exps` and `tempered_others`.

    Source: the derivatives at the top of this file, and softmax minus target for the token losses.
    """
    is_counted = has_target.to(student.exps)
    # T² of the loss, times 1/T of the derivative of D.
    divergence_share = is_counted * (divergence.weight * divergence.temperature)
    by_others = divergence_share * _slope_of_others(events, divergence) / student.tempered_normalizer
    by_top = divergence_share.unsqueeze(-1) * _slopes_of_top(events, divergence)
    grad_logits = student.tempered_others.mul_(by_others.unsqueeze(-1))
    grad_logits.scatter_add_(-1, student.top.columns, torch.where(student.top.is_here, by_top, 0.0))
    token_share = is_counted * (1.0 - divergence.weight)
    grad_logits.add_(student.exps.mul_((token_share / student.normalizer).unsqueeze(-1)))
    positions = torch.arange(len(has_target), device=has_target.device)
    grad_logits[positions, student.target.columns] -= token_share * student.target.is_here
    return grad_logits


def _slopes_of_top(events: _Events, divergence: Divergence) -> torch.Tensor:
    """Return T ∂D/∂z_j of the top tokens, [n, k]."""
    q = events.q[:, : events.top_k]
    if divergence.kind == "forward":
        return q - events.p[:, : events.top_k]
    return q * (events.log_ratio[:, : events.top_k] - events.divergences.unsqueeze(-1))


def _slope_of_others(events: _Events, divergence: Divergence) -> torch.Tensor | float:
    """Return T ∂D/∂z_j of any other token, divided by its probability q_j, [n]."""
    rest = events.top_k
    if divergence.kind == "forward":
        return 1.0 - (events.p[:, rest] / events.q[:, rest] if events.has_rest else 0.0)
    return (events.log_ratio[:, rest] if events.has_rest else 0.0) - events.divergences


def subtract_largest(logits: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Subtract from logits [n, v], in place, the largest of each position on all ranks of `group`.

    This keeps exp() in range, and cancels in every probability.
    """
    largest = logits.amax(dim=-1)
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits.sub_(largest.unsqueeze(-1))


class DistilledLoss(torch.autograd.Function):
    """The loss of distillation of full logits, with its gradient made in the forward pass.

    (logits [n, v], targets [n], teacher, weights [n], …) -> (weighted sum of losses, token losses [n], divergences [n])
    """

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
        subtract_largest(logits, group)
        # Of this rank's rows, the first ones are tokens that the student has.
        known_rows = max(0, min(shard.rows, self._vocabulary - shard.start))
        candidates = logits.clone() if known_rows < shard.rows else logits
        candidates[:, known_rows:] = float("-inf")
        values, columns = candidates.topk(min(self._top_k, shard.rows), dim=-1)  # [n, k']
        ids = columns + shard.start
        if group is not None:
            values = _gathered(values, group)
            ids = _gathered(ids, group)
        top, order = values.topk(self._top_k, dim=-1)  # [n, k]
        ids = ids.gather(-1, order)
        others = logits.exp_()
        _VocabularyColumns.of(ids, shard).clear(others)
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
