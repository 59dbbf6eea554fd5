"""A benchmark's table: on the screen, and with --save as benchmarks/results/<name>.md with the machine and versions."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

_RESULTS = Path(__file__).resolve().parents[1] / "results"
_FILE_COLUMNS = 150
"""Where no terminal says how wide it is."""
_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table. The first `text_columns` are words."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1
    notes: Sequence[str] = ()

    @property
    def sides(self) -> list[str]:
        """Of each column: words to the left, figures to the right."""
        return ["left" if number < self.text_columns else "right" for number in range(len(self.headings))]


def publish(
    name: str,
    *,
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    text_columns: int = 1,
    notes: Sequence[str] = (),
    save: bool,
) -> None:
    """Print the table and its notes; with `save`, write them too. The first `text_columns` are words."""
    sheet = Sheet(title=title, headings=headings, rows=rows, text_columns=text_columns)
    publish_all(name, sheets=[sheet], notes=notes, save=save)


def publish_all(
    name: str,
    *,
    sheets: Sequence[Sheet],
    notes: Sequence[str] = (),
    save: bool,
    path: Path | None = None,
    command: str | None = None,
) -> None:
    """Several tables of one benchmark, the first of which gives the page its title.

    `path` and `command`: where the page is written instead, and how.
    """
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_COLUMNS)
    for sheet in sheets:
        table = Table(title=sheet.title)
        for heading, side in zip(sheet.headings, sheet.sides, strict=True):
            table.add_column(heading, justify="left" if side == "left" else "right")
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)
        for note in sheet.notes:
            console.print(note, highlight=False)
    for note in notes:
        console.print(note, highlight=False)
    if save:
        path = path or _RESULTS / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        command = command or f"python benchmarks/{name}.py --save"
        path.write_text(_markdown(command, sheets, notes), encoding="utf-8")


def target_met(value: float, target: float, *, at_most: bool) -> str:
    """Say what the target is, and whether it is reached."""
    reached = value <= target if at_most else value >= target
    return f"{'<=' if at_most else '>='} {target:g} {'reached' if reached else 'missed'}"


def _markdown(command: str, sheets: Sequence[Sheet], notes: Sequence[str]) -> str:
    tables = []
    for number, sheet in enumerate(sheets):
        heading = [] if number == 0 else [f"## {sheet.title}", ""]
        sides = ["---" if side == "left" else "---:" for side in sheet.sides]
        tables += [*heading, _line(sheet.headings), _line(sides), *(_line(row) for row in sheet.rows), ""]
        tables += [line for note in sheet.notes for line in (note, "")]
    lines = [
        f"# {sheets[0].title}",
        "",
        f"Written by `{command}`; the file's docstring says what is compared.",
        "",
        *tables,
        *(f"- {note}" for note in notes),
        f"- {_processor()}, {os.cpu_count()} cores",
        f"- Python {platform.python_version()}, {', '.join(f'{package} {version(package)}' for package in _PACKAGES)}",
        f"- {date.today().isoformat()}",
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
