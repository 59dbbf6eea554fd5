"""manifest.json, which defines a complete checkpoint, and the checkpoints of a run in the order of their manifests.

A manifest names every other file with its size and sha256; the step, so that files of two steps cannot be mixed; and a
sequence number that grows with every save into a run directory. The newest checkpoint has the highest sequence number,
not the highest step: a run may go back and save earlier steps again.

The manifest contains a hash of itself, and there is only one way to encode it, so every change to it is detected.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from toolkit.checkpoint import names
from toolkit.files import decode_json_object, first_problem, printable, read_regular
from toolkit.remote_files import RemotePath, raise_unreachable

VERSION = 1
_LATEST = re.compile(rb"(step-[0-9]{8,18})\n?")
Count = Annotated[int, Field(ge=0, lt=2**63)]


def _of_checkpoint(path: str) -> str:
    if not names.is_safe_path(path) or path == names.MANIFEST:
        raise ValueError(f"it names {printable(path)}, which no checkpoint contains")
    return path


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file, by its path inside the checkpoint."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    path: Annotated[str, AfterValidator(_of_checkpoint)]
    size: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of one checkpoint. `sequence`: the number of the save into its run directory, from 1."""

    step: Count
    sequence: Count
    files: tuple[FileRecord, ...]

    @classmethod
    def of(cls, *, step: int, sequence: int, files: Iterable[FileRecord]) -> "Manifest":
        """A manifest with its files sorted by path."""
        return cls(step=step, sequence=sequence, files=tuple(sorted(files, key=lambda file: file.path)))

    def encode(self) -> bytes:
        content = {
            "version": VERSION,
            "step": self.step,
            "sequence": self.sequence,
            "files": [vars(file) for file in self.files],
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return (json.dumps(content | {"sha256": digest}, indent=1) + "\n").encode()


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a manifest. Raises ValueError where it is not valid, OSError where it cannot be read."""
    text = read_regular(checkpoint / names.MANIFEST)
    version = decode_json_object(text).get("version")
    if type(version) is int and version > VERSION:
        raise ValueError(f"it has version {version}, this toolkit reads {VERSION}: use a newer one")
    try:
        manifest = TypeAdapter(Manifest).validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None
    paths = [file.path for file in manifest.files]
    if paths != sorted(set(paths)):
        raise ValueError("its files are not sorted, or one is named twice")
    if manifest.encode() != text:
        raise ValueError("its hash of itself differs")
    return manifest


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """A checkpoint's directory, which may be damaged. `name`: the directory's name, or the one it had before a save
    that was interrupted moved it aside."""

    path: Path
    name: str
    step: int
    sequence: int
    """Sequence number in the manifest. If that cannot be read: the highest, if `latest` names it, else that of the step
    before."""


def list_checkpoints(run_dir: Path) -> list[ListedCheckpoint]:
    """The checkpoints of a run in the order in which they were saved. Raises OSError where it cannot be read.

    Only real directories with a checkpoint's name count, and behind a URL only those with a manifest; links are never
    followed.
    """
    if isinstance(run_dir, RemotePath):
        checkpoints = [path for path in run_dir.iterdir() if names.step_of(path.name) is not None]
        return _in_order(run_dir, {path.name: path for path in checkpoints if (path / names.MANIFEST).exists()})
    paths: dict[str, Path] = {}
    moved_aside: dict[str, Path] = {}
    with os.scandir(run_dir) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                continue
            if names.step_of(entry.name) is not None:
                paths[entry.name] = run_dir / entry.name
                continue
            parts = names.parse_temporary_name(entry.name)
            if parts is not None and parts[1] == "old":
                moved_aside[parts[0]] = run_dir / entry.name
    # A process died between moving the old checkpoint aside and moving the new one in: the old one is complete.
    return _in_order(run_dir, moved_aside | paths)


def _in_order(run_dir: Path, paths: Mapping[str, Path]) -> list[ListedCheckpoint]:
    known = {name: _sequence(path) for name, path in paths.items()}
    latest = read_latest(run_dir)
    newest = max((number for number in known.values() if number is not None), default=0)
    listed = []
    previous = 0
    for name in sorted(paths, key=lambda name: (names.step_of(name), name)):
        number = known[name]
        if number is not None:
            previous = number
        sequence = previous
        if number is None and name == latest:
            sequence = newest + 1
        listed.append(ListedCheckpoint(path=paths[name], name=name, step=names.step_of(name) or 0, sequence=sequence))
    return sorted(listed, key=lambda checkpoint: (checkpoint.sequence, checkpoint.step))


def read_latest(run_dir: Path) -> str | None:
    """The directory that `latest` names; None where there is no such file, or it contains anything else."""
    try:
        match = _LATEST.fullmatch(read_regular(run_dir / names.LATEST, max_bytes=64))
    except OSError as error:
        raise_unreachable(error)
        return None
    return match[1].decode() if match else None


def _sequence(path: Path) -> int | None:
    try:
        return read_manifest(path).sequence
    except (OSError, ValueError) as error:
        raise_unreachable(error)
        return None
