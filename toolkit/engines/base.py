"""The interface of every engine, and how all ranks take an update or skip it together."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines.compiled_layers import CompiledLayers
from toolkit.engines.context_slices import ContextSlices
from toolkit.engines.objectives.distillation import Distillation
from toolkit.engines.objectives.token_weights import TokenWeights
from toolkit.engines.optimizer_states import MASTER, OptimizerStates
from toolkit.engines.routing import Routing, RoutingStats
from toolkit.errors import NonFiniteError
from toolkit.model_init.model_modules import persistent_buffers
from toolkit.model_init.model_partition import ModelPartition
from toolkit.parallel.adapter_names import holds_adapters, saved_name
from toolkit.parallel.chunked_loss import LossInHead
from toolkit.parallel.distilled_loss import TeacherTokens, TopTokens
from toolkit.parallel.gather import Names, Opened, gather_parameters, open_local
from toolkit.parallel.shard import FullTensor, Shard, shard_of
from toolkit.parallel.tensor.vocabulary import VocabularyShard
from toolkit.phases import PhaseReporter, ignore_phase
from toolkit.units import some

LOSS = "the loss"
"""The name of the loss among the gradients that `Engine.repeat` returns."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """The update of a step: the norm of the gradient, and the totals that the host has read together with it.

    `skipped`: nothing has changed, because the norm is not finite.
    """

    totals: list[float]
    grad_norm: float
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The token-weighted loss of one global batch (nats) and the norm of its gradient.

    `skipped`: an fp16 step that overflowed; the loss scale was lowered and no weight changed. `source_losses`: the sum
    of the token losses of each source of a mixture. `routing`: of a model with experts. `objective`: metrics of an
    objective, by name. `margins`: pairs by their margin, counted between MARGIN_EDGES.
    """

    loss: float
    grad_norm: float
    skipped: bool = False
    source_losses: tuple[float, ...] = ()
    routing: RoutingStats | None = None
    objective: dict[str, float] | None = None
    margins: tuple[int, ...] | None = None


