"""Resume: which checkpoint `--resume` means, whether it is complete, and whether it fits the recipe."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.manifest import list_checkpoints
from toolkit.checkpoint.names import TRAINER_STATE, not_a_directory, reported, step_of
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.checkpoint.select import SelectedCheckpoint, select_checkpoint
from toolkit.checkpoint.trainer_state import TrainerState
from toolkit.config.recipe import Recipe
from toolkit.errors import CheckpointError
from toolkit.files import expanded, place
from toolkit.remote_files import RemotePath

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A complete checkpoint to resume from."""

    saved: CheckpointReader
    state: TrainerState
    notices: tuple[str, ...] = ()
    """Damaged checkpoints that were passed over, one line each."""


def run_of(asked: str, recipe: Recipe) -> Path | None:
    """The run directory that `--resume` names, or for `auto` that of the recipe; None where `auto` finds no run.

    Where the recipe has a checkpoint.url, that takes the place of the run directory.

    Raises CheckpointError where there is nothing to resume from.
    """
    if asked == AUTO:
        if recipe.checkpoint.url is not None:
            url = RemotePath(recipe.checkpoint.url)
            with reported(url):
                return url if list_checkpoints(url) else None
        if recipe.run_dir is None:
            settings = (("--resume", AUTO), ("run_dir", None))
            reason = "there is no run to look for"
            raise CheckpointError.between(settings, reason, "set run_dir=…")
        path = expanded(recipe.run_dir)
        return path if path.is_dir() and any(step_of(entry.name) is not None for entry in path.iterdir()) else None
    path = place(asked)
    with reported(path):
        is_directory = path.is_dir()
    if not is_directory:
        raise CheckpointError.of("--resume", asked, not_a_directory(path), "name a run, a checkpoint, or auto")
    return path.parent if step_of(path.resolve().name) is not None else path


def newest_checkpoint(run_dir: Path) -> Resumed | None:
    """The newest complete checkpoint of a run; None where there is none. A collective call."""
    try:
        chosen = select_checkpoint(run_dir, ranks=Ranks.of())
    except CheckpointError:
        return None
    return None if chosen.is_weights_only else _open(chosen)


def resume(asked: str, recipe: Recipe, *, strict: bool) -> Resumed | None:
    """The checkpoint that `--resume` means, verified file by file; None where `auto` finds none.

    Ranks share the reading: a collective call. Raises CheckpointError, the same on every rank.
    """
    # The first rank looks: another machine might still see the directory as it was.
    if Ranks.of().run_on_first(lambda: run_of(asked, recipe)) is None:
        return None
    path = place(recipe.checkpoint.url or recipe.run_dir or "" if asked == AUTO else asked)
    chosen = select_checkpoint(path, strict=strict, ranks=Ranks.of())
    if chosen.is_weights_only:
        advice = f"begin with them: model.name_or_path={asked} model.init=pretrained"
        raise CheckpointError.of("--resume", asked, "these are weights without the state of a run", advice)
    return _open(chosen)


def _open(chosen: SelectedCheckpoint) -> Resumed:
    with reported(chosen.path):
        saved = CheckpointReader(chosen.path)
    state = TrainerState.from_dict(saved.trainer_state or {}, path=str(chosen.path / TRAINER_STATE))
    return Resumed(saved=saved, state=state, notices=chosen.notices)
