"""How a checkpoint appears on disk: all of it, or none. The first rank does this for all.

1. Everything is written into `.step-….NONCE.tmp`, each file fsynced.
2. The manifest follows, then an fsync of every folder.
3. One rename makes it `step-…`; an fsync of the run directory makes that last. A checkpoint that had the name is moved
   aside first, to `.step-….NONCE.old`, and deleted after; were the saver to die between, readers take it from there.
4. `latest` is replaced by a rename too. It is a hint for people: nothing depends on it.

What dead savers left is removed by the next one.
"""

import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from toolkit.checkpoint.listing import checkpoints_in
from toolkit.checkpoint.manifest import FileRecord, Manifest
from toolkit.checkpoint.names import LATEST, MANIFEST, step_name, unfinished, unfinished_name
from toolkit.checkpoint.plain_file import hash_plain, sync, write_synced


def new_nonce() -> str:
    """What tells this save's folder from that of a dead one."""
    return secrets.token_hex(4)


def open_folder(run_dir: Path, step: int, nonce: str, folders: Iterable[str]) -> Path:
    """An empty folder to write into, with these subfolders; what dead savers left is gone."""
    if not run_dir.exists():
        run_dir.mkdir(parents=True, exist_ok=True)
        sync(run_dir.parent)
    remove_leftovers(run_dir)
    temporary = run_dir / unfinished_name(step, nonce, "tmp")
    temporary.mkdir()
    for folder in folders:
        (temporary / folder).mkdir()
    return temporary


def remove_leftovers(run_dir: Path) -> None:
    """Delete what dead savers were writing or replacing; a checkpoint that was moved aside only is put back."""
    for path in list(run_dir.iterdir()):
        name, kind = unfinished(path.name) or ("", "")
        if path.is_symlink() or not path.is_dir():
            if path.name.startswith(f".{LATEST}.") and path.name.endswith(".tmp"):
                path.unlink(missing_ok=True)
        elif kind == "tmp" or (kind == "old" and (run_dir / name).exists()):
            shutil.rmtree(path, ignore_errors=True)
        elif kind == "old":
            path.rename(run_dir / name)
            sync(run_dir)


def publish(temporary: Path, step: int, records: Iterable[FileRecord]) -> tuple[Path, list[str]]:
    """Give a folder in which every file is written its name. `records`: of the files that need no hashing any more.

    The path, and what did not succeed and costs nothing: `latest`. Raises OSError while nothing has been replaced.
    """
    run_dir = temporary.parent
    known = {known.path: known for known in records}
    _check_presence(temporary, known.values())
    sequence = 1 + max((listed.sequence for listed in checkpoints_in(run_dir)), default=0)
    beside = (record(temporary, path) for path in files_in(temporary) if path not in known)
    manifest = Manifest.of(step=step, sequence=sequence, files=[*known.values(), *beside])
    write_synced(temporary / MANIFEST, manifest.encode())
    for folder, _, _ in os.walk(temporary, topdown=False):
        sync(Path(folder))
    final = _rename(temporary, run_dir / step_name(step))
    return final, _point_at(final)


def _check_presence(temporary: Path, records: Iterable[FileRecord]) -> None:
    for known in records:
        path = temporary / known.path
        if not path.exists() or path.stat().st_size != known.size:
            raise OSError(f"{known.path} is not what a rank wrote: do all machines see the same {temporary.parent}?")


def files_in(folder: Path) -> list[str]:
    """Paths of all files in it and below."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()]


def record(folder: Path, path: str) -> FileRecord:
    """The record of a small file; it is on the disk."""
    sync(folder / path)
    return FileRecord(path=path, size=(folder / path).stat().st_size, sha256=hash_plain(folder / path))


def _rename(temporary: Path, final: Path) -> Path:
    aside = temporary.with_suffix(".old")
    is_replaced = final.exists()
    if is_replaced:
        final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        if is_replaced:
            aside.rename(final)
        raise
    sync(final.parent)
    if is_replaced:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _point_at(checkpoint: Path) -> list[str]:
    run_dir = checkpoint.parent
    temporary = run_dir / f".{LATEST}.{new_nonce()}.tmp"
    try:
        write_synced(temporary, f"{checkpoint.name}\n".encode())
        temporary.rename(run_dir / LATEST)
        sync(run_dir)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        return [f"{run_dir / LATEST} still names an older checkpoint ({error.strerror or error})"]
    return []
