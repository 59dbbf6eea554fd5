"""Results of the fuzz: a line of JSON for each composition, in one folder for each state of the code."""

import datetime
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from compositions import FOLDER, ROOT, Composition
from fuzz_runs import FINE, Verdict
from results import State


@dataclass(frozen=True, kw_only=True)
class Result:
    """One composition."""

    seed: int
    index: int
    family: str
    sizes: str
    steps: int
    options: dict[str, Any]
    verdicts: list[Verdict]
    """Empty where transformers itself cannot run the family."""
    command: str
    shrunk: dict[str, str] = field(default_factory=dict)
    """Layout that failed -> the smallest command that shows it."""
    seconds: float
    date: str
    state: State

    @classmethod
    def of(
        cls,
        seed: int,
        index: int,
        composition: Composition | None,
        verdicts: list[Verdict],
        seconds: float,
        state: State,
    ) -> Self:
        """The result of a composition that has just been trained; None if there is none with this index."""
        return cls(
            seed=seed,
            index=index,
            family="" if composition is None else composition.family,
            sizes="" if composition is None else composition.sizes.name,
            steps=0 if composition is None else composition.steps,
            options={} if composition is None else dict(composition.options),
            verdicts=verdicts,
            command="" if composition is None else composition.command,
            seconds=round(seconds, 2),
            date=datetime.date.today().isoformat(),
            state=state,
        )

    @property
    def failures(self) -> list[Verdict]:
        """What is neither the same nor refused as it should be."""
        return [verdict for verdict in self.verdicts if verdict.verdict not in FINE]

    def line(self) -> str:
        """Serialize as a line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def parse(cls, line: str) -> Self:
        """Parse a line of JSON."""
        fields = json.loads(line)
        verdicts = [Verdict(**verdict) for verdict in fields.pop("verdicts")]
        return cls(**fields | {"verdicts": verdicts, "state": State(**fields["state"])})


def folder_of(code: str) -> Path:
    """Where the results of a state of the code are, by its hash."""
    return ROOT / FOLDER / "results" / code


def known_results(folder: Path) -> Iterator[Result]:
    """Read all results of a folder; skip an incomplete line of a killed run."""
    for path in sorted(folder.glob("*.jsonl")):
        yield from (Result.parse(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
