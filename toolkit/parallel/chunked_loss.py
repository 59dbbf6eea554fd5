"""The loss inside the LM head, over chunks of tokens: full logits exist on no rank, in neither pass.

The forward pass makes the logits of a chunk, turns them in place into their gradient, and adds from it to the gradients
of the hidden states and of the head's weight. The backward pass only scales these, because every token has the same
factor. So each product with the vocabulary is computed once, as with full logits (the idea is that of Liger's fused
linear cross-entropy). Without gradients nothing is kept.

With `weigh`, a token has a weight that depends on the losses of all tokens. Then the losses of all chunks are computed
first, and their logits a second time for the gradients.

Dims: b samples, s positions, n = b*s, c tokens of a chunk, h hidden, v vocabulary (rows of this rank).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from toolkit.models.chunked_head import HeadFormula, chunk_tokens, head_formula
from toolkit.parallel.distilled_loss import Divergence, TeacherTokens, TopTokens, distilled_losses, subtract_largest
from toolkit.parallel.linear_product import Defer
from toolkit.parallel.loss import IGNORE
from toolkit.parallel.tensor.collectives import copy_to_tensor_ranks
from toolkit.parallel.tensor.overlapped_gradients import OverlappedGradients
from toolkit.parallel.tensor.vocabulary import VocabParallelHead, VocabularyShard, columns_of, mask_padding


class Distilling(Protocol):
    """What the loss of distillation is computed with (toolkit/engines/objectives/distillation.py)."""

    divergence: Divergence

    def add(self, loss: torch.Tensor, token_losses: torch.Tensor, divergences: torch.Tensor) -> None:
        """Add a loss, and the parts that it is made of, to those of the step."""


class LossInHead:
    """Lets the head of `model` compute the loss of a forward pass for which `labels` are set; others return logits."""

    labels: torch.Tensor | None = None
    """[b, s], already shifted, of the next forward pass: its output has `loss`, a sum, and no logits."""
    weights: torch.Tensor | None = None
    """Weights of tokens [b, s] that are known before their losses, of the same forward pass; None: all are 1."""
    teacher: TeacherTokens | None = None
    """What the teacher of the same forward pass says, [b, s, k]; None without one."""
    distillation: Distilling | None = None
    """The constants of its loss, and where parts of it are added up."""
    top: TopTokens | None = None
    """What collects from all logits instead of a loss, while this model is the teacher."""
    weigh: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Returns the weights of tokens [b, s] for their losses [b, s], without gradients; None: all weigh the same."""
    chunk_tokens: Callable[[int, int], int] = staticmethod(chunk_tokens)
    _sample_losses: torch.Tensor | None = None

    def __init__(self, model: PreTrainedModel, formula: HeadFormula, *, is_liger: bool = False) -> None:
        self._is_liger = is_liger
        self._scale, self._cap = formula.values(model.config.get_text_config(decoder=True))
        head = model.get_output_embeddings()
        head_class = type(head)
        # The forward pass stops where the head was called, behind all hooks of the head: ZeRO-3's see its output.
        # Python looks `__call__` up on the class, so only another class can do that; a module around the head would
        # change the names of its parameters.
        head.__class__ = type(head_class.__name__, (_HeadWithLoss, head_class), {"loss": self})
        model.forward = MethodType(_until_the_head(type(model).forward), model)

    @classmethod
    def of(
        cls, model: PreTrainedModel, formula: HeadFormula | None = None, *, is_liger: bool = False
    ) -> "LossInHead | None":
        """Place the loss in the head, where it is exact: in a linear layer of a family whose formula is known.

        `is_liger`: compute it by Liger's kernel, where a rank has the whole vocabulary and logits have no factor.
        """
        formula = formula or head_formula(model.config.model_type)
        is_ours = type(model).__module__.startswith("transformers.models.")  # not a model's own code
        is_linear = type(model.get_output_embeddings()) in (nn.Linear, VocabParallelHead)
        return cls(model, formula, is_liger=is_liger) if formula is not None and is_ours and is_linear else None

    def compute(self, head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Return the sum of the token losses, the same on every tensor-parallel rank. hidden [b, s, h]."""
        micro_batch = self._take_micro_batch()
        head_input = _HeadInput.of(head, hidden)
        options = self._options(head, head_input, micro_batch)
        weight = head.weight if options.defer is None else head.weight.detach()
        with torch.autocast(hidden.device.type, enabled=False):
            if self.top is not None:
                return _collect(head_input.flat, head, options, self.top)
            labels = micro_batch.labels
            loss, losses = _ChunkedLoss.apply(head_input.flat, weight, head.bias, labels.flatten(), options)
        self._sample_losses = losses.view(labels.shape).sum(dim=1)  # [n] -> [b]
        result: torch.Tensor = loss
        return result

    def _take_micro_batch(self) -> "_HeadMicroBatch":
        """Return what was set for this forward pass, and forget it: the next one sets its own."""
        assert self.labels is not None
        micro_batch = _HeadMicroBatch(labels=self.labels, weights=self.weights, teacher=self.teacher)
        self.labels = None
        self.weights = None
        self.teacher = None
        return micro_batch

    def _options(self, head: nn.Linear, head_input: "_HeadInput", micro_batch: "_HeadMicroBatch") -> "_HeadLossOptions":
        """Return the constants of the loss of a micro-batch."""
        device = head_input.flat.device.type
        weights = micro_batch.weights
        teacher = micro_batch.teacher
        is_plain = self._scale == 1.0 and self.weigh is None and weights is None and teacher is None
        return _HeadLossOptions(
            scale=self._scale,
            cap=self._cap,
            shard=head_input.shard,
            group=head_input.group,
            chunk=self.chunk_tokens(head_input.flat.shape[0], head.weight.shape[0]),
            dtype=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype,
            makes_gradients=torch.is_grad_enabled(),
            is_liger=self._is_liger and head_input.group is None and is_plain,
            teacher=None if teacher is None else teacher.map(lambda tensor: tensor.flatten(0, -2)),
            distillation=self.distillation,
            weights=None if weights is None else weights.flatten(),
            weigh=None if self.weigh is None else partial(_flat_weights, self.weigh, micro_batch.labels.shape),
            defer=head_input.defer,
        )

    def take_sample_losses(self) -> torch.Tensor:
        """Return the sums of the token losses of each sample of the last such pass, [b], without gradients; once."""
        losses = self._sample_losses
        self._sample_losses = None
        assert losses is not None
        return losses


@dataclass(frozen=True, kw_only=True)
class _HeadMicroBatch:
    """What the loss of one micro-batch takes beside hidden states. Its fields are those of LossInHead."""

    labels: torch.Tensor
    weights: torch.Tensor | None
    teacher: TeacherTokens | None


@dataclass(frozen=True, kw_only=True)
class _HeadInput:
    """The input of a head, and which part of the vocabulary the head has."""

    flat: torch.Tensor
    """Hidden states [n, h]."""
    shard: VocabularyShard
    group: dist.ProcessGroup | None
    """The ranks that share the vocabulary; None where this rank has all of it."""
    defer: Defer | None
    """What takes the gradient of the head's weight, for later; None where autograd computes it."""

    @classmethod
    def of(cls, head: nn.Linear, hidden: torch.Tensor) -> Self:
        """Return the input for hidden states [b, s, h], whose gradient is summed over tensor-parallel ranks."""
        if not isinstance(head, VocabParallelHead):
            rows = head.weight.shape[0]
            whole = VocabularyShard(size=rows, start=0, rows=rows)
            return cls(flat=hidden.flatten(0, -2), shard=whole, group=None, defer=None)
        overlapped = OverlappedGradients.of(hidden, (head.weight,), head.group)
        hidden = copy_to_tensor_ranks(hidden, head.group, overlapped)
        defer = None if overlapped is None else overlapped.taking(hidden, head.weight)
        return cls(flat=hidden.flatten(0, -2), shard=head.vocabulary, group=head.group, defer=defer)


@contextmanager
def collecting_in_head(head: LossInHead | None, top: TopTokens) -> Iterator[None]:
    """Let a head that computes a loss give its logits to `top` instead."""
    if head is None:
        yield
        return
    head.top = top
    try:
        yield
    finally:
        head.top = None


class _ForwardStopped(Exception):  # noqa: N818 - not an error: how the forward pass ends
    """Ends the forward pass of the model at its head, with the loss."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class _HeadWithLoss(nn.Linear):
    loss: LossInHead

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        is_loss = self.loss.labels is not None
        result: torch.Tensor = super().__call__(hidden)
        if is_loss:
            raise _ForwardStopped(result)
        return result

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) if self.loss.labels is None else self.loss.compute(self, hidden)


def _until_the_head(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def caught(*arguments: Any, **keywords: Any) -> Any:
        try:
            return forward(*arguments, **keywords)
        except _ForwardStopped as stopped:
            return CausalLMOutput(loss=stopped.loss)

    return caught


@dataclass(frozen=True, kw_only=True)
class _HeadLossOptions:
    """Constants of the loss: how logits follow from products, the vocabulary's shard, and the size of chunks."""

    scale: float
    cap: float | None
    shard: VocabularyShard
    group: dist.ProcessGroup | None
    chunk: int
    dtype: torch.dtype
    """Dtype of the head's products."""
    makes_gradients: bool
    is_liger: bool
    teacher: TeacherTokens | None
    """What the teacher says of all tokens, [n, k]; None without one."""
    distillation: Distilling | None
    weights: torch.Tensor | None
    """Weights of all tokens [n] that are known already; None: all are 1."""
    weigh: Callable[[torch.Tensor], torch.Tensor] | None
    """Weights of all tokens [n] for their losses [n]."""
    defer: Defer | None
    """Takes the gradient of the weight, which then is no input, for the time when that of the hidden states is summed
    over ranks; None where it is returned with the others."""


class _ChunkedLoss(torch.autograd.Function):
    """(hidden [n, h], weight [v, h], bias [v] or None, targets [n]) -> (weighted sum of token losses, losses [n])."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        options: _HeadLossOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Of hidden states, weight and bias.
        wanted = [needs_gradient and options.makes_gradients for needs_gradient in ctx.needs_input_grad[:3]]
        wanted[1] |= options.defer is not None
        ctx.dtypes = [hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype]
        ctx.defer = options.defer
        x = hidden.to(options.dtype)
        w = weight.to(options.dtype)
        b = None if bias is None else bias.to(options.dtype)
        exact = torch.promote_types(options.dtype, torch.float32)
        if options.is_liger:
            losses, ctx.gradients = _by_liger(x, w, b, targets, options, wanted)
            ctx.mark_non_differentiable(losses)
            return losses.sum(), losses
        gradients = _ChunkGradients(x, w, wanted, exact, is_single=options.chunk >= x.shape[0])
        losses = torch.empty(x.shape[0], dtype=exact, device=x.device)
        weights = options.weights
        if options.weigh is not None:
            _compute_losses(losses, x, w, b, targets, options)
            weights = options.weigh(losses)
        if options.weigh is None or any(wanted):
            for part in _chunks(x.shape[0], options.chunk):
                logits = _logits(x[part], w, b, exact)
                losses[part], grad_logits = _chunk_losses(logits, part, targets, weights, options, any(wanted))
                del logits
                if grad_logits is not None:
                    gradients.add(part, grad_logits)
                del grad_logits  # before the next chunk's logits are made
        ctx.mark_non_differentiable(losses)
        # Not saved by autograd, which would hold them while they become gradients: then those are copied.
        ctx.gradients = gradients.take()
        return (losses if weights is None else losses * weights).sum(), losses

    @staticmethod
    def backward(ctx: Any, *factors: torch.Tensor) -> Any:
        made: list[torch.Tensor | None] = []
        for index, dtype in enumerate(ctx.dtypes):
            gradient = ctx.gradients.pop(0)
            if index == 1 and ctx.defer is not None:
                ctx.defer(partial(_scaled, [gradient], factors[0], dtype))
                made.append(None)
            else:
                made.append(None if gradient is None else _scaled([gradient], factors[0], dtype))
            del gradient
        return (*made, None, None)


class _ChunkGradients:
    """Gradients of the hidden states [n, h], of the weight [v, h] and of the bias [v], from those of chunks of logits.

    Sums of chunks are in fp32 at least, so that their number does not matter; one chunk is not added to anything.
    """

    def __init__(
        self, x: torch.Tensor, w: torch.Tensor, wanted: list[bool], exact: torch.dtype, *, is_single: bool
    ) -> None:
        wants_hidden, wants_weight, wants_bias = wanted
        self._x = x
        self._w = w
        self._wants_weight = wants_weight
        self._hidden = torch.empty_like(x) if wants_hidden else None
        self._bias = torch.zeros(w.shape[0], dtype=exact, device=w.device) if wants_bias else None
        self._weight: torch.Tensor | None = None
        if wants_weight and not is_single:
            self._weight = torch.zeros(w.shape, dtype=exact, device=w.device)

    def add(self, part: slice, grad_logits: torch.Tensor) -> None:
        """Add those that follow from the gradients of a chunk's logits [c, v]."""
        if self._bias is not None:
            self._bias += grad_logits.sum(dim=0, dtype=self._bias.dtype)
        if self._hidden is not None:
            torch.mm(grad_logits, self._w, out=self._hidden[part])  # [c, v] -> [c, h]
        if self._weight is not None:
            _add_product(self._weight, grad_logits.t(), self._x[part])  # [v, c] @ [c, h]
        elif self._wants_weight:
            self._weight = grad_logits.t() @ self._x[part]

    def take(self) -> list[torch.Tensor | None]:
        """Return the gradients of hidden states, weight and bias; None for each that is not wanted."""
        return [self._hidden, self._weight, self._bias]


def _chunks(tokens: int, chunk: int) -> Iterator[slice]:
    """Yield the tokens of each chunk."""
    for start in range(0, tokens, chunk):
        yield slice(start, start + chunk)


def _compute_losses(
    losses: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    targets: torch.Tensor,
    options: _HeadLossOptions,
) -> None:
    """Write the losses of all tokens, which have no weights yet, into `losses` [n]."""
    for part in _chunks(x.shape[0], options.chunk):
        losses[part], _ = _losses_and_grad_logits(
            _logits(x[part], w, b, losses.dtype), targets[part], options, None, False
        )


def _scaled(gradients: list[torch.Tensor], factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the single gradient times a factor. Nobody holds it then: autograd keeps the result without a copy."""
    return gradients.pop().mul_(factor).to(dtype)


def _by_liger(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    targets: torch.Tensor,
    options: _HeadLossOptions,
    wanted: list[bool],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The token losses, and the gradients of their sum, in chunks of Liger's choice."""
    from liger_kernel.ops import fused_linear_cross_entropy_forward

    losses, _z_losses, _accuracies, _predictions, *gradients = fused_linear_cross_entropy_forward(
        x,
        w,
        targets,
        bias=b,
        ignore_index=IGNORE,
        reduction="none",
        softcap=options.cap,
        accum_dtype=torch.float32,
        compute_gradients=any(wanted),
        weight_requires_grad=wanted[1],
    )
    return losses, [each if is_wanted else None for each, is_wanted in zip(gradients, wanted, strict=True)]


def _flat_weights(
    weigh: Callable[[torch.Tensor], torch.Tensor], shape: torch.Size, losses: torch.Tensor
) -> torch.Tensor:
    """Return the weights [n] that `weigh` has for losses [n] of a micro-batch of this shape [b, s]."""
    return weigh(losses.view(shape)).flatten()


def _logits(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, exact: torch.dtype) -> torch.Tensor:
    """The products of a chunk [c, h] with the vocabulary, in the dtype of the losses, [c, v]; the caller's own."""
    products = x @ w.t() if b is None else torch.addmm(b, x, w.t())  # [c, h] -> [c, v]
    return products.to(exact)  # what it is converted from ends here, before the gradient is made


def _chunk_losses(
    logits: torch.Tensor,
    part: slice,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    options: _HeadLossOptions,
    wants_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The losses of a chunk's tokens [c], and the gradients of their weighted sum by the products [c, v].

    `part`: the chunk's tokens among all, of which `targets` and `weights` are. Overwrites `logits`, these products.
    """
    of_chunk = None if weights is None else weights[part]
    if options.teacher is None:
        return _losses_and_grad_logits(logits, targets[part], options, of_chunk, wants_gradients)
    teacher = options.teacher.map(lambda tensor: tensor[part])
    return _distilled_chunk(logits, targets[part], teacher, options, of_chunk, wants_gradients)


def _losses_and_grad_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    options: _HeadLossOptions,
    weights: torch.Tensor | None,
    wants_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The losses of a chunk's tokens [c], and the gradients of their weighted sum by the products [c, v].

    Overwrites `logits`, these products. `weights` [c]; None: all are 1.
    """
    shard = options.shard
    softcap_derivative = _apply_formula(logits, options, wants_gradients=wants_gradients)
    mask_padding(logits, shard)
    subtract_largest(logits, options.group)
    columns, here = columns_of(targets, shard)
    target_logits = logits.gather(-1, columns.unsqueeze(-1)).squeeze(-1)  # [c, v] -> [c]
    logits.exp_()
    parts = torch.stack([logits.sum(dim=-1), torch.where(here, target_logits, 0.0)])
    if options.group is not None:
        dist.all_reduce(parts, group=options.group)
    normalizer, target_logit = parts
    has_target = targets != IGNORE
    losses = torch.where(has_target, normalizer.log() - target_logit, 0.0)
    if not wants_gradients:
        return losses, None
    factor = options.scale * has_target.to(logits.dtype)
    if weights is not None:
        factor = factor * weights
    logits.mul_((factor / normalizer).unsqueeze(-1))
    logits[torch.arange(len(targets), device=targets.device), columns] -= factor * here
    if softcap_derivative is not None:
        logits.mul_(softcap_derivative)
    return losses, logits.to(options.dtype)


def _distilled_chunk(
    logits: torch.Tensor,
    targets: torch.Tensor,
    teacher: TeacherTokens,
    options: _HeadLossOptions,
    weights: torch.Tensor | None,
    wants_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the losses of distillation of a chunk [c], and what `_losses_and_grad_logits` returns beside its losses.

    Overwrites `logits`, the products of hidden states and vocabulary. `weights` [c]; None: all are 1.
    """
    assert options.distillation is not None
    softcap_derivative = _apply_formula(logits, options, wants_gradients=wants_gradients)
    each = distilled_losses(
        logits,
        targets,
        teacher,
        options.distillation.divergence,
        shard=options.shard,
        group=options.group,
        wants_gradients=wants_gradients,
    )
    weighted = each.losses if weights is None else each.losses * weights
    options.distillation.add(weighted.sum(), each.token_losses, each.divergences)
    grad_logits = each.grad_logits
    if grad_logits is None:
        return each.losses, None
    if softcap_derivative is not None:
        grad_logits.mul_(softcap_derivative)
    if options.scale != 1.0:
        grad_logits.mul_(options.scale)
    if weights is not None:
        grad_logits.mul_(weights.unsqueeze(-1))
    return each.losses, grad_logits.to(options.dtype)


def _collect(x: torch.Tensor, head: nn.Linear, options: _HeadLossOptions, top: TopTokens) -> torch.Tensor:
    """Give the logits of all tokens to `top`, in chunks; return a loss of 0."""
    w = head.weight.to(options.dtype)
    b = None if head.bias is None else head.bias.to(options.dtype)
    exact = torch.promote_types(options.dtype, torch.float32)
    for part in _chunks(x.shape[0], options.chunk):
        logits = _logits(x[part].to(options.dtype), w, b, exact)
        _apply_formula(logits, options, wants_gradients=False)
        top.add(logits, options.shard, options.group)
    return torch.zeros((), dtype=exact, device=x.device)


def _apply_formula(logits: torch.Tensor, options: _HeadLossOptions, *, wants_gradients: bool) -> torch.Tensor | None:
    """Make logits of products with the vocabulary, in place; return the derivative of their soft cap."""
    softcap_derivative = None
    if options.cap is not None:
        logits.mul_(options.scale / options.cap).tanh_()
        softcap_derivative = logits.square().neg_().add_(1.0) if wants_gradients else None
        logits.mul_(options.cap)
    elif options.scale != 1.0:
        logits.mul_(options.scale)
    return softcap_derivative


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
