"""One rank's share of a checkpoint: the files that it writes, out of the tensors that it is given."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from toolkit.checkpoint.manifest import FileRecord
from toolkit.checkpoint.piece_stream import PieceStream
from toolkit.checkpoint.plan import PlannedFile
from toolkit.checkpoint.ranks import Failure
from toolkit.checkpoint.tensor_file import TensorFile

Outcome = Failure | list[FileRecord]


class ShareWriter:
    """Writes this rank's `files`, which follow each other as their tensors do, into `folder`.

    Nothing raises but what a caller does: a failure is the outcome, and tensors that follow are dropped.
    """

    def __init__(
        self, folder: Path, files: Sequence[PlannedFile], *, rank: int, stream: PieceStream | None = None
    ) -> None:
        self._folder, self._rank = folder, rank
        self._stream = stream or PieceStream()
        self._file_of = {(file.kind, spec.name): file for file in files for spec in file.specs}
        self._open: dict[str, TensorFile] = {}
        self._complete: list[TensorFile] = []
        self._begun: set[str] = set()

    def owns(self, kind: str, name: str) -> bool:
        """Whether this rank writes the tensor."""
        return (kind, name) in self._file_of

    def put(self, kind: str, name: str, tensor: torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Copy a tensor, or the next runs of its bytes, if this rank writes it. Waits while the disk is behind.

        The caller may free or change it afterwards.
        """
        file = self._file_of.get((kind, name))
        if file is None or self._stream.failure is not None:
            return
        try:
            self._put(file, name, tensor)
        except Exception as error:
            self._stream.fail(file.path, error)

    def close(self) -> None:
        """No tensor follows."""
        for path, opened in self._open.items():
            try:
                opened.close()  # raises: a tensor is missing
            except ValueError as error:
                self._stream.fail(path, error)
        untouched = {file.path for file in self._file_of.values()} - self._begun
        if untouched:
            self._stream.fail(min(untouched), ValueError("no tensor of this file was given"))
        self._stream.close()

    def abandon(self) -> None:
        """Stop as soon as may be; what was written is of no use."""
        self._stream.fail("", RuntimeError("abandoned"))
        self._stream.close()
        self._stream.wait()
        self._close_files()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Whether all is on the disk, or has failed, within this time."""
        is_over = self._stream.wait(timeout_seconds)
        if is_over:
            self._close_files()
        return is_over

    @property
    def outcome(self) -> Outcome:
        """What was written, or why not; when `wait` says that it is over."""
        if self._stream.failure is None:
            return self._stream.records
        path, error = self._stream.failure
        return Failure.of(error, rank=self._rank, path=self._folder / path)

    @property
    def error(self) -> BaseException | None:
        """The exception behind a failure."""
        return None if self._stream.failure is None else self._stream.failure[1]

    def _put(self, file: PlannedFile, name: str, tensor: torch.Tensor | Iterable[torch.Tensor]) -> None:
        if file.path not in self._begun:
            self._begun.add(file.path)
            self._open[file.path] = TensorFile(self._folder, file.path, file.specs, self._stream)
        opened = self._open[file.path]
        if isinstance(tensor, torch.Tensor):
            opened.write(name, tensor)
        else:
            opened.write_bytes(name, tensor)
        if opened.is_complete:
            self._complete.append(self._open.pop(file.path))
            opened.close()

    def _close_files(self) -> None:
        for file in [*self._open.values(), *self._complete]:
            file.abandon()
