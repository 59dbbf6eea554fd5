"""Replicas: which tensors of this rank others hold as well, and whether all hold the same bits.

Nothing here knows a layout. Each tensor has a key: what it is, and which part of the full tensor this rank has of it
(`shard_of`, `OptimizerStates.extent`). Ranks of a process group with equal keys hold replicas. So a weight is one under
ZeRO 0 to 2 and a shard of ZeRO-3 is none, but that of a norm is one over tensor-parallel ranks.
"""

import hashlib
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from toolkit.data.samples.micro_batch import MicroBatch
from toolkit.engines.base import LOSS, Engine
from toolkit.engines.optimizer_states import MASTER, local_part
from toolkit.parallel.groups import transfer_device
from toolkit.parallel.shard import Shard, shard_of
from toolkit.units import some

WEIGHT = "weight"
PARTITION = "weight partition"
BUFFER = "buffer"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
"""Elements that are widened to 64 bits at a time."""
_NAMED = 4
"""Most tensors that each rank reports of a difference."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements' bits as integers, that of element i times 2 i + 1, modulo 2^64: int64, a scalar.

    One flipped bit changes it, by an odd number times a power of two. So do two: their changes cancel only if both
    are of the same bit and (2 i + 1) ± (2 j + 1) is a multiple of 2^(64 - bit), which no i ≠ j below 2^30 has.
    """
    flat = tensor.detach().reshape(-1)
    bits = flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    odd = torch.arange(1, 2 * min(_CHUNK, max(1, flat.numel())), 2, dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        wide = bits[start : start + _CHUNK].to(torch.int64)
        total += (wide * odd[: wide.numel()]).sum() + 2 * start * wide.sum()
    return total


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Replicas that do not hold the same bits."""

    ranks: tuple[int, ...]
    """The ranks that differ from the majority; without a majority, all that may be wrong."""
    is_named: bool
    """Whether `ranks` are the wrong ones, and not those among which one is."""
    hosts: tuple[str, ...]
    """Host name of each of `ranks`."""
    tensors: tuple[str, ...]
    """Names of some tensors that differ, with what they are."""

    def __str__(self) -> str:
        places = [f"{rank} ({host})" for rank, host in zip(self.ranks, self.hosts, strict=True)]
        noun = "rank" if len(places) == 1 else "ranks"
        verb = "differ" if len(places) > 1 else "differs"
        versus = " from the other replicas" if self.is_named else ""
        return f"{noun} {some(places, 8)} {verb}{versus} in {some(self.tensors, 2)}"


@dataclass(frozen=True, kw_only=True)
class _Item:
    """A tensor of this rank."""

    kind: str
    name: str
    key: int
    """Hash of what it is, and of the part of it that is here."""
    read: Callable[[], torch.Tensor | None]
    """Reader of the present value, which is None where this rank has nothing of it."""

    @property
    def label(self) -> str:
        return f"{self.name} ({self.kind})"


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """Ranks that compare some of their items.

    `slots` maps, for each item that is compared, the positions of ranks with the same part to the items' indices:
    (0, 0, 2, 2) is a part that two pairs of ranks hold.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    items: tuple[int, ...]
    slots: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class Replicas:
    """The replicated tensors of an engine. Every method is a collective call."""

    _over_tensor_ranks = True
    """Whether tensor-parallel ranks compare what they hold alike."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._weights, self._states = self._items()
        self._axes = [axis for axis in self._find_axes() if axis.slots]
        self._compared = {index for axis in self._axes for _, indices in axis.slots for index in indices}

    def _items(self) -> tuple[list[_Item], list[_Item]]:
        """Return the weights and buffers, and the optimizer states."""
        return list(_weights(self._engine)), list(_states(self._engine))

    @property
    def labels(self) -> set[str]:
        """The tensors of this rank that some other rank holds as well."""
        items = [*self._weights, *self._states]
        return {items[index].label for index in self._compared}

    def weights(self) -> torch.Tensor:
        """Return a checksum of each weight and buffer as it is now. Not a collective call."""
        return self._checksums(self._weights, first_index=0)

    def compare(self, weights: torch.Tensor) -> Difference | None:
        """Compare `weights` and the present optimizer states; None where all replicas agree. All ranks return alike."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        sums = torch.cat([weights, self._checksums(self._states, first_index=len(self._weights))])
        device = transfer_device(None)
        differing = [axis for axis in self._axes if not _agrees(axis, sums)]
        flag = torch.tensor([len(differing)], device=device)
        dist.all_reduce(flag)
        if not int(flag):
            return None
        mismatches = [mismatch for axis in differing for mismatch in self._mismatches(axis, sums)]
        reports: list[tuple[str, list[_Mismatch]]] = [("", [])] * dist.get_world_size()
        dist.all_gather_object(reports, (socket.gethostname(), mismatches))
        hosts = [host for host, _ in reports]
        return _judge({mismatch for _, theirs in reports for mismatch in theirs}, hosts)

    def _checksums(self, items: Sequence[_Item], *, first_index: int) -> torch.Tensor:
        """Return one number for each item: 0 for those that no other rank holds."""
        device = transfer_device(None) if dist.is_initialized() else torch.device("cpu")
        sums = torch.zeros(len(items), dtype=torch.int64, device=device)
        for index, item in enumerate(items):
            value = item.read() if first_index + index in self._compared else None
            if value is not None:
                sums[index] = checksum(value)
        return sums

    def _find_axes(self) -> Iterator[_Axis]:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        items = [*self._weights, *self._states]
        everything = tuple(range(len(items)))
        partition = self._engine.partition
        if partition is None:
            assert dist.group.WORLD is not None
            yield _axis(dist.group.WORLD, items, everything)
            return
        groups = partition.groups
        yield _axis(groups.data, items, everything)
        if self._over_tensor_ranks:
            yield _axis(groups.tensor, items, everything, partly=True)
        if groups.layout.ep > 1:
            yield _axis(groups.expert_data, items, everything)
        if partition.shared and self._over_tensor_ranks:
            ends = groups.ends()
            if ends is not None:
                shared = [index for index in everything if items[index].name in partition.shared]
                shared.sort(key=lambda index: (items[index].kind, items[index].name))
                yield _axis(ends, items, tuple(shared))

    def _mismatches(self, axis: _Axis, sums: torch.Tensor) -> Iterator["_Mismatch"]:
        """Yield the tensors of an axis that differ, by asking for the checksum of each."""
        items = [*self._weights, *self._states]
        every = _gather(sums[list(axis.items)], axis.group)
        position = {index: number for number, index in enumerate(axis.items)}
        compared = sorted((index, owners) for owners, indices in axis.slots for index in indices)
        count = 0
        # Weights come first: optimizer states after an update that they spoilt may differ as well.
        for index, owners in compared:
            column = [values[position[index]] for values in every]
            for owner in sorted(set(owners)):
                members = [rank for rank, first in enumerate(owners) if first == owner]
                if len({column[member] for member in members}) > 1 and count < _NAMED:
                    count += 1
                    yield _Mismatch(
                        label=items[index].label,
                        ranks=tuple(axis.ranks[member] for member in members),
                        sums=tuple(column[member] for member in members),
                    )


class RepeatedGradients(Replicas):
    """The loss and the gradients of a micro-batch that all replicas compute. Nothing of them is kept in the engine.

    With sequence parallelism a tensor-parallel rank has its part of the gradient of a norm: only replicas compare.
    """

    _over_tensor_ranks = False

    @override
    def _items(self) -> tuple[list[_Item], list[_Item]]:
        self._values: dict[str, torch.Tensor] = {}
        items = [_item("loss", LOSS, Shard(name=LOSS, shape=(1,)), (0, 1), partial(self._values.get, LOSS))]
        for name, parameter in self._engine.named_parameters():
            if parameter.requires_grad:
                shard = _shard(self._engine, name, parameter)
                whole = (0, getattr(parameter, "ds_numel", parameter.numel()))
                items.append(_item("gradient", name, shard, whole, partial(self._values.get, name)))
        return items, []

    def compute(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Compute a micro-batch forward and backward; return a checksum of its loss and of each gradient."""
        self._values.clear()
        self._values.update(self._engine.repeat(micro_batch))
        sums = self.weights()
        self._values.clear()
        return sums


@dataclass(frozen=True, kw_only=True)
class _Mismatch:
    """A tensor of which ranks have different checksums."""

    label: str
    ranks: tuple[int, ...]
    sums: tuple[int, ...]

    @property
    def minority(self) -> set[int]:
        """The ranks that differ from more than half; empty where no checksum is that of so many."""
        value, count = Counter(self.sums).most_common(1)[0]
        if 2 * count <= len(self.ranks):
            return set()
        return {rank for rank, total in zip(self.ranks, self.sums, strict=True) if total != value}


def _judge(mismatches: set[_Mismatch], hosts: Sequence[str]) -> Difference:
    """Name the ranks that are wrong: minorities, or the only rank that differs in most comparisons of a tensor.

    Only tensors that tell are named then: others may differ because of what the wrong rank computed with these.
    """
    by_label: dict[str, list[_Mismatch]] = defaultdict(list)
    for mismatch in mismatches:
        by_label[mismatch.label].append(mismatch)
    wrong = {label: ranks for label in by_label if (ranks := _wrong_ranks(by_label[label]))}
    if wrong:
        named = sorted(set().union(*wrong.values()))
    else:
        named = sorted({rank for mismatch in mismatches for rank in mismatch.ranks})
    return Difference(
        ranks=tuple(named),
        is_named=bool(wrong),
        hosts=tuple(hosts[rank] for rank in named),
        tensors=tuple(sorted(wrong or by_label)),
    )


def _wrong_ranks(mismatches: Sequence[_Mismatch]) -> set[int]:
    """Return the ranks that are wrong by the comparisons of one tensor; empty where they do not tell."""
    wrong = {rank for mismatch in mismatches for rank in mismatch.minority}
    if wrong:
        return wrong
    counts = Counter(rank for mismatch in mismatches for rank in mismatch.ranks)
    (rank, most), (_, next_most) = counts.most_common(2)
    return {rank} if most > next_most else set()


def _weights(engine: Engine) -> Iterator[_Item]:
    """Yield the weights that the forward pass uses, and the buffers."""
    for name, parameter in engine.named_parameters():
        shard = _shard(engine, name, parameter)
        if hasattr(parameter, "ds_tensor"):
            if parameter.ds_persist:  # type: ignore[attr-defined]
                whole = (0, parameter.ds_numel)  # type: ignore[attr-defined]
                yield _item(WEIGHT, name, shard, whole, partial(_whole, parameter))
            if engine.states.are_in_memory:
                extent = engine.states.extent(parameter)
                yield _item(PARTITION, name, shard, extent, partial(_partition, parameter))
        else:
            whole = (0, parameter.numel())
            extent = engine.states.extent(parameter) if isinstance(parameter.data, DTensor) else whole
            yield _item(WEIGHT, name, shard, extent, partial(_local, parameter))
    tensor_rank = 0 if engine.partition is None else engine.partition.groups.coordinate.model
    for name, buffer in engine.local_buffers():
        # Its name alone does not tell whether tensor-parallel ranks have the same.
        shard = Shard(name=name, shape=tuple(buffer.shape), dim=0, pieces=((tensor_rank, 1),))
        yield _item(BUFFER, name, shard, (0, buffer.numel()), partial(_buffer, engine, name))


def _partition(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's elements of a parameter under ZeRO-3."""
    partition: torch.Tensor = parameter.ds_tensor.data  # type: ignore[attr-defined]
    return partition


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's elements of a parameter that PyTorch holds, whole or as a DTensor."""
    return local_part(parameter.data)


def _buffer(engine: Engine, name: str) -> torch.Tensor:
    """Return a buffer as it is now."""
    return dict(engine.local_buffers())[name]


def _whole(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return a persistent parameter of ZeRO-3; None before the first step, when it is sharded like all others."""
    return parameter.data if parameter.numel() == parameter.ds_numel else None  # type: ignore[attr-defined]


def _states(engine: Engine) -> Iterator[_Item]:
    """Yield the fp32 weights that are updated, and the optimizer states."""
    states = engine.states
    if not states.are_in_memory:
        return
    trained = engine.trained_names()
    for kind in (MASTER, *states.kinds):
        names = {name for name, shape in trained if states.keeps(kind, name, shape)}
        for name, parameter in engine.named_parameters():
            if name not in names:
                continue
            extent = states.extent(parameter, kind)
            shard = states.shard(_shard(engine, name, parameter), kind)

            def read(p: nn.Parameter = parameter, k: str = kind, length: int = extent[1]) -> torch.Tensor | None:
                return states.local(p, k) if length else None

            yield _item(kind, name, shard, extent, read)


def _shard(engine: Engine, name: str, parameter: nn.Parameter) -> Shard:
    if engine.partition is not None:
        return shard_of(parameter)
    return Shard(name=name, shape=tuple(getattr(parameter, "ds_shape", parameter.shape)))


def _item(
    kind: str, name: str, shard: Shard, extent: tuple[int, int], read: Callable[[], torch.Tensor | None]
) -> _Item:
    part = (kind, name, tuple(shard.shape), shard.dim, shard.pieces, shard.padding, extent)
    digest = hashlib.blake2b(repr(part).encode(), digest_size=8).digest()
    return _Item(kind=kind, name=name, key=int.from_bytes(digest, "big", signed=True), read=read)


def _axis(group: dist.ProcessGroup, items: Sequence[_Item], indices: tuple[int, ...], *, partly: bool = False) -> _Axis:
    """Find out which items the ranks of a group share. With `partly`, also those that only some of them share."""
    ranks = tuple(dist.get_process_group_ranks(group))
    slots: dict[tuple[int, ...], list[int]] = defaultdict(list)
    if len(ranks) > 1 and indices:
        keys = torch.tensor([items[index].key for index in indices], device=transfer_device(group))
        if partly:
            every = _gather(keys, group)
            owners = [tuple(column.index(key) for key in column) for column in zip(*every, strict=True)]
        else:
            lowest = keys.clone()
            highest = keys.clone()
            dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            alone = tuple(range(len(ranks)))
            owners = [(0,) * len(ranks) if same else alone for same in (lowest == highest).tolist()]
        for index, owner in zip(indices, owners, strict=True):
            if len(set(owner)) < len(ranks):
                slots[owner].append(index)
    ordered = tuple((owner, tuple(slots[owner])) for owner in sorted(slots))
    return _Axis(group=group, ranks=ranks, items=indices, slots=ordered)


def _agrees(axis: _Axis, sums: torch.Tensor) -> bool:
    """Compare one number for each slot."""
    odd = torch.arange(1, 2 * len(axis.items), 2, dtype=torch.int64, device=sums.device)
    position = {index: number for number, index in enumerate(axis.items)}
    totals = [(sums[list(indices)] * odd[[position[index] for index in indices]]).sum() for _, indices in axis.slots]
    every = _gather(torch.stack(totals), axis.group)
    return all(
        values[slot] == every[owner][slot]
        for slot, (owners, _) in enumerate(axis.slots)
        for values, owner in zip(every, owners, strict=True)
    )


def _gather(values: torch.Tensor, group: dist.ProcessGroup) -> list[list[int]]:
    """Return the values of every rank of a group."""
    values = values.to(transfer_device(group)).contiguous()
    every = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, values, group=group)
    return [part.tolist() for part in every]
