"""Writing Hugging Face model directories tensor by tensor; a directory becomes visible only when it is complete.

write_weights   a new directory, from weights whose shapes are known: import and export
write_model     a directory that may replace an old one, from tensors as a training run gathers them
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch

from toolkit.checkpoint import names as on_disk
from toolkit.checkpoint.rank_writer import RankWriter
from toolkit.checkpoint.safetensors_header import TensorSpec
from toolkit.checkpoint.save import model_index
from toolkit.checkpoint.save_plan import MAX_FILE_BYTES, plan_files
from toolkit.errors import CheckpointError
from toolkit.files import printable, published, reason_of
from toolkit.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class NamedWeights:
    """Tensors by name, each read when it is requested. `read` returns what the spec says."""

    specs: Sequence[TensorSpec]
    read: Callable[[str], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


@dataclass(frozen=True, kw_only=True)
class WrittenDirectory:
    """A model directory that was written: its path, and how many files, tensors and bytes."""

    path: Path
    files: int
    tensors: int
    nbytes: int


def check_unused(destination: Path) -> None:
    """Raise CheckpointError where something exists already: nothing is ever replaced."""
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise on_disk.checkpoint_error(destination, "it exists and is not a directory. Name a new one.")
    try:
        is_used = destination.is_dir() and any(destination.iterdir())
    except OSError as error:
        raise _cannot_write(destination, error) from error
    if is_used:
        raise on_disk.checkpoint_error(destination, "it is not empty, and nothing is replaced. Name a new directory.")


def write_weights(
    destination: Path,
    weights: NamedWeights,
    *,
    write_small_files: Callable[[Path], None],
    max_shard_bytes: int = MAX_FILE_BYTES,
) -> WrittenDirectory:
    """Write the weights as a new Hugging Face directory. `write_small_files` adds config and tokenizer.

    Raises CheckpointError.
    """
    check_unused(destination)
    with new_directory(destination, nbytes=weights.nbytes) as directory:
        write_small_files(directory)
        tensors = ((spec.name, weights.read(spec.name)) for spec in weights.specs)
        files = _write_tensors(directory, weights.specs, tensors, max_shard_bytes, reads_on=False)
    return WrittenDirectory(path=destination, files=files, tensors=len(weights.specs), nbytes=weights.nbytes)


@contextmanager
def new_directory(destination: Path, *, nbytes: int) -> Iterator[Path]:
    """A temporary directory that becomes `destination` when the block succeeds, and is removed when it fails.

    `nbytes` is what will be written, so that a lack of disk space is reported before hours of writing. Raises
    CheckpointError.
    """
    try:
        destination.absolute().parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(destination.absolute().parent).free
        if nbytes > free:
            room = f"{format_bytes(nbytes)} are needed, and {format_bytes(free)} are free"
            advice = "Free disk space, or name another directory."
            raise CheckpointError(f"{printable(destination)}: {room}. {advice}", bytes_needed=nbytes)
        with published(destination) as directory:
            yield directory
    except OSError as error:
        raise _cannot_write(destination, error) from error


def write_model(
    directory: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    is_writer: bool,
    write_small_files: Callable[[Path], None] = lambda directory: None,
    max_shard_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `tensors`, which are in the order of `specs`, to `directory`, replacing its content at the very end.

    Every rank iterates over `tensors` (gathering them may be collective); only the writer touches the disk, and has a
    few megabytes of them in memory. `write_small_files` adds config and tokenizer. Raises OSError.
    """
    if not is_writer:
        for _ in tensors:
            pass
        return
    with published(directory, replaces=True) as folder:
        _write_tensors(folder, specs, _in_order(specs, tensors), max_shard_bytes, reads_on=True)
        write_small_files(folder)


def _in_order(
    specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for spec, (name, tensor) in zip(specs, tensors, strict=True):
        assert name == spec.name, f"{name} was given, {spec.name} is expected"
        yield name, tensor


def _write_tensors(
    directory: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_shard_bytes: int,
    *,
    reads_on: bool,
) -> int:
    """Write the files of a model, and the index of several; return their number. `reads_on`: also after a failure."""
    files = plan_files([(on_disk.MODEL, specs)], 1, max_file_bytes=max_shard_bytes)
    writer = RankWriter(directory, files, rank=0)
    wanted = takewhile(lambda _: reads_on or writer.error is None, tensors)
    writer.write((on_disk.MODEL, name, tensor) for name, tensor in wanted)
    writer.wait()
    if writer.error is not None:
        raise writer.error
    if (index := model_index(files)) is not None:
        on_disk.write_synced(directory / on_disk.INDEX, index)
    return len(files)


def _cannot_write(destination: Path, error: OSError) -> CheckpointError:
    where = f" at {printable(str(error.filename))}" if error.filename else ""
    return on_disk.checkpoint_error(
        destination, f"cannot be written ({reason_of(error)}{where}). Name another directory."
    )
