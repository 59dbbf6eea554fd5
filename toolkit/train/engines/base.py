"""What every engine can do, and the step that all engines but the reference share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from toolkit.errors import NonFiniteError
from toolkit.parallel.gather import Names, whole_parameters
from toolkit.parallel.shard import Whole, shard_of
from toolkit.train.cut import ModelCut
from toolkit.train.dropout import DropoutStream
from toolkit.train.engines.states import OptimizerStates
from toolkit.train.loss import IGNORE, token_loss_sum
from toolkit.train.watchdog.mark import Mark, unwatched
from toolkit.train.weights.part import persistent_buffers


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """input_ids and labels [b, s], labels already shifted; the seed of dropout in this forward pass.

    position_ids [b, s] start at 0 with each document where documents do not see each other, else they are None.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    dropout_seed: int
    position_ids: torch.Tensor | None = None

    def inputs(self) -> dict[str, torch.Tensor]:
        """What the model's forward pass is given."""
        if self.position_ids is None:
            return {"input_ids": self.input_ids}
        return {"input_ids": self.input_ids, "position_ids": self.position_ids}

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`."""
        return MicroBatch(
            input_ids=self.input_ids.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            dropout_seed=self.dropout_seed,
            position_ids=None if self.position_ids is None else self.position_ids.to(device, non_blocking=True),
        )


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step reports: the token-weighted loss of the global batch (nats) and the norm of its gradient.

    `skipped`: an fp16 step that overflowed; the loss scale was lowered and no weight changed.
    """

    loss: float
    grad_norm: float
    skipped: bool = False


class Engine(ABC):
    """One strategy on this rank. `model` is the module itself; `device` is where it lives."""

    model: PreTrainedModel
    device: torch.device
    cut: ModelCut | None = None
    """What this rank keeps of the model, where that is not all of it."""
    before_update: Callable[[], None] = staticmethod(lambda: None)
    """Called in every step when the learning rate is set, the gradients are complete, and nothing was clipped yet."""

    mark: Mark = staticmethod(unwatched)
    """Called where the phases of a step begin."""

    @abstractmethod
    def train_step(
        self, micro_batches: Iterable[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        """One optimizer step. `target_tokens` counts the whole global batch.

        Raises NonFiniteError, on every rank alike, where the loss or the gradient's norm is not finite. Then neither a
        weight nor a state of the optimizer has changed, the gradients are gone, and the next step may follow.
        """

    stage_layers: tuple[int, ...] = ()
    """Decoder layers of each pipeline stage; empty where there is no pipeline."""

    def parameter_count(self) -> int:
        """Of the whole model, tied ones once."""
        return sum(getattr(p, "ds_numel", p.numel()) for p in self.model.parameters())

    @abstractmethod
    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face name and whole value, one after the other, tied ones once, on every rank. A collective call."""

    states: OptimizerStates
    """What the optimizer keeps of each local parameter."""

    def full_states(self, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        """As `full_parameters`, of an optimizer state or of the fp32 master weights, in fp32. A collective call."""
        if self.cut is None:
            for name, parameter in self.model.named_parameters():
                yield name, self.states.read(parameter, kind)
            return
        yield from whole_parameters(
            self.cut.names,
            self.model.parameters(),
            self.cut.groups,
            values=lambda parameter: self.states.read(parameter, kind),
            dtype=torch.float32,
        )

    def load_states(self, kind: str, source: Callable[[str], Whole]) -> None:
        """Set them, each from the whole tensor that `source` has under a Hugging Face name; only what this rank needs
        of it is read. A collective call."""
        for name, parameter in self.model.named_parameters():
            if self.cut is None:
                value = source(name).clone(memory_format=torch.contiguous_format)
            else:
                shard = shard_of(parameter)
                value = shard.take(source(shard.name))
            self.states.write(parameter, kind, value.to(self.device, torch.float32))

    def loss_scale(self) -> dict[str, float]:
        """The state of the fp16 loss scaler; empty where there is none."""
        return {}

    def load_loss_scale(self, state: Mapping[str, float]) -> None:
        """Set it, where there is a scaler; a checkpoint of an fp16 run can go on without one."""
        return

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same of the gradients, for `before_update` to call. Zeros where there is none."""
        for name, parameter in self.model.named_parameters():
            yield name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    @abstractmethod
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Mean token loss (nats) of all ranks' micro-batches. Every rank must pass the same number of them."""

    def parameter_names(self) -> Names:
        """Name and shape of every parameter of the whole model, in its order, tied ones once."""
        if self.cut is not None:
            return self.cut.names
        return [(name, getattr(p, "ds_shape", p.shape)) for name, p in self.model.named_parameters()]

    def buffer_specs(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Name, and a tensor of the shape and dtype, of each buffer that `buffers` gives."""
        return list(persistent_buffers(self.model)) if self.cut is None else self.cut.buffers

    def local_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that this rank has, to be written in place."""
        yield from persistent_buffers(self.model)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers that a state dict of the whole model holds. A collective call."""
        yield from self.local_buffers()


class WholeModelEngine(Engine):
    """An engine that runs the model from ids to logits on this rank."""

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> float:
        """See Engine.evaluate."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        self.model.eval()
        with torch.no_grad():
            for micro_batch in micro_batches:
                batch = self._own_share(micro_batch).to(self.device)
                totals[0] += self._loss_sum(self._logits(batch), batch.labels)
                totals[1] += (batch.labels != IGNORE).sum()
        self.model.train()
        self._sum_over_replicas(totals)
        return float(totals[0] / totals[1])

    @abstractmethod
    def _logits(self, batch: MicroBatch) -> torch.Tensor:
        """Forward pass: logits [b, s, v]."""

    def _own_share(self, micro_batch: MicroBatch) -> MicroBatch:
        """What this rank computes of a micro-batch: all of it, where ranks do not share sequences."""
        return micro_batch

    def _loss_sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum of the token losses of one micro-batch."""
        return token_loss_sum(logits, labels)

    def _sum_over_replicas(self, values: torch.Tensor) -> None:
        """Add up what each data-parallel rank counted of its samples, in place."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(values)


class DataParallelEngine(WholeModelEngine):
    """The step of engines whose ranks each compute a part of the global batch and average gradients over dp ranks."""

    dp: int
    """Ranks over which the engine averages gradients."""
    accumulation: int
    grad_clip: float
    dropout: DropoutStream

    def train_step(
        self, micro_batches: Iterable[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        """See Engine.train_step."""
        loss_sum = torch.zeros(1, dtype=torch.float64, device=self.device)
        # The engine averages over dp ranks and we sum over micro-batches: this factor turns both into
        # sum of token losses / target tokens of the global batch.
        scale = self.dp / target_tokens
        for i, micro_batch in enumerate(micro_batches):
            batch = self._own_share(micro_batch).to(self.device)
            self.dropout.start(batch.dropout_seed)
            with self._accumulating(last=i == self.accumulation - 1):
                micro_loss = self._loss_sum(self._logits(batch), batch.labels)
                self.mark("backward")
                self._backward(micro_loss * (scale * not_a_number_unless_finite(micro_loss)))
            loss_sum += micro_loss.detach()
        self.mark("update")
        loss = self._global_loss(loss_sum, target_tokens)
        self._set_learning_rate(learning_rate)
        if not math.isfinite(loss):
            error = refuse_loss(loss, loss_sum)
            with suppress(NonFiniteError):
                self._update(loss)  # its gradient is no number either: the engine's own way to go without this step
            raise error
        self.before_update()
        return self._update(loss)

    def _global_loss(self, loss_sum: torch.Tensor, target_tokens: int) -> float:
        total = loss_sum.clone()
        self._sum_over_replicas(total)
        return float(total) / target_tokens

    def _accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """A context around forward and backward of one micro-batch; `last` of the step synchronises gradients."""
        return nullcontext()

    @abstractmethod
    def _backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients of a scaled micro-batch loss."""

    @abstractmethod
    def _update(self, loss: float) -> StepResult:
        """Clip, take the optimizer step, and clear the gradients."""

    @abstractmethod
    def _set_learning_rate(self, learning_rate: float) -> None:
        """The learning rate of the step that comes."""

    @abstractmethod
    def _discard_gradients(self) -> None:
        """Forget what was accumulated."""


def not_a_number_unless_finite(loss: torch.Tensor) -> torch.Tensor:
    """1, or NaN for a loss that is not finite. As a factor it makes all gradients NaN, which the loss alone need not.

    So one rule decides on every rank whether a step counts: the gradient's norm. Nothing waits for the device.
    """
    return torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)


def refuse_loss(loss: float, local: torch.Tensor) -> NonFiniteError:
    """The error for a loss that is not finite; `local` is this rank's part of it. A collective call."""
    return NonFiniteError(f"the loss is {loss} on {describe_ranks(ranks_where_not_finite(local))}")


def refuse_gradient(norm: float) -> NonFiniteError:
    """The error for a finite loss with a gradient that is not."""
    return NonFiniteError(f"the gradient norm is {norm} while the loss is finite")


def ranks_where_not_finite(local: torch.Tensor) -> list[int]:
    """The ranks whose own part of the loss is not finite. A collective call."""
    if not dist.is_initialized():
        return [0]
    flag = (~torch.isfinite(local)).to(torch.int32)
    flags = [torch.zeros_like(flag) for _ in range(dist.get_world_size())]
    dist.all_gather(flags, flag)
    return [rank for rank, value in enumerate(flags) if int(value)]


def describe_ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 9 more`."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
