"""Collectives of one rank in their order: what it sent and received, over which group, in which shapes and dtypes."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.config.layout import Layout

_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "receive",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
"""Operators of c10d, and what torch.distributed calls them."""
WAIT = "wait"
"""The kind of call at which a rank waits for a message of a pipeline schedule: no operator of c10d."""
AXES = (
    "world",
    "sequence",
    "tensor",
    "data",
    "pipeline",
    "expert",
    "expert data",
    "secondary",
    "context",
    "heads",
    "ring",
    "ends",
    "stage",
    "replica",
)
"""Names of groups. One whose ranks lie along several axes has the first of their names."""
_PEER = ("root_rank", "dst", "src")
_LISTENED = ("toolkit/", "deepspeed/runtime/", "deepspeed/sequence/")
_PASSED_ON = ("recorder/rehearsal/", "recorder/gpu_kernels.py", "parallel/tensor/collectives.py")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One call of torch.distributed on a rank."""

    kind: str
    group: str
    """The axis along which the ranks of the group lie, one of AXES; for a group along none, its ranks in words."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors that the rank puts in, or receives."""
    dtype: str
    nbytes: int
    """Bytes of these tensors."""
    peer: int | None = None
    """The root's index in the group; of a message, by how many places its other end is further on: pipeline stages, or
    context-parallel ranks in their ring."""
    where: str = ""
    """File and function that called."""
    ranks: tuple[int, ...] = ()
    """The ranks of a group that lie along no axis; empty for every other group."""
    message: str = ""
    """What a message of a pipeline schedule carries, and to which stage; empty for every other call."""

    def fits(self, other: "Collective") -> bool:
        """Whether two ranks of a group may make these calls at once. Rows of an all-to-all follow from the data."""
        if self.kind != other.kind or self.dtype != other.dtype or self.peer != other.peer:
            return False
        if self.kind == "all_to_all":
            return [shape[1:] for shape in self.shapes] == [shape[1:] for shape in other.shapes]
        return self.shapes == other.shapes

    def __str__(self) -> str:
        shapes = " ".join(str(list(shape)) for shape in self.shapes[:2])
        more = f" and {len(self.shapes) - 2} more" if len(self.shapes) > 2 else ""
        place = f" in {self.where}" if self.where else ""
        carried = f"({self.message})" if self.message else ""
        return " ".join(f"{self.kind} {shapes}{more} {self.dtype} {carried}{place}".split())


