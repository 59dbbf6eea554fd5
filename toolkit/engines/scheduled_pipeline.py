"""DeepSpeed's pipeline engine with a schedule of the toolkit: any order of passes over the stages of a rank.

DeepSpeed's own forward pass, backward pass, reductions and update run unchanged. What differs: a pass names its stage
and micro-batch, and buffers are kept for both; messages pass through channels; and W, the weight gradients that B has
left, is an instruction of its own.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from deepspeed.runtime.pipe import engine as deepspeed_pipe
from deepspeed.runtime.pipe import schedule as instructions

from toolkit.config.pipeline_messages import Message
from toolkit.config.pipeline_schedules import PASS_NAMES, Operation, Pass, Schedule
from toolkit.parallel.pipeline.channels import Channels
from toolkit.parallel.pipeline.stage import PipelineStage
from toolkit.parallel.pipeline.weight_gradients import WeightGradients

Place = tuple[int, int]
"""A stage and a micro-batch."""
Batches = Callable[[int], tuple[Any, torch.Tensor]]
"""Returns a micro-batch's inputs of the first stage, and labels of the last."""


def _described(kind: Pass, stage: int, micro_batch: int) -> str:
    return f"{PASS_NAMES[kind]} of micro-batch {micro_batch} in stage {stage}"


class RunPass(instructions.PipeInstruction):  # type: ignore[misc]
    """One pass of a micro-batch through a stage: kind, stage, micro_batch."""


class ScheduledStep:
    """The instructions of one rank: the passes of a schedule, or its forward passes alone."""

    def __init__(self, operations: Sequence[Operation], *, reduces: bool) -> None:
        self._operations = operations
        self._reduces = reduces

    def num_pipe_buffers(self) -> int:
        """Return 0: buffers are kept by stage and micro-batch, not by number."""
        return 0

    def __iter__(self) -> Iterator[list[Any]]:
        for kind, stage, micro_batch in self._operations:
            yield [RunPass(kind=kind, stage=stage, micro_batch=micro_batch)]
        if self._reduces:
            yield [instructions.ReduceTiedGrads(), instructions.ReduceGrads()]


