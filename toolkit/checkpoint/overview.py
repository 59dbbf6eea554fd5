"""What is known of a checkpoint without reading its tensors: place in the run, size, and whether it seems whole."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.choose import choose
from toolkit.checkpoint.listing import checkpoints_in
from toolkit.checkpoint.manifest import read_manifest
from toolkit.checkpoint.names import MANIFEST, shown, step_of, unfinished
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.checkpoint.verify import verify
from toolkit.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Overview:
    """One checkpoint. `problems`: what was found wrong with it; sizes and states are missing where it is damaged."""

    path: Path
    name: str
    step: int
    nbytes: int | None
    modified: float | None
    """When it was written, in seconds since 1970."""
    state: dict[str, Any]
    """trainer_state.json."""
    problems: tuple[str, ...]


def overview_of(place: Path, *, hashes: bool) -> list[Overview]:
    """The checkpoints of a run, oldest first, or the one that `place` is.

    Looks at manifests, headers and sizes; with `hashes`, at every byte. Raises CheckpointError where there is none.
    """
    return [_overview(path, name, hashes) for path, name in checkpoints_at(place)]


def checkpoints_at(place: Path) -> list[tuple[Path, str]]:
    """(path, name) of the checkpoints of a run, oldest first, or of the one that `place` is. Raises CheckpointError."""
    given = shown(str(place))
    if not place.is_dir():
        raise CheckpointError(f"{given}: no such directory. Name a run or a checkpoint.", path=given)
    if is_checkpoint(place):
        return [(place, place.resolve().name)]
    try:
        listed = checkpoints_in(place)
    except OSError as error:
        raise CheckpointError(f"{given}: cannot be read ({error.strerror or error}).", path=given) from None
    if not listed:
        raise CheckpointError(
            f"{given}: there is no checkpoint in it. Name a run that saved one (checkpoint.every), or a step-… "
            "directory.",
            path=given,
        )
    return [(one.path, one.name) for one in listed]


def is_checkpoint(place: Path) -> bool:
    """Whether this is a checkpoint's directory, and no run's."""
    name = place.resolve().name
    return (place / MANIFEST).exists() or step_of(name) is not None or unfinished(name) is not None


def newest_whole(place: Path) -> Path:
    """The checkpoint that a run would go on from, or `place` itself. Raises CheckpointError."""
    return choose(place, ranks=Ranks.alone()).path


def _overview(path: Path, name: str, hashes: bool) -> Overview:
    problems = tuple(verify(path, ranks=Ranks.alone())) if hashes else ()
    try:
        manifest = read_manifest(path)
        modified = (path / MANIFEST).stat().st_mtime
        saved = CheckpointReader(path)
        step, nbytes, state = manifest.step, sum(file.size for file in manifest.files), saved.trainer_state or {}
        problems = problems or tuple(
            f"{file.path}: not of the size that was written"
            for file in manifest.files
            if (path / file.path).lstat().st_size != file.size
        )
    except (OSError, ValueError, CheckpointError) as error:
        step, nbytes, modified, state = step_of(name) or 0, None, None, {}
        problems = problems or (shown(str(error)),)
    return Overview(path=path, name=name, step=step, nbytes=nbytes, modified=modified, state=state, problems=problems)
