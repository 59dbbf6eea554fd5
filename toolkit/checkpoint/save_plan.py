"""The plan of a save: which tensor goes into which file, which rank writes it, and which bytes have to get there.

Every rank computes the same plan from the same specs and local shards, none of which change during a run.

Files: the rank that writes most determines how long a save takes. So tensors are assigned to ranks first, across all
kinds: the largest first, each to the rank with the least.

Transfers: a local shard is a run of elements, of a parameter that ZeRO has partitioned, of a tensor-parallel shard, or
of a full tensor. Every rank publishes its shards once, and a save moves each byte at most once, straight to the rank
that writes it. What the writing rank has itself is not moved.
"""

import heapq
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from toolkit.checkpoint.names import ADAPTERS, MODEL, is_kind, is_safe_name, tensor_file_names
from toolkit.checkpoint.safetensors_header import TensorSpec
from toolkit.parallel.adapter_names import holds_adapters
from toolkit.parallel.shard import Shard

MAX_FILE_BYTES = 5_000_000_000
MIN_FILE_BYTES = 32_000_000

Kinds = Sequence[tuple[str, Sequence[TensorSpec]]]


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """One file of a checkpoint: its path inside, the rank that writes it, and its tensors in order."""

    path: str
    kind: str
    rank: int
    specs: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def plan_files(
    kinds: Kinds, world_size: int, *, max_file_bytes: int = MAX_FILE_BYTES, min_file_bytes: int = MIN_FILE_BYTES
) -> list[PlannedFile]:
    """Plan the files of all kinds. A file exceeds `max_file_bytes` only where a single tensor does.

    A kind gets one file, unless that would exceed the maximum, or is large enough that ranks can write it in parallel
    in files of a useful size. Within a file tensors keep the model's order, in which they are received.
    """
    for kind, specs in kinds:
        names = [spec.name for spec in specs]
        assert is_kind(kind), kind
        assert len(set(names)) == len(names), f"{kind}: duplicate name"
        assert all(map(is_safe_name, names)), f"{kind}: a name cannot be printed"
    writers = _assign(kinds, _writers_of_kinds(kinds, world_size, max_file_bytes, min_file_bytes), world_size)
    files = []
    for (kind, specs), of_kind in zip(kinds, writers, strict=True):
        is_single = _are_adapters(kind, specs)
        contents = _contents(of_kind, specs, sys.maxsize if is_single else max_file_bytes)
        paths = [ADAPTERS] if is_single else tensor_file_names(kind, len(contents))
        for path, (rank, content) in zip(paths, contents, strict=True):
            files.append(PlannedFile(path=path, kind=kind, rank=rank, specs=tuple(content)))
    return files


def _are_adapters(kind: str, specs: Sequence[TensorSpec]) -> bool:
    """Whether these are LoRA's adapters in place of a model, of which peft reads one file."""
    return kind == MODEL and holds_adapters(spec.name for spec in specs)


