"""Which tensor goes into which file, and which rank writes it. Every rank computes the same plan from the same specs.

What a rank writes decides how long a save takes, so tensors go to ranks before they go to files: the largest first,
each to the rank that has the least, over all kinds together. Inside a file tensors keep the model's order, in which
they arrive, and files have the order of their first tensors.

A kind of tensors has one file unless there is reason for more: a file would exceed the cap, or ranks can share the
writing in files of a useful size.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.checkpoint.header import TensorSpec
from toolkit.checkpoint.names import is_kind, is_safe_name, tensor_file_names

MAX_FILE_BYTES = 5_000_000_000
MIN_FILE_BYTES = 32_000_000

Kinds = Sequence[tuple[str, Sequence[TensorSpec]]]


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """One file of a checkpoint: its path inside, who writes it, and what is in it, in order."""

    path: str
    kind: str
    rank: int
    specs: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(spec.nbytes for spec in self.specs)


def plan_files(
    kinds: Kinds, world_size: int, *, max_file_bytes: int = MAX_FILE_BYTES, min_file_bytes: int = MIN_FILE_BYTES
) -> list[PlannedFile]:
    """The files of all kinds. A file exceeds `max_file_bytes` only where a single tensor does."""
    for kind, specs in kinds:
        _check(kind, specs)
    writers = _assign(kinds, _sharing(kinds, world_size, max_file_bytes, min_file_bytes), world_size)
    files = []
    for (kind, specs), of_kind in zip(kinds, writers, strict=True):
        contents = _contents(of_kind, specs, max_file_bytes)
        for path, (rank, content) in zip(tensor_file_names(kind, len(contents)), contents, strict=True):
            files.append(PlannedFile(path=path, kind=kind, rank=rank, specs=tuple(content)))
    return files


def _check(kind: str, specs: Sequence[TensorSpec]) -> None:
    names = [spec.name for spec in specs]
    assert is_kind(kind), kind
    assert len(set(names)) == len(names), f"{kind}: a name occurs twice"
    assert all(map(is_safe_name, names)), f"{kind}: a name cannot be printed"


def _sharing(kinds: Kinds, world_size: int, max_file_bytes: int, min_file_bytes: int) -> list[list[int]]:
    """For each kind the ranks that share its writing."""
    expected = [0.0] * world_size
    sharing = []
    for _, specs in kinds:
        nbytes = sum(spec.nbytes for spec in specs)
        count = max(1, min(world_size, max(-(-nbytes // max_file_bytes), nbytes // max(1, min_file_bytes))))
        ranks = sorted(range(world_size), key=lambda rank: (expected[rank], _spread(rank, world_size)))[:count]
        for rank in ranks:
            expected[rank] += nbytes / count
        sharing.append(ranks)
    return sharing


def _assign(kinds: Kinds, sharing: Sequence[Sequence[int]], world_size: int) -> list[list[int]]:
    """A rank for each tensor of each kind: the largest first, each to the rank that has the least to write."""
    load = [0] * world_size
    # Entries may be out of date: loads only grow, so one is put right when it comes up.
    heaps = [[(0, place, rank) for place, rank in enumerate(ranks)] for ranks in sharing]
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
            content, nbytes = [], 0
            files.append((rank, content))
        content.append(spec)
        filling[rank] = content, nbytes + spec.nbytes
    return files


def _spread(rank: int, world_size: int) -> int:
    """An order in which any first few ranks lie far apart, hence on different machines: the bits in reverse."""
    bits = (world_size - 1).bit_length()
    return int(f"{rank:0{bits}b}"[::-1], 2) if bits else 0
