"""Saving a checkpoint: every rank writes its share, and all of them agree on whether it is one.

    start    the first rank makes the folder; all agree that it could
    write    each rank is given the tensors that it writes, one at a time; its threads hash and write them (share.py).
             The first rank writes what is small meanwhile
    commit   all wait for all, agree, and the first rank publishes (publication.py)

What fails on one rank fails on all, with the same CheckpointError, after the folder is gone; older checkpoints stay as
they are. Nothing is pickled onto the disk.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from toolkit.checkpoint.host_copies import HostCopies
from toolkit.checkpoint.manifest import FileRecord
from toolkit.checkpoint.names import INDEX, MODEL, OPTIMIZER, TRAINER_STATE, shown, step_name, unfinished_name
from toolkit.checkpoint.plain_file import write_synced
from toolkit.checkpoint.plan import MAX_FILE_BYTES, MIN_FILE_BYTES, PlannedFile, plan_files
from toolkit.checkpoint.publication import files_in, new_nonce, open_folder, publish, record
from toolkit.checkpoint.ranks import Failure, Ranks, first_failure
from toolkit.checkpoint.retention import Keep, remove_old
from toolkit.checkpoint.share import Share
from toolkit.checkpoint.source import Source, TensorGroup, WholeTensors
from toolkit.errors import CheckpointError
from toolkit.units import format_bytes

T = TypeVar("T")

_HEARTBEAT_SECONDS = 1.0
"""Ranks that are done wait for the others in collective calls no longer than this: a slow disk is no timeout."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was committed. `notices`: what did not succeed beside it, one line each."""

    path: Path
    step: int
    nbytes: int
    """Of all its tensors."""
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FileSizes:
    """Where files end. `min_file_bytes`: ranks share the writing of a kind only in files of at least this size."""

    max_file_bytes: int = MAX_FILE_BYTES
    min_file_bytes: int = MIN_FILE_BYTES


def save(
    run_dir: Path,
    step: int,
    *,
    groups: Sequence[TensorGroup] | Source,
    trainer_state: Mapping[str, Any],
    beside: Callable[[Path], None] = lambda folder: None,
    keep: Keep | None = None,
    ranks: Ranks | None = None,
    sizes: FileSizes | None = None,
) -> Saved:
    """Write `run_dir/step-…` and return when it is on the disk. A collective call; every rank raises what one does.

    `beside` adds small files (config, tokenizer) to a folder; the first rank calls it. `keep`: which older checkpoints
    stay, all where it is None. `ranks`: who saves together, by default all of the job. Raises CheckpointError.
    """
    saving = Saving(
        run_dir,
        step,
        groups=groups,
        trainer_state=trainer_state,
        beside=beside,
        keep=keep,
        ranks=ranks or Ranks.joined(),
        sizes=sizes or FileSizes(),
    )
    return saving.finish()


@dataclass(frozen=True, kw_only=True)
class Aside:
    """What saving beside training needs: memory for the snapshot, and the ranks over connections of their own."""

    copies: HostCopies
    ranks: Ranks


