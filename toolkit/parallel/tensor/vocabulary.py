"""Vocabulary-parallel embedding, LM head and loss: no rank ever holds the full logits.

Dims: b samples, s positions, h hidden, v vocabulary, t ranks. Rank r holds rows [r*V/t, (r+1)*V/t), where V is v
rounded up to a multiple of t; the rows from v on are padding. They are never looked up and excluded from the softmax,
so their gradient is exactly zero and they never change. Shoeybi et al. 2019, sec. 3.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.parallel.linear_product import TakesGradients, multiply
from toolkit.parallel.loss import IGNORE
from toolkit.parallel.shard import Shard, is_marked, mark, source_of
from toolkit.parallel.tensor.collectives import Group, copy_to_tensor_ranks, reduce_from_tensor_ranks
from toolkit.parallel.tensor.overlapped_gradients import OverlappedGradients


@dataclass(frozen=True, kw_only=True)
class VocabularyShard:
    """The vocabulary rows of one rank."""

    size: int
    """Entries of the full vocabulary, without padding."""
    start: int
    rows: int
    """Rows of this rank, padding included: the same on every rank."""

    @classmethod
    def of(cls, size: int, group: Group) -> "VocabularyShard":
        """The shard of this process in `group`."""
        rows = -(-size // group.size())
        return cls(size=size, start=group.rank() * rows, rows=rows)

    @property
    def real_rows(self) -> int:
        """Rows that are not padding."""
        return max(0, min(self.rows, self.size - self.start))


class VocabParallelEmbedding(nn.Embedding):
    """An embedding with its rows sharded. weight [V/t, h]; ids [b, s] -> [b, s, h], the same on all ranks.

    `shard_embedding` converts a model's own embedding, whose class stays a base: a family may scale the output.
    """

    vocabulary: VocabularyShard
    group: Group
    is_idle: bool
    """Whether lookups return zeros: a pipeline's last stage has the rows for a tied head alone."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up the local rows, zeros for others, and sum over the ranks."""
        if self.is_idle:
            return self.weight.new_zeros(()).expand(*ids.shape, self.embedding_dim)
        local = ids - self.vocabulary.start
        elsewhere = (local < 0) | (local >= self.vocabulary.rows)
        rows = super().forward(local.masked_fill(elsewhere, 0))  # [b, s] -> [b, s, h]
        return reduce_from_tensor_ranks(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)


class VocabParallelHead(nn.Linear):
    """The LM head with its outputs sharded. weight [V/t, h]; hidden [b, s, h] -> this rank's logits [b, s, V/t]."""

    vocabulary: VocabularyShard
    group: Group
    split: TakesGradients | None = None
    """What takes the weight's gradient in a split backward pass, where there are such passes."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's logits."""
        defer = None if self.split is None else self.split.taking(hidden, self.weight)
        if defer is not None:
            return multiply(copy_to_tensor_ranks(hidden, self.group), self.weight, self.bias, defer=defer)
        later = OverlappedGradients.of(hidden, (self.weight,), self.group)
        hidden = copy_to_tensor_ranks(hidden, self.group, later)
        defer = None if later is None else later.taking(hidden, self.weight)
        return multiply(hidden, self.weight, self.bias, defer=defer)


def shard_embedding(embedding: nn.Embedding, name: str, group: Group, *, is_idle: bool = False) -> None:
    """Convert `embedding` in place, keeping this rank's rows. `is_idle`: see VocabParallelEmbedding."""
    vocabulary = VocabularyShard.of(embedding.num_embeddings, group)
    _shard_rows(embedding, name, vocabulary)
    family = type(embedding)
    # Another class, not another module: what else refers to this one keeps doing so, and a family that scales its
    # embedding does it in the next forward pass in line (`super().forward`).
    embedding.__class__ = type(f"VocabParallel{family.__name__}", (VocabParallelEmbedding, family), {})
    assert isinstance(embedding, VocabParallelEmbedding)
    embedding.vocabulary = vocabulary
    embedding.group = group
    embedding.is_idle = is_idle
    embedding.num_embeddings = vocabulary.rows
    padding = embedding.padding_idx
    if padding is not None:
        local = padding - vocabulary.start
        embedding.padding_idx = local if 0 <= local < vocabulary.real_rows else None


def shard_head(head: nn.Linear, name: str, group: Group, *, tied_to: nn.Parameter | None = None) -> None:
    """Convert the LM head in place, keeping this rank's outputs; with `tied_to`, its weight is the embedding's rows."""
    vocabulary = VocabularyShard.of(head.out_features, group)
    if tied_to is not None:
        head.weight = tied_to
    _shard_rows(head, name, vocabulary)
    head.__class__ = VocabParallelHead  # as for the embedding: hooks and references stay
    assert isinstance(head, VocabParallelHead)
    head.vocabulary = vocabulary
    head.group = group
    head.out_features = vocabulary.rows


