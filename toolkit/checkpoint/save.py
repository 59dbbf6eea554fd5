"""Saving a checkpoint: every rank writes a part, and all agree on whether it succeeded.

    start    the first rank makes the directory
    write    each rank receives the tensors that it writes (tensor_source.py), hashes and writes them (rank_writer.py);
             the first rank writes the small files meanwhile
    commit   when all have finished, the first rank commits (commit.py)

`save` returns when that is done. `AsyncSaver` first copies each rank's local shards into host memory; a thread does the
rest while training continues. Steps, agreement and bytes are the same.

A failure on one rank raises the same CheckpointError on all, after the directory was removed; older checkpoints stay as
they are. Nothing is pickled onto the disk.
"""

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from toolkit.checkpoint import names
from toolkit.checkpoint.commit import Retention, commit, delete_old_checkpoints, open_directory, sync_and_hash
from toolkit.checkpoint.manifest import FileRecord
from toolkit.checkpoint.rank_writer import RankWriter
from toolkit.checkpoint.ranks import RankFailure, Ranks, first_failure
from toolkit.checkpoint.remote_commit import commit_uploaded, reserve, upload
from toolkit.checkpoint.save_plan import MAX_FILE_BYTES, MIN_FILE_BYTES, PlannedFile, plan_files
from toolkit.checkpoint.tensor_source import ShardedTensorSource, Snapshot, SnapshotMemory, TensorData
from toolkit.errors import CheckpointError
from toolkit.files import printable
from toolkit.remote_files import RemotePath
from toolkit.units import format_bytes

T = TypeVar("T")

_POLL_SECONDS = 1.0
"""Ranks that have finished wait for the others in collective calls no longer than this: a slow disk is no timeout."""