class Engine(ABC):
    """One strategy on this rank: `model` is the module itself, on `device`."""

    model: PreTrainedModel
    device: torch.device
    sources: int = 0
    """Sources of a mixture, whose losses are summed apart; 0 for a single source."""
    optimizer: Any
    partition: ModelPartition | None = None
    """The part of the model on this rank; None where that is the full model."""
    routing: Routing | None = None
    """The routers of a model with experts."""
    compiled: CompiledLayers | None = None
    """The decoder layers that torch.compile has compiled."""
    context: ContextSlices | None = None
    """This rank's part of sequences that context-parallel ranks share, or the whole ones that the toolkit's attention
    takes; else None."""
    head_loss: LossInHead | None = None
    """The hooks that compute the loss inside the model's head; None where logits are computed."""
    objective: TokenWeights | None = None
    """The weights of tokens that make an objective of the token loss; None where all tokens weigh the same."""
    distillation: Distillation | None = None
    """The teacher of the micro-batches; None where there is none."""
    with_reference: Callable[[], AbstractContextManager[None]] | None = None
    """Returns a context in which the engine computes with the weights of a reference model that is kept in memory."""
    before_update: Callable[[], None] = staticmethod(lambda: None)
    """Called in every step once the learning rate is set and the gradients are complete, before clipping.

    Whether they are finite is known after it: the host reads loss and norm together.
    """

    loop_numbers: Callable[[], torch.Tensor] | None = None
    """Called in every step before the update: numbers of the training loop, fp64 [n] on `device`, that the host reads
    together with loss and norm."""
    read_loop_numbers: Sequence[float] = ()
    """What the host has read of `loop_numbers` in the last step, also where its update was refused."""

    report_phase: PhaseReporter = staticmethod(ignore_phase)
    """Called where the phases of a step begin."""

    @abstractmethod
    def train_step(
        self, micro_batches: Iterable[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        """Take one optimizer step. `target_tokens` counts the global batch: with an objective its pairs or completions.

        Raises NonFiniteError, on every rank, if the loss or the gradient norm is not finite. Then no weight and no
        optimizer state has changed, the gradients are discarded, and training may continue with the next step.
        """

    stage_layers: tuple[int, ...] = ()
    """Decoder layers of each pipeline stage; empty where there is no pipeline."""

    def parameter_count(self) -> int:
        """Count the parameters of the full model, tied ones once."""
        if self.partition is not None:
            return self.partition.parameter_count
        return sum(getattr(p, "ds_numel", p.numel()) for p in self.model.parameters())

    states: OptimizerStates
    """The optimizer states of the local parameters."""

    def full_parameters(self, names: Names | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and full value of each parameter, or of these, tied ones once. A collective call."""
        return self._full(names, lambda parameter: parameter.detach())

    def full_states(self, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield an optimizer state or the fp32 master weights, in fp32, of all that have one. A collective call."""
        with self.states.opened(kind):
            yield from self._full(
                self.saved_names(kind),
                lambda parameter: self.states.read(parameter, kind),
                dtype=torch.float32,
                shard=lambda parameter: self.states.shard(shard_of(parameter), kind),
            )

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradients of all that trains, for use in `before_update`. Zeros where there is none."""
        return self._full(self.trained_names(), lambda parameter: parameter.grad)

    def _full(
        self,
        names: Names | None,
        read: Callable[[nn.Parameter], torch.Tensor | None],
        *,
        dtype: torch.dtype | None = None,
        opened: Opened = open_local,
        shard: Callable[[nn.Parameter], Shard] = shard_of,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and full value of what `read` returns for each of `names`, by default of all parameters.

        Other arguments are those of `gather_parameters`.
        """
        if self.partition is not None:
            yield from gather_parameters(
                self.partition.names if names is None else names,
                self.model.parameters(),
                self.partition.groups,
                opened=opened,
                values=read,
                dtype=dtype,
                shard=shard,
            )
            return
        wanted = None if names is None else {name for name, _ in names}
        for name, parameter in self.named_parameters():
            if wanted is not None and name not in wanted:
                continue
            with opened([parameter]):
                value = read(parameter)
                yield name, torch.zeros_like(parameter) if value is None else value

    def load_states(self, kind: str, source: Callable[[str], FullTensor]) -> None:
        """Set an optimizer state or the master weights; `source` returns the full tensor of a Hugging Face name, of
        which only the local shard is read. A collective call."""
        wanted = {name for name, _ in self.saved_names(kind)}
        with self.states.opened(kind, writes=True):
            for name, parameter in self.named_parameters():
                if name not in wanted:
                    continue
                if self.partition is None:
                    value = source(name).clone(memory_format=torch.contiguous_format)
                else:
                    value = self.states.shard(shard_of(parameter), kind).take(source(name))
                self.states.write(parameter, kind, value.to(self.device, torch.float32))

    def loss_scale(self) -> dict[str, float]:
        """Return the state of the fp16 loss scaler; empty if there is none."""
        return {}

    def load_loss_scale(self, state: Mapping[str, float]) -> None:
        """Set the state of the loss scaler, if there is one: the checkpoint of an fp16 run may resume without."""
        return

    @abstractmethod
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Return the mean token loss (nats) of all ranks' micro-batches. All ranks must pass equally many."""

    def parameter_names(self) -> Names:
        """Return name and shape of every parameter of the full model, in model order, tied ones once."""
        if self.partition is not None:
            return self.partition.names
        return [(name, getattr(p, "ds_shape", p.shape)) for name, p in self.named_parameters()]

    def trained_names(self) -> Names:
        """Return name and shape of every parameter that trains: all but frozen ones."""
        if self.partition is not None:
            return [entry for entry in self.partition.names if entry[0] in self.partition.trained]
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return [entry for entry in self.parameter_names() if entry[0] in trained]

    def saved_names(self, kind: str) -> Names:
        """Return name and shape of each state of this kind, or of each weight (MASTER), that a checkpoint has.

        In a model with adapters only these are saved: the weights beside them never change.
        """
        trained = [entry for entry in self.trained_names() if self.states.keeps(kind, *entry)]
        if kind == MASTER:
            return trained if holds_adapters(name for name, _ in trained) else self.parameter_names()
        shards = (self.states.shard(Shard(name=name, shape=tuple(shape)), kind) for name, shape in trained)
        return [(shard.name, torch.Size(shard.shape)) for shard in shards]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the local parameters with their names in files."""
        for name, parameter in self.model.named_parameters():
            yield saved_name(name) if self.partition is None else shard_of(parameter).name, parameter

    def buffer_specs(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Return the name of each buffer that `buffers` yields, with a tensor of its shape and dtype."""
        return list(persistent_buffers(self.model)) if self.partition is None else self.partition.buffers

    def local_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers on this rank, to be written in place."""
        yield from persistent_buffers(self.model)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers in a state dict of the full model. A collective call."""
        yield from self.local_buffers()

    def repeat(self, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Compute a micro-batch as in training, and keep nothing: its loss, and this rank's gradients by name.

        Raises NotImplementedError in an engine that cannot compute one without a step.
        """
        raise NotImplementedError

    def sequence_sums(self, micro_batches: Iterable[MicroBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the numbers of pieces [n] and the log-probabilities of their sequences [n, 2] of all micro-batches.

        Of ranks that compute the same, only one has them; for the others the list is empty. All ranks must pass equally
        many micro-batches. Raises NotImplementedError in an engine that computes no objective.
        """
        raise NotImplementedError

    def _collect_sums(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Run forward passes without dropout, from which the objective collects; as `sequence_sums` otherwise."""
        raise NotImplementedError

    @property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """The ranks that share each sequence, position by position; None where a rank has whole ones."""
        return None if self.context is None else self.context.group

    def _begin_step(self, micro_batches: Iterable[MicroBatch]) -> Iterable[MicroBatch]:
        """Begin a step; compute first what its loss needs to know of the whole global batch."""
        batches = self._begin_routing(micro_batches)
        if self.distillation is not None:
            self.distillation.begin_step()
        if self.objective is None:
            return batches
        self.objective.begin_step()
        batches = self._with_reference_sums(batches)
        if not self.objective.needs_mean:
            return batches
        step_batches = list(batches)
        with self.objective.averaging():
            self._pass_forward(step_batches)
        if self.routing is not None:
            self.routing.forget_passes()
        self._sum_over_samples(self.objective.mean)
        self.objective.finish_mean()
        return step_batches

    @property
    def _step_totals(self) -> TokenWeights | Distillation | None:
        """What adds up the loss and the metrics of a step, where that is more than the loss of tokens."""
        return self.distillation if self.objective is None else self.objective

    def top_tokens(self, micro_batches: Iterable[MicroBatch], top: TopTokens) -> list[tuple[MicroBatch, TeacherTokens]]:
        """Return what `top` collects of each micro-batch, [b s, k], beside this rank's part of the micro-batch.

        Of ranks that compute the same, only one has it; for the others the list is empty. Raises NotImplementedError in
        an engine that cannot be a teacher.
        """
        raise NotImplementedError

    def vocabulary(self) -> tuple[VocabularyShard | None, dist.ProcessGroup | None]:
        """Return the rows of the vocabulary that logits are of, and the ranks that have the others; None for all."""
        if self.partition is None or self.partition.layout.tp == 1:
            return None, None
        group = self.partition.groups.tensor
        return VocabularyShard.of(self.partition.vocabulary, group), group

    def _with_reference_sums(self, micro_batches: Iterable[MicroBatch]) -> Iterable[MicroBatch]:
        """Compute the log-probabilities of a reference model that is in memory, for the passes that follow."""
        if self.with_reference is None or self.objective is None:
            return micro_batches
        batches = list(micro_batches)
        with self.with_reference():
            self._collect_sums(batches)
        self.objective.keep_reference()
        return batches

    def release_gathered_weights(self) -> None:
        """Let go of weights that are gathered from the shards of ranks."""
        return

    def _pass_forward(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run the forward passes of a step without gradients; with an objective, up to the losses of the tokens.

        Raises NotImplementedError in an engine that computes no objective and no router loss of a global batch.
        """
        raise NotImplementedError

    def _begin_routing(self, micro_batches: Iterable[MicroBatch]) -> Iterable[MicroBatch]:
        """Begin a step; where the loss of the routers needs the counts of the global batch, count them first."""
        if self.routing is None or not self.routing.begin_step():
            return micro_batches
        step_batches = list(micro_batches)
        with self.routing.counting():
            self._pass_forward(step_batches)
        self._sum_over_samples(self.routing.global_counts)
        return step_batches

    def _add_router_losses(self, token_loss: torch.Tensor, target_tokens: int) -> torch.Tensor:
        """Add the losses of the routers to the sum of the token losses of a micro-batch that has run."""
        if self.routing is None or not self.routing.has_loss:
            return token_loss
        return token_loss + target_tokens * self.routing.loss()

    def _host_totals(self, losses: torch.Tensor) -> torch.Tensor:
        """Return all that the host reads in a step together with the norm, fp64 [n]; `_take_totals` takes it apart.

        `losses`: the sums of the losses. What routing has summed follows, of a model with experts, and the numbers of
        the training loop.
        """
        totals = [losses]
        if self.routing is not None:
            self._sum_over_samples(self.routing.totals)
            totals.append(self.routing.totals)
        if self.loop_numbers is not None:
            totals.append(self.loop_numbers())
            self.report_phase("update")
        return torch.cat(totals)

    def _take_totals(self, totals: list[float]) -> list[float]:
        """Keep the numbers of the training loop; return what else `_host_totals` has collected."""
        routed = 0 if self.routing is None else len(self.routing.totals)
        end = self._loss_count + routed
        self.read_loop_numbers = totals[end:]
        return totals[:end]

    @property
    def _loss_count(self) -> int:
        """Count the sums of losses that the host reads in a step: of all samples, of sources, and of an objective."""
        return 1 + self.sources if self._step_totals is None else len(self._step_totals.totals)

    def _result(self, update: Update, target_tokens: int) -> StepResult:
        """Build the result of a step from what `_take_totals` returned."""
        losses = update.totals[: self._loss_count]
        routing = None
        if self.routing is not None:
            routing = self.routing.finish_step(update.totals[self._loss_count :], updated=not update.skipped)
        if self._step_totals is not None:
            metrics = self._step_totals.metrics(losses, target_tokens)
            return StepResult(
                loss=losses[0] / target_tokens,
                grad_norm=update.grad_norm,
                skipped=update.skipped,
                routing=routing,
                objective=metrics,
                margins=None if self.objective is None else self.objective.margins(losses),
            )
        return StepResult(
            loss=losses[0] / target_tokens,
            grad_norm=update.grad_norm,
            skipped=update.skipped,
            source_losses=tuple(losses[1:]),
            routing=routing,
        )

    def _sum_over_samples(self, values: torch.Tensor) -> None:
        """Sum over all ranks that have other tokens or layers, in place."""
        if self.routing is not None:
            self.routing.sum_over_shards(values)

    def _set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_ratio", 1.0)


class DistributedEngine(Engine):
    """An engine whose ranks take one update together, or skip it together."""

    _fp16 = False
    """Whether a loss scaler may skip an update."""

    def _finish_step(
        self, losses: torch.Tensor, local: torch.Tensor, *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        """Take the update, unless it is not finite.

        `losses`, fp64 [1 + sources]: the sum of the token losses of the global batch, and those of each source; `local`
        is this rank's part of the former. Where the loss is not finite, the gradient is NaN, and the engine refuses the
        update by its norm.
        """
        self._set_learning_rate(learning_rate)
        self.before_update()
        update = self._update(self._host_totals(losses))
        update = replace(update, totals=self._take_totals(update.totals))
        loss = update.totals[0] / target_tokens
        if not math.isfinite(loss):
            raise loss_error(loss, local)
        if update.skipped and not self._fp16:
            raise gradient_error(update.grad_norm)
        return self._result(update, target_tokens)

    @abstractmethod
    def _update(self, totals: torch.Tensor) -> Update:
        """Clip, take the optimizer step unless the norm is not finite, and clear the gradients.

        The host reads `totals`, fp64, together with the norm, and nothing else (toolkit/engines/host_read.py).
        """


def loss_error(loss: float, local: torch.Tensor) -> NonFiniteError:
    """Build the error for a loss that is not finite; `local` is this rank's part of it. A collective call."""
    ranks = [0]
    if dist.is_initialized():
        flag = (~torch.isfinite(local)).to(torch.int32)
        flags = [torch.zeros_like(flag) for _ in range(dist.get_world_size())]
        dist.all_gather(flags, flag)
        ranks = [rank for rank, value in enumerate(flags) if int(value)]
    noun = "ranks" if len(ranks) > 1 else "rank"
    return NonFiniteError(f"the loss is {loss} on {noun} {some(ranks, 8)}")


def gradient_error(norm: float) -> NonFiniteError:
    """Build the error for a gradient that is not finite although the loss is."""
    return NonFiniteError(f"the gradient norm is {norm} while the loss is finite")
