"""File systems that fail on one rank while all of them save."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tiny_checkpoint import SIZES, contents_of, save_tiny

from toolkit.checkpoint.save import AsyncSaver
from toolkit.errors import CheckpointError

FAULTS = [
    (number, where)
    for number in (errno.ENOSPC, errno.EACCES, errno.EDQUOT, errno.EROFS, errno.EIO)
    for where in ("open", "first write", "later write", "fsync")
]


def fail(number: int, where: str) -> Callable[[], None]:
    """Make the system calls of this rank fail; returns what restores them."""
    kept = os.open, os.write, os.fsync
    count = 0

    def broken(call: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
        def attempt(*arguments: Any, **options: Any) -> Any:
            if when(*arguments):
                raise OSError(number, os.strerror(number))
            return call(*arguments, **options)

        return attempt

    def later(*arguments: Any) -> bool:
        nonlocal count
        count += 1
        return count > 2

    if where == "open":
        os.open = broken(os.open, lambda path, flags, *mode: bool(flags & os.O_CREAT))
    elif where == "fsync":
        os.fsync = broken(os.fsync, lambda descriptor: True)
    else:
        os.write = broken(os.write, later if where == "later write" else lambda *arguments: True)

    def fix() -> None:
        os.open, os.write, os.fsync = kept

    return fix


def save_with_faults(run_dir: Path, is_async: bool) -> list[tuple[str, int | None, int | None, list[str]]]:
    """For each fault on each rank: the error that this rank saw, and what it then found on the disk."""
    save_tiny(run_dir, 1)
    seen = []
    for number, where in FAULTS:
        for victim in range(3):
            fix = fail(number, where) if dist.get_rank() == victim else lambda: None
            try:
                if is_async:
                    saver = AsyncSaver(sizes=SIZES)
                    saver.begin(run_dir, 2, contents_of(2))
                    saver.finish()
                else:
                    save_tiny(run_dir, 2)
                seen.append(("no error", None, None, []))
            except CheckpointError as error:
                left = sorted(path.name for path in run_dir.iterdir())
                seen.append((str(error), error.rank, error.bytes_needed, left))
            fix()
            dist.barrier()
    save_tiny(run_dir, 3)
    return seen
