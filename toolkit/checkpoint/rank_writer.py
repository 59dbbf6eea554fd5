"""One rank's part of writing a checkpoint: tensor files, tensor by tensor, and on the first rank the small files.

    RankWriter        takes tensors and gives them to the files that this rank writes
    SafetensorsFile   copies the header and the tensors of one file into buffers
    WritePipeline     two threads: one hashes the buffers, the other writes them
    OutputFile        the file itself, written past the page cache where the file system supports it

The library's `save_file` needs all tensors of a file in memory at once. Here the header (names, shapes, dtypes, hence
offsets) is written before the first value is known, and the values follow as they are gathered. The sha256 is computed
from the bytes in memory: the file is never read back.
"""

import errno
import fcntl
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from toolkit.checkpoint.manifest import FileRecord
from toolkit.checkpoint.names import write_all
from toolkit.checkpoint.ranks import RankFailure
from toolkit.checkpoint.safetensors_header import TensorSpec, encode_header
from toolkit.checkpoint.save_plan import PlannedFile
from toolkit.checkpoint.tensor_source import PAGE_BYTES, TensorData, host_memory

BUFFER_BYTES = 2 * 2**20
"""Size of a buffer, which is copied, hashed and written while it is in the CPU's cache; a multiple of any block size of
direct writes."""
BUFFERS = 4


