"""A checkpoint behind a URL: ranks upload the files that they wrote, and the manifest, uploaded last, completes it.

An object store cannot rename a directory, so what a rename is on a disk is the manifest here: a directory without one
is no checkpoint, for every reader. While a directory is being written or deleted, a marker lies beside it:

URL/.step-00000120.NONCE.tmp   an empty file: step-00000120 is garbage if it has no manifest and the writer is dead

A save never writes into a directory that another one has begun. Where a step is saved again, the new one is
`step-000000120`, with one zero more, and the old one is deleted once that is complete. So the newest checkpoint is
whole at every moment, and what a process does that comes back after another job took its place is garbage at worst.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from toolkit.checkpoint import names
from toolkit.checkpoint.manifest import FileRecord, Manifest, list_checkpoints
from toolkit.files import reason_of
from toolkit.remote_files import RemotePath

_FILES_AT_ONCE = 2
_LONGEST_NUMBER = 18


def reserve(run: RemotePath, step: int) -> RemotePath:
    """Choose and mark the directory of a checkpoint, after removing what dead processes left. Raises OSError."""
    entries = [path.name for path in run.iterdir()]
    taken = set(entries)
    for name in entries:
        if (marked := names.parse_temporary_name(name)) is not None:
            taken.add(marked[0])
            if not (run / marked[0] / names.MANIFEST).exists():
                (run / marked[0]).remove_files()
            (run / name).unlink(missing_ok=True)
    candidates = (f"step-{step:0{digits}d}" for digits in range(len(f"{step:08d}"), _LONGEST_NUMBER + 1))
    name = next(name for name in candidates if name not in taken)
    (run / names.temporary_name(name)).write_bytes(b"")
    return run / name


def upload(folder: Path, records: Iterable[FileRecord], checkpoint: RemotePath, progress: Callable[[], None]) -> None:
    """Upload files of a folder. Raises OSError; what has arrived is not sent again by the attempts that precede it."""
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        sent = [
            pool.submit((checkpoint / record.path).upload, folder / record.path, progress)
            for record in sorted(records, key=lambda record: -record.size)
        ]
        try:
            for file in sent:
                file.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def commit_uploaded(checkpoint: RemotePath, step: int, records: Iterable[FileRecord]) -> list[str]:
    """Check that all files are there, and write the manifest. Returns notices, of what failed after that.

    Raises OSError where it is not complete.
    """
    run = checkpoint.parent
    manifest = Manifest.of(step=step, sequence=1 + _newest_sequence(run), files=records)
    sizes = checkpoint.sizes()
    for record in manifest.files:
        if sizes.get(record.path) != record.size:
            there = f"it has {sizes[record.path]} bytes" if record.path in sizes else "it is missing"
            raise OSError(f"{record.path} is not what a rank uploaded: {there}, of {record.size}")
    (checkpoint / names.MANIFEST).write_bytes(manifest.encode())
    notices = []
    for path in run.iterdir():
        marked = names.parse_temporary_name(path.name)
        try:
            if marked is not None and marked[0] == checkpoint.name:
                path.unlink(missing_ok=True)
            is_replaced = names.step_of(path.name) == step and path.name != checkpoint.name
            if is_replaced and (path / names.MANIFEST).exists():
                delete_uploaded(path)
        except OSError as error:
            notices.append(f"{path} could not be deleted ({reason_of(error)})")
    try:
        (run / names.LATEST).write_bytes(f"{checkpoint.name}\n".encode())
    except OSError as error:
        notices.append(f"{run / names.LATEST} still names an older checkpoint ({reason_of(error)})")
    return notices


def _newest_sequence(run: Path) -> int:
    return max((listed.sequence for listed in list_checkpoints(run)), default=0)


def delete_uploaded(checkpoint: RemotePath) -> None:
    """Delete a checkpoint, its manifest first, so that what an interruption leaves is none. Raises OSError."""
    marker = checkpoint.parent / names.temporary_name(checkpoint.name)
    marker.write_bytes(b"")
    (checkpoint / names.MANIFEST).unlink(missing_ok=True)
    checkpoint.remove_files()
    marker.unlink(missing_ok=True)


def check_writable(run: RemotePath) -> None:
    """Write a small file there, and delete it. Raises OSError."""
    probe = run / names.temporary_name("write-test")
    probe.write_bytes(b"a file that tests whether checkpoints can be written here\n")
    probe.unlink()
