"""Counts of what one training step asks of a device: operations, host reads, bytes, casts and collectives.

A TorchDispatchMode sees every operation of the rank's main thread, in forward passes, in autograd and in hooks, and
every collective. Counts are exact: they do not depend on how fast or how busy the machine is. They say about a GPU:

    operations      all that launch a kernel there: no views, no allocations, no collectives. One call of a
                    multi-tensor (`_foreach_`) or fused operation is one, whatever its number of tensors.
    host reads      where Python needs the value of a tensor (`item`, `tolist`, `bool`, `nonzero`, ...): the host waits
                    until the device has computed it. `counter reads` are apart: PyTorch's optimizers keep their step
                    counters on the host, also on a GPU, and nothing waits for those.
    bytes           inputs and outputs of all operations that are neither matrix products nor attention.
    casts           copies to another dtype; `repeated` are those of a weight that this step has cast before.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from measure.closed_forms import StepFacts
from toolkit import Callback
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

    @property
    def total_operations(self) -> int:
        """Of all phases."""
        return sum(self.operations.values())

    def collective_calls(self, kind: str, *, phase: str | None = None) -> int:
        """Count the calls of a kind, in one phase or in all."""
        return sum(n for call, n in self.collectives.items() if call.kind == kind and phase in (None, call.phase))


class StepCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what happens between `start` and `stop`. `part`: the phase of the step, which the caller sets."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = StepCounts()
        self.part = FORWARD
        self._cast_weights: set[tuple[int, torch.dtype]] = set()
        self._patches: list[Any] = []

    def start(self) -> None:
        """Begin to count."""
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

    def _read(self, operation: str) -> None:
        place, function = _caller()
        if function == "_get_value" and "torch/optim" in place:
            self.counts.counter_reads += 1
        else:
            self.counts.host_reads[HostRead(phase=self.phase, place=place, operation=operation)] += 1

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, name = func.namespace, func._schema.name.partition("::")[2]
        if namespace == "c10d":
            self._collective(func, name, args, kwargs or {})
        elif namespace == "aten" or namespace == "prims":
            self._operation(func, name, args, kwargs or {}, result)
        else:
            self._count(name, args, kwargs or {}, result, is_product=False)
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
        self._count(name, args, kwargs, result, is_product=is_product)

    def _count(self, name: str, args: Any, kwargs: Any, result: Any, *, is_product: bool) -> None:
        phase = self.phase
        self.counts.operations[phase] += 1
        self.counts.by_name[phase, name] += 1
        read = _bytes([args, kwargs])
        if not is_product:
            self.counts.bytes_moved[phase] += read + _bytes(result)
        if name in _NORMS and phase == UPDATE:
            self.counts.norm_calls += 1
            self.counts.norm_bytes += read

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
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        if name == "monitored_barrier_":
            return
        group = named.get("process_group")
        size = dist.ProcessGroup.unbox(group).size() if group is not None else 0
        kind = name.strip("_").removesuffix("_").replace("allgather_base", "allgather")
        kind = kind.replace("reduce_scatter_base", "reduce_scatter").replace("alltoall_base", "alltoall")
        # The schema's default is async_op=True, and a value that is the default is left out.
        has_choice = any(argument.name == "async_op" for argument in func._schema.arguments)
        is_async = has_choice and bool(named.get("async_op", True))
        call = Collective(phase=self.phase, kind=kind, group_size=size, is_async=is_async)
        self.counts.collectives[call] += 1
        # The whole tensor of a gather or a scatter is the longer of the two.
        sizes = [_bytes(value) for key, value in named.items() if "tensor" in key or key in _ENDS]
        self.counts.collective_bytes[call] += max(sizes, default=0)


_ENDS = ("input", "output", "inputs", "outputs")


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

    def step_ended(self, loss: float) -> None:
        """A step has ended; called after every one."""
        self.losses.append(loss)
        if len(self.losses) == self.after:
            self.counter.start()
        elif len(self.losses) == self.after + 1:
            self.result = self.counter.stop()
