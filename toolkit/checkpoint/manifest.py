"""manifest.json: what a whole checkpoint consists of.

It names every other file with its size and sha256, the step, so that files of two steps cannot be mixed, and a number
that grows with every save into a directory: which checkpoint is the newest does not follow from steps, since a run may
go back and save earlier steps again.

It carries a hash of itself, and there is only one way to write it: whatever is changed in it is found.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.names import MANIFEST, is_safe_path, shown
from toolkit.checkpoint.plain_file import read_plain

VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ManifestError(ValueError):
    """A manifest that no save left."""


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """A file, by its path inside the checkpoint."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of one checkpoint. `sequence`: the how-manieth save into its run directory."""

    step: int
    sequence: int
    files: tuple[FileRecord, ...]

    @classmethod
    def of(cls, *, step: int, sequence: int, files: Iterable[FileRecord]) -> "Manifest":
        """The files sorted by path."""
        return cls(step=step, sequence=sequence, files=tuple(sorted(files, key=lambda file: file.path)))

    def encode(self) -> bytes:
        """The content of manifest.json."""
        content = {
            "version": VERSION,
            "step": self.step,
            "sequence": self.sequence,
            "files": [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in self.files],
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return (json.dumps(content | {"sha256": digest}, indent=1) + "\n").encode()


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint. Raises ManifestError for one that no save left, OSError as files do."""
    text = read_plain(checkpoint / MANIFEST)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ManifestError("it is not JSON") from None
    if not isinstance(content, dict):
        raise ManifestError("it is not a JSON object")
    version = content.get("version")
    if type(version) is int and version > VERSION:
        raise ManifestError(f"it has version {version}, this toolkit reads {VERSION}: use a newer one")
    step: Any = content.get("step")
    sequence: Any = content.get("sequence")
    files = content.get("files")
    if not _is_count(step) or not _is_count(sequence) or not isinstance(files, list):
        raise ManifestError("it lacks step, sequence or files")
    manifest = Manifest(step=step, sequence=sequence, files=tuple(map(_record, files)))
    paths = [file.path for file in manifest.files]
    if paths != sorted(set(paths)):
        raise ManifestError("its files are not sorted, or one is named twice")
    if manifest.encode() != text:
        raise ManifestError("its hash of itself differs")
    return manifest


def _record(entry: Any) -> FileRecord:
    if not isinstance(entry, dict) or entry.keys() != {"path", "size", "sha256"}:
        raise ManifestError("a file in it lacks path, size or sha256")
    path, size, sha256 = entry["path"], entry["size"], entry["sha256"]
    if not is_safe_path(path) or path == MANIFEST:
        raise ManifestError(f"it names {shown(path)}, which no checkpoint holds")
    if not _is_count(size) or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ManifestError(f"it has no size and sha256 for {shown(path)}")
    return FileRecord(path=path, size=size, sha256=sha256)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
