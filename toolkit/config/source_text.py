"""Shared parts of every reader of YAML and JSON: paths to values, positions in a text, and how both are printed."""

import re
from bisect import bisect_right
from typing import NamedTuple

Path = tuple[str | int, ...]
"""The keys and indices that lead to a value: ("optimizer", "betas", 0)."""


class Mark(NamedTuple):
    """A position in a text, counted from 1 as editors do."""

    line: int
    column: int


class Lines:
    """The line starts of a text, for many lookups."""

    def __init__(self, text: str) -> None:
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def mark(self, offset: int) -> Mark:
        """Line and column of an offset."""
        line = bisect_right(self._starts, offset)
        return Mark(line, offset - self._starts[line - 1] + 1)


def dotted(path: Path) -> str:
    """('optimizer', 'betas', 0) -> 'optimizer.betas[0]'; a name that is not a plain word is quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if re.fullmatch(r"[\w<-]{1,60}", part) else quote(part)
            text += f".{name}" if text else name
    return text or "the value"


def undotted(field: str) -> Path:
    """'data.sources[1].path' -> ('data', 'sources', 1, 'path')."""
    names = re.sub(r"\[(\d+)\]", r".\1", field).split(".")
    return tuple(int(name) if name.isdigit() else name for name in names if name)


def shorten(text: str, limit: int = 40) -> str:
    """Return a text of at most `limit` characters, with … for the middle."""
    return text if len(text) <= limit else f"{text[: limit - 15]}…{text[-10:]}"


def printable(text: str) -> str:
    """Return the text on one line, without characters that a terminal would act on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def quote(text: str) -> str:
    """Return the text in double quotes, shortened and printable."""
    return '"' + printable(shorten(text).replace("\\", "\\\\").replace('"', '\\"')) + '"'
