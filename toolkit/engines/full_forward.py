"""Engines that run the model from ids to the loss on a rank, and the training step of data parallelism."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines.base import LOSS, DistributedEngine, Engine, StepResult
from toolkit.engines.dropout import DropoutStream
from toolkit.parallel.chunked_loss import collecting_in_head
from toolkit.parallel.context.sequence import SequenceSlice
from toolkit.parallel.distilled_loss import TeacherTokens, TopTokens
from toolkit.parallel.loss import IGNORE, sample_loss_sums, token_loss_sum, token_losses
from toolkit.parallel.packed_documents import documents_known


class FullForwardEngine(Engine):
    """An engine that runs the model from ids to the loss on this rank."""

    dropout: DropoutStream
    _sequence: SequenceSlice | None = None
    """The sequences of the last micro-batch, where ranks share them."""

    @override
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> float:
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self.objective is not None:
            self.objective.begin_step()
        micro_batches = self._with_reference_sums(micro_batches)
        self.model.eval()
        with self._forward_only():
            for micro_batch in micro_batches:
                batch = self._local_micro_batch(micro_batch).to(self.device)
                totals[0] += self._losses(self._run(batch), batch)[0]
                totals[1] += (batch.labels != IGNORE).sum()
        self.model.train()
        if self.objective is not None:
            totals = self.objective.loss_and_count()
        self._sum_over_replicas(totals)
        return float(totals[0] / totals[1])

    @override
    def sequence_sums(self, micro_batches: Iterable[MicroBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        assert self.objective is not None
        self._collect_sums(micro_batches)
        is_first = self.partition is None or self.partition.groups.is_first_of_tensor
        return self.objective.counted_sums() if is_first and self.objective.is_first else []

    @override
    def _collect_sums(self, micro_batches: Iterable[MicroBatch]) -> None:
        assert self.objective is not None
        self.model.eval()
        with self.objective.collecting(), self._forward_only():
            for micro_batch in micro_batches:
                batch = self._local_micro_batch(micro_batch).to(self.device)
                self._losses(self._run(batch), batch)
        self.model.train()

    @override
    def top_tokens(self, micro_batches: Iterable[MicroBatch], top: TopTokens) -> list[tuple[MicroBatch, TeacherTokens]]:
        collected = []
        self.model.eval()
        with collecting_in_head(self.head_loss, top), self._forward_only():
            for micro_batch in micro_batches:
                batch = self._local_micro_batch(micro_batch).to(self.device)
                output = self._run(batch)
                if self.head_loss is None:
                    top.add_logits(output.logits, *self.vocabulary())
                collected.append((batch, top.take()))
        self.model.train()
        return collected if self.partition is None or self.partition.groups.is_first_of_tensor else []

    @override
    def _pass_forward(self, micro_batches: Sequence[MicroBatch]) -> None:
        with self._forward_only():
            for micro_batch in micro_batches:
                batch = self._local_micro_batch(micro_batch).to(self.device)
                output = self._training_run(batch)
                if self.objective is not None:
                    self._losses(output, batch)

    @contextmanager
    def _forward_only(self) -> Iterator[None]:
        """A context for forward passes that no backward pass follows."""
        with torch.no_grad():
            yield

    @abstractmethod
    def _forward(self, batch: MicroBatch) -> Any:
        """Run the model and return its output: the loss, or logits [b, s, v]."""

    def _run(self, batch: MicroBatch) -> Any:
        if self.objective is not None:
            self.objective.start(batch.sequences)
        if self.head_loss is not None:
            self.head_loss.labels = batch.labels
            self.head_loss.weights = batch.weights
            self.head_loss.teacher = batch.teacher
        with documents_known(are_packed=bool(batch.is_packed)), self._attending():
            return self._forward(batch)

    def _attending(self) -> AbstractContextManager[None]:
        """Return a context for the forward pass of the last micro-batch that `_local_micro_batch` returned."""
        if self.context is None:
            return nullcontext()
        assert self._sequence is not None
        return self.context.attending(self._sequence)

    def _losses(self, output: Any, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted sum of the token losses of one micro-batch; with sources also those of samples, [b]."""
        if self.head_loss is not None:
            return output.loss, self.head_loss.take_sample_losses()
        if self.objective is not None:
            each = self._token_losses(output.logits, batch.labels)
            return (each * self.objective.weigh(each)).sum(), each.detach().sum(dim=1)
        if batch.teacher is not None:
            return self._distilled(output.logits, batch), output.logits.new_zeros(len(batch.labels))
        if batch.weights is not None:
            each = self._token_losses(output.logits, batch.labels) * batch.weights
            return each.sum(), each.detach().sum(dim=1)
        loss_of = self._loss_sum if batch.sources is None else self._sample_losses
        losses = loss_of(output.logits, batch.labels)
        return losses.sum(), losses

    def _local_micro_batch(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return this rank's part of a micro-batch: all of it unless ranks share sequences."""
        if self.context is None:
            return micro_batch
        self._sequence = self.context.sequence(micro_batch)
        return self.context.take(micro_batch, self._sequence)

    def _distilled(self, logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """Sum the losses of one micro-batch that has a teacher."""
        assert self.distillation is not None
        assert batch.teacher is not None
        return self.distillation.loss(logits, batch.labels, batch.teacher, batch.weights, *self.vocabulary())

    def _loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum the token losses of one micro-batch."""
        return token_loss_sum(logits, labels)

    def _sample_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum the token losses of each sample, [b]."""
        return sample_loss_sums(logits, labels)

    def _token_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token, [b, s]."""
        return token_losses(logits, labels)

    def _training_loss(self, batch: MicroBatch, source_losses: torch.Tensor) -> torch.Tensor:
        """Run the forward pass; return the sum of the token losses, and add those of each source to `source_losses`."""
        loss, losses = self._losses(self._training_run(batch), batch)
        if batch.sources is not None:
            add_by_source(source_losses, losses, batch.sources)
        return loss

    def _training_run(self, batch: MicroBatch) -> Any:
        self.dropout.start(batch.dropout_seed)
        if self.routing is None:
            return self._run(batch)
        self.routing.start(batch.lengths)
        output = self._run(batch)
        self.routing.finish()
        return output

    @override
    def _sum_over_samples(self, values: torch.Tensor) -> None:
        super()._sum_over_samples(values)
        self._sum_over_replicas(values)

    def _sum_over_replicas(self, values: torch.Tensor) -> None:
        """Sum over the data-parallel ranks, in place."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(values)


class DataParallelEngine(FullForwardEngine, DistributedEngine):
    """The training step of engines whose ranks each compute a part of the global batch and average gradients."""

    dp: int
    """Ranks over which the engine averages gradients."""
    accumulation: int
    grad_clip: float
    keeps_casts = False
    """Whether autocast casts the weights, which stay whole on this rank, so that all micro-batches can share a cast."""

    @override
    def train_step(
        self, micro_batches: Iterable[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        # The loss of all samples, then that of the samples of each source.
        loss_sums = torch.zeros(1 + self.sources, dtype=torch.float64, device=self.device)
        # The engine averages over dp ranks and we sum over micro-batches: this factor turns both into
        # sum of token losses / target tokens of the global batch.
        scale = self.dp / target_tokens
        step_batches = self._begin_step(micro_batches)
        with casts_kept() if self.keeps_casts else nullcontext():
            for i, micro_batch in enumerate(step_batches):
                batch = self._local_micro_batch(micro_batch).to(self.device)
                with self._accumulating(last=i == self.accumulation - 1):
                    micro_loss = self._training_loss(batch, loss_sums[1:])
                    objective = self._add_router_losses(micro_loss, target_tokens)
                    self.report_phase("backward")
                    self._backward(objective * (scale * nan_unless_finite(objective)))
                loss_sums[:1] += micro_loss.detach()
        self.report_phase("update")
        if self._step_totals is not None:
            loss_sums = self._step_totals.local_totals()
        totals = loss_sums.clone()
        self._sum_over_replicas(totals)
        return self._finish_step(totals, loss_sums[:1], target_tokens=target_tokens, learning_rate=learning_rate)

    @override
    def repeat(self, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        batch = self._local_micro_batch(micro_batch).to(self.device)
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        with self._accumulating(last=False):
            loss = self._training_loss(batch, torch.zeros(self.sources, dtype=torch.float64, device=self.device))
            gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        values = {name: value for name, value in zip(trained, gradients, strict=True) if value is not None}
        return values | {LOSS: loss.detach().reshape(1)}

    def _accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Return a context for forward and backward of one micro-batch; the `last` of a step synchronizes gradients."""
        return nullcontext()

    @abstractmethod
    def _backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients of a scaled micro-batch loss."""


@contextmanager
def casts_kept() -> Iterator[None]:
    """Let autocast keep the weights that it has cast until the end, for all micro-batches of a step.

    Autocast caches them for the outermost `autocast` that is active, which is one forward pass: each micro-batch would
    cast all weights again. A cast saves nothing for the backward pass, so that several may run through it.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def add_by_source(source_losses: torch.Tensor, losses: torch.Tensor, sources: torch.Tensor) -> None:
    """Add the losses of samples [b] to those of their sources, in place."""
    source_losses.index_add_(0, sources, losses.detach().to(source_losses.dtype))


def nan_unless_finite(loss: torch.Tensor) -> torch.Tensor:
    """Return 1, or NaN if `loss` is not finite: as a factor it makes all gradients NaN.

    So one criterion decides on every rank whether a step is taken, the gradient norm, and no rank waits for its device.
    """
    return torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)
