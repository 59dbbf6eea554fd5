"""DeepSpeed's pipeline engine with ZeRO 0 or 1, alone or with tensor parallelism, with our loss and our checks."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from transformers import PreTrainedModel
from typing_extensions import override

from toolkit.config.job import Job
from toolkit.config.pipeline_schedules import SPLITTING
from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines import deepspeed_patches
from toolkit.engines.base import StepResult, Update
from toolkit.engines.context_slices import ContextSlices
from toolkit.engines.deepspeed_engine import DeepSpeedBase, model_dtype
from toolkit.engines.deepspeed_patches import equalize_norm_calls, quiet_stdout, reduce_in_the_buckets_there_are
from toolkit.engines.dropout import DropoutStream
from toolkit.engines.full_forward import add_by_source, nan_unless_finite
from toolkit.engines.gradient_norm import full_grad_norm
from toolkit.engines.host_read import update_if_finite
from toolkit.engines.routing import find_routing
from toolkit.engines.scheduled_pipeline import ScheduledPipeline
from toolkit.model_init.model_partition import ModelPartition
from toolkit.parallel.chunked_loss import collecting_in_head
from toolkit.parallel.context.sequence import SequenceSlice
from toolkit.parallel.distilled_loss import TeacherTokens, TopTokens
from toolkit.parallel.gather import gather_buffers
from toolkit.parallel.loss import IGNORE
from toolkit.parallel.pipeline.channels import Channels
from toolkit.parallel.pipeline.pipeline_module import StagePipeline, StepWithoutUpdate


class PipelineEngine(DeepSpeedBase):
    """This rank's stage of a model. Only the first and the last stage read the micro-batches' tokens."""

    partition: ModelPartition

    def __init__(
        self,
        job: Job,
        config: Mapping[str, Any],
        model: PreTrainedModel,
        device: torch.device,
        partition: ModelPartition,
    ) -> None:
        assert partition.stage is not None
        self.model = model
        self.device = device
        self.partition = partition
        self.batch = job.batch
        self._replicas = job.layout.replicas
        sequence_group = partition.groups.tensor if job.layout.sequence_parallel else None
        entries = partition.stage.entries
        self.dropout = DropoutStream(model, device, sequence_group=sequence_group, entries=entries)
        if job.layout.cp > 1:
            self.context = ContextSlices(job, partition.groups.context)
        self.routing = find_routing(job, model, device, sequence_group, self.context)
        if self.context is None and job.recipe.attends_in_blocks:
            self.context = ContextSlices(job, None)
        if self.routing is not None:
            partition.stage.connect_routers(self.routing.finish, have_loss=self.routing.has_loss)
        self.stage_layers = tuple(stop - start for start, stop in pairwise(partition.bounds))
        self._layout = job.layout
        self._scale = 0.0
        self._target_tokens = 0
        self._fp16 = job.recipe.precision == "fp16" and job.layout.zero_stage > 0
        self.sources = len(job.recipe.data.labels)
        # Losses, targets, and the losses of each source.
        self._totals = torch.zeros(2 + self.sources, dtype=torch.float64, device=device)
        self._micro_batches: Sequence[MicroBatch] = ()
        self._contexts: Sequence[SequenceSlice] = ()
        self._order: Iterator[int] = iter(())
        """The micro-batch of each forward pass that is to come."""
        self._top: TopTokens | None = None
        self._teacher_tokens: list[TeacherTokens] = []
        partition.stage.register_forward_pre_hook(lambda *_: self._begin_forward())
        deepspeed.init_distributed()  # PipelineModule reads the ranks before `initialize` sets them
        with quiet_stdout(unless=job.recipe.log.level == "debug"):
            pipeline = StagePipeline(partition.stage, partition.groups, partition.shared, self._loss)
        self._initialize(job, config, pipeline)
        if job.layout.schedule is not None:
            channels = Channels(partition.groups, device)
            self.engine = ScheduledPipeline.adopt(
                self.engine,
                partition.stage,
                channels,
                splits=job.layout.schedule in SPLITTING,
                report=self._report_pass,
            )
        if hasattr(self.optimizer, "ipg_buckets"):
            reduce_in_the_buckets_there_are(self.optimizer)
        equalize_norm_calls(self.optimizer, partition.groups)
        partition.stage.cast_nonlocal(model_dtype(config))

    @override
    def train_step(
        self, micro_batches: Iterable[MicroBatch], *, target_tokens: int, learning_rate: float
    ) -> StepResult:
        # DeepSpeed averages over micro-batches and replicas: this factor turns that into
        # sum of token losses / target tokens of the global batch.
        self._target_tokens = target_tokens
        self._scale = self._replicas * self.batch.accumulation / target_tokens
        self.engine.module.train()
        self._run(list(self._begin_step(micro_batches)), trains=True)
        self.report_phase("update")
        local = self._totals[0].clone()
        self._sum_over_ranks()
        losses = torch.cat([self._totals[:1], self._totals[2:]])
        if self._step_totals is not None:
            losses = self._step_totals.local_totals()
            local = losses[0].clone()
            self._sum_over_samples_of(losses)
        return self._finish_step(losses, local, target_tokens=target_tokens, learning_rate=learning_rate)

    @override
    def _pass_forward(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._run(micro_batches)

    @override
    def sequence_sums(self, micro_batches: Iterable[MicroBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        assert self.objective is not None
        self._collect_sums(micro_batches)
        if not (self.partition.groups.is_first_of_tensor and self.objective.is_first):
            return []
        return self.objective.counted_sums()

    @override
    def _collect_sums(self, micro_batches: Iterable[MicroBatch]) -> None:
        assert self.objective is not None
        self.engine.module.eval()
        with self.objective.collecting():
            self._run(list(micro_batches))
        self.engine.module.train()

    @override
    def top_tokens(self, micro_batches: Iterable[MicroBatch], top: TopTokens) -> list[tuple[MicroBatch, TeacherTokens]]:
        self._top = top
        self._teacher_tokens = []
        self.engine.module.eval()
        with torch.no_grad(), collecting_in_head(self.head_loss, top):
            self._run(list(micro_batches))
        self.engine.module.train()
        self._top = None
        collected = list(zip(self._micro_batches, self._teacher_tokens, strict=False))  # of the last stage alone
        return collected if self.partition.groups.is_first_of_tensor else []

    @override
    def _sum_over_samples(self, values: torch.Tensor) -> None:
        super()._sum_over_samples(values)
        self._sum_over_samples_of(values)

    def _sum_over_samples_of(self, values: torch.Tensor) -> None:
        """Sum what last stages have counted, in place. Tensor-parallel ranks have counted the same."""
        if not self.partition.groups.is_first_of_tensor:
            values.zero_()
        dist.all_reduce(values)

    @override
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> float:
        if self.objective is not None:
            self.objective.begin_step()
        micro_batches = self._with_reference_sums(micro_batches)
        self.engine.module.eval()
        with torch.no_grad():
            self._run(list(micro_batches))
        self.engine.module.train()
        if self.objective is not None:
            totals = self.objective.loss_and_count()
            self._sum_over_samples_of(totals)
            return float(totals[0] / totals[1])
        self._sum_over_ranks()
        return float(self._totals[0] / self._totals[1])

    @override
    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        # Each stage has those of its own layers.
        yield from gather_buffers(self.partition.buffers, dict(self.local_buffers()), self.partition.groups)

    def _run(self, micro_batches: Sequence[MicroBatch], *, trains: bool = False) -> None:
        """Run micro-batches through the pipeline, forward or in a step that `trains`; sum losses and target tokens in
        `_totals`."""
        engine = self.engine
        self._totals.zero_()
        if self.context is not None:
            self._contexts = [self.context.sequence(micro_batch) for micro_batch in micro_batches]
            micro_batches = list(map(self.context.take, micro_batches, self._contexts))
        self._micro_batches = micro_batches
        if self._layout.schedule is not None:
            self._run_scheduled(trains=trains)
            return
        self._order = iter(range(len(micro_batches)))
        engine.set_dataiterator(_tensors(micro_batch, self.device) for micro_batch in micro_batches)
        engine.total_loss = None
        engine._compute_loss = True
        kind = StepWithoutUpdate if trains else schedule.InferenceSchedule
        engine._exec_schedule(
            kind(micro_batches=len(micro_batches), stages=engine.num_stages, stage_id=engine.stage_id)
        )
        self._release_outputs()

    def _run_scheduled(self, *, trains: bool) -> None:
        """Run the micro-batches in the order of a schedule of the toolkit's own."""
        table = self._layout.table(len(self._micro_batches))
        order = table.orders[self.engine.stage_id]
        self._order = (micro_batch for kind, _, micro_batch in order if kind == "F")
        self.engine.run(table, lambda index: _tensors(self._micro_batches[index], self.device), only_forward=not trains)

    def _release_outputs(self) -> None:
        """Let go of what the last stage returned for earlier micro-batches.

        DeepSpeed keeps it until its slot is used again, and with it, through autograd, what was received, and the
        gradient of that.
        """
        if self._layout.schedule is None and self.engine.is_last_stage():
            self.engine.loss = None
            self.engine.pipe_buffers["outputs"] = [None] * self.engine.num_pipe_buffers

    def _report_pass(self, detail: str) -> None:
        """Report what a rank of a scheduled pipeline does. All ranks are in one phase, whatever pass each is in."""
        if self.model.training:
            self.report_phase(f"pipeline: {detail}")

    def _begin_forward(self) -> None:
        self._release_outputs()
        index = next(self._order)
        self._current = self._micro_batches[index]
        self.dropout.start(self._current.dropout_seed)
        assert self.partition.stage is not None
        self.partition.stage.is_packed = bool(self._current.is_packed)
        if self.context is not None:
            self.partition.stage.attending = partial(self.context.attending, self._contexts[index])
        sequences = self._current.sequences
        if self.objective is not None and sequences is not None and self.partition.stage.ends_model:
            self.objective.start(sequences.map(lambda tensor: tensor.to(self.device, non_blocking=True)))
        if self.head_loss is not None and self.partition.stage.ends_model:
            self.head_loss.labels = self._current.labels.to(self.device, non_blocking=True)
            self.head_loss.weights = self._weights_on_device()
            self.head_loss.teacher = self._teacher_on_device()
        if self.routing is not None and self.model.training:
            self.routing.start(self._current.lengths)
        if self.model.training and self._layout.schedule is None:
            self.report_phase("forward")  # of the whole pipeline: which pass a stage is in differs

    def _weights_on_device(self) -> torch.Tensor | None:
        """Return the weights of the micro-batch's tokens, on the device of the last stage; None without weights."""
        weights = self._current.weights
        return None if weights is None else weights.to(self.device, non_blocking=True)

    def _teacher_on_device(self) -> TeacherTokens | None:
        """Return what the teacher says of the micro-batch, on the device of the last stage; None without a teacher."""
        teacher = self._current.teacher
        return None if teacher is None else teacher.map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def _loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The objective of a micro-batch. `output`: of the last stage, the sum of the token losses, or logits."""
        sources = self._current.sources
        if self._top is not None:
            if self.head_loss is None:
                self._top.add_logits(output, *self.vocabulary())
            self._teacher_tokens.append(self._top.take())
            return output.new_zeros(())
        if self.head_loss is not None:
            loss = output
            losses = self.head_loss.take_sample_losses()
        elif self.objective is not None:
            each = self.partition.token_losses(output, labels)
            loss = (each * self.objective.weigh(each)).sum()
            losses = None
        elif (teacher := self._teacher_on_device()) is not None:
            assert self.distillation is not None
            loss = self.distillation.loss(output, labels, teacher, self._weights_on_device(), *self.vocabulary())
            losses = None
        elif (weights := self._weights_on_device()) is not None:
            loss = (self.partition.token_losses(output, labels) * weights).sum()
            losses = None
        elif sources is None:
            loss = self.partition.loss_sum(output, labels)
            losses = None
        else:
            losses = self.partition.loss_sum(output, labels, by_sample=True)
            loss = losses.sum()
        if sources is not None and losses is not None:
            add_by_source(self._totals[2:], losses, sources.to(self.device, non_blocking=True))
        self._totals[0] += loss.detach()
        self._totals[1] += (labels != IGNORE).sum()
        objective = self._add_router_losses(loss, self._target_tokens) if torch.is_grad_enabled() else loss
        return objective * (self._scale * nan_unless_finite(objective))

    def _sum_over_ranks(self) -> None:
        """Sum `_totals`. Only last stages have counted; tensor-parallel ranks have counted the same."""
        if not self.partition.groups.is_first_of_tensor:
            self._totals.zero_()
        dist.all_reduce(self._totals)

    @override
    def _update(self, totals: torch.Tensor) -> Update:
        if self._zero_stage > 0:
            update = self._zero_update(totals, self.engine._exec_optimizer_step)
            return replace(update, skipped=update.skipped or not math.isfinite(update.grad_norm))
        norm = full_grad_norm(self.model.parameters(), self.partition)
        with deepspeed_patches.known_norm(self.engine, norm):
            update = update_if_finite(self.optimizer, totals, norm, self.engine._exec_optimizer_step)
        if update.skipped:
            self.engine.zero_grad()
        return update


def _tensors(micro_batch: MicroBatch, device: torch.device) -> tuple[Any, torch.Tensor]:
    batch = micro_batch.to(device)
    inputs = (batch.input_ids,) if batch.position_ids is None else (batch.input_ids, batch.position_ids)
    return (inputs[0] if len(inputs) == 1 else inputs), batch.labels
