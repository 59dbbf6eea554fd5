"""Results of the whole matrix: a line of JSON for each cell, in one folder for each state of the code.

A result is valid as long as the toolkit, the versions, the code that runs and compares cells, and the recipes of the
cell and its baseline are unchanged.
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
from tempfile import TemporaryDirectory
from typing import Self

from cell_runs import CellRun, Outcome
from matrix import Text

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "parity"
WATCHED = (
    "toolkit",
    *(f"tests/parity/{name}.py" for name in ("cell_runs", "fresh_ranks")),
    *(f"tests/support/{name}.py" for name in ("rank_parent", "small_text")),
)
"""Files that decide the result of two recipes."""
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")


@dataclass(frozen=True, kw_only=True)
class State:
    """The code that was run. A page never mixes results of two states."""

    commit: str
    code: str
    """Hash of the files in WATCHED, committed or not, and of the versions."""
    has_changes: bool
    """Whether there were uncommitted changes."""
    versions: str

    @classmethod
    def now(cls) -> Self:
        """Return the state of this checkout and environment."""
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

    def folder(self, suite: str) -> Path:
        """Folder of the results of a suite."""
        return RESULTS / self.code / suite


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
        """Return the result of a run that has just ended."""
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
        """Whether this is a result of `run`."""
        return self.cell == str(run.cell) and self.recipes == digest_of_recipes(run)

    def line(self) -> str:
        """Serialize as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def parse(cls, line: str) -> Self:
        """Parse a line of JSON."""
        fields = json.loads(line)
        failed_checks = tuple(fields["outcome"].pop("failed_checks"))
        outcome = Outcome(**fields.pop("outcome"), failed_checks=failed_checks)
        return cls(**fields | {"outcome": outcome, "state": State(**fields["state"])})


@cache
def digest_of_recipes(run: CellRun) -> str:
    """Hash the recipes of a cell and of its baseline, and the configs written for them, and not where these are."""
    with TemporaryDirectory() as folder:
        text = Text(corpus=Path(folder) / "documents.jsonl", cache=Path(folder) / "cache")
        recipes = (run.cell.recipe(text, steps=run.steps), run.cell.mathematics.recipe(text, steps=run.steps))
        described = "".join(recipe.model_dump_json() for recipe in recipes).replace(folder, "")
        described += "".join(path.read_text() for path in sorted(text.models.rglob("config.json")))
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def read_results(folder: Path) -> Iterator[Result]:
    """Read all results of a folder; skip an incomplete line of a killed run."""
    for path in sorted(folder.glob("*.jsonl")):
        yield from (Result.parse(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))


@cache
def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
