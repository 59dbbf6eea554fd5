"""Which tensor goes into which file, and which rank writes it. Every rank computes the same plan from the same specs.

Tensors arrive in the model's order, one at a time, and only a few of them wait in a rank's queue. Were a file a run of
consecutive tensors, one rank would be busy with its file while all others waited for theirs to begin. So as many files
as there are ranks are open at a time (a wave), and each tensor goes to the one that has the fewest bytes: all ranks
write all the time, and files differ by no more than one tensor. Inside a file tensors keep the model's order; between
waves the model's order holds too.

A kind of tensors has one file unless there is reason for more: a file would exceed the cap, or ranks can share the
writing in files of a useful size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.checkpoint.header import TensorSpec
from toolkit.checkpoint.names import is_kind, is_safe_name, tensor_file_names

MAX_FILE_BYTES = 5_000_000_000
MIN_FILE_BYTES = 64_000_000

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
    load = [0] * world_size
    files = []
    for kind, specs in kinds:
        _check(kind, specs)
        waves = _waves(specs, world_size, max_file_bytes, min_file_bytes)
        paths = iter(tensor_file_names(kind, sum(map(len, waves))))
        for wave in waves:
            ranks = _writers(wave, load)
            for rank, content in zip(ranks, wave, strict=True):
                files.append(PlannedFile(path=next(paths), kind=kind, rank=rank, specs=tuple(content)))
                load[rank] += files[-1].nbytes
    return files


def _check(kind: str, specs: Sequence[TensorSpec]) -> None:
    names = [spec.name for spec in specs]
    assert is_kind(kind), kind
    assert len(set(names)) == len(names), f"{kind}: a name occurs twice"
    assert all(map(is_safe_name, names)), f"{kind}: a name cannot be printed"


def _waves(
    specs: Sequence[TensorSpec], world_size: int, max_file_bytes: int, min_file_bytes: int
) -> list[list[list[TensorSpec]]]:
    waves = []
    start = 0
    while start < len(specs):
        rest_bytes = sum(spec.nbytes for spec in specs[start:])
        needed = -(-rest_bytes // max_file_bytes)
        useful = rest_bytes // max(1, min_file_bytes)
        wave: list[list[TensorSpec]] = [[] for _ in range(max(1, min(world_size, max(needed, useful))))]
        held = [0] * len(wave)
        for spec in specs[start:]:
            least = held.index(min(held))
            if wave[least] and held[least] + spec.nbytes > max_file_bytes:
                break
            wave[least].append(spec)
            held[least] += spec.nbytes
            start += 1
        waves.append([content for content in wave if content])
    return waves


def _writers(wave: Sequence[Sequence[TensorSpec]], load: Sequence[int]) -> list[int]:
    """A rank for each file of a wave: the largest file to the rank with the least to write."""
    by_load = sorted(range(len(load)), key=lambda rank: (load[rank], _spread(rank, len(load))))
    by_size = sorted(range(len(wave)), key=lambda i: -sum(spec.nbytes for spec in wave[i]))
    rank_of = dict(zip(by_size, by_load, strict=False))
    return [rank_of[i] for i in range(len(wave))]


def _spread(rank: int, world_size: int) -> int:
    """An order in which any first few ranks lie far apart, hence on different machines: the bits in reverse."""
    bits = (world_size - 1).bit_length()
    return int(f"{rank:0{bits}b}"[::-1], 2) if bits else 0
