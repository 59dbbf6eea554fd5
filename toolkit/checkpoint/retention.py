"""Which checkpoints stay: the last few that were saved, and every so many steps one for good.

A checkpoint is renamed before it is deleted, so that a deletion which is cut short leaves nothing that looks like one.
Only directories with a manifest are deleted: no other is ours.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.listing import checkpoints_in, read_latest
from toolkit.checkpoint.names import MANIFEST, unfinished_name
from toolkit.checkpoint.publication import new_nonce


@dataclass(frozen=True, kw_only=True)
class Keep:
    """The `newest` ones, and those whose step is a multiple of `every`."""

    newest: int
    every: int | None = None

    def __post_init__(self) -> None:
        assert self.newest >= 1, self.newest
        assert self.every is None or self.every >= 1, self.every


def remove_old(run_dir: Path, keep: Keep) -> list[str]:
    """Delete what need not stay, never what `latest` names. What could not be deleted, one line each."""
    notices = []
    latest = read_latest(run_dir)
    for old in checkpoints_in(run_dir)[: -keep.newest]:
        if old.name == latest or (keep.every is not None and old.step % keep.every == 0):
            continue
        if not (old.path / MANIFEST).exists():
            continue
        doomed = run_dir / unfinished_name(old.step, new_nonce(), "tmp")
        try:
            old.path.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            notices.append(f"{old.path} could not be deleted ({error.strerror or error})")
    return notices
