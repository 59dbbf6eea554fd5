"""This process as one rank of a job whose other ranks do not exist: no tensor has memory, no message arrives.

Small tensors of integers are real: the headers of pipeline messages, counts, sizes. What a rank receives of them is
what the rank before it sent in its own rehearsal. On a GPU that does not exist no tensor can be real: there a fake one
has its values in a tensor of the host beside it.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import utils as zero_utils
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_iter, tree_map
from typing_extensions import override

from toolkit.config.layout import Layout
from toolkit.engines.optimizers.muon import Muon
from toolkit.engines.scheduled_pipeline import ScheduledStep
from toolkit.models.hidden_matrices import is_hidden_matrix
from toolkit.parallel.matrix_exchange import Fragment, MatrixExchange, Part, fragments_of
from toolkit.parallel.shard import Shard
from toolkit.recorder.gpu_kernels import GpuKernels
from toolkit.recorder.rehearsal.channel_messages import messages_named
from toolkit.recorder.rehearsal.collectives import Collective, CollectiveRecorder
from toolkit.recorder.rehearsal.live_bytes import LiveBytes
from toolkit.recorder.rehearsal.stage_order import NotedSchedule, RecordedSchedule
from toolkit.recorder.routing import BalancedRouting, expert_shards
from toolkit.recorder.run_pass import run_backward, values_assumed

aten = torch.ops.aten
_MOST_REAL = 1024
"""Elements of the largest tensor of integers that has values."""
_VALUES = "_host_values"
"""Attribute of a fake tensor of integers on a GPU: its values, on the host."""
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
        most: Messages,
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
        self._most = iter(most)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            values = host_values(args[0])
            with unset_fake_temporarily():
                return self._answer(args[0].dtype) if values is None else values.item()
        if _is_real(func, args, kwargs):
            if not _is_on_gpu(args, kwargs):
                with unset_fake_temporarily():
                    return func(*args, **kwargs)
            result = _with_values(func, args, kwargs)
        else:
            _forget_values(func, args)
            result = func(*args, **kwargs)
        self.live.see(func, args, result)
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
                _fill(values[0], next(self._received, None))
            elif call.kind == "all_reduce":
                self.maxima.append(values[0].reshape(-1).tolist())
                _fill(values[0], next(self._most, None))
        return func(*args, **kwargs)

    def _carry(self, kind: str, values: torch.Tensor) -> None:
        """Send or receive integers of a pipeline schedule: headers, which are alike at all stages, and positions.

        A header is that of a stage of this rank, or of one before it where none has sent.
        """
        is_header = values.dim() == 1
        if kind == "send" and is_header:
            self.sent.append(values.tolist())
        elif kind == "receive" and is_header:
            _fill(values, self.sent[-1] if self.sent else next(self._received, None))
        elif kind == "receive":
            values.zero_()

    def _check_device(self, call: Collective, tensors: Sequence[torch.Tensor]) -> None:
        """Raise RuntimeError for a tensor that is not on the rank's device, as NCCL does: gloo copies it."""
        wrong = next((tensor for tensor in tensors if tensor.device.type != self.device.type), None)
        if wrong is not None and self.device.type != "cpu":
            raise RuntimeError(f"{call} of group {call.group} has a tensor on {wrong.device}, which NCCL cannot send")


def host_values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a small tensor of integers, on the host; None for any other."""
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, _VALUES, None)
    return tensor if tensor.numel() <= _MOST_REAL and not tensor.is_floating_point() else None


def _is_on_gpu(args: Any, kwargs: Any) -> bool:
    """Whether an operation takes or makes tensors of a GPU: fake ones, which have values beside them."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        return True
    return any(isinstance(value, FakeTensor) for value in tree_iter((args, kwargs)))


