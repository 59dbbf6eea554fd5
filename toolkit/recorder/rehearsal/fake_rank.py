"""This process as one rank of a job whose other ranks do not exist: no tensor has memory, no message arrives.

Small tensors of integers have values (`host_values.py`). What a rank receives of them is what the rank before it sent
in its own rehearsal.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_iter
from typing_extensions import override

from toolkit.config.layout import Layout
from toolkit.engines.scheduled_pipeline import ScheduledStep
from toolkit.recorder.gpu_kernels import GpuKernels
from toolkit.recorder.rehearsal.channel_messages import messages_named
from toolkit.recorder.rehearsal.collectives import Collective, CollectiveRecorder
from toolkit.recorder.rehearsal.host_values import (
    fill,
    forget_values,
    host_values,
    is_on_gpu,
    makes_values,
    run_with_values,
)
from toolkit.recorder.rehearsal.live_bytes import LiveBytes
from toolkit.recorder.rehearsal.other_ranks import other_ranks_answered
from toolkit.recorder.rehearsal.stage_order import NotedSchedule, RecordedSchedule
from toolkit.recorder.rehearsal.torch_on_fake_tensors import torch_on_fake_tensors
from toolkit.recorder.run_pass import values_assumed

aten = torch.ops.aten
CPU = torch.device("cpu")
Messages = Sequence[list[int]]
"""Tensors of integers, in their order."""


class FakeRank(CollectiveRecorder):
    """A mode that answers for values that do not exist, and counts bytes. It needs a FakeTensorMode below it."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        *,
        received: Messages,
        stage_maxima: Messages,
        on_gpu: bool,
        documents: bool,
        device: torch.device,
    ) -> None:
        super().__init__(layout, rank)
        self.documents = documents
        self.device = device
        self.live = LiveBytes(on_gpu=on_gpu)
        self.sent: list[list[int]] = []
        self.maxima: list[list[int]] = []
        """What this rank put into all-reduces of integers over the stages of its pipeline."""
        self.schedules: list[RecordedSchedule] = []
        """Schedules of a pipeline that this rank has run."""
        self._received = iter(received)
        self._stage_maxima = iter(stage_maxima)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            values = host_values(args[0])
            with unset_fake_temporarily():
                return self._answer(args[0].dtype) if values is None else values.item()
        if makes_values(func, args, kwargs):
            if not is_on_gpu(args, kwargs):
                with unset_fake_temporarily():
                    return func(*args, **kwargs)
            result = run_with_values(func, args, kwargs)
        else:
            forget_values(func, args)
            result = func(*args, **kwargs)
        self.live.see(func, args, kwargs, result)
        return result

    def _answer(self, dtype: torch.dtype) -> bool | int:
        """Return a value that does not exist: numbers are 1, and no number is too large.

        transformers asks whether positions are consecutive, which those of several documents are not.
        """
        if dtype != torch.bool:
            return 1
        return not self.documents and _is_called_by_transformers()

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = self.record(func, args)
        tensors = [tensor for tensor in tree_iter(args[0]) if isinstance(tensor, torch.Tensor)]
        if call is not None and call.kind != "barrier":
            self._check_device(call, tensors)
        values = [held for tensor in tensors if (held := host_values(tensor)) is not None]
        if call is None or not values or call.group != "pipeline":
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            if call.message:
                self._carry(call.kind, values[0])
            elif call.kind == "send" and call.peer == 1:
                self.sent.append(values[0].tolist())
            elif call.kind == "receive" and call.peer == -1:
                fill(values[0], next(self._received, None))
            elif call.kind == "all_reduce":
                self.maxima.append(values[0].reshape(-1).tolist())
                fill(values[0], next(self._stage_maxima, None))
        return func(*args, **kwargs)

    def _carry(self, kind: str, values: torch.Tensor) -> None:
        """Send or receive integers of a pipeline schedule: headers, which are alike at all stages, and positions.

        A header is that of a stage of this rank, or of one before it where none has sent.
        """
        is_header = values.dim() == 1
        if kind == "send" and is_header:
            self.sent.append(values.tolist())
        elif kind == "receive" and is_header:
            fill(values, self.sent[-1] if self.sent else next(self._received, None))
        elif kind == "receive":
            values.zero_()

    def _check_device(self, call: Collective, tensors: Sequence[torch.Tensor]) -> None:
        """Raise RuntimeError for a tensor that is not on the rank's device, as NCCL does: gloo copies it."""
        wrong = next((tensor for tensor in tensors if tensor.device.type != self.device.type), None)
        if wrong is not None and self.device.type != "cpu":
            raise RuntimeError(f"{call} of group {call.group} has a tensor on {wrong.device}, which NCCL cannot send")


def _is_called_by_transformers() -> bool:
    """Whether the innermost function that is not PyTorch's, or of this file, is of transformers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and "/transformers/" in frame.f_code.co_filename


@contextmanager
def fake_rank(
    layout: Layout,
    rank: int,
    *,
    received: Messages = (),
    stage_maxima: Messages = (),
    on_gpu: bool = True,
    documents: bool = False,
    device: torch.device = CPU,
) -> Iterator[FakeRank]:
    """Be one rank of a layout inside. There must be no process group. `on_gpu`: which device's kernels run.

    `received`: the headers that the stage before sends. `stage_maxima`: what each all-reduce of integers over the
    stages of a pipeline returns. `documents`: whether positions restart inside a sample. `device`: where fake tensors
    say that they are.
    """
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(layout.world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    mode = FakeRank(
        layout, rank, received=received, stage_maxima=stage_maxima, on_gpu=on_gpu, documents=documents, device=device
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(torch_on_fake_tensors(device))
        stack.enter_context(mock.patch.object(PipelineEngine, "_exec_schedule", _noting_schedules(mode)))
        stack.enter_context(messages_named(mode))
        stack.enter_context(other_ranks_answered(layout))
        stack.enter_context(values_assumed())
        if on_gpu:
            stack.enter_context(GpuKernels())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mode)
        yield mode


def _noting_schedules(mode: FakeRank) -> Callable[[PipelineEngine, Any], None]:
    """Return DeepSpeed's loop over the instructions of a schedule, which notes the calls of each."""
    run = PipelineEngine._exec_schedule

    def noted(engine: PipelineEngine, schedule: Any) -> None:
        if isinstance(schedule, ScheduledStep):  # each of its ranks is rehearsed
            run(engine, schedule)
            return
        run(engine, NotedSchedule(schedule, mode, mode.schedules))

    return noted