class Groups:
    """Names of process groups: the axis of a layout along which their ranks lie.

    `replica`: all ranks of one; `ends`: the first and last stage, which share tied embeddings; `secondary`: the ranks
    that keep a secondary partition of ZeRO++; `heads` and `ring`: of context-parallel ranks, the neighbors that
    exchange heads for positions, and one of each such group, which exchange keys and values.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._names: dict[str, str] = {}

    def members(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group of that name that `rank` is in. Raises KeyError where there is no such axis."""
        layout = self.layout
        if name == "world":
            return tuple(range(layout.world_size))
        at = layout.coordinate(rank)
        if name in ("tensor", "sequence"):
            return tuple(layout.rank(pipe=at.pipe, data=at.data, model=i) for i in range(layout.tp * layout.ulysses))
        if name == "pipeline":
            return tuple(at_stage(layout, rank, stage) for stage in range(layout.pp))
        if name == "ends":
            return tuple(at_stage(layout, rank, stage) for stage in (0, layout.pp - 1))
        if name == "stage":
            first = at.pipe * (layout.world_size // layout.pp)
            return tuple(range(first, first + layout.world_size // layout.pp))
        data = range(layout.replicas)
        sizes = {"expert": layout.ep, "secondary": layout.hpz, "context": layout.cp, "heads": layout.cp_ulysses}
        if name in sizes:
            size = sizes[name]
            first = at.data // size * size
            data = range(first, first + size)
        elif name == "ring":
            first = at.data // layout.cp * layout.cp
            data = range(first + at.data % layout.cp_ulysses, first + layout.cp, layout.cp_ulysses)
        elif name == "expert data":
            data = range(at.data % layout.ep, layout.replicas, layout.ep)
        elif name == "replica":
            width = layout.tp * layout.ulysses
            stages = range(layout.pp)
            return tuple(layout.rank(pipe=stage, data=at.data, model=i) for stage in stages for i in range(width))
        elif name != "data":
            raise KeyError(name)
        return tuple(layout.rank(pipe=at.pipe, data=i, model=at.model) for i in data)

    def name(self, group: dist.ProcessGroup, rank: int) -> str:
        """The name of a group that this rank is in; of one along no axis, its ranks."""
        key = group.group_name
        if key not in self._names:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._names[key] = self._name_of(ranks, rank)
        return self._names[key]

    def _name_of(self, ranks: Sequence[int], rank: int) -> str:
        other_name_of_model = "tensor" if self.layout.ulysses > 1 else "sequence"
        for name in AXES:
            if name != other_name_of_model and ranks == self.members(name, rank):
                return name
        return f"ranks {', '.join(map(str, ranks))}"


def at_stage(layout: Layout, rank: int, stage: int) -> int:
    """The rank at another pipeline stage that is `rank` in all else."""
    at = layout.coordinate(rank)
    return layout.rank(pipe=stage, data=at.data, model=at.model)


class CollectiveRecorder(TorchDispatchMode):
    """A mode that records the collectives of this rank, on real tensors and on fake ones."""

    def __init__(self, layout: Layout, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.groups = Groups(layout)
        self.recorded: list[Collective] = []
        self.message = ""
        """What the messages of a pipeline schedule carry that are sent or asked for now; empty outside of them."""

    @contextmanager
    def carrying(self, message: str) -> Iterator[None]:
        """Call the messages inside so."""
        before = self.message
        self.message = message
        try:
            yield
        finally:
            self.message = before

    def note_wait(self, sender: int) -> None:
        """Record that this rank waits for the message that it asked the sender for."""
        group, peer = self._message_to(sender)
        call = Collective(kind=WAIT, group=group, shapes=(), dtype="", nbytes=0, peer=peer, message=self.message)
        self.recorded.append(call)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.record(func, args)
        return func(*args, **(kwargs or {}))

    def record(self, func: Any, args: Sequence[Any]) -> Collective | None:
        """Record a call of an operator of c10d; None for one that communicates nothing."""
        kind = _KINDS.get(func._opname)
        if kind is None:
            return None
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        group = dist.ProcessGroup.unbox(named["process_group"])
        sent = tuple(_tensors(_first(named, kind)))
        peer = next((named[name] for name in _PEER if name in named), None)
        name = self.groups.name(group, self.rank)
        if kind in ("send", "receive"):
            assert peer is not None
            name, peer = self._message_to(dist.get_global_rank(group, peer))
        is_barrier = kind == "barrier"
        call = Collective(
            kind=kind,
            group=name,
            shapes=() if is_barrier else tuple(tuple(tensor.shape) for tensor in sent),
            dtype="" if is_barrier else str(sent[0].dtype).removeprefix("torch."),
            nbytes=0 if is_barrier else sum(tensor.nbytes for tensor in sent),
            peer=peer,
            where=_caller(sys._getframe(2)),
            ranks=() if name in AXES else tuple(dist.get_process_group_ranks(group)),
            message=self.message if kind in ("send", "receive") else "",
        )
        self.recorded.append(call)
        return call

    def _message_to(self, other: int) -> tuple[str, int]:
        """Return the group of a message to or from another rank, and by how many places that rank is further on."""
        layout = self.groups.layout
        stage = layout.coordinate(other).pipe
        if at_stage(layout, self.rank, stage) == other:
            return "pipeline", stage - layout.coordinate(self.rank).pipe
        context = self.groups.members("context", self.rank)
        if other in context:
            return "context", (context.index(other) - context.index(self.rank)) % layout.cp
        return f"ranks {self.rank}, {other}", 0


def _first(named: dict[str, Any], kind: str) -> Any:
    """Return what the rank puts in, where that is told from what it gets; else what it gets."""
    for name in ("input", "input_tensor", "inputs", "input_list", "input_tensors"):
        if name in named and kind != "scatter":
            return named[name]
    return next(iter(named.values()))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for part in value:
            yield from _tensors(part)


def _caller(frame: FrameType | None) -> str:
    """Return the innermost function of the toolkit or of DeepSpeed's engines: `region.py leave`."""
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in _LISTENED) and not any(part in name for part in _PASSED_ON):
            return f"{name.rpartition('/')[2]} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