def _with_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on fake tensors of a GPU, and on their values beside them."""

    def on_host(value: Any) -> Any:
        return host_values(value) if isinstance(value, FakeTensor) else value

    host_kwargs = {key: CPU if key == "device" else value for key, value in kwargs.items()}
    with unset_fake_temporarily():
        values = func(*tree_map(on_host, args), **tree_map(on_host, host_kwargs))
    result = func(*tree_map(_without_values, args), **tree_map(_without_values, kwargs))
    for made, held in zip(tree_iter(result), tree_iter(values), strict=True):
        if isinstance(made, FakeTensor) and host_values(held) is not None:
            setattr(made, _VALUES, held)
    return result


def _without_values(value: Any) -> Any:
    """Return a fake tensor in the place of a real one, with which torch would compute on the GPU."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _forget_values(func: Any, args: Any) -> None:
    """Forget the values of what an operation writes, which it computes from numbers that do not exist."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.is_write:
            for tensor in tree_iter(value):
                if isinstance(tensor, FakeTensor) and hasattr(tensor, _VALUES):
                    delattr(tensor, _VALUES)


def _fill(tensor: torch.Tensor, values: list[int] | None) -> None:
    if values is not None and len(values) == tensor.numel():
        tensor.copy_(torch.tensor(values, dtype=tensor.dtype).view(tensor.shape))


def _is_real(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation makes or takes nothing but small tensors of integers, which have values."""
    if func.namespace != "aten":
        return False
    has_tensors = False
    for value in tree_iter((args, kwargs)):
        if isinstance(value, torch.Tensor):
            if host_values(value) is None and (isinstance(value, FakeTensor) or value.numel() > _MOST_REAL):
                return False
            has_tensors = True
    dtype = kwargs.get("dtype")
    if has_tensors:
        return dtype is None or not dtype.is_floating_point
    device = kwargs.get("device")
    if dtype is None or dtype.is_floating_point or (device is not None and torch.device(device).type == "meta"):
        return False
    size = args[0] if args else None
    return isinstance(size, list | tuple) and prod(size) <= _MOST_REAL


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
    most: Messages = (),
    on_gpu: bool = True,
    documents: bool = False,
    device: torch.device = CPU,
) -> Iterator[FakeRank]:
    """Be one rank of a layout inside. There must be no process group. `on_gpu`: which device's kernels run.

    `received`: the headers that the stage before sends; `most`: the largest values of a pipeline's stages; `documents`:
    whether positions restart inside a sample; `device`: where fake tensors say that they are.
    """
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(layout.world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    mode = FakeRank(layout, rank, received=received, most=most, on_gpu=on_gpu, documents=documents, device=device)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(_torch_on_fake_tensors(device))
        stack.enter_context(mock.patch.object(PipelineEngine, "_exec_schedule", _noting_schedules(mode)))
        stack.enter_context(messages_named(mode))
        stack.enter_context(_other_ranks_answered(layout))
        stack.enter_context(values_assumed())
        if on_gpu:
            stack.enter_context(GpuKernels())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(mode)
        yield mode


@contextmanager
def _torch_on_fake_tensors(device: torch.device) -> Iterator[None]:
    """Replace the functions of PyTorch that treat fake tensors in other ways than real ones of the device."""
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(mock.patch.object(dist, "get_backend", return_value="nccl"))
            stack.enter_context(mock.patch.object(FakeTensor, "data", _DATA, create=True))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _applied))
        stack.enter_context(mock.patch.object(torch.autograd, "backward", _backward))
        stack.enter_context(mock.patch.object(torch.Tensor, "backward", _backward_of))
        yield


@contextmanager
def _other_ranks_answered(layout: Layout) -> Iterator[None]:
    """Answer what the code asks other ranks, and whose answers decide what this rank does.

    These are DeepSpeed's checks that ranks agree, the rows that routers send, and who holds which part of a matrix.
    """
    matrices: list[Shard] = []
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(zero_utils, "dist", _RankZeroSends(zero_utils.dist)))
        own_list = _own_list(zero_utils.get_lst_from_rank0)
        stack.enter_context(mock.patch.object(zero_utils, "get_lst_from_rank0", own_list))
        stack.enter_context(BalancedRouting(partial(_even_counts, layout)).assumed())
        stack.enter_context(mock.patch.object(Muon, "connect", _noting_matrices(matrices)))
        stack.enter_context(mock.patch.object(MatrixExchange, "_held_by_all", _held_by_others(matrices)))
        yield


def _noting_schedules(mode: FakeRank) -> Callable[[PipelineEngine, Any], None]:
    """Return DeepSpeed's loop over the instructions of a schedule, which notes the calls of each."""
    run = PipelineEngine._exec_schedule

    def noted(engine: PipelineEngine, schedule: Any) -> None:
        if isinstance(schedule, ScheduledStep):  # each of its ranks is rehearsed
            run(engine, schedule)
            return
        run(engine, NotedSchedule(schedule, mode, mode.schedules))

    return noted


