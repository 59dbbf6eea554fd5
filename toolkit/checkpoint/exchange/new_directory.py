"""A new directory of tensors, written one tensor at a time and visible only when it is whole."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.checkpoint.header import TensorSpec
from toolkit.checkpoint.names import INDEX, MODEL, shown
from toolkit.checkpoint.plain_file import sync, write_synced
from toolkit.checkpoint.plan import MAX_FILE_BYTES, plan_files
from toolkit.checkpoint.save import model_index
from toolkit.checkpoint.share_writer import ShareWriter
from toolkit.errors import CheckpointError
from toolkit.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Tensors by name, each read when it is asked for. `read` gives what the spec says."""

    specs: Sequence[TensorSpec]
    read: Callable[[str], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(spec.nbytes for spec in self.specs)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written."""

    path: Path
    files: int
    tensors: int
    nbytes: int


def check_unused(destination: Path) -> None:
    """Raise CheckpointError where something is in the way: nothing is ever replaced."""
    given = shown(str(destination))
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise CheckpointError(f"{given}: it is there and no directory. Name a new one.", path=given)
    try:
        is_used = destination.is_dir() and any(destination.iterdir())
    except OSError as error:
        raise _failed(destination, error) from error
    if is_used:
        raise CheckpointError(f"{given}: it is not empty, and nothing is replaced. Name a new directory.", path=given)


def write_weights(
    destination: Path,
    weights: Weights,
    *,
    beside: Callable[[Path], None],
    max_shard_bytes: int = MAX_FILE_BYTES,
) -> Written:
    """Write the weights as a Hugging Face directory. `beside` adds config and tokenizer. Raises CheckpointError."""
    check_unused(destination)
    files = plan_files([(MODEL, weights.specs)], 1, max_file_bytes=max_shard_bytes)
    with new_directory(destination, nbytes=weights.nbytes) as folder:
        beside(folder)
        writer = ShareWriter(folder, files, rank=0)
        try:
            for spec in weights.specs:
                if writer.error is None:
                    writer.put(MODEL, spec.name, weights.read(spec.name))
        except BaseException:
            writer.abandon()
            raise
        writer.close()
        writer.wait()
        if writer.error is not None:
            raise writer.error
        index = model_index(files)
        if index is not None:
            write_synced(folder / INDEX, index)
    return Written(path=destination, files=len(files), tensors=len(weights.specs), nbytes=weights.nbytes)


@contextmanager
def new_directory(destination: Path, *, nbytes: int) -> Iterator[Path]:
    """A folder that becomes `destination` when the block ends well, and leaves nothing when it does not.

    `nbytes` is what it will need, so that a lack of room shows before hours of writing.
    """
    temporary = destination.absolute().with_name(f".{destination.absolute().name}.{os.getpid()}.tmp")
    try:
        destination.absolute().parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(temporary.parent).free
        if nbytes > free:
            raise CheckpointError(
                f"{shown(str(destination))}: {format_bytes(nbytes)} are needed, and {format_bytes(free)} are free. "
                "Make room, or name another directory.",
                bytes_needed=nbytes,
            )
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed and had our number
        temporary.mkdir()
        yield temporary
        for path in temporary.rglob("*"):
            sync(path)
        sync(temporary)
        temporary.rename(destination.absolute())  # in the place of an empty directory, but of no other
        sync(temporary.parent)
    except OSError as error:
        raise _failed(destination, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _failed(destination: Path, error: OSError) -> CheckpointError:
    reason = shown(error.strerror or str(error))
    where = f" at {shown(str(error.filename))}" if error.filename else ""
    return CheckpointError(f"{shown(str(destination))}: cannot be written ({reason}{where}). Name another directory.")