@dataclass(frozen=True, kw_only=True)
class CheckpointContents:
    """Contents of a checkpoint. `write_model_files` adds small files (config, tokenizer), on the first rank."""

    tensors: ShardedTensorSource
    trainer_state: Mapping[str, Any]
    write_model_files: Callable[[Path], None] = lambda directory: None
    retention: Retention | None = None
    """Older checkpoints that are kept; None keeps all."""
    progress: Callable[[], None] = lambda: None
    """Called after each tensor, however slow the disk is; not while a snapshot is written beside training."""
    check_lock: Callable[[], None] = lambda: None
    """Called on the first rank before it changes the run directory; raises where another job has taken that over."""
    url: RemotePath | None = None
    """Place of the checkpoint, instead of the run directory, in which each rank then stages what it uploads."""


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A committed checkpoint. `notices`: what failed without affecting it, one line each."""

    path: Path
    step: int
    nbytes: int
    """Size of all its tensors."""
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FileSizes:
    """Limits of tensor files. Ranks write a kind of tensors in parallel only in files of at least `min_file_bytes`."""

    max_file_bytes: int = MAX_FILE_BYTES
    min_file_bytes: int = MIN_FILE_BYTES


def save(
    run_dir: Path,
    step: int,
    contents: CheckpointContents,
    *,
    ranks: Ranks | None = None,
    sizes: FileSizes | None = None,
) -> SavedCheckpoint:
    """Write and commit `run_dir/step-…`. A collective call of `ranks`, by default of the whole job.

    Raises CheckpointError, on every rank alike.
    """
    return _Save(run_dir, step, contents, ranks or Ranks.of(), sizes or FileSizes()).finish()


class AsyncSaver:
    """Saves while training continues, at most one checkpoint at a time. All methods are collective calls.

    It keeps its host memory (this rank's local shards) and its process group, which only its thread uses.
    """

    def __init__(self, *, ranks: Ranks | None = None, sizes: FileSizes | None = None) -> None:
        self._ranks = ranks or Ranks.of()
        self._sizes = sizes or FileSizes()
        self._memory = SnapshotMemory()
        self._thread_ranks: Ranks | None = None
        self._running: Future[SavedCheckpoint] | None = None

    def begin(self, run_dir: Path, step: int, contents: CheckpointContents) -> SavedCheckpoint | None:
        """Take a snapshot. Waits for the previous checkpoint, if any, and returns it. Raises CheckpointError.

        `contents.write_model_files` is called in the thread.
        """
        previous = self.finish()
        self._thread_ranks = self._thread_ranks or self._ranks.with_own_connections()
        saving = _Save(run_dir, step, contents, self._ranks, self._sizes)
        saving.take_snapshot(self._memory, self._thread_ranks)
        self._running = _start_thread(saving.finish)
        return previous

    def poll(self) -> SavedCheckpoint | None:
        """The checkpoint, once it is committed and every rank knows; None until then. Raises CheckpointError."""
        if self._running is None or not self._ranks.all(self._running.done()):
            return None
        running = self._running
        self._running = None
        return running.result()

    def finish(self) -> SavedCheckpoint | None:
        """Wait for the checkpoint that has begun, if there is one. Raises CheckpointError."""
        running = self._running
        self._running = None
        if running is None:
            return None
        while not self._ranks.all(bool(wait([running], _POLL_SECONDS).done)):
            pass
        return running.result()


def _start_thread(function: Callable[[], T]) -> Future[T]:
    """Call `function` in a daemon thread, so that a process which fails need not wait for it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


class _Save:
    """A checkpoint in progress. The constructor makes its directory; `finish` does the rest.

    With a URL each rank has a directory of its own, which nothing else sees: hosts need not share a file system.

    After `take_snapshot`, `finish` may run in a thread: it reads the copies, and communicates with other ranks over
    connections of its own.
    """

    def __init__(self, run_dir: Path, step: int, contents: CheckpointContents, ranks: Ranks, sizes: FileSizes) -> None:
        self._run_dir = run_dir
        self._step = step
        self._contents = contents
        self._ranks = ranks
        specs = contents.tensors.specs
        self._files = plan_files(specs, ranks.size, **vars(sizes))
        self._nbytes = sum(file.nbytes for file in self._files)
        self._tensors: Snapshot = self._reported_tensors
        self._progress = contents.progress
        self._directory = run_dir / names.temporary_name(names.step_name(step))
        url = contents.url
        if url is None:
            self._directory = run_dir / self._on_first_rank(self._make_directory)
        else:
            self._checkpoint = self._on_first_rank(lambda: self._reserve(url))
            self._on_every_rank(self._make_staging)

    def _reported_tensors(self, ranks: Ranks) -> Iterator[TensorData]:
        for data in self._contents.tensors.tensors(self._files, ranks):
            yield data
            del data  # else it would be referenced while the next one is gathered
            self._contents.progress()

    def take_snapshot(self, memory: SnapshotMemory, ranks: Ranks) -> None:
        """Copy the tensors into `memory`. `ranks`: the same ranks over connections that only `finish` uses."""
        with self._directory_removed_on_error():
            self._tensors = self._contents.tensors.snapshot(self._files, self._ranks, memory)
        self._ranks = ranks
        self._progress = lambda: None

    def finish(self) -> SavedCheckpoint:
        """Write, wait for all ranks, and commit. A collective call. Raises CheckpointError, on every rank alike."""
        ranks = self._ranks
        small_files = self._write_small_files if ranks.is_first else None
        with self._directory_removed_on_error():
            writer = RankWriter(self._directory, self._files, rank=ranks.rank, write_small_files=small_files)
            writer.write(self._tensors(ranks))
        while not ranks.all(writer.wait(_POLL_SECONDS)):
            pass
        outcomes = ranks.gather(writer.outcome)
        if (failure := first_failure(outcomes)) is not None:
            self._fail(failure, writer.error)
        if self._contents.url is not None:
            self._upload(outcomes[ranks.rank])
        records = [record for outcome in outcomes if isinstance(outcome, list) for record in outcome]
        path, notices = self._on_first_rank(lambda: self._commit(records))
        if self._contents.url is not None:
            self._remove_directory()
        return SavedCheckpoint(path=path, step=self._step, nbytes=self._nbytes, notices=tuple(notices))

    def _make_directory(self) -> str:
        self._contents.check_lock()
        has_optimizer = any(file.kind != names.MODEL for file in self._files)
        open_directory(self._directory, [names.OPTIMIZER] if has_optimizer else [])
        return self._directory.name

    def _reserve(self, url: RemotePath) -> RemotePath:
        self._contents.check_lock()
        return reserve(url, self._step)

    def _make_staging(self) -> None:
        optimizer = [names.OPTIMIZER] if any(file.kind != names.MODEL for file in self._files) else []
        for name in ("", *optimizer):
            (self._directory / name).mkdir(parents=True)

    def _upload(self, records: RankFailure | list[FileRecord]) -> None:
        """Upload what this rank has written, and wait for the others. A collective call."""
        assert isinstance(records, list)
        arrived = threading.Event()
        uploading = _start_thread(lambda: upload(self._directory, records, self._checkpoint, arrived.set))
        while not self._ranks.all(bool(wait([uploading], _POLL_SECONDS).done)):
            if arrived.is_set():
                arrived.clear()
                self._progress()
        self._on_every_rank(uploading.result)

    def _write_small_files(self) -> list[FileRecord]:
        self._contents.write_model_files(self._directory)
        state = json.dumps(self._contents.trainer_state, indent=1) + "\n"
        names.write_synced(self._directory / names.TRAINER_STATE, state.encode())
        if (index := model_index(self._files)) is not None:
            names.write_synced(self._directory / names.INDEX, index)
        return sync_and_hash(self._directory, exclude={file.path for file in self._files})

    def _commit(self, records: Sequence[FileRecord]) -> tuple[Path, list[str]]:
        self._contents.check_lock()
        path: Path
        if self._contents.url is None:
            path, notices = commit(self._directory, self._step, records)
        else:
            path = self._checkpoint
            notices = commit_uploaded(self._checkpoint, self._step, records)
        if self._contents.retention is not None:
            notices += delete_old_checkpoints(self._place, self._contents.retention)
        return path, notices

    def _on_first_rank(self, function: Callable[[], T]) -> T:
        """Call `function` on the first rank; every rank returns its result. Where it raises, all fail."""
        agreed: T | None = self._on_every_rank(lambda: function() if self._ranks.is_first else None)[0]
        return agreed  # type: ignore[return-value]

    def _on_every_rank(self, function: Callable[[], T]) -> list[T]:
        """Call `function` on every rank; every rank returns all results. Where one raises, all fail."""
        cause = None
        outcome: T | RankFailure
        try:
            outcome = function()
        except Exception as error:
            outcome = RankFailure.of(error, rank=self._ranks.rank, path=self._directory)
            cause = error
        outcomes = self._ranks.gather(outcome)
        if (failure := first_failure(outcomes)) is not None:
            self._fail(failure, cause)
        return outcomes  # type: ignore[return-value]

    @contextmanager
    def _directory_removed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._remove_directory()
            raise

    def _remove_directory(self) -> None:
        if self._ranks.is_first or self._contents.url is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _fail(self, failure: RankFailure, cause: BaseException | None) -> NoReturn:
        self._remove_directory()
        free_bytes = self._ranks.run_on_first(self._free_bytes)  # also a barrier: no rank returns before the removal
        path = printable(self._place / names.step_name(self._step))
        where = f" at {failure.path}" if failure.path else ""
        advice = ""
        if failure.advice:
            problem = f"rank {failure.rank} failed{where} ({failure.reason})"
            advice = f" {failure.advice[:1].upper()}{failure.advice[1:]}."
        elif failure.is_disk_full:
            free = "" if free_bytes is None else f", and {format_bytes(free_bytes)} are free"
            needed = f"The checkpoint needs {format_bytes(self._nbytes)}{free}"
            problem = f"rank {failure.rank} ran out of disk space{where}. {needed}"
            advice = " Free disk space, or choose another run_dir."
        else:
            problem = f"rank {failure.rank} failed{where} ({failure.reason})"
            advice = " Choose a run_dir that every rank may write to." if failure.is_permission_denied else ""
        raise CheckpointError(
            f"{path}: {problem}. Earlier checkpoints are unaffected.{advice}",
            path=path,
            rank=failure.rank,
            reason=failure.reason,
            bytes_needed=self._nbytes if failure.is_disk_full else None,
        ) from cause

    @property
    def _place(self) -> Path:
        """Directory or URL of the checkpoints."""
        return self._contents.url or self._run_dir

    def _free_bytes(self) -> int | None:
        try:
            return shutil.disk_usage(self._run_dir).free
        except OSError:
            return None


def model_index(files: Sequence[PlannedFile]) -> bytes | None:
    """The content of model.safetensors.index.json; None where the model is in one file."""
    model_files = [file for file in files if file.kind == names.MODEL]
    if len(model_files) <= 1:
        return None
    weight_map = {spec.name: file.path for file in model_files for spec in file.specs}
    index = {"metadata": {"total_size": sum(file.nbytes for file in model_files)}, "weight_map": weight_map}
    return (json.dumps(index, indent=2) + "\n").encode()
