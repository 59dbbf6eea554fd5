"""Counts of what one training step asks of a device: operations, host reads, bytes, allocations, casts, collectives.

A TorchDispatchMode sees every operation of the rank's main thread, in forward passes, in autograd and in hooks, and
every collective. Counts are exact: they do not depend on how fast or how busy the machine is. They say about a GPU:

    operations      all that launch a kernel there: no views, no allocations, no collectives, no marks of a profiler.
                    One call of a multi-tensor (`_foreach_`) or fused operation is one, whatever its number of tensors.
    host reads      where Python needs the value of a tensor (`item`, `tolist`, `bool`, `nonzero`, ...): the host waits
                    until the device has computed it. `counter reads` are apart: the step counters of PyTorch's
                    optimizers and numbers from the host's random generator are on the host, also on a GPU, and
                    nothing waits for those.
    bytes           what all operations that are neither matrix products nor attention read and write. A tensor that is
                    changed in place is read and written, one that is overwritten is written alone, and of a table
                    that is looked up the rows that are read count.
    allocations     storages that an operation returns and did not get, and their bytes: what the allocator is asked
                    for. Workspaces within an operation are not seen.
    casts           copies to another dtype; `repeated` are those of a weight that this step has cast before.
    collectives     also those of DTensor and other functional ones. Of an asynchronous one: operations, and floating
                    point operations of matrix products, between its start and where the rank waits for it
                    (benchmarks/measure/collective_waits.py).

Operations on a DTensor are counted as the operations and collectives on local tensors that it makes of them.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.sequence.layer import _all_to_all_groups
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from measure.closed_forms import StepFacts
from measure.collective_waits import CollectiveWaits
from toolkit import Callback
from toolkit.parallel.host_numbers import draw_number
from toolkit.parallel.model_structure import decoder_layer_list
from toolkit.parallel.pipeline.stage import NonLocalLayer
from toolkit.step_metrics import StepMetrics
from toolkit.training.loop import TrainingRun

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
PHASES = (FORWARD, BACKWARD, UPDATE)

_ROOT = Path(__file__).resolve().parents[2]
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_addmm_activation", "dot", "mv")
_READS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
)
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_")
_OVERWRITES = ("copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "normal_", "uniform_", "random_")
"""Operations that do not read what they change."""
_LOOKUPS = {"embedding": 1, "index_select": 2, "gather": 2, "index": 1}
"""Operations that read rows of their first argument, and the position of the argument with the rows' numbers."""
_NORMS = ("linalg_vector_norm", "_foreach_norm", "norm", "_foreach_powsum", "linalg_norm")


@dataclass(frozen=True, order=True, kw_only=True)
class Collective:
    """A kind of collective, as all calls of a step share it."""

    phase: str
    kind: str
    group_size: int
    is_async: bool


@dataclass(frozen=True, order=True, kw_only=True)
class HostRead:
    """Where the host reads a tensor: file and line, relative to the repository or the package that it is in."""

    phase: str
    place: str
    operation: str


@dataclass(kw_only=True)
class StepCounts:
    """What one rank did in one step. Bytes are of tensors as the rank passes them."""

    operations: Counter[str] = field(default_factory=Counter)
    """Of each phase."""
    by_name: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Operations of each phase and name."""
    bytes_moved: Counter[str] = field(default_factory=Counter)
    """Of each phase: bytes that all but matrix products and attention read and write."""
    moved_by_name: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes of each phase and name of an operation."""
    product_flops: int = 0
    """Floating point operations of matrix products."""
    allocations: int = 0
    """New storages that operations return."""
    allocated_bytes: int = 0
    host_reads: Counter[HostRead] = field(default_factory=Counter)
    counter_reads: int = 0
    copies: int = 0
    """Clones and copies within a dtype."""
    casts: int = 0
    repeated_casts: int = 0
    norm_calls: int = 0
    norm_bytes: int = 0
    """Read by operations that compute norms, in the update."""
    collectives: Counter[Collective] = field(default_factory=Counter)
    collective_bytes: Counter[Collective] = field(default_factory=Counter)
    waits: Counter[Collective] = field(default_factory=Counter)
    """Asynchronous calls whose wait was seen."""
    operations_meanwhile: Counter[Collective] = field(default_factory=Counter)
    """Operations between the starts and the waits of these calls."""
    flops_meanwhile: Counter[Collective] = field(default_factory=Counter)
    """Floating point operations of matrix products between the starts and the waits of these calls."""

    @property
    def total_operations(self) -> int:
        """Of all phases."""
        return sum(self.operations.values())

    def collective_calls(self, kind: str, *, phase: str | None = None) -> int:
        """Count the calls of a kind, in one phase or in all."""
        return sum(n for call, n in self.collectives.items() if call.kind == kind and phase in (None, call.phase))


