"""Restart: with what a run that crashed is started again, so that it goes on where it was. Imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.checkpoint.listing import Listed, checkpoints_in
from toolkit.checkpoint.names import MANIFEST

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The arguments of recipes/train.py for each start of one run. Made before the first of them.

    A checkpoint that the run has saved since then is gone on from. Until there is one it starts as it first did, over
    what its first start left; a run that lay there before, and was not to be replaced, is left alone.
    """

    run_dir: Path
    given: Sequence[str]
    """Recipe, overrides, and all but what follows."""
    resume: str | None
    overwrite: bool
    _before: frozenset[tuple[str, int, int]] = field(init=False)
    _was_run: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_before", frozenset(_identity(one) for one in self._listed()))
        object.__setattr__(self, "_was_run", (self.run_dir / "metrics.jsonl").exists())

    def arguments(self, attempt: int) -> tuple[list[str], str]:
        """For the how-manieth restart, 0 being the first start; and from where it goes on."""
        # Quoted, for a name such as 2024 would be read as a number.
        given = [*self.given, f"run_dir={json.dumps(str(self.run_dir), ensure_ascii=False)}"]
        first = ["--resume", self.resume] if self.resume else []
        if attempt == 0:
            return [*given, *first, *["--overwrite"] * self.overwrite], ""
        saved = [one for one in self._listed() if _identity(one) not in self._before]
        if saved:
            return [*given, "--resume", AUTO], f"on from {saved[-1].name} in {self.run_dir}"
        origin = f"from {self.resume}, as at first" if self.resume else "from the beginning, for nothing was saved yet"
        return [*given, *first, *["--overwrite"] * (self.overwrite or not self._was_run)], origin

    def _listed(self) -> list[Listed]:
        try:
            return checkpoints_in(self.run_dir)
        except OSError:
            return []


def _identity(listed: Listed) -> tuple[str, int, int]:
    """Of one checkpoint, also where another takes its name later."""
    try:
        status = (listed.path / MANIFEST).stat()
    except OSError:
        return listed.name, 0, 0
    return listed.name, status.st_ino, status.st_mtime_ns
