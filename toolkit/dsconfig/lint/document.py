"""Document: the values of a config file, and where in its text each of them stands."""

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from toolkit.dsconfig.lint.finding import Found, Mark, Path
from toolkit.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 48

Syntax = Literal["json", "yaml"]


class Span(NamedTuple):
    """Where a key and its value begin and end, as offsets into the text; an item of a list has no key."""

    key: int
    key_end: int
    start: int
    end: int


@dataclass(kw_only=True)
class Document:
    """One file, read."""

    file: str
    text: str
    syntax: Syntax
    value: Any = None
    spans: dict[Path, Span] = field(default_factory=dict)
    found: list[tuple[int, Found]] = field(default_factory=list)
    """What is wrong with the text itself, each with its offset."""
    _lines: list[int] = field(default_factory=list)

    def mark(self, offset: int) -> Mark:
        """Line and column of an offset."""
        if not self._lines:
            self._lines = [0, *(i + 1 for i, c in enumerate(self.text) if c == "\n")]
        line = bisect_right(self._lines, offset)
        return Mark(line, offset - self._lines[line - 1] + 1)

    def place(self, path: Path, *, key: bool = False) -> Mark:
        """Where the value at `path` stands (its key, where asked for or the value is a section); else its parent's."""
        while path and path not in self.spans:
            path = path[:-1]
        span = self.spans[path]
        is_section = self.text[span.start : span.start + 1] in ("{", "") or "\n" in self.text[span.start : span.end]
        return self.mark(span.key if key or is_section else span.start)


class NotAConfigError(ConfigError):
    """A file that cannot be read as a config: one line that says where and why."""


def bad_text(file: str, text: str, offset: int, message: str) -> NotAConfigError:
    """An error at an offset of a text."""
    mark = Document(file=file, text=text, syntax="json").mark(min(offset, len(text)))
    return NotAConfigError(f"{file}:{mark.line}:{mark.column}: {message}")
