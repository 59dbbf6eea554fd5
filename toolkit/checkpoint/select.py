"""Selects checkpoints: those that a path names, and the newest complete one to resume from.

A user's path is trusted as a place; its content is not. `latest` is not used: it may be out of date when a process
died while saving, and its content could be anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint import names
from toolkit.checkpoint.manifest import ListedCheckpoint, list_checkpoints, read_latest, read_manifest
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.reader import CheckpointReader, model_files
from toolkit.checkpoint.safetensors_header import HeaderError, read_header
from toolkit.checkpoint.verify import index_problems, verify
from toolkit.errors import CheckpointError
from toolkit.files import is_there, printable, reason_of
from toolkit.remote_files import RemotePath


@dataclass(frozen=True, kw_only=True)
class SelectedCheckpoint:
    """A directory to read. `is_weights_only`: a Hugging Face model, without optimizer and trainer state.

    `notices`: newer checkpoints that are damaged, one line each with the file.
    """

    path: Path
    is_weights_only: bool = False
    notices: tuple[str, ...] = ()


def select_checkpoint(path: Path, *, strict: bool = False, ranks: Ranks | None = None) -> SelectedCheckpoint:
    """The newest complete checkpoint of a run directory; or `path` itself, if it is a checkpoint or a model.

    A collective call of `ranks`, by default of the whole job, which divide the verification among them. Raises
    CheckpointError where nothing is complete, and with `strict` where the newest checkpoint is not.
    """
    with names.reported(path):
        return _select(path, strict, ranks or Ranks.of())


def _select(path: Path, strict: bool, ranks: Ranks) -> SelectedCheckpoint:
    kind, listed = ranks.run_on_first(lambda: _classify(path))
    if kind == "nothing":
        raise names.checkpoint_error(path, _why_nothing(path))
    if kind == "model":
        problems = ranks.run_on_first(lambda: _model_problems(path))
        if problems:
            raise names.checkpoint_error(path, f"{first_of(problems)}. Choose another model.")
        return SelectedCheckpoint(path=path, is_weights_only=True)
    if kind == "checkpoint":
        problems = verify(path, ranks=ranks)
        if problems:
            advice = "Name another checkpoint, or the run directory to use its newest complete one."
            raise CheckpointError(f"{printable(path)} is damaged: {first_of(problems)}. {advice}", path=printable(path))
        return SelectedCheckpoint(path=path)
    return _newest_complete(path, listed, strict, ranks)


def _newest_complete(run_dir: Path, listed: list[ListedCheckpoint], strict: bool, ranks: Ranks) -> SelectedCheckpoint:
    notices: list[str] = []
    for checkpoint in reversed(listed):
        problems = verify(checkpoint.path, ranks=ranks)
        if not problems:
            latest = ranks.run_on_first(lambda: read_latest(run_dir))
            if notices:
                notices[-1] += f"; {checkpoint.name} is used"
            elif latest is not None and all(latest != existing.name for existing in listed):
                notices.append(f"{names.LATEST} names {latest}, which does not exist; {checkpoint.name} is used")
            return SelectedCheckpoint(path=checkpoint.path, notices=tuple(notices))
        notices.append(f"{checkpoint.name} is damaged: {first_of(problems)}")
        if strict:
            raise names.checkpoint_error(
                run_dir, f"{notices[0]}. Without --strict, the newest complete checkpoint is used."
            )
    raise names.checkpoint_error(run_dir, f"no checkpoint is complete. {notices[0]}. Start again in another run_dir.")


def _classify(path: Path) -> tuple[str, list[ListedCheckpoint]]:
    """Classify a path: `nothing`, `checkpoint`, `model`, or `run` with the checkpoints in it."""
    if not path.is_dir():
        return "nothing", []
    if is_there(path / names.MANIFEST):
        return "checkpoint", []
    try:
        listed = list_checkpoints(path)
    except OSError:
        if isinstance(path, RemotePath):
            raise
        return "nothing", []
    if listed:
        return "run", listed
    if any(is_there(path / name) for name in (names.SINGLE, names.INDEX, names.ADAPTERS)):
        return "checkpoint" if is_there(path / names.TRAINER_STATE) else "model", []
    return "nothing", []


def _why_nothing(path: Path) -> str:
    if not path.is_dir():
        return f"{names.not_a_directory(path)}."
    if not isinstance(path, RemotePath) and any(path.glob("pytorch_model*.bin")):
        return "its weights are pickled, and pickles are not read. Save the model as safetensors."
    return "there is no checkpoint in it. Name a run directory, a step-… directory, or a Hugging Face model."


def _model_problems(directory: Path) -> list[str]:
    # Links are followed here, because the cache of the Hugging Face hub consists of links.
    try:
        files = {file: read_header(directory / file, follow=True) for file in model_files(directory)}
    except (OSError, HeaderError, ValueError) as error:
        return [printable(str(error))]
    return list(index_problems(directory, files, follow=True))


def first_of(problems: Sequence[str]) -> str:
    """The first of several problems, and how many more there are."""
    if len(problems) == 1:
        return problems[0]
    return f"{problems[0]} (and {len(problems) - 1} more)"


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """A checkpoint, without its tensors. `problems`: what is wrong with it; if so, other fields may be missing."""

    path: Path
    step: int
    nbytes: int | None
    modified: float | None
    """Time of writing in seconds since 1970; None if unknown."""
    state: dict[str, Any]
    """Content of trainer_state.json; empty if it cannot be read."""
    problems: tuple[str, ...]


def summarize_checkpoints(path: Path, *, hashes: bool) -> list[CheckpointSummary]:
    """The checkpoints of a run, oldest first, or the one at `path`.

    Checks manifests, headers and sizes; with `hashes`, every byte. Raises CheckpointError where there is none.
    """
    with names.reported(path):
        return _summarize(path, hashes)


def _summarize(path: Path, hashes: bool) -> list[CheckpointSummary]:
    if not path.is_dir():
        raise names.checkpoint_error(path, f"{names.not_a_directory(path)}. Name a run or a checkpoint.")
    if is_checkpoint(path):
        return [_summary(path, path.resolve().name, hashes)]
    try:
        listed = list_checkpoints(path)
    except OSError as error:
        if isinstance(path, RemotePath):
            raise
        raise names.checkpoint_error(path, f"cannot be read ({reason_of(error)}).") from None
    if not listed:
        message = "there is no checkpoint in it. Name a run that saved one (checkpoint.every), or a step-… directory."
        raise names.checkpoint_error(path, message)
    return [_summary(checkpoint.path, checkpoint.name, hashes) for checkpoint in listed]


def is_checkpoint(path: Path) -> bool:
    """Whether this is the directory of a checkpoint, rather than of a run."""
    name = path.resolve().name
    return (
        (path / names.MANIFEST).exists()
        or names.step_of(name) is not None
        or names.parse_temporary_name(name) is not None
    )


def _summary(path: Path, name: str, hashes: bool) -> CheckpointSummary:
    problems = tuple(verify(path, ranks=Ranks.single())) if hashes else ()
    try:
        manifest = read_manifest(path)
        modified = (path / names.MANIFEST).stat().st_mtime
        saved = CheckpointReader(path)
        step = manifest.step
        nbytes = sum(file.size for file in manifest.files)
        state = saved.trainer_state or {}
        problems = problems or tuple(
            f"{file.path}: its size differs from what was written"
            for file in manifest.files
            if (path / file.path).lstat().st_size != file.size
        )
    except (OSError, ValueError, CheckpointError) as error:
        step = names.step_of(name) or 0
        nbytes = None
        modified = None
        state = {}
        problems = problems or (printable(str(error)),)
    return CheckpointSummary(path=path, step=step, nbytes=nbytes, modified=modified, state=state, problems=problems)
