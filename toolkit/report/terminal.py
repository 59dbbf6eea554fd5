"""The console of every table that a command prints: how wide it is, in a terminal and in a pipe."""

import os
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich is imported by the commands that print a table
    from rich.console import Console

PIPE_COLUMNS = 100
"""Columns where the output is no terminal: a page of a document, a log, half of a screen."""
_FEWEST = 40


def columns() -> int:
    """Columns of a table: what COLUMNS says, else the terminal's, else those of a pipe or a file."""
    said = os.environ.get("COLUMNS", "")
    if not (said.isdecimal() and 0 < len(said) < 5) and not sys.stdout.isatty():
        return PIPE_COLUMNS
    return max(_FEWEST, shutil.get_terminal_size(fallback=(PIPE_COLUMNS, 24)).columns)


def table_console(*, most: int | None = None) -> "Console":
    """A console for tables, at most `most` columns wide. Lines that are no tables are printed with `soft_wrap`."""
    from rich.console import Console

    return Console(highlight=False, width=min(columns(), most or columns()))