class Saving:
    """A checkpoint on its way to the disk: its folder is there when this is made, `finish` does the rest.

    With `aside` the tensors are copied when this is made. `finish` is then for a thread: it looks at the copies, and
    talks to other ranks over connections of its own.
    """

    def __init__(
        self,
        run_dir: Path,
        step: int,
        *,
        groups: Sequence[TensorGroup] | Source,
        trainer_state: Mapping[str, Any],
        beside: Callable[[Path], None],
        keep: Keep | None,
        ranks: Ranks,
        sizes: FileSizes,
        aside: Aside | None = None,
    ) -> None:
        self._run_dir, self._step, self._keep, self._ranks = run_dir, step, keep, ranks
        source = groups if isinstance(groups, Source) else WholeTensors(groups)
        self._files = plan_files(
            source.specs,
            ranks.size,
            max_file_bytes=sizes.max_file_bytes,
            min_file_bytes=sizes.min_file_bytes,
        )
        self.nbytes = sum(file.nbytes for file in self._files)
        self._start()
        small = partial(self._write_small, trainer_state, beside) if ranks.is_first else None
        self._share = Share(self._folder, self._files, ranks, small)
        if aside is None:
            self._tensors = partial(source.own, self._files, ranks)
        else:
            with self._removed_if_it_fails():
                snapshot = source.snapshot(self._files, ranks, aside.copies)
            self._tensors = partial(snapshot, aside.ranks)
            self._ranks = aside.ranks

    def finish(self) -> Saved:
        """Write, wait for all ranks, and publish. A collective call. Raises CheckpointError, on every rank alike."""
        with self._removed_if_it_fails():
            self._share.write(self._tensors())
        while not self._ranks.all(self._share.wait(_HEARTBEAT_SECONDS)):
            pass
        outcomes = self._ranks.gather(self._share.outcome)
        failure = first_failure(outcomes)
        if failure is not None:
            self._fail(failure, self._share.error)
        records = [record for outcome in outcomes if isinstance(outcome, list) for record in outcome]
        path, notices = self._on_first_rank(lambda: self._publish(records))
        return Saved(path=path, step=self._step, nbytes=self.nbytes, notices=tuple(notices))

    def _start(self) -> None:
        nonce = new_nonce()

        def start() -> str:
            open_folder(self._run_dir, self._step, nonce, [OPTIMIZER] if self._has_optimizer() else [])
            return nonce

        self._folder = self._run_dir / unfinished_name(self._step, nonce, "tmp")  # removed where the first rank fails
        self._folder = self._run_dir / unfinished_name(self._step, self._on_first_rank(start), "tmp")

    def _write_small(self, trainer_state: Mapping[str, Any], beside: Callable[[Path], None]) -> list[FileRecord]:
        beside(self._folder)
        write_synced(self._folder / TRAINER_STATE, (json.dumps(trainer_state, indent=1) + "\n").encode())
        index = model_index(self._files)
        if index is not None:
            write_synced(self._folder / INDEX, index)
        large = {file.path for file in self._files}
        return [record(self._folder, path) for path in files_in(self._folder) if path not in large]

    def _has_optimizer(self) -> bool:
        return any(file.kind != MODEL for file in self._files)

    @contextmanager
    def _removed_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._remove_folder()
            raise

    def _publish(self, records: Sequence[FileRecord]) -> tuple[Path, list[str]]:
        path, notices = publish(self._folder, self._step, records)
        if self._keep is not None:
            notices += remove_old(self._run_dir, self._keep)
        return path, notices

    def _on_first_rank(self, function: Callable[[], T]) -> T:
        """What `function` gives there, on every rank; where it raises, all fail."""
        outcome: T | Failure | None = None
        cause = None
        if self._ranks.is_first:
            try:
                outcome = function()
            except Exception as error:
                outcome, cause = Failure.of(error, rank=0, path=self._folder), error
        agreed: T | Failure | None = self._ranks.gather(outcome)[0]
        if isinstance(agreed, Failure):
            self._fail(agreed, cause)
        return agreed  # type: ignore[return-value]

    def _fail(self, failure: Failure, cause: BaseException | None) -> NoReturn:
        self._remove_folder()
        # Also so that nobody goes on before it is gone.
        free_bytes = self._ranks.from_first(self._free_bytes)
        raise self._error(failure, free_bytes) from cause

    def _remove_folder(self) -> None:
        if self._ranks.is_first:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _free_bytes(self) -> int | None:
        try:
            return shutil.disk_usage(self._run_dir).free
        except OSError:
            return None

    def _error(self, failure: Failure, free_bytes: int | None) -> CheckpointError:
        path = shown(str(self._run_dir / step_name(self._step)))
        where = f" at {failure.path}" if failure.path else ""
        if failure.is_full:
            free = "" if free_bytes is None else f", and {format_bytes(free_bytes)} are free"
            what = f"rank {failure.rank} ran out of room{where}. The checkpoint needs {format_bytes(self.nbytes)}{free}"
            advice = " Make room, or choose another run_dir."
        else:
            what = f"rank {failure.rank} failed{where} ({failure.reason})"
            advice = " Choose a run_dir that every rank may write." if failure.is_denied else ""
        return CheckpointError(
            f"{path}: {what}. What was saved before is whole.{advice}",
            path=path,
            rank=failure.rank,
            reason=failure.reason,
            bytes_needed=self.nbytes if failure.is_full else None,
        )


def model_index(files: Sequence[PlannedFile]) -> bytes | None:
    """The content of model.safetensors.index.json; None where the model is in one file."""
    of_model = [file for file in files if file.kind == MODEL]
    if len(of_model) <= 1:
        return None
    index = {
        "metadata": {"total_size": sum(file.nbytes for file in of_model)},
        "weight_map": {spec.name: file.path for file in of_model for spec in file.specs},
    }
    return (json.dumps(index, indent=2) + "\n").encode()