def _shard_rows(module: nn.Module, name: str, vocabulary: VocabularyShard) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        if is_marked(parameter):
            continue  # tied, and sharded already
        shard = Shard(
            name=f"{name}.{key}",
            shape=tuple(parameter.shape),
            dim=0,
            pieces=((vocabulary.start, vocabulary.real_rows),) if vocabulary.real_rows else (),
            padding=vocabulary.rows - vocabulary.real_rows,
        )
        local = nn.Parameter(shard.take(source_of(parameter)), requires_grad=parameter.requires_grad)
        setattr(module, key, mark(local, shard))


def vocab_parallel_token_loss_sum(
    logits: torch.Tensor,
    labels: torch.Tensor,
    shard: VocabularyShard,
    group: Group,
    *,
    ignore: int = IGNORE,
    by_sample: bool = False,
) -> torch.Tensor:
    """Sum the token losses in nats, fp32, the same on every rank and equal to `token_loss_sum` of the full logits; with
    `by_sample` those of each sample, [b].

    logits [b, s, V/t] of this rank in any floating dtype; labels [b, s] of the full vocabulary, or `ignore`.
    """
    if by_sample:
        return vocab_parallel_token_losses(logits, labels, shard, group, ignore=ignore).sum(dim=1)
    loss: torch.Tensor = _TokenLossSum.apply(logits.flatten(0, -2), labels.flatten(), shard, group, ignore, True)
    return loss


def vocab_parallel_token_losses(
    logits: torch.Tensor, labels: torch.Tensor, shard: VocabularyShard, group: Group, *, ignore: int = IGNORE
) -> torch.Tensor:
    """Return the loss of each token, [b, s]; arguments and ranks as in `vocab_parallel_token_loss_sum`."""
    losses: torch.Tensor = _TokenLossSum.apply(logits.flatten(0, -2), labels.flatten(), shard, group, ignore, False)
    return losses.view(labels.shape)


class _TokenLossSum(torch.autograd.Function):
    """Log-sum-exp and target logit from local parts: ranks exchange three numbers per token, never the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        shard: VocabularyShard,
        group: Group,
        ignore: int,
        sums: bool,
    ) -> torch.Tensor:
        scores = logits.float()  # [n, V/t], n = b*s
        if shard.real_rows < shard.rows:
            scores = scores.clone() if scores is logits else scores
            mask_padding(scores, shard)
        # The largest score keeps exp() in range; it cancels in the loss, so it needs no gradient.
        largest = scores.amax(dim=-1) if shard.real_rows else scores.new_full((scores.shape[0],), float("-inf"))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        exponentials = (scores - largest.unsqueeze(-1)).exp_()

        columns, here = columns_of(targets, shard)
        gathered = scores.gather(-1, columns.unsqueeze(-1)).squeeze(-1)  # [n, V/t] -> [n]
        parts = torch.stack([exponentials.sum(dim=-1), torch.where(here, gathered - largest, 0.0)])
        dist.all_reduce(parts, group=group)
        normalizer, target_score = parts

        # Columns are found again in the backward pass: what is kept does not depend on whose targets these are.
        ctx.save_for_backward(exponentials.div_(normalizer.unsqueeze(-1)), targets)
        ctx.shard = shard
        ctx.ignore = ignore
        ctx.dtype = logits.dtype
        if not sums:
            return torch.where(targets != ignore, normalizer.log() - target_score, 0.0)
        # Without a name, so that the losses of single tokens are freed at once.
        return torch.where(targets != ignore, normalizer.log() - target_score, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        softmax, targets = ctx.saved_tensors
        columns, here = columns_of(targets, ctx.shard)
        gradient = softmax.clone()
        gradient[torch.arange(targets.shape[0], device=targets.device), columns] -= here.to(gradient.dtype)
        gradient *= ((targets != ctx.ignore) * gradients[0]).unsqueeze(-1)
        return gradient.to(ctx.dtype), None, None, None, None, None


def mask_padding(logits: torch.Tensor, shard: VocabularyShard) -> None:
    """Exclude the rows that are padding from a softmax over logits [n, V/t], which are changed in place."""
    if shard.real_rows < shard.rows:
        logits[:, shard.real_rows :] = float("-inf")


def columns_of(targets: torch.Tensor, shard: VocabularyShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each target in this rank's logits, 0 where another rank has it, and whether it is here: [n] each."""
    local = targets - shard.start
    here = (local >= 0) & (local < shard.real_rows)
    return local.masked_fill_(~here, 0), here