@dataclass(frozen=True, kw_only=True)
class _Start:
    """An asynchronous collective, and what the step had counted when it was started."""

    call: Collective
    operations: int
    flops: int


class StepCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what happens between `start` and `stop`. `part`: the phase of the step, which the caller sets."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = StepCounts()
        self.part = FORWARD
        self._cast_weights: set[tuple[int, torch.dtype]] = set()
        self._patches: list[Any] = []
        self._waits = CollectiveWaits(self._waited)

    def start(self) -> None:
        """Begin to count."""
        self._waits.open()
        patch = mock.patch.object(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_))
        patch.start()
        self._patches.append(patch)
        for name in ("tolist", "cpu"):
            original = getattr(torch.Tensor, name)
            patch = mock.patch.object(torch.Tensor, name, self._reading(name, original))
            patch.start()
            self._patches.append(patch)
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> StepCounts:
        """Count no more; return the counts."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for patch in self._patches:
            patch.stop()
        self._patches = []
        self._waits.backward_ended()
        self._waits.close()
        return self.counts

    @property
    def phase(self) -> str:
        """Backward within autograd, whatever else is going on: a pipeline has one part of both."""
        return BACKWARD if torch._C._current_graph_task_id() != -1 else self.part

    def _reading(self, name: str, original: Any) -> Any:
        """Return the method of a tensor that reads it, counted. On a CPU these dispatch no operation."""

        def read(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            self._read(name)
            return original(tensor, *arguments, **keywords)

        return read

    def _resizing(self, original: Any) -> Any:
        """Return the method of a storage that gives it another size, which FSDP allocates with, counted."""

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            if size > storage.nbytes():
                self.counts.allocations += 1
                self.counts.allocated_bytes += size
            return original(storage, size)

        return resize

    def _read(self, operation: str) -> None:
        place, function = _caller()
        if (function == "_get_value" and "torch/optim" in place) or function == draw_number.__name__:
            self.counts.counter_reads += 1
        else:
            self.counts.host_reads[HostRead(phase=self.phase, place=place, operation=operation)] += 1

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # the subclass makes operations on local tensors of it, which come here again
        kwargs = kwargs or {}
        if self.phase != BACKWARD:
            self._waits.backward_ended()
        result = func(*args, **kwargs)
        namespace, name = func.namespace, func._schema.name.partition("::")[2]
        if namespace == "c10d":
            self._collective(func, name, args, kwargs)
        elif namespace == "_c10d_functional":
            self._functional_collective(func, name, args, kwargs, result)
        elif name == "dim_zero_all_to_all":
            self._ulysses_exchange(args)
        elif namespace == "aten" or namespace == "prims":
            self._operation(func, name, args, kwargs, result)
        elif namespace != "profiler":
            self._count(func, name, args, kwargs, result, is_product=False)
        if namespace != "c10d":  # these return their outputs, which they were given
            self._allocation(args, kwargs, result)
        return result

    def _operation(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if name in _READS or (name == "index" and _has_mask(args)):
            self._read(name)
        if name == "_local_scalar_dense" or name in _ALLOCATIONS or _is_view(func):
            return
        if name in ("_to_copy", "copy_", "_foreach_copy_"):
            self._copy(name, args, result)
        elif name == "clone":
            self.counts.copies += 1
        is_product = name in _PRODUCTS or "attention" in name or "convolution" in name
        if is_product and func.overloadpacket in flop_registry:
            self.counts.product_flops += int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
        self._count(func, name, args, kwargs, result, is_product=is_product)

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, result: Any, *, is_product: bool) -> None:
        phase = self.phase
        self.counts.operations[phase] += 1
        self.counts.by_name[phase, name] += 1
        read, written = _traffic(func, name, args, kwargs, result)
        if not is_product:
            self.counts.bytes_moved[phase] += read + written
            self.counts.moved_by_name[phase, name] += read + written
        if name in _NORMS and phase == UPDATE:
            self.counts.norm_calls += 1
            self.counts.norm_bytes += read

    def _allocation(self, args: Any, kwargs: Any, result: Any) -> None:
        new = {storage._cdata: storage.nbytes() for storage in _storages(result)}
        if not new:
            return
        for storage in _storages([args, kwargs]):
            new.pop(storage._cdata, None)
        sizes = [size for size in new.values() if size > 0]
        self.counts.allocations += len(sizes)
        self.counts.allocated_bytes += sum(sizes)

    def _copy(self, name: str, args: Any, result: Any) -> None:
        target, source = (result, args[0]) if name == "_to_copy" else (args[0], args[1])
        if name == "_foreach_copy_":
            target, source = target[0], source[0]
        if target.dtype == source.dtype:
            self.counts.copies += 1
            return
        self.counts.casts += 1
        if isinstance(source, torch.nn.Parameter):
            key = source.data_ptr(), target.dtype
            self.counts.repeated_casts += key in self._cast_weights
            self._cast_weights.add(key)

    def _collective(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        named = _named(func, args, kwargs)
        kind = _kind(name)
        if kind is None:
            return
        group = named.get("process_group")
        size = dist.ProcessGroup.unbox(group).size() if group is not None else 0
        # The schema's default is async_op=True, and a value that is the default is left out.
        has_choice = any(argument.name == "async_op" for argument in func._schema.arguments)
        is_async = has_choice and bool(named.get("async_op", True))
        # The whole tensor of a gather or a scatter is the longer of the two; of rows that are exchanged, what is sent.
        ends = {key: _bytes(value) for key, value in named.items() if "tensor" in key or key in _ENDS}
        sent = next((ends[key] for key in ("input", "input_tensors") if key in ends), 0)
        whole = sent if kind == "alltoall" else max(ends.values(), default=0)
        call = self._called(kind, size, whole, is_async=is_async)
        if is_async:
            self._waits.started(self._start_of(call))

    def _functional_collective(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Count one of those that return their result, and are waited for by an operation."""
        if name == "wait_tensor":
            self._waits.result_awaited(args[0])
            return
        kind = _kind(name)
        if kind is None:
            return
        named = _named(func, args, kwargs)
        size = _resolve_process_group(named["group_name"]).size()
        given = _bytes(args[0])
        whole = given if kind == "alltoall" else max(given, _bytes(result))
        call = self._called(kind, size, whole, is_async=True)
        for tensor in tree_leaves(result):
            self._waits.result_started(self._start_of(call), tensor)

    def _ulysses_exchange(self, args: Any) -> None:
        """Count the all-to-all of DeepSpeed's Ulysses, a custom operation that hides the collective within."""
        size = dist.get_world_size(_all_to_all_groups[args[1]])
        self._called("alltoall", size, _bytes(args[0]), is_async=False)

    def _called(self, kind: str, size: int, sent_bytes: int, *, is_async: bool) -> Collective:
        call = Collective(phase=self.phase, kind=kind, group_size=size, is_async=is_async)
        self.counts.collectives[call] += 1
        self.counts.collective_bytes[call] += sent_bytes
        return call

    def _start_of(self, call: Collective) -> _Start:
        return _Start(call=call, operations=self.counts.total_operations, flops=self.counts.product_flops)

    def _waited(self, start: _Start) -> None:
        self.counts.waits[start.call] += 1
        self.counts.operations_meanwhile[start.call] += self.counts.total_operations - start.operations
        self.counts.flops_meanwhile[start.call] += self.counts.product_flops - start.flops