class ScheduledPipeline(deepspeed_pipe.PipelineEngine):  # type: ignore[misc]
    """A DeepSpeed pipeline engine that runs schedules. `adopt` makes one of an engine from `initialize`."""

    pipe_buffers: Any
    loss: Any
    grad_layer: Any
    _channels: Channels
    _at_work: int | None = None
    """The stage whose pass runs; None between passes."""

    @classmethod
    def adopt(
        cls,
        engine: Any,
        stage: PipelineStage,
        channels: Channels,
        *,
        splits: bool,
        report: Callable[[str], None] = lambda detail: None,
    ) -> Self:
        """Let an engine run schedules from now on, over the stages of `stage`. `report`s what a rank does.

        `splits`: whether they have gradients of weights as passes of their own.
        """
        engine.__class__ = cls
        adopted: Self = engine
        adopted._stage = stage
        adopted._channels = channels
        adopted._report = report
        adopted._weight_gradients = WeightGradients()
        if splits:
            adopted._weight_gradients.connect(stage.model)
        return adopted

    def is_first_stage(self) -> bool:
        """Whether the stage at work is the first; between passes, whether the rank is."""
        if self._at_work is None:
            return bool(super().is_first_stage())
        return self._at_work == 0

    def is_last_stage(self) -> bool:
        """Whether the stage at work is the last; between passes, whether the rank is."""
        if self._at_work is None:
            return bool(super().is_last_stage())
        return self._at_work == len(self._schedule.rank_of) - 1

    def run(self, schedule: Schedule, batches: Batches, *, only_forward: bool = False) -> None:
        """Run the passes of a schedule, and reduce the gradients; or run the forward passes alone."""
        if only_forward:
            schedule = schedule.only_forward
        order = schedule.orders[self.stage_id]
        self._schedule = schedule
        self._batches = batches
        self._split = {(stage, micro_batch) for kind, stage, micro_batch in order if kind == "B"}
        self._keeps = not only_forward
        self._losses: dict[Place, torch.Tensor] = {}
        self._handed_on: dict[Message, list[torch.Tensor]] = {}
        self.pipe_buffers = {name: defaultdict(lambda: None) for name in self.pipe_buffers}
        self.total_loss = None
        self._compute_loss = True
        self._channels.begin_step(schedule)
        self._exec_schedule(ScheduledStep(order, reduces=not only_forward))
        self._channels.finish_step()
        assert not any((self._losses, self._handed_on, self._weight_gradients.count)), "every pass has run"

    def _reserve_pipe_buffers(self, num_buffers: int) -> None:
        """Reserve nothing: buffers come and go with passes."""

    def _run_pass(self, kind: Pass, stage: int, micro_batch: int) -> None:
        self._at_work = self._stage.active = stage
        is_split = (stage, micro_batch) in self._split
        try:
            with self._weight_gradients.splitting(is_split=is_split):
                match kind:
                    case "F":
                        self._run_forward(stage, micro_batch)
                    case "B":
                        with self._weight_gradients.collecting(stage, micro_batch):
                            self._run_backward(kind, stage, micro_batch)
                        self._send_gradients(stage, micro_batch)
                    case "D":
                        self._run_backward(kind, stage, micro_batch)
                        self._send_gradients(stage, micro_batch)
                    case "W":
                        self._run_weights(stage, micro_batch)
        finally:
            self._at_work = None

    def _run_forward(self, stage: int, micro_batch: int) -> None:
        place = (stage, micro_batch)
        if stage == 0:
            self.pipe_buffers["inputs"][place] = self._batches(micro_batch)[0]
        else:
            received = self._take(Message("activation", stage, micro_batch))
            for tensor in received:
                tensor.requires_grad_(tensor.is_floating_point())
            self.pipe_buffers["inputs"][place] = tuple(received)
        if self.is_last_stage():
            self.pipe_buffers["labels"][place] = self._batches(micro_batch)[1]
        self._report(_described("F", stage, micro_batch))
        self._exec_forward_pass(place)
        if self.is_last_stage():
            self._losses[place] = self.loss
            self.loss = None
            # The loss has all that the backward pass needs of it.
            del self.pipe_buffers["outputs"][place]
            del self.pipe_buffers["labels"][place]
        else:
            self._hand_on(Message("activation", stage + 1, micro_batch), self.pipe_buffers["outputs"][place])
        if not self._keeps:
            self._losses.pop(place, None)
            self.pipe_buffers["inputs"].pop(place)
            self.pipe_buffers["outputs"].pop(place, None)

    def _run_backward(self, kind: Pass, stage: int, micro_batch: int) -> None:
        place = (stage, micro_batch)
        if self.is_last_stage():
            self.loss = self._losses.pop(place)
        else:
            self.grad_layer = self._take(Message("gradient", stage, micro_batch))
        self._report(_described(kind, stage, micro_batch))
        if self.using_bf16_optimizer:
            # What has no gradient in this pass is not added.
            self.optimizer.clear_lp_grads(set_to_none=True)
        outputs = self.pipe_buffers["outputs"].get(place)
        # Behind frozen embeddings and layers nothing of the first stage has a gradient.
        if outputs is None or any(tensor.requires_grad for tensor in outputs):
            self._exec_backward_pass(place)
        self.loss = None
        self.grad_layer = None
        for name in ("outputs", "output_tensors"):
            self.pipe_buffers[name].pop(place, None)

    def _send_gradients(self, stage: int, micro_batch: int) -> None:
        inputs = self.pipe_buffers["inputs"].pop((stage, micro_batch))
        if stage > 0:
            gradients = [tensor.grad for tensor in inputs if tensor.is_floating_point()]
            self._hand_on(Message("gradient", stage - 1, micro_batch), gradients)

    def _run_weights(self, stage: int, micro_batch: int) -> None:
        self._report(_described("W", stage, micro_batch))
        if self.using_bf16_optimizer:
            self.optimizer.clear_lp_grads(set_to_none=True)
        # DeepSpeed's hooks of parameters ask whether its engine runs the backward pass.
        self._running_engine_backward = True
        try:
            self._weight_gradients.compute(stage, micro_batch)
        finally:
            self._running_engine_backward = False
        if self.using_bf16_optimizer:
            self.optimizer.update_hp_grads(clear_lp_grads=False)

    def _hand_on(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Pass tensors to another stage, of this rank or of another one."""
        if self._schedule.rank_of[message.stage] == self.stage_id:
            self._handed_on[message] = [tensor.detach() for tensor in tensors]
        else:
            self._channels.send(message, tensors)

    def _take(self, message: Message) -> list[torch.Tensor]:
        """Return what another stage has passed to the one at work, in new tensors without a history."""
        here = self._handed_on.pop(message, None)
        if here is not None:
            return here
        self._report(f"waits for the {message.carries} of micro-batch {message.micro_batch} at stage {message.stage}")
        return self._channels.receive(message)

    def _begin_reductions(self) -> None:
        self._report("sums gradients")
        self._exec_reduce_tied_grads()

    _INSTRUCTION_MAP = deepspeed_pipe.PipelineEngine._INSTRUCTION_MAP | {
        RunPass: _run_pass,
        instructions.ReduceTiedGrads: _begin_reductions,
    }
