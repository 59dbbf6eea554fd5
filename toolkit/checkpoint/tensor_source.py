"""Sources of a checkpoint's tensors: local shards, or copies of them, sent to the ranks that write them.

ShardedTensorSource  every rank has local shards, each of which is sent straight to the rank that writes it
                     (save_plan.py); while one round is written, the next one is in transit
SnapshotMemory       host memory for copies of them, while training continues
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from toolkit.checkpoint import save_plan
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.safetensors_header import TensorSpec

PACKED_BYTES = 2**20
"""Transfers smaller than this are packed into one message."""

PAGE_BYTES = 4096
_ALIGNMENT = 64

TensorData = tuple[str, str, torch.Tensor | list[torch.Tensor]]
"""(kind, name, tensor or the next runs of its bytes), to be copied before the next one is requested."""

Snapshot = Callable[[Ranks], Iterator[TensorData]]
"""Yields what this rank writes; a collective call of the ranks that it is given."""


def host_memory(nbytes: int) -> torch.Tensor:
    """Uninitialized host memory: page-aligned for direct writes, and pinned where tensors come from a GPU.

    Fresh memory costs a page fault every 4 KiB, which takes longer than copying into it; huge pages, where the system
    has them, reduce that to one every 2 MiB.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            memory = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # no more memory can be pinned; raising on one rank would leave the others waiting
            pass
        else:
            start = -memory.data_ptr() % PAGE_BYTES
            return memory[start : start + nbytes]
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    block = mmap.mmap(-1, nbytes)
    with suppress(OSError, AttributeError):  # a system without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)


class SnapshotMemory:
    """Host memory that snapshots are copied into, reused from one snapshot to the next.

    Copying 480 MB into fresh memory took 7 times as long. A rank keeps as much as its largest snapshot needed.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def clear(self, nbytes: int, count: int) -> None:
        """Discard all copies, and make room for `count` tensors of `nbytes` in total."""
        self._used = 0
        needed = nbytes + count * _ALIGNMENT
        if self._memory.numel() < needed:
            self._memory = torch.empty(0, dtype=torch.uint8)  # first, so that both never exist at once
            self._memory = host_memory(needed)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of a tensor, valid until `clear`."""
        start = self._used
        self._used += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        target = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return target.copy_(tensor.detach())


@dataclass(frozen=True, kw_only=True)
class ShardedTensorGroup:
    """This rank's local shards of one kind of tensors. `values(i)`: those of shard i, flat, in the spec's dtype."""

    kind: str
    specs: Sequence[TensorSpec]
    local_shards: Sequence[save_plan.LocalShard]
    values: Callable[[int], torch.Tensor]


@dataclass(kw_only=True)
class ShardedTensorSource:
    """Tensors that are assembled only on the rank that writes them. The sharding must not change during its life."""

    groups: Sequence[ShardedTensorGroup]
    _planned: tuple[Sequence[save_plan.PlannedFile], list[save_plan.TransferRound]] | None = field(
        default=None, init=False
    )

    @property
    def specs(self) -> save_plan.Kinds:
        """(kind, specs) of each kind, in the order in which tensors are yielded; the same on every rank."""
        return [(group.kind, group.specs) for group in self.groups]

    def tensors(self, files: Sequence[save_plan.PlannedFile], ranks: Ranks) -> Iterator[TensorData]:
        """Yield what this rank writes of `files`. Iterating is a collective call."""
        return _exchange(self._rounds(files, ranks), self._values(), ranks)

    def snapshot(self, files: Sequence[save_plan.PlannedFile], ranks: Ranks, memory: SnapshotMemory) -> Snapshot:
        """Copy what is needed for `tensors`, which may change afterwards. A collective call."""
        rounds = self._rounds(files, ranks)
        values = self._values()
        needed: list[save_plan.Transfer] = []
        for planned in rounds:
            for transfers in planned.sends.values():
                needed += transfers
        for planned in rounds:
            for incoming in planned.incoming:
                needed += [transfer for transfer in incoming.transfers if transfer.source == ranks.rank]
        memory.clear(sum(transfer.nbytes for transfer in needed), len(needed))
        copies = {id(transfer): memory.copy(values(transfer)) for transfer in needed}
        return lambda ranks: _exchange(rounds, lambda transfer: copies[id(transfer)], ranks)

    def _values(self) -> "_Values":
        of_kind = {group.kind: group.values for group in self.groups}

        def values(transfer: save_plan.Transfer) -> torch.Tensor:
            return of_kind[transfer.kind](transfer.index).narrow(0, transfer.offset, transfer.length)

        return values

    def _rounds(self, files: Sequence[save_plan.PlannedFile], ranks: Ranks) -> list[save_plan.TransferRound]:
        if self._planned is None or self._planned[0] != files:
            of_ranks = ranks.gather({group.kind: list(group.local_shards) for group in self.groups})
            shards = {group.kind: [of_rank[group.kind] for of_rank in of_ranks] for group in self.groups}
            self._planned = files, save_plan.plan_rounds(files, dict(self.specs), shards, rank=ranks.rank)
        return self._planned[1]


