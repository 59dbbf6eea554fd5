"""Committing a checkpoint: it becomes visible as a whole or not at all. Only the first rank calls these functions.

1. Every file is written into `.step-….NONCE.tmp` and fsynced.
2. The manifest is written, then every directory is fsynced.
3. One rename makes it `step-…`, and an fsync of the run directory makes that durable. An existing checkpoint of the
   same step is first moved to `.step-….NONCE.old`, and deleted afterwards; if the process dies in between, readers use
   that one.
4. `latest` is replaced by a rename too. It is a hint for people: nothing depends on it.

The next save removes what a dead process left behind.
"""

import os
import secrets
import shutil
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint import names
from toolkit.checkpoint.manifest import FileRecord, Manifest, list_checkpoints, read_latest
from toolkit.checkpoint.remote_commit import delete_uploaded
from toolkit.files import move_into_place, reason_of, sync
from toolkit.remote_files import RemotePath


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Retention of checkpoints: the `newest` ones stay, and those whose step is a multiple of `every`."""

    newest: int
    every: int | None = None

    def __post_init__(self) -> None:
        assert self.newest >= 1, self.newest
        assert self.every is None or self.every >= 1, self.every


def open_directory(temporary: Path, subdirectories: Iterable[str]) -> None:
    """Make a directory to write into, after removing what dead processes left in the run directory."""
    run_dir = temporary.parent
    if not run_dir.exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        sync(run_dir.parent)
    _remove_leftovers(run_dir)
    temporary.mkdir()
    for name in subdirectories:
        (temporary / name).mkdir()


def _remove_leftovers(run_dir: Path) -> None:
    """Delete what dead processes were writing or replacing; restore a checkpoint that was only moved aside."""
    for path in list(run_dir.iterdir()):
        name, kind = names.parse_temporary_name(path.name) or ("", "")
        if path.is_symlink() or not path.is_dir():
            if path.name.startswith(f".{names.LATEST}.") and path.name.endswith(".tmp"):
                path.unlink(missing_ok=True)
        elif kind == "tmp" or (kind == "old" and (run_dir / name).exists()):
            shutil.rmtree(path, ignore_errors=True)
        elif kind == "old":
            path.rename(run_dir / name)
            sync(run_dir)


def commit(temporary: Path, step: int, records: Iterable[FileRecord]) -> tuple[Path, list[str]]:
    """Write the manifest and rename a directory whose files are all written. `records`: of the files hashed so far.

    Returns the path, and a notice if only `latest` could not be written. Raises OSError before anything is replaced.
    """
    run_dir = temporary.parent
    known = {record.path: record for record in records}
    for record in known.values():
        path = temporary / record.path
        if not path.exists() or path.stat().st_size != record.size:
            raise OSError(f"{record.path} is not what a rank wrote: do all nodes see the same {run_dir}?")
    sequence = 1 + max((listed.sequence for listed in list_checkpoints(run_dir)), default=0)
    files = [*known.values(), *sync_and_hash(temporary, exclude=known)]
    manifest = Manifest.of(step=step, sequence=sequence, files=files)
    names.write_synced(temporary / names.MANIFEST, manifest.encode())
    for directory, _, _ in os.walk(temporary, topdown=False):
        sync(Path(directory))
    final = run_dir / names.step_name(step)
    move_into_place(temporary, final, replaces=True)
    return final, _update_latest(final)


def sync_and_hash(directory: Path, *, exclude: Container[str]) -> list[FileRecord]:
    """fsync all files in a directory and below, except those of a path in `exclude`, and return their records."""
    records = []
    for file in directory.rglob("*"):
        path = file.relative_to(directory).as_posix()
        if not file.is_dir() and path not in exclude:
            sync(file)
            records.append(FileRecord(path=path, size=file.stat().st_size, sha256=names.hash_file(file)))
    return records


def _update_latest(checkpoint: Path) -> list[str]:
    run_dir = checkpoint.parent
    temporary = run_dir / f".{names.LATEST}.{secrets.token_hex(4)}.tmp"
    try:
        names.write_synced(temporary, f"{checkpoint.name}\n".encode())
        temporary.rename(run_dir / names.LATEST)
        sync(run_dir)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        return [f"{run_dir / names.LATEST} still names an older checkpoint ({error.strerror or error})"]
    return []


def delete_old_checkpoints(run_dir: Path, keep: Retention) -> list[str]:
    """Delete what need not be kept, never what `latest` names. Returns a notice for each that could not be deleted.

    A checkpoint on disk is renamed before it is deleted, so that an interrupted deletion leaves nothing that looks like
    one. `run_dir` may be a URL.
    Directories without a manifest are not deleted: no save wrote them.
    """
    notices = []
    latest = read_latest(run_dir)
    for old in list_checkpoints(run_dir)[: -keep.newest]:
        is_kept = old.name == latest or (keep.every is not None and old.step % keep.every == 0)
        if is_kept or not (old.path / names.MANIFEST).exists():
            continue
        try:
            if isinstance(old.path, RemotePath):
                delete_uploaded(old.path)
                continue
            renamed = run_dir / names.temporary_name(old.name)
            old.path.rename(renamed)
            shutil.rmtree(renamed)
        except OSError as error:
            notices.append(f"{old.path} could not be deleted ({reason_of(error)})")
    return notices