def _writers_of_kinds(kinds: Kinds, world_size: int, max_file_bytes: int, min_file_bytes: int) -> list[list[int]]:
    """Return the ranks that write each kind."""
    expected = [0.0] * world_size
    writers: list[list[int]] = []
    for kind, specs in kinds:
        nbytes = sum(spec.nbytes for spec in specs)
        count = 1
        if not _are_adapters(kind, specs):
            least = -(-nbytes // max_file_bytes)
            wanted = nbytes // max(1, min_file_bytes)
            count = max(1, min(world_size, max(least, wanted)))
        ranks = sorted(range(world_size), key=lambda rank: (expected[rank], _spread(rank, world_size)))[:count]
        for rank in ranks:
            expected[rank] += nbytes / count
        writers.append(ranks)
    return writers


def _assign(kinds: Kinds, writers_of_kinds: Sequence[Sequence[int]], world_size: int) -> list[list[int]]:
    """A rank for each tensor of each kind: the largest first, each to the rank with the least to write."""
    load = [0] * world_size
    # Entries may be out of date: loads only grow, so an entry is corrected when it reaches the top.
    heaps = [[(0, place, rank) for place, rank in enumerate(ranks)] for ranks in writers_of_kinds]
    assigned = [[0] * len(specs) for _, specs in kinds]
    tensors = [(spec.nbytes, k, i) for k, (_, specs) in enumerate(kinds) for i, spec in enumerate(specs)]
    for nbytes, k, i in sorted(tensors, key=lambda tensor: -tensor[0]):
        heap = heaps[k]
        while heap[0][0] != load[heap[0][2]]:
            _, place, rank = heap[0]
            heapq.heapreplace(heap, (load[rank], place, rank))
        _, place, rank = heap[0]
        assigned[k][i] = rank
        load[rank] += nbytes
    return assigned


def _contents(
    ranks: Sequence[int], specs: Sequence[TensorSpec], max_file_bytes: int
) -> list[tuple[int, list[TensorSpec]]]:
    """(rank, tensors) of each file of a kind, in the order of their first tensors."""
    files: list[tuple[int, list[TensorSpec]]] = []
    filling: dict[int, tuple[list[TensorSpec], int]] = {}
    for rank, spec in zip(ranks, specs, strict=True):
        content, nbytes = filling.get(rank, ([], 0))
        if not content or nbytes + spec.nbytes > max_file_bytes:
            content = []
            nbytes = 0
            files.append((rank, content))
        content.append(spec)
        filling[rank] = content, nbytes + spec.nbytes
    return files


def _spread(rank: int, world_size: int) -> int:
    """A sort key by which the first ranks are far apart, hence on different nodes: the bits in reverse."""
    bits = (world_size - 1).bit_length()
    return int(f"{rank:0{bits}b}"[::-1], 2) if bits else 0


BUCKET_BYTES = 8 * 2**20
"""The most that a rank assembles at once, unless a single tensor that is sharded by columns is larger."""
BUCKET_BYTES_PER_RANK = 16 * 2**10
"""Share of each rank in a bucket, which is larger than BUCKET_BYTES where there are many ranks."""


@dataclass(frozen=True, kw_only=True)
class LocalShard:
    """Elements [start, start + length) of a flattened shard of a tensor, on some rank."""

    shard: Shard
    start: int
    length: int
    pipeline_stage: int = 0
    """Pipeline stage of the rank: of replicas on several stages (tied embeddings), those of the first one are
    written."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A run of elements that the rank `source` sends to the rank `target`, which may be the same."""

    kind: str
    spec: TensorSpec
    shard: Shard
    start: int
    length: int
    """Number of elements, as in LocalShard."""
    source: int
    target: int
    index: int
    """Index of the local shard among those that `source` has of this kind."""
    offset: int
    """Index of the first element in that local shard."""

    @property
    def nbytes(self) -> int:
        return self.length * self.spec.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class IncomingSlice:
    """A tensor that this rank writes, or a run of its elements; slices follow in the model's order."""

    kind: str
    spec: TensorSpec
    transfers: tuple[Transfer, ...]


@dataclass(kw_only=True)
class TransferRound:
    """Transfers of one rank in a round, and the slices that it then writes. `sends`, `receives`: by the other rank."""

    sends: dict[int, list[Transfer]] = field(default_factory=dict)
    receives: dict[int, list[Transfer]] = field(default_factory=dict)
    incoming: list[IncomingSlice] = field(default_factory=list)

    def _add(self, incoming: IncomingSlice, writer: int, rank: int) -> None:
        """Add what `rank` has to do so that `writer` gets this slice."""
        if rank == writer:
            self.incoming.append(incoming)
        for transfer in incoming.transfers:
            if rank == transfer.source != writer:
                self.sends.setdefault(writer, []).append(transfer)
            elif rank == writer != transfer.source:
                self.receives.setdefault(transfer.source, []).append(transfer)


def local_shape(shard: Shard) -> tuple[int, ...]:
    """The shape of the local tensor that a shard describes."""
    if shard.dim is None:
        return shard.shape
    width = sum(length for _, length in shard.pieces) + shard.padding
    return (*shard.shape[: shard.dim], width, *shard.shape[shard.dim + 1 :])


def plan_rounds(
    files: Sequence[PlannedFile],
    specs: Mapping[str, Sequence[TensorSpec]],
    local_shards: Mapping[str, Sequence[Sequence[LocalShard]]],
    *,
    rank: int,
    bucket_bytes: int | None = None,
) -> list[TransferRound]:
    """The rounds of `rank`. `local_shards`: of each kind, those of every rank. All ranks must plan from the same input.

    Raises ValueError where no rank has some element.
    """
    writers = {(file.kind, spec.name): file.rank for file in files for spec in file.specs}
    size = max((len(ranks) for ranks in local_shards.values()), default=1)
    bucket_bytes = bucket_bytes or max(BUCKET_BYTES, BUCKET_BYTES_PER_RANK * size)
    sent = [0] * size
    incoming_bytes = [0] * size
    rounds = [TransferRound()]
    for kind, specs_of_kind in specs.items():
        candidates = _candidates_by_name(local_shards[kind])
        for spec in specs_of_kind:
            writer = writers[kind, spec.name]
            transfers = _transfers(kind, spec, candidates.get(spec.name, []), writer, sent)
            for run in _split_into_buckets(transfers, bucket_bytes):
                nbytes = sum(transfer.nbytes for transfer in run)
                if incoming_bytes[writer] and incoming_bytes[writer] + nbytes > bucket_bytes:
                    rounds.append(TransferRound())
                    incoming_bytes = [0] * size
                incoming_bytes[writer] += nbytes
                rounds[-1]._add(IncomingSlice(kind=kind, spec=spec, transfers=tuple(run)), writer, rank)
    return [planned for planned in rounds if planned.incoming or planned.sends]


def _split_into_buckets(transfers: list[Transfer], bucket_bytes: int) -> list[list[Transfer]]:
    """Runs that can be written one after the other. A tensor that is sharded by columns is written at once."""
    if not transfers or transfers[0].shard.dim is not None:
        return [transfers]
    runs = []
    for transfer in transfers:
        most = max(1, bucket_bytes // transfer.spec.dtype.itemsize)
        for first in range(0, transfer.length, most):
            length = min(most, transfer.length - first)
            runs.append(
                [replace(transfer, start=transfer.start + first, offset=transfer.offset + first, length=length)]
            )
    return runs


_Candidate = tuple[int, int, LocalShard]
"""(rank, index among its local shards of this kind, local shard)"""


def _candidates_by_name(local_shards: Sequence[Sequence[LocalShard]]) -> dict[str, list[_Candidate]]:
    candidates: dict[str, list[_Candidate]] = {}
    for rank, of_rank in enumerate(local_shards):
        for index, local in enumerate(of_rank):
            candidates.setdefault(local.shard.name, []).append((rank, index, local))
    return candidates


def _transfers(
    kind: str, spec: TensorSpec, candidates: Sequence[_Candidate], writer: int, sent: list[int]
) -> list[Transfer]:
    first_stage = min((local.pipeline_stage for _, _, local in candidates), default=0)
    replicas: dict[object, list[_Candidate]] = {}
    for candidate in candidates:
        shard = candidate[2].shard
        if shard.shape != spec.shape:
            raise ValueError(f"{kind}: the shape of {spec.name} is {list(shard.shape)}, expected {list(spec.shape)}")
        if candidate[2].pipeline_stage == first_stage:
            replicas.setdefault((shard.dim, shard.pieces, shard.padding), []).append(candidate)
    transfers = [transfer for shards in replicas.values() for transfer in _cover(kind, spec, shards, writer, sent)]
    pieces = {
        tuple(transfer.shard.pieces): transfer.shard.dim for transfer in transfers if transfer.shard.dim is not None
    }
    covered = sum(length for piece in pieces for _, length in piece)
    if spec.nbytes and (not transfers or any(covered != spec.shape[dim] for dim in pieces.values())):
        raise ValueError(f"{kind}: the local shards do not cover {spec.name}, or overlap")
    return transfers


def _cover(
    kind: str, spec: TensorSpec, candidates: Sequence[_Candidate], writer: int, sent: list[int]
) -> list[Transfer]:
    """Consecutive runs that cover one shard. Of several sources, prefer the writer, then who has sent least."""
    count = math.prod(local_shape(candidates[0][2].shard))
    by_start: dict[int, list[_Candidate]] = {}
    for candidate in candidates:
        by_start.setdefault(candidate[2].start, []).append(candidate)
    transfers: list[Transfer] = []
    position = 0
    while position < count:
        here = by_start.get(position) or [
            candidate
            for candidate in candidates
            if candidate[2].start <= position < candidate[2].start + candidate[2].length
        ]
        if not here:
            raise ValueError(f"{kind}: no rank has element {position} of {spec.name}")
        rank, index, local = min(here, key=lambda candidate: (candidate[0] != writer, sent[candidate[0]], candidate[0]))
        end = min(local.start + local.length, count)
        transfer = Transfer(
            kind=kind,
            spec=spec,
            shard=local.shard,
            start=position,
            length=end - position,
            source=rank,
            target=writer,
            index=index,
            offset=position - local.start,
        )
        transfers.append(transfer)
        if rank != writer:
            sent[rank] += transfer.nbytes
        position = end
    return transfers
