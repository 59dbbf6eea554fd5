"""Going on: which checkpoint `--resume` means, whether it is whole, and whether it fits the recipe."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.choose import Chosen, choose
from toolkit.checkpoint.names import TRAINER_STATE, step_of
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.reader import CheckpointReader
from toolkit.errors import CheckpointError
from toolkit.recipe import Recipe
from toolkit.train.data.tokens import TokenCorpus
from toolkit.train.trainer_state import TrainerState

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """A whole checkpoint that a run goes on from."""

    saved: CheckpointReader
    state: TrainerState
    notices: tuple[str, ...] = ()
    """What was found damaged on the way, one line each."""

    def check(self, recipe: Recipe, corpus: TokenCorpus) -> None:
        """Raise CheckpointError where the recipe would go on with something else."""
        self.state.check(recipe, corpus.contents, path=str(self.saved.path))

    @property
    def run_dir(self) -> Path:
        """The run that it is of."""
        return self.saved.path.parent


def run_of(asked: str, recipe: Recipe) -> Path | None:
    """The run directory that `--resume` names, or for `auto` that of the recipe; None where `auto` finds no run.

    Raises CheckpointError where there is nothing to go on from.
    """
    if asked == AUTO:
        if recipe.run_dir is None:
            raise CheckpointError("--resume auto without a run_dir: there is no telling which run. Set run_dir=….")
        path = Path(recipe.run_dir).expanduser()
        return path if path.is_dir() and any(step_of(entry.name) is not None for entry in path.iterdir()) else None
    path = Path(asked).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"--resume {asked}: no such directory. Name a run, a checkpoint, or auto.")
    return path.parent if step_of(path.resolve().name) is not None else path


def newest_checkpoint(run_dir: Path) -> Resumed | None:
    """The newest checkpoint of a run that is whole; None where there is none. A collective call."""
    try:
        chosen = choose(run_dir, ranks=Ranks.joined())
    except CheckpointError:
        return None
    return None if chosen.is_weights_only else _open(chosen)


def resume(asked: str, recipe: Recipe, *, strict: bool) -> Resumed | None:
    """The checkpoint that `--resume` means, verified file by file; None where `auto` finds none.

    Ranks share the reading: a collective call. Raises CheckpointError, on every rank alike.
    """
    if run_of(asked, recipe) is None:
        return None
    path = Path(recipe.run_dir or "").expanduser() if asked == AUTO else Path(asked).expanduser()
    chosen = choose(path, strict=strict, ranks=Ranks.joined())
    if chosen.is_weights_only:
        raise CheckpointError(
            f"--resume {asked}: weights alone, without the state of a run. To begin with them, set "
            f"model.name_or_path={asked} and model.init=pretrained."
        )
    return _open(chosen)


def _open(chosen: Chosen) -> Resumed:
    saved = CheckpointReader(chosen.path)
    state = TrainerState.from_dict(saved.trainer_state or {}, path=str(chosen.path / TRAINER_STATE))
    return Resumed(saved=saved, state=state, notices=chosen.notices)
