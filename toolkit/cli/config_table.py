"""The table of `dstk config --explain`."""

import json
import shutil
import sys
from typing import Any

from toolkit.dsconfig.explain import explain
from toolkit.dsconfig.job import ConfigJob

_WIDTH_OF_A_FILE = 160


def show(config: dict[str, Any], job: ConfigJob) -> None:
    """Print every key, its value, DeepSpeed's default, what it does and why it has its value."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("key", overflow="fold")
    table.add_column("value", overflow="fold")
    table.add_column("default", overflow="fold", style="dim")
    table.add_column("what it does, and why it has this value", overflow="fold", ratio=1)
    for row in explain(config, job):
        same = _equal(row.value, row.default)
        why = Text(f"{row.what} ").append(f"{row.why[0].upper()}{row.why[1:]}.", style="cyan")
        table.add_row(row.path, Text(_shown(row.value), style="" if same else "bold"), _shown(row.default), why)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH_OF_A_FILE
    console = Console(width=width, highlight=False)
    console.print(table)
    console.print(
        f"\n{job.recipe.model.name_or_path}, {job.layout}, defaults of DeepSpeed 0.19.8; bold where they differ.",
        soft_wrap=True,
    )


def _shown(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) and value else json.dumps(value)


def _equal(value: Any, default: Any) -> bool:
    return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)
