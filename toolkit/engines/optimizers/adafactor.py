"""Adafactor: the same update in every layout, out of sums over the ranks that hold parts of a matrix.

Adafactor (Shazeer and Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost") keeps of a matrix'
second moments the means of rows and of columns, V_ij = r_i c_j / mean(r), and all of a vector's. This is the variant of
torch.optim.Adafactor: learning rate min(lr, 1 / sqrt(t)) max(1e-3, RMS(W)), decay 1 - t^-0.8, and updates scaled down
to a root mean square of 1.

A rank may hold a part of a flat partition of a tensor-parallel shard. It adds up what it has; two all-reduces a group
of parameters give all ranks the sums of rows and columns, then the norms of the updates. No matrix is moved. The
means are on every rank of a pipeline stage.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from toolkit.checkpoint.names import state_shape
from toolkit.config.update_chunk import UPDATE_CHUNK_ELEMENTS
from toolkit.engines.optimizer_states import KINDS, MASTER, OptimizerStates, local_part
from toolkit.errors import RunError
from toolkit.parallel.matrix_exchange import Fragment, Part
from toolkit.parallel.shard import Shard

_DECAY = -0.8
_LEAST_RMS = 1e-3
_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True, kw_only=True, eq=False)
class _Parameter:
    """A parameter as a stack of matrices, a vector as one with a single column; its states and what the rank has."""

    name: str
    matrices: int
    rows: int
    columns: int
    states: dict[str, torch.Tensor]
    pieces: list[tuple[torch.Tensor, Fragment, float]] = field(default_factory=list)
    """(tensor, elements in it, their share in sums over ranks: more than one may have them)"""

    @classmethod
    def zeros(cls, shard: Shard, device: torch.device) -> "_Parameter":
        if len(shard.shape) > 1:
            *stack, rows, columns = shard.shape
        else:
            stack = []
            rows = math.prod(shard.shape)
            columns = 1
        states = {kind: torch.zeros(state_shape(kind, shard.shape), device=device) for kind in _kinds(shard.shape)}
        return cls(name=shard.name, matrices=math.prod(stack), rows=rows, columns=columns, states=states)

    @property
    def numel(self) -> int:
        return self.matrices * self.rows * self.columns

    @property
    def sums(self) -> tuple[int, int, int]:
        """Number of sums over rows, over columns (0 without column states), and over the squared weights."""
        columns = self.matrices * self.columns if "col_var" in self.states else 0
        return self.matrices * self.rows, columns, 1

    def add(self, sums: torch.Tensor) -> None:
        """Add what the rank has to the sums over squared gradients, and over squared weights."""
        of_rows, of_columns, of_weights = torch.split(sums, list(self.sums))
        for tensor, fragment, share in self.pieces:
            squares = _rows_of(fragment, _gradient(tensor)).square().mul_(share)
            rows, columns = _indices(fragment, tensor.device)
            of_rows.index_add_(0, rows, squares.sum(1))
            if "col_var" in self.states:
                each = squares.new_zeros(self.matrices, squares.shape[1]).index_add_(0, rows // self.rows, squares)
                of_columns.view(self.matrices, -1).index_add_(1, columns, each)
            weights = _rows_of(fragment, local_part(tensor).view(-1))
            of_weights.add_(weights.square().sum(1).double().sum(), alpha=share)

    def average(self, sums: torch.Tensor, weight: float) -> None:
        """Move the states towards the means over rows and columns."""
        of_rows, of_columns, _ = torch.split(sums, list(self.sums))
        if "col_var" in self.states:
            self.states["row_var"].view(-1).lerp_(of_rows / self.columns, weight)
            self.states["col_var"].view(-1).lerp_(of_columns / self.rows, weight)
        else:
            self.states["variance"].view(-1).lerp_(of_rows, weight)

    def updates(self) -> Iterator[tuple[torch.Tensor, Fragment, float, torch.Tensor]]:
        """Yield each of `pieces` with G / sqrt(V)."""
        for tensor, fragment, share in self.pieces:
            rows, columns = _indices(fragment, tensor.device)
            if "col_var" in self.states:
                of_rows = self.states["row_var"].view(self.matrices, -1)
                scaled = (of_rows / of_rows.mean(1, keepdim=True).clamp_(min=_EPS)).view(-1)[rows]
                of_columns = self.states["col_var"].view(self.matrices, -1)[:, columns]
                each = scaled[:, None] * (of_columns if self.matrices == 1 else of_columns[rows // self.rows])
            else:
                each = self.states["variance"].view(-1)[rows, None]
            update = each.clamp(min=_EPS**2).rsqrt_().mul_(_rows_of(fragment, _gradient(tensor)))
            yield tensor, fragment, share, update


class Adafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor for parts of tensors. `connect` says where their elements are, before a step."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.parameters: dict[str, _Parameter] = {}
        self._of_tensor: dict[int, list[_Parameter]] = defaultdict(list)
        self._group: dist.ProcessGroup | None = None
        self._ends: dist.ProcessGroup | None = None
        self._tied: Container[str] = ()

    def connect(
        self,
        parts: Iterable[Part],
        group: dist.ProcessGroup | None,
        *,
        tied: Container[str] = (),
        ends: dist.ProcessGroup | None = None,
    ) -> None:
        """Create the states of all parameters that the ranks of `group` hold parts of. Collective.

        All must list the same parameters in the same order, also those of which they have nothing. `tied`: those with
        copies on both `ends` of a pipeline.
        """
        self._group = group
        self._tied = tied
        self._ends = ends
        placed = [(part, list(_fragments(part))) for part in parts]
        if not placed:
            return
        for part, _ in placed:
            tensor = part.tensor
            name = part.shard.name
            if name not in self.parameters:
                parameter = _Parameter.zeros(part.shard, local_part(tensor).device)
                self.parameters[name] = parameter
                self.state[tensor].setdefault("factors", {})[name] = parameter.states
            self.state[tensor].setdefault("step", 0)
            self._of_tensor[id(tensor)].append(self.parameters[name])
        counts = dict.fromkeys(self.parameters, 0)
        for part, fragments in placed:
            if part.shard.owner:
                counts[part.shard.name] += sum(fragment.length for fragment in fragments)
        held = torch.tensor(list(counts.values()), device=placed[0][0].tensor.device)
        for parameter, copies in zip(self.parameters.values(), self._over_ranks(held).tolist(), strict=True):
            counts[parameter.name] = copies // parameter.numel
        for part, fragments in placed:
            share = 1 / counts[part.shard.name] if part.shard.owner else 0.0
            pieces = self.parameters[part.shard.name].pieces
            pieces.extend((part.tensor, fragment, share) for fragment in fragments)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update. Collective, over the ranks of `connect`, before which nothing is updated."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            parameters = [parameter for tensor in group["params"] for parameter in self._of_tensor.get(id(tensor), ())]
            if parameters:
                self._update(group, list(dict.fromkeys(parameters)))
        return loss

    def _update(self, group: Mapping[str, Any], parameters: list[_Parameter]) -> None:
        for tensor in group["params"]:
            self.state[tensor]["step"] += 1
            step = self.state[tensor]["step"]
        group_tensors = set(map(id, group["params"]))
        for parameter in parameters:
            if any(id(tensor) not in group_tensors for tensor, _, _ in parameter.pieces):
                reason = f"ZeRO-3 updates {parameter.name} in two parts, one after the other"
                raise RunError.of(
                    "optimizer.name", "adafactor", reason, ("parallel.tp", 1), ("optimizer.name", "adamw")
                )
        sizes = [sum(parameter.sums) for parameter in parameters]
        sums = torch.zeros(sum(sizes), device=group["params"][0].device)
        for parameter, sums_of_parameter in zip(parameters, torch.split(sums, sizes), strict=True):
            parameter.add(sums_of_parameter)
        self._over_ranks(sums, torch.split(sums, sizes), parameters)
        for parameter, sums_of_parameter in zip(parameters, torch.split(sums, sizes), strict=True):
            parameter.average(sums_of_parameter, step**_DECAY)
        of_weights = torch.stack([sums_of_parameter[-1] for sums_of_parameter in torch.split(sums, sizes)]).tolist()
        norms = sums.new_zeros(len(parameters))
        for parameter, square in zip(parameters, norms, strict=True):
            for _, _, share, update in parameter.updates():
                square.add_(update.square_().sum(1).double().sum(), alpha=share)
        of_updates = self._over_ranks(norms, torch.split(norms, 1), parameters).tolist()
        decay = 1 - group["lr"] * group["weight_decay"]
        for parameter, weight, update in zip(parameters, of_weights, of_updates, strict=True):
            rate = max(_LEAST_RMS, math.sqrt(weight / parameter.numel)) * min(group["lr"], step**-0.5)
            rate /= max(1.0, math.sqrt(update / parameter.numel))
            for tensor, fragment, _, change in parameter.updates():
                values = fragment.view(local_part(tensor).view(-1))
                skipped = fragment.start % change.shape[1]
                values.mul_(decay).sub_(change.view(-1).narrow(0, skipped, fragment.length), alpha=rate)

    def _over_ranks(
        self, sums: torch.Tensor, each: Iterable[torch.Tensor] = (), parameters: Iterable[_Parameter] = ()
    ) -> torch.Tensor:
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        for sums_of_parameter, parameter in zip(each, parameters, strict=True):
            if self._ends is not None and parameter.name in self._tied:
                # Both ends add up other pieces: their sums differ by rounding, and copies must not.
                dist.all_reduce(sums_of_parameter, group=self._ends)
                sums_of_parameter.mul_(0.5)
        return sums


class FactoredStates(OptimizerStates):
    """Adafactor's states, whole on every rank of a pipeline stage; master weights are those of the engine's `inner`."""

    base: Adafactor

    def __init__(self, inner: OptimizerStates, names: Mapping[int, str]) -> None:
        super().__init__(inner.base, KINDS["adafactor"])
        self._inner = inner
        self._names = names

    @override
    def create(self) -> None:
        pass  # `connect` has

    @override
    def keeps(self, kind: str, name: str, shape: Sequence[int]) -> bool:
        return kind == MASTER or kind in _kinds(shape)

    @override
    def shard(self, shard: Shard, kind: str) -> Shard:
        return shard if kind == MASTER else Shard(name=shard.name, shape=state_shape(kind, shard.shape))

    @override
    def read(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        return self._inner.read(parameter, kind) if kind == MASTER else self._state(parameter, kind).clone()

    @override
    def extent(self, parameter: nn.Parameter, kind: str = MASTER) -> tuple[int, int]:
        return self._inner.extent(parameter) if kind == MASTER else (0, self._state(parameter, kind).numel())

    @override
    def local(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        return self._inner.local(parameter, kind) if kind == MASTER else self._state(parameter, kind).view(-1)

    @override
    def write(self, parameter: nn.Parameter, kind: str, value: torch.Tensor) -> None:
        if kind == MASTER:
            self._inner.write(parameter, kind, value)
        else:
            self._state(parameter, kind).copy_(value)

    def _state(self, parameter: nn.Parameter, kind: str) -> torch.Tensor:
        return self.base.parameters[self._names[id(parameter)]].states[kind]


def _fragments(part: Part) -> Iterator[Fragment]:
    """Yield runs of elements, which bound the temporaries of an update."""
    shard = part.shard
    if len(shard.shape) < 2:
        shard = replace(shard, shape=(math.prod(shard.shape), 1))
    whole = Fragment(index=0, part=shard, start=part.start, length=part.length, tensor=0, offset=part.offset)
    # Rows of a padded vocabulary, the last ones, are no part of the parameter.
    length = min(part.length, math.prod(whole.part_shape) - part.start)
    for first in range(0, length, UPDATE_CHUNK_ELEMENTS):
        count = min(UPDATE_CHUNK_ELEMENTS, length - first)
        yield replace(whole, start=part.start + first, offset=part.offset + first, length=count)


def _kinds(shape: Sequence[int]) -> tuple[str, ...]:
    """The states of a parameter, as torch.optim.Adafactor has them."""
    return ("row_var", "col_var") if len(shape) > 1 else ("variance",)


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    # Every rank must take part, so a gradient that nothing contributed to is zero, as ZeRO has it.
    return (torch.zeros_like(local_part(tensor)) if tensor.grad is None else local_part(tensor.grad)).reshape(-1)


def _rows_of(fragment: Fragment, flat: torch.Tensor) -> torch.Tensor:
    """The rows that a fragment touches, [n, columns]; zero where they are not part of it."""
    width = fragment.part_shape[-1]
    skipped = fragment.start % width
    rows = -(-(skipped + fragment.length) // width)
    values = fragment.view(flat)
    if rows * width != fragment.length:
        whole = values.new_zeros(rows * width)
        whole.narrow(0, skipped, fragment.length).copy_(values)
        values = whole
    return values.view(rows, width)


def _indices(fragment: Fragment, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and columns of the whole parameter that a fragment touches; a stack is one run of rows."""
    shape = fragment.part.shape
    dim = fragment.part.dim
    width = fragment.part_shape[-1]
    rows = torch.arange(math.prod(shape[:-1]), device=device).view(shape[:-1])
    columns = torch.arange(shape[-1], device=device)
    if dim == len(shape) - 1:
        columns = torch.cat([columns.narrow(0, start, count) for start, count in fragment.part.pieces])
    elif dim is not None:
        rows = torch.cat([rows.narrow(dim, start, count) for start, count in fragment.part.pieces], dim)
    first = fragment.start // width
    end = -(-(fragment.start + fragment.length) // width)
    return rows.reshape(-1)[first:end], columns
