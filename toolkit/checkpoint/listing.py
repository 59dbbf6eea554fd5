"""The checkpoints of a run directory, oldest first, and what `latest` says about them.

Only real directories with a checkpoint's name count; a link is never followed. Nothing here says that one is whole.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.manifest import ManifestError, read_manifest
from toolkit.checkpoint.names import LATEST, step_of, unfinished
from toolkit.checkpoint.plain_file import read_plain

_LATEST = re.compile(rb"(step-[0-9]{8,18})\n?")


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A checkpoint's directory. `name`: as it is called when no save was cut short."""

    path: Path
    name: str
    step: int
    sequence: int
    """The how-manieth save it was. Where its manifest cannot be read: the last, if `latest` names it, else that of the
    step before it."""


def checkpoints_in(run_dir: Path) -> list[Listed]:
    """Oldest first, in the order in which they were saved. Raises OSError where `run_dir` cannot be read."""
    found: dict[str, Path] = {}
    aside: dict[str, Path] = {}
    with os.scandir(run_dir) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                continue
            if step_of(entry.name) is not None:
                found[entry.name] = run_dir / entry.name
            elif (parts := unfinished(entry.name)) is not None and parts[1] == "old":
                aside[parts[0]] = run_dir / entry.name
    # Its saver died between moving the old one aside and moving the new one in: the old one is whole.
    found = aside | found
    readable = {name: _sequence(path) for name, path in found.items()}
    latest, newest = read_latest(run_dir), max((known for known in readable.values() if known is not None), default=0)
    listed, sequence = [], 0
    for name in sorted(found, key=lambda name: (step_of(name), name)):
        known = readable[name]
        if known is not None:
            sequence = known
        place = newest + 1 if known is None and name == latest else sequence
        listed.append(Listed(path=found[name], name=name, step=step_of(name) or 0, sequence=place))
    return sorted(listed, key=lambda one: (one.sequence, one.step))


def read_latest(run_dir: Path) -> str | None:
    """The directory's name that `latest` gives; None where there is no such file, or anything else is in it."""
    try:
        match = _LATEST.fullmatch(read_plain(run_dir / LATEST, max_bytes=64))
    except OSError:
        return None
    return match[1].decode() if match else None


def _sequence(path: Path) -> int | None:
    try:
        return read_manifest(path).sequence
    except (OSError, ManifestError):
        return None
