"""Which checkpoint to go on from: the newest one that is whole.

A directory is given by its user and is trusted as a place; nothing in it is. `latest` is not asked: it may be older
than the newest checkpoint when a saver died, and what it says could be anything.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.header import HeaderError, read_header
from toolkit.checkpoint.listing import Listed, checkpoints_in, read_latest
from toolkit.checkpoint.names import INDEX, LATEST, MANIFEST, SINGLE, TRAINER_STATE, shown
from toolkit.checkpoint.ranks import Ranks
from toolkit.checkpoint.reader import model_files
from toolkit.checkpoint.verify import index_problems, verify
from toolkit.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A directory to read. `is_weights_only`: a Hugging Face model, without optimizer and position in the data.

    `notices`: which newer checkpoints are damaged, one line each with the file.
    """

    path: Path
    is_weights_only: bool = False
    notices: tuple[str, ...] = ()


def choose(place: Path, *, strict: bool = False, ranks: Ranks | None = None) -> Chosen:
    """The newest whole checkpoint of a run directory; or `place` itself, where it is a checkpoint or a model.

    A collective call of `ranks`, by default of all of the job, which share the verification. Raises CheckpointError
    where nothing is whole, and with `strict` where the newest is not.
    """
    ranks = ranks or Ranks.joined()
    given = shown(str(place))
    what, listed = ranks.from_first(lambda: _look_at(place))
    if what == "nothing":
        raise CheckpointError(f"{given}: {_nothing(place)}", path=given)
    if what == "model":
        problems = ranks.from_first(lambda: _model_problems(place))
        if problems:
            raise CheckpointError(f"{given}: {_first(problems)}. Choose another model.", path=given)
        return Chosen(path=place, is_weights_only=True)
    if what == "checkpoint":
        problems = verify(place, ranks=ranks)
        if problems:
            raise CheckpointError(
                f"{given} is damaged: {_first(problems)}. Name another checkpoint, or the run directory to have the "
                "newest whole one.",
                path=given,
            )
        return Chosen(path=place)
    return _newest(given, place, listed, strict, ranks)


def _newest(given: str, run_dir: Path, listed: list[Listed], strict: bool, ranks: Ranks) -> Chosen:
    notices: list[str] = []
    for one in reversed(listed):
        problems = verify(one.path, ranks=ranks)
        if not problems:
            latest = ranks.from_first(lambda: read_latest(run_dir))
            if notices:
                notices[-1] += f"; {one.name} is used"
            elif latest is not None and latest not in {other.name for other in listed}:
                notices.append(f"{LATEST} names {latest}, which is not there; {one.name} is used")
            return Chosen(path=one.path, notices=tuple(notices))
        notices.append(f"{one.name} is damaged: {_first(problems)}")
        if strict:
            raise CheckpointError(
                f"{given}: {notices[0]}. Without --strict, the newest whole checkpoint is used.", path=given
            )
    raise CheckpointError(f"{given}: no checkpoint is whole. {notices[0]}. Start anew in another run_dir.", path=given)


def _look_at(place: Path) -> tuple[str, list[Listed]]:
    """What this is: nothing, checkpoint, model, or a run with the checkpoints in it."""
    if not place.is_dir():
        return "nothing", []
    if os.path.lexists(place / MANIFEST):
        return "checkpoint", []
    try:
        listed = checkpoints_in(place)
    except OSError:
        return "nothing", []
    if listed:
        return "run", listed
    if os.path.lexists(place / SINGLE) or os.path.lexists(place / INDEX):
        return "checkpoint" if os.path.lexists(place / TRAINER_STATE) else "model", []
    return "nothing", []


def _nothing(place: Path) -> str:
    if not place.is_dir():
        return "no such directory."
    if any(place.glob("pytorch_model*.bin")):
        return "its weights are pickled, and pickles are not read. Save the model as safetensors."
    return "there is no checkpoint in it. Name a run directory, a step-… directory, or a Hugging Face model."


def _model_problems(folder: Path) -> list[str]:
    # Links are followed here: this is how the cache of the Hugging Face hub is made.
    try:
        files = {file: read_header(folder / file, follow=True) for file in model_files(folder)}
    except (OSError, HeaderError, ValueError) as error:
        return [shown(str(error))]
    return list(index_problems(folder, files, follow=True))


def _first(problems: list[str]) -> str:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0] + more