_ENDS = ("input", "output", "inputs", "outputs")
_KINDS = {
    "allreduce": "allreduce",
    "allgather": "allgather",
    "reducescatter": "reduce_scatter",
    "alltoall": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}
"""How the names of operations begin, without underscores, and the kinds that they are of."""


def _kind(name: str) -> str | None:
    """Return the kind of collective of an operation; None of one that sends nothing."""
    flat = name.replace("_", "")
    return next((kind for beginning, kind in _KINDS.items() if flat.startswith(beginning)), None)


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of an operation by their names in its schema."""
    return dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | dict(kwargs)


def _traffic(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> tuple[int, int]:
    """Return the bytes that an operation reads and writes."""
    if name in _LOOKUPS:
        rows = _bytes(result)
        return rows + _bytes(args[_LOOKUPS[name]]), rows
    read = 0
    written = 0
    named = _named(func, args, kwargs)
    for argument in func._schema.arguments:
        size = _bytes(named.get(argument.name))
        is_changed = argument.alias_info is not None and argument.alias_info.is_write
        if name.startswith("_fused_adam") and argument.name == "grads":
            is_changed = False  # unless they are divided by a loss scale, which is never passed
        if is_changed:
            written += size
        if not (argument.is_out or (is_changed and name in _OVERWRITES)):
            read += size
    if all(returned.alias_info is None for returned in func._schema.returns):
        written += _bytes(result)
    return read, written


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors in nested values."""
    leaves = tree_leaves(values)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _is_view(func: Any) -> bool:
    """Whether an operation returns its input seen otherwise, without touching its elements."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases) or func._schema.name in (
        "aten::_unsafe_view",
        "aten::detach",
        "aten::lift_fresh",
        "aten::is_same_size",
    )


def _has_mask(args: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _bytes(values: Any) -> int:
    """Bytes of all tensors in nested values."""
    leaves = tree_leaves(values)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))


def _caller() -> tuple[str, str]:
    """File and line, and function, that ask for a value: the innermost frame outside of PyTorch's own machinery."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        inner = name == __file__ or ("/torch/" in name and "/torch/optim/" not in name and "/torch/nn/" not in name)
        if not inner and not name.startswith("<"):
            return f"{_short(name)}:{frame.f_lineno}", frame.f_code.co_name
        frame = frame.f_back
    return "?", "?"