_Values = Callable[[save_plan.Transfer], torch.Tensor]


_InTransit = tuple[list[dist.Work], list[torch.Tensor], dict[int, torch.Tensor]]
"""(work, tensors that are referenced until they have been sent, received bytes of a transfer by its identity)"""


def _exchange(rounds: Sequence[save_plan.TransferRound], values: _Values, ranks: Ranks) -> Iterator[TensorData]:
    if not rounds:
        return
    # Two rounds exist at a time, each in a buffer of its own that is reused by the next but one.
    buffers = [_receive_buffer(rounds[first::2], ranks) for first in (0, 1)]
    ahead = _start(rounds[0], values, ranks, buffers[0])
    for i, now in enumerate(rounds):
        work, _sent, received = ahead
        if i + 1 < len(rounds):
            ahead = _start(rounds[i + 1], values, ranks, buffers[(i + 1) % 2])
        for operation in work:
            operation.wait()
        for incoming in now.incoming:
            yield incoming.kind, incoming.spec.name, _assemble(incoming, received, values, ranks)


def _receive_buffer(rounds: Sequence[save_plan.TransferRound], ranks: Ranks) -> torch.Tensor:
    """Memory for what the largest of these rounds receives."""
    nbytes = max(map(_received_bytes, rounds), default=0)
    is_host = ranks.device.type == "cpu"
    return host_memory(nbytes) if is_host else torch.empty(nbytes, dtype=torch.uint8, device=ranks.device)


def _received_bytes(planned: save_plan.TransferRound) -> int:
    return sum(transfer.nbytes for transfers in planned.receives.values() for transfer in transfers)


def _start(round: save_plan.TransferRound, values: _Values, ranks: Ranks, buffer: torch.Tensor) -> _InTransit:
    sends: list[tuple[int, torch.Tensor]] = []
    receives: list[tuple[int, torch.Tensor]] = []
    received: dict[int, torch.Tensor] = {}
    for target, transfers in round.sends.items():
        for message in _messages(transfers):
            parts = [_bytes(values(transfer)).to(ranks.device) for transfer in message]
            sends.append((target, parts[0] if len(parts) == 1 else torch.cat(parts)))
    used = 0
    for source, transfers in round.receives.items():
        for message in _messages(transfers):
            sizes = [transfer.nbytes for transfer in message]
            content = buffer[used : used + sum(sizes)]
            used += sum(sizes)
            receives.append((source, content))
            received.update(zip(map(id, message), torch.split(content, sizes), strict=True))
    return ranks.transfer(sends, receives), [sent for _, sent in sends], received


def _messages(transfers: Sequence[save_plan.Transfer]) -> list[list[save_plan.Transfer]]:
    """Large transfers alone, so that they need no copy; small ones packed. The same on both ends."""
    small = [transfer for transfer in transfers if transfer.nbytes < PACKED_BYTES]
    messages = [[transfer] for transfer in transfers if transfer.nbytes >= PACKED_BYTES]
    return [small, *messages] if small else messages


def _assemble(
    incoming: save_plan.IncomingSlice, received: dict[int, torch.Tensor], values: _Values, ranks: Ranks
) -> torch.Tensor | list[torch.Tensor]:
    transfers = incoming.transfers
    spec = incoming.spec
    parts = [received[id(transfer)] if id(transfer) in received else _bytes(values(transfer)) for transfer in transfers]
    if not transfers or transfers[0].shard.dim is None:
        return parts
    full = torch.empty(spec.shape, dtype=spec.dtype, device=ranks.device)
    for transfer, part in zip(transfers, parts, strict=True):
        if transfer.start == 0:
            local = torch.empty(save_plan.local_shape(transfer.shard), dtype=spec.dtype, device=ranks.device)
            flat = _bytes(local)
        begin = transfer.start * spec.dtype.itemsize
        flat[begin : begin + transfer.nbytes].copy_(part)
        if transfer.start + transfer.length == local.numel():
            transfer.shard.put(local, full)
    return full


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.detach().contiguous().reshape(-1).view(torch.uint8)