class OutputFile:
    """A new file at `path` inside the checkpoint `directory`. Contents are given in order, to `hash` and then `write`.

    A checkpoint is not read again soon. Through the page cache the kernel would copy it once more, evict what is useful
    there, and still have to write it before `fsync` returns.
    """

    def __init__(self, directory: Path, path: str) -> None:
        self.path = path
        self._hash = hashlib.sha256()
        self._size = 0
        self._descriptor = os.open(directory / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._is_direct = False
        self._set_direct(True)

    def hash(self, content: memoryview) -> None:
        self._hash.update(content)

    def write(self, content: memoryview) -> None:
        """Append contents. Direct writes need page-aligned memory and, for all but the last call, whole pages."""
        self._size += len(content)
        if self._is_direct:
            content = self._write_direct(content)
        if content:
            write_all(self._descriptor, content)

    def finish(self) -> FileRecord:
        try:
            os.fsync(self._descriptor)
        finally:
            self.close()
        return FileRecord(path=self.path, size=self._size, sha256=self._hash.hexdigest())

    def close(self) -> None:
        """Close without fsync; the file is of no use then."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write_direct(self, content: memoryview) -> memoryview:
        """Write the whole pages of `content`, and return the rest."""
        nbytes = len(content) // PAGE_BYTES * PAGE_BYTES
        start = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        try:
            write_all(self._descriptor, content[:nbytes])
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._set_direct(False)  # this file system needs another alignment
            return content[os.lseek(self._descriptor, 0, os.SEEK_CUR) - start :]
        if nbytes < len(content):
            self._set_direct(False)
        return content[nbytes:]

    def _set_direct(self, wanted: bool) -> None:
        self._is_direct = False
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
        except OSError:  # not supported, for example by a file system in memory
            return
        self._is_direct = wanted and bool(flag)


@dataclass(frozen=True)
class _FilledBuffer:
    file: OutputFile
    buffer: torch.Tensor
    nbytes: int
    is_last: bool

    @property
    def content(self) -> memoryview:
        return memoryview(self.buffer[: self.nbytes].numpy())  # type: ignore[arg-type]


class WritePipeline:
    """`take` a buffer, fill it, `put` it; then `close`, and `wait`.

    `take` blocks while all buffers are in use, which bounds the memory. After a failure buffers are accepted and
    dropped: the caller takes part in an exchange with other ranks, which must complete.
    """

    def __init__(self, *, buffers: int = BUFFERS, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.records: list[FileRecord] = []
        """Records of the files that are complete and fsynced."""
        self.failure: tuple[str, BaseException] | None = None
        """The first one, with the path of the file."""
        self._failure_lock = threading.Lock()
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for buffer in torch.split(host_memory(buffers * buffer_bytes), buffer_bytes):
            self._free.put(buffer)
        self._to_hash: SimpleQueue[_FilledBuffer | None] = SimpleQueue()
        self._to_write: SimpleQueue[_FilledBuffer | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="checkpoint-write", daemon=True)
        threading.Thread(target=self._hash, name="checkpoint-hash", daemon=True).start()
        self._writer.start()

    def take(self) -> torch.Tensor:
        return self._free.get()

    def put(self, file: OutputFile, buffer: torch.Tensor, nbytes: int, *, is_last: bool) -> None:
        """Append the first `nbytes` of a buffer to a file; fsync the file after the last one."""
        self._to_hash.put(_FilledBuffer(file, buffer, nbytes, is_last))

    def close(self) -> None:
        self._to_hash.put(None)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Whether everything is on disk, or has failed, within this time."""
        self._writer.join(timeout_seconds)
        return not self._writer.is_alive()

    def fail(self, path: str, error: BaseException) -> None:
        """Write nothing more; the first failure is kept."""
        with self._failure_lock:
            self.failure = self.failure or (path, error)

    def _hash(self) -> None:
        while (filled := self._to_hash.get()) is not None:
            self._try(filled, lambda filled: filled.file.hash(filled.content))
            self._to_write.put(filled)
            del filled  # else its buffer would be referenced while waiting for the next one
        self._to_write.put(None)

    def _write(self) -> None:
        while (filled := self._to_write.get()) is not None:
            self._try(filled, self._append)
            self._free.put(filled.buffer)

    def _append(self, filled: _FilledBuffer) -> None:
        filled.file.write(filled.content)
        if filled.is_last:
            self.records.append(filled.file.finish())

    def _try(self, filled: _FilledBuffer, step: Callable[[_FilledBuffer], None]) -> None:
        if self.failure is not None:
            return
        try:
            step(filled)
        except BaseException as error:
            self.fail(filled.file.path, error)


class SafetensorsFile:
    """A new file at `path` in `directory`, for exactly the tensors of `specs` in their order."""

    def __init__(self, directory: Path, path: str, specs: Sequence[TensorSpec], pipeline: WritePipeline) -> None:
        assert sys.byteorder == "little", "safetensors are little-endian"
        self._specs = specs
        self._pipeline = pipeline
        self._complete_tensors = 0
        self._bytes_of_tensor = 0
        """Bytes written so far of the tensor that is expected."""
        self._buffer: torch.Tensor | None = None
        self._filled = 0
        header = encode_header(specs)
        self._file = OutputFile(directory, path)
        self._append(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    @property
    def is_complete(self) -> bool:
        return self._complete_tensors == len(self._specs)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the next tensor. Raises ValueError when it is not the expected one."""
        actual = TensorSpec.of(name, tensor)
        expected = self._expected(name)
        if actual != expected:
            raise ValueError(f"{_describe(actual)} was given, where {_describe(expected)} is expected")
        parts = []
        if tensor.numel():
            parts.append(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        self.write_bytes(name, parts)

    def write_bytes(self, name: str, parts: Iterable[torch.Tensor]) -> None:
        """Copy the next bytes of the next tensor, which may take several calls.

        Raises ValueError when it is not the expected one, or would get too many bytes.
        """
        expected = self._expected(name)
        if expected.name != name:
            raise ValueError(f"{name} was given, where {_describe(expected)} is expected")
        for part in parts:
            self._append(part)
            self._bytes_of_tensor += part.numel()
        if self._bytes_of_tensor > expected.nbytes:
            raise ValueError(f"{self._bytes_of_tensor} bytes were given, where {_describe(expected)} is expected")
        if self._bytes_of_tensor == expected.nbytes:
            self._complete_tensors += 1
            self._bytes_of_tensor = 0

    def close(self) -> None:
        """Have the pipeline finish the file. Raises ValueError when tensors are missing."""
        if not self.is_complete:
            missing = self._specs[self._complete_tensors]
            raise ValueError(f"{_describe(missing)} is expected, where the file was closed")
        self._flush(is_last=True)

    def abandon(self) -> None:
        """Close the file without fsync, after the pipeline has ended."""
        self._file.close()

    def _expected(self, name: str) -> TensorSpec:
        if self.is_complete:
            raise ValueError(f"{name} was given, where all {len(self._specs)} tensors have been written")
        return self._specs[self._complete_tensors]

    def _append(self, content: torch.Tensor) -> None:
        while content.numel():
            if self._buffer is None:
                self._buffer = self._pipeline.take()
            count = min(content.numel(), self._buffer.numel() - self._filled)
            self._buffer[self._filled : self._filled + count].copy_(content[:count])
            self._filled += count
            content = content[count:]
            if self._filled == self._buffer.numel():
                self._flush(is_last=False)

    def _flush(self, *, is_last: bool) -> None:
        buffer = self._pipeline.take() if self._buffer is None else self._buffer
        self._pipeline.put(self._file, buffer, self._filled, is_last=is_last)
        self._buffer = None
        self._filled = 0


def _describe(spec: TensorSpec) -> str:
    return f"{spec.name} {list(spec.shape)} {str(spec.dtype).removeprefix('torch.')}"


class RankWriter:
    """Writes those of `files` that belong to `rank` into `directory`.

    `write_small_files`, if any, runs in a thread meanwhile. A failure to write is not raised but is the `outcome`;
    tensors that follow are dropped.
    """

    def __init__(
        self,
        directory: Path,
        files: Sequence[PlannedFile],
        *,
        rank: int,
        write_small_files: Callable[[], list[FileRecord]] | None = None,
        pipeline: WritePipeline | None = None,
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._pipeline = pipeline or WritePipeline()
        self._file_of = {(file.kind, spec.name): file for file in files if file.rank == rank for spec in file.specs}
        self._files: dict[str, SafetensorsFile] = {}
        self._small_files = threading.Thread(
            target=self._write_small_files, args=[write_small_files], name="checkpoint-small-files", daemon=True
        )
        self._small_records: list[FileRecord] = []
        self._small_files.start()

    def write(self, tensors: Iterable[TensorData]) -> None:
        """Take all tensors, and return when their bytes are in the pipeline. Raises what iterating raises."""
        try:
            for kind, name, tensor in tensors:
                self._put(kind, name, tensor)
                del tensor  # else it would be referenced while the next one is gathered
        except BaseException:
            self._pipeline.fail("", RuntimeError("abandoned"))
            self._pipeline.close()
            self.wait()  # the directory must not be removed while files are written into it
            raise
        for path, file in self._files.items():
            try:
                if not file.is_complete:
                    file.close()  # raises: a tensor is missing
            except ValueError as error:
                self._pipeline.fail(path, error)
        if untouched := {file.path for file in self._file_of.values()} - self._files.keys():
            self._pipeline.fail(min(untouched), ValueError("no tensor of this file was given"))
        self._pipeline.close()

    def _put(self, kind: str, name: str, tensor: torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Copy a tensor, or the next runs of its bytes, if this rank writes it. Blocks while the disk is behind.

        The caller may free or change it afterwards.
        """
        planned = self._file_of.get((kind, name))
        if planned is None or self._pipeline.failure is not None:
            return
        try:
            path = planned.path
            if path not in self._files:
                self._files[path] = SafetensorsFile(self._directory, path, planned.specs, self._pipeline)
            file = self._files[path]
            if isinstance(tensor, torch.Tensor):
                file.write(name, tensor)
            else:
                file.write_bytes(name, tensor)
            if file.is_complete:
                file.close()
        except Exception as error:
            self._pipeline.fail(planned.path, error)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Whether everything is on disk, or has failed, within this time."""
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._small_files.join(timeout_seconds)
        is_over = self._pipeline.wait(None if end is None else max(0.0, end - time.monotonic()))
        if is_over:
            for file in self._files.values():
                file.abandon()
        return is_over and not self._small_files.is_alive()

    @property
    def outcome(self) -> RankFailure | list[FileRecord]:
        """Records of the files that were written, or the failure; valid once `wait` has returned true."""
        if self._pipeline.failure is None:
            return self._pipeline.records + self._small_records
        path, error = self._pipeline.failure
        return RankFailure.of(error, rank=self._rank, path=self._directory / path)

    @property
    def error(self) -> BaseException | None:
        return None if self._pipeline.failure is None else self._pipeline.failure[1]

    def _write_small_files(self, write: Callable[[], list[FileRecord]] | None) -> None:
        try:
            self._small_records = [] if write is None else write()
        except BaseException as error:
            self._pipeline.fail("", error)
