"""Results of the whole matrix: a line of JSON for each cell, in a folder of its own for each state of the code.

A result counts as long as nothing changes that decides it: the toolkit, the versions, the way cells are run and judged,
and the recipes of the cell and of its baseline.
"""

import datetime
import hashlib
import json
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Self

from cell_runs import CellRun, Outcome
from matrix import Text

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "parity"
WATCHED = (
    "toolkit",
    *(f"tests/parity/{name}.py" for name in ("cell_runs", "fresh_ranks")),
    *(f"tests/{name}.py" for name in ("rank_parent", "small_text")),
)
"""What decides what comes out of two recipes."""
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")


@dataclass(frozen=True, kw_only=True)
class State:
    """What was run. Results of two codes are never put on one page."""

    commit: str
    code: str
    """A hash of what decides what comes out, committed or not, and of the versions."""
    has_changes: bool
    """Whether `commit` does not have all of that code."""
    versions: str

    @classmethod
    def now(cls) -> Self:
        """Of this checkout and this environment."""
        versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
        versions = f"Python {platform.python_version()}, {versions}"
        digest = hashlib.sha256(versions.encode())
        for name in WATCHED:
            path = ROOT / name
            for file in sorted(path.rglob("*.py")) + sorted(path.rglob("*.json")) if path.is_dir() else [path]:
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
        return cls(
            commit=_git("rev-parse", "HEAD")[:12],
            code=digest.hexdigest()[:12],
            has_changes=bool(_git("status", "--porcelain", "--", *WATCHED)),
            versions=versions,
        )

    @property
    def folder(self) -> Path:
        """Where its results are."""
        return RESULTS / self.code


@dataclass(frozen=True, kw_only=True)
class Result:
    """One cell that was run."""

    cell: str
    steps: int
    recipes: str
    """See `digest_of_recipes`."""
    outcome: Outcome
    seconds: float
    date: str
    state: State

    @classmethod
    def of(cls, run: CellRun, outcome: Outcome, seconds: float, state: State) -> Self:
        """What came out now."""
        return cls(
            cell=str(run.cell),
            steps=run.steps,
            recipes=digest_of_recipes(run),
            outcome=outcome,
            seconds=round(seconds, 3),
            date=datetime.date.today().isoformat(),
            state=state,
        )

    def is_of(self, run: CellRun) -> bool:
        """Whether it is what this run would give."""
        return self.cell == str(run.cell) and self.recipes == digest_of_recipes(run)

    def line(self) -> str:
        """As it is kept."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def parse(cls, line: str) -> Self:
        """The reverse."""
        fields = json.loads(line)
        alarms = tuple(fields["outcome"].pop("alarms"))
        outcome = Outcome(**fields.pop("outcome"), alarms=alarms)
        return cls(**fields | {"outcome": outcome, "state": State(**fields["state"])})


@cache
def digest_of_recipes(run: CellRun) -> str:
    """A hash of the recipes of a cell and of its baseline, steps included."""
    nowhere = Text(corpus=Path("documents.jsonl"), cache=Path("cache"))
    recipes = (run.cell.recipe(nowhere, steps=run.steps), run.cell.mathematics.recipe(nowhere, steps=run.steps))
    return hashlib.sha256("".join(recipe.model_dump_json() for recipe in recipes).encode()).hexdigest()[:12]


def read_results(folder: Path) -> Iterator[Result]:
    """Everything in a folder; a line that a killed run left unfinished does not count."""
    for path in sorted(folder.glob("*.jsonl")):
        yield from (Result.parse(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))


@cache
def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