class _RankZeroSends:
    """deepspeed.comm for DeepSpeed's checks that a list is that of rank 0, which is taken for this rank's own.

    ZeRO-3 makes them before the first steps. Ranks that differ are found where their collectives are compared.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def get_rank(self) -> int:
        return 0


def _own_list(ask: Callable[[list[int]], list[int]]) -> Callable[[list[int]], list[int]]:
    """Return DeepSpeed's broadcast of a list from rank 0 with this rank's own list as the answer.

    The lists of large models, one number a parameter, are too long for tensors with values.
    """

    def answered(values: list[int]) -> list[int]:
        ask(values)
        return values

    return answered


def _applied(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Apply a function to parameters and buffers, as nn.Module does to real ones; fake ones it would swap."""
    for part in module.modules() if recurse else [module]:
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            with torch.no_grad():
                applied = function(parameter)
            if torch._has_compatible_shallow_copy_type(parameter, applied):
                if applied is not parameter:
                    parameter.data = applied
            else:  # as peft moves adapters to the meta device
                part._parameters[name] = nn.Parameter(applied, parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = function(buffer)
    return module


def _set_data(tensor: FakeTensor, value: torch.Tensor) -> None:
    """Set the data of a fake tensor, and with it the device, which torch leaves as it was."""
    torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    if isinstance(value, FakeTensor):
        tensor.fake_device = value.fake_device


_DATA = property(torch.Tensor.data.__get__, _set_data)  # type: ignore[attr-defined]
"""The property `data` of fake tensors that move to another device with what they are set to."""


def _backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False, **_: Any
) -> None:
    """Stand in for torch.autograd.backward."""
    roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    if isinstance(grad_tensors, torch.Tensor):
        grad_tensors = (grad_tensors,)
    gradients = [None] * len(roots) if grad_tensors is None else list(grad_tensors)
    for index, root in enumerate(roots):
        if gradients[index] is None and root.requires_grad:
            gradients[index] = torch.ones_like(root)
    keep = create_graph if retain_graph is None else retain_graph
    run_backward(roots, tuple(gradients), retain_graph=keep, create_graph=create_graph)


def _backward_of(
    tensor: torch.Tensor, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, **_: Any
) -> None:
    _backward(tensor, gradient, retain_graph, create_graph)


def _even_counts(layout: Layout, rows: int, counts: torch.Tensor) -> list[list[int]]:
    """Return the rows for each rank of routers that spread theirs evenly over all ranks."""
    ranks = counts.shape[1]
    return [[rows // (expert_shards(layout) * ranks)] * ranks for _ in range(counts.shape[0])]


def _noting_matrices(matrices: list[Shard]) -> Any:
    """Return Muon's `connect`, which notes this rank's part of each matrix, wherever ZeRO keeps it."""
    connect = Muon.connect

    def noted(optimizer: Muon, parts: Iterable[Part], group: dist.ProcessGroup | None) -> None:
        known = list(parts)
        matrices.extend(part.shard for part in known if is_hidden_matrix(part.shard.name, part.shard.shape))
        connect(optimizer, known, group)

    return noted


def _held_by_others(matrices: Sequence[Shard]) -> Any:
    """Return what stands for a gather of the fragments of all ranks: those that this rank has not are of the next one.

    Which rank works on which matrix, and in how many rounds, follows from the shapes of all, and is as in the job.
    """

    def held(exchange: MatrixExchange, fragments: Sequence[Fragment]) -> list[list[Fragment]]:
        every: list[list[Fragment]] = [[] for _ in range(exchange.size)]
        rank = 0 if exchange.group is None else dist.get_rank(exchange.group)
        every[rank] = list(fragments)
        others = every[(rank + 1) % exchange.size]
        here = {(fragment.matrix, fragment.part.pieces): fragment for fragment in fragments}
        for shard in matrices:
            for whole in fragments_of(shard, start=0, length=prod(shard.shape), tensor=0, offset=0):
                mine = here.get((whole.matrix, whole.part.pieces))
                bounds = [0, whole.length] if mine is None else [0, mine.start, mine.start + mine.length, whole.length]
                for start, end in zip(bounds[::2], bounds[1::2], strict=True):
                    if end > start:
                        others.append(replace(whole, start=start, length=end - start))
        return every

    return held
