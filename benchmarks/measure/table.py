"""A benchmark's table: on the screen, and with --save as benchmarks/results/<name>.md with the machine and versions."""

import os
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

_RESULTS = Path(__file__).resolve().parents[1] / "results"
_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")


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
    align = ["left" if number < text_columns else "right" for number in range(len(headings))]
    table = Table(title=title)
    for heading, side in zip(headings, align, strict=True):
        table.add_column(heading, justify="left" if side == "left" else "right")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)
    if save:
        _RESULTS.mkdir(exist_ok=True)
        (_RESULTS / f"{name}.md").write_text(_markdown(name, title, headings, align, rows, notes), encoding="utf-8")


def verdict(value: float, target: float, *, at_most: bool) -> str:
    """The target, and whether it is reached."""
    reached = value <= target if at_most else value >= target
    return f"{'<=' if at_most else '>='} {target:g} {'reached' if reached else 'missed'}"


def _markdown(
    name: str,
    title: str,
    headings: Sequence[str],
    align: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
) -> str:
    lines = [
        f"# {title}",
        "",
        f"Written by `python benchmarks/{name}.py --save`; the file's docstring says what is compared.",
        "",
        _line(headings),
        _line(["---" if side == "left" else "---:" for side in align]),
        *(_line(row) for row in rows),
        "",
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
