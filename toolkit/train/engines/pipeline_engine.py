"""DeepSpeed's pipeline engine with ZeRO 0 or 1, alone or with tensor parallelism, under our loss and our checks."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.utils import safe_get_full_grad
from transformers import PreTrainedModel

from toolkit.batch import Batch
from toolkit.errors import NonFiniteError
from toolkit.layout import Layout
from toolkit.parallel.deepspeed_pipeline import StagePipeline, StepWithoutUpdate
from toolkit.parallel.gather import whole_buffers, whole_parameters
from toolkit.recipe import Recipe
from toolkit.train.cut import ModelCut
from toolkit.train.dropout import DropoutStream
from toolkit.train.engines.base import (
    Engine,
    MicroBatch,
    StepResult,
    not_a_number_unless_finite,
    refuse_gradient,
    refuse_loss,
)
from toolkit.train.engines.deepspeed_engine import (
    keep_buffers,
    model_dtype,
    plain_norm,
    quiet_stdout,
    read_loss_scale,
    repair_norms,
    restore_buffers,
    write_loss_scale,
)
from toolkit.train.engines.states import deepspeed_states, state_kinds
from toolkit.train.loss import IGNORE
from toolkit.train.optimizer import parameter_groups, torch_optimizer


class PipelineEngine(Engine):
    """This rank's stage of a model. Only the first and the last stage look at the micro-batches' tokens."""

    cut: ModelCut

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        batch: Batch,
        config: Mapping[str, Any],
        model: PreTrainedModel,
        device: torch.device,
        cut: ModelCut,
    ) -> None:
        assert cut.stage is not None
        self.model, self.device, self.cut, self.batch = model, device, cut, batch
        self.dropout = DropoutStream(
            model, device, sequence_group=cut.groups.tensor if layout.sequence_parallel else None
        )
        self.stage_layers = tuple(stop - start for start, stop in pairwise(cut.bounds))
        self._zero_stage = layout.zero_stage
        self._scale = 0.0
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)
        self._seeds: Iterator[int] = iter(())
        cut.stage.register_forward_pre_hook(lambda *_: self._begin_forward())
        buffers = keep_buffers(model)
        with quiet_stdout(unless=recipe.log.level == "debug"):
            deepspeed.init_distributed()  # PipelineModule asks DeepSpeed for the ranks before anybody made it look
            pipeline = StagePipeline(cut.stage, cut.groups, cut.shared, self._loss)
            groups = parameter_groups(model, recipe.optimizer.weight_decay)
            client = None if "optimizer" in config else torch_optimizer(recipe.optimizer, groups)
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=pipeline, model_parameters=None if client else groups, optimizer=client, config=dict(config)
            )
        restore_buffers(model, buffers, device)
        cut.stage.cast_elsewhere(model_dtype(config))
        repair_norms(self.engine, self.cut)
        kinds = state_kinds(recipe.optimizer.name, recipe.optimizer.momentum)
        self.states = deepspeed_states(self.optimizer, layout.zero_stage, kinds)

    def train_step(
        self, micro_batches: Iterable[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        """See Engine.train_step."""
        # DeepSpeed averages over micro-batches and replicas: this factor turns that into
        # sum of token losses / target tokens of the global batch.
        self._scale = self.batch.dp * self.batch.accumulation / target_tokens
        self.engine.module.train()
        self._run(StepWithoutUpdate, list(micro_batches))
        self.mark("update")
        local = self._totals[0].clone()
        self._sum_over_ranks()
        loss = float(self._totals[0]) / target_tokens
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if not math.isfinite(loss):
            error = refuse_loss(loss, local)
            with suppress(NonFiniteError):
                self._update(loss)  # its gradient is not a number either: DeepSpeed's own way to go without this step
            raise error
        self.before_update()
        return self._update(loss)

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> float:
        """See Engine.evaluate."""
        self.engine.module.eval()
        with torch.no_grad():
            self._run(schedule.InferenceSchedule, list(micro_batches))
        self.engine.module.train()
        self._sum_over_ranks()
        return float(self._totals[0] / self._totals[1])

    def parameter_count(self) -> int:
        """See Engine.parameter_count."""
        return self.cut.parameter_count

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_parameters."""
        yield from whole_parameters(self.cut.names, self.model.parameters(), self.cut.groups)

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.buffers. Each stage has those of its own layers."""
        yield from whole_buffers(self.cut.buffers, dict(self.local_buffers()), self.cut.groups)

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See Engine.full_gradients."""
        yield from whole_parameters(
            self.cut.names, self.model.parameters(), self.cut.groups, values=safe_get_full_grad, dtype=torch.float32
        )

    def loss_scale(self) -> dict[str, float]:
        """See Engine.loss_scale."""
        return read_loss_scale(self.engine)

    def load_loss_scale(self, state: Mapping[str, float]) -> None:
        """See Engine.load_loss_scale."""
        write_loss_scale(self.engine, state)

    def _run(self, kind: type[Any], micro_batches: list[MicroBatch]) -> None:
        """Send micro-batches through the pipeline and leave the sums of loss and target tokens in `_totals`."""
        engine = self.engine
        self._totals.zero_()
        self._seeds = iter([micro_batch.dropout_seed for micro_batch in micro_batches])
        engine.set_dataiterator(_tensors(micro_batch, self.device) for micro_batch in micro_batches)
        engine.total_loss = None
        engine._compute_loss = True
        engine._exec_schedule(
            kind(micro_batches=len(micro_batches), stages=engine.num_stages, stage_id=engine.stage_id)
        )

    def _begin_forward(self) -> None:
        self.dropout.start(next(self._seeds))
        if self.model.training:
            self.mark("forward")  # of the pipeline as a whole: which of its passes stages are at differs by design

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = self.cut.loss_sum(logits, labels)
        self._totals[0] += loss.detach()
        self._totals[1] += (labels != IGNORE).sum()
        return loss * (self._scale * not_a_number_unless_finite(loss))

    def _sum_over_ranks(self) -> None:
        """Only last stages have counted; tensor-parallel ranks have counted the same."""
        if not self.cut.groups.is_first_of_tensor:
            self._totals.zero_()
        dist.all_reduce(self._totals)

    def _update(self, loss: float) -> StepResult:
        norm: float | None = None
        if self._zero_stage == 0:
            norm = float(plain_norm(self.model.parameters(), self.cut))
            if not math.isfinite(norm):
                self.engine.zero_grad()
                raise refuse_gradient(norm)
        self.engine._exec_optimizer_step()
        if norm is None:
            reported = self.engine.get_global_grad_norm()
            norm = math.nan if reported is None else float(reported)
            if not math.isfinite(norm) or not self.engine.was_step_applied():
                raise refuse_gradient(norm)
        return StepResult(loss=loss, grad_norm=norm)


def _tensors(micro_batch: MicroBatch, device: torch.device) -> tuple[Any, torch.Tensor]:
    batch = micro_batch.to(device)
    inputs = (batch.input_ids,) if batch.position_ids is None else (batch.input_ids, batch.position_ids)
    return (inputs[0] if len(inputs) == 1 else inputs), batch.labels