def _short(name: str) -> str:
    if "site-packages/" in name:
        return name.partition("site-packages/")[2]
    return str(Path(name).relative_to(_ROOT)) if name.startswith(str(_ROOT)) else Path(name).name


class CountedStep(Callback):
    """Counts one step of a run, from the end of step `after` to the end of the next one, with all that lies between.

    The first steps differ: DDP arranges its buckets in the third, and ZeRO-3 learns when weights are used in the first.
    """

    def __init__(self, after: int = 3) -> None:
        self.after = after
        self.counter = StepCounter()
        self.result: StepCounts | None = None
        self.losses: list[float] = []
        self.facts: StepFacts | None = None

    @override
    def on_step_end(self, run: TrainingRun, metrics: StepMetrics) -> None:
        if metrics.step == self.after:
            report = run.engine.report_phase

            def follow(phase: str, step: int | None = None) -> None:
                if phase in PHASES:
                    self.counter.part = phase
                report(phase, step)

            run.engine.report_phase = follow
            object.__setattr__(run.loader, "report_phase", follow)
            model = run.engine.model
            layers = decoder_layer_list(model)[1]
            self.facts = StepFacts.of(
                run.recipe,
                model,
                layers=sum(not isinstance(layer, NonLocalLayer) for layer in layers),
                micro_batches=run.job.batch.accumulation,
            )
        self.step_ended(metrics.loss)

    @property
    def outcome(self) -> tuple[StepCounts, StepFacts]:
        """Counts and sizes, after the run."""
        assert self.result is not None
        assert self.facts is not None
        return self.result, self.facts

    def step_ended(self, loss: float) -> None:
        """A step has ended; called after every one."""
        self.losses.append(loss)
        if len(self.losses) == self.after:
            self.counter.start()
        elif len(self.losses) == self.after + 1:
            self.result = self.counter.stop()
