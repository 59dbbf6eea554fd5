"""YAML, read strictly: every value keeps its place, and nothing in the text is executed, guessed or dropped.

Scalars follow YAML 1.2's core schema, so `1e-4` is a number and `no`, `12:30` and `2024-01-01` are strings. Tags,
anchors, aliases, merge keys, duplicate keys and a second document are problems: with them a file means more than it
shows.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

# libyaml's parser is thirty times faster; both produce the same events.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MAX_DEPTH = 32
_MAX_INT = 2**63 - 1
_NUMBER = r"[0-9]+(?:_[0-9]+)*"
_EXPONENT = r"[eE][-+]?[0-9]+"
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)")
_FLOAT = re.compile(rf"[-+]?(?:(?:{_NUMBER}\.[0-9]*|\.[0-9]+)(?:{_EXPONENT})?|{_NUMBER}{_EXPONENT})")
_INFINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)")
_WORDS: dict[str, bool | float | None] = {
    "": None,
    **dict.fromkeys(("~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}

Path = tuple[str | int, ...]


class Mark(NamedTuple):
    """A place in the text, counted from 1 as editors do."""

    line: int
    column: int


class Written(NamedTuple):
    """How a value stands in the text: where its key and the value begin, and an unquoted scalar's spelling."""

    key: Mark
    value: Mark
    plain: str | None = None


class Problem(NamedTuple):
    """What is wrong, where, and with which value; `path` is None where no value is meant (a syntax error)."""

    mark: Mark
    message: str
    path: Path | None = None


@dataclass(kw_only=True)
class Document:
    """The values of a YAML text, where each of them stands, and what is wrong with the text."""

    value: Any = None
    written: dict[Path, Written] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    complete: bool = True
    """False where reading had to stop: what is missing may stand in the part that was not read."""
    empty: bool = True


class _StopError(Exception):
    def __init__(self, mark: Mark, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(mark, message)


def parse(text: str) -> Document:
    """Read one document. Problems are collected, never raised."""
    bad = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if bad:
        before = text[: bad.start()]
        mark = Mark(before.count("\n") + 1, bad.start() - before.rfind("\n"))
        message = (
            f"character U+{ord(bad[0]):04X} is not allowed in YAML. Remove it, or write it as an escape in quotes."
        )
        return Document(problems=[Problem(mark, message)], complete=False, empty=False)
    reader = _Reader(yaml.parse(text, Loader=_LOADER))
    document = reader.document
    try:
        reader.read()
    except _StopError as stop:
        document.problems.append(stop.problem)
        document.complete = document.empty = False
    except yaml.MarkedYAMLError as error:
        mark = _mark(error.problem_mark or error.context_mark)
        details = ", ".join(part for part in (error.context, error.problem) if part)
        line = dict(enumerate(text.split("\n"), start=1)).get(mark.line, "")
        hint = " Indent with spaces, not tabs." if "\t" in line else ""
        document.problems.append(Problem(mark, f"this is not YAML: {' '.join(details.split())}.{hint}"))
        document.complete = document.empty = False
    return document


def resolve(plain: str) -> bool | int | float | str | None:
    """The value of an unquoted scalar. A whole number of any length keeps its value; 1e400 is infinite."""
    if plain in _WORDS:
        return _WORDS[plain]
    if _INT.fullmatch(plain):
        # 20 characters hold every number that is allowed; int() is quadratic in the length and refuses long ones
        return int(plain) if len(plain) <= 40 else (-1 if plain[0] == "-" else 1) * 10**40
    if _FLOAT.fullmatch(plain):
        return float(plain)
    if _INFINITE.fullmatch(plain):
        return -math.inf if plain[0] == "-" else math.inf
    return plain


class _Reader:
    """Recursive descent over the parser's events; depth is bounded, so is the stack."""

    def __init__(self, events: Iterable[yaml.Event]) -> None:
        self.events: Iterator[yaml.Event] = iter(events)
        self.document = Document()

    def read(self) -> None:
        document = self.document
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                if not document.empty:
                    raise _StopError(
                        _mark(event.start_mark), "a second document begins here. A file holds one; remove it."
                    )
                first = next(self.events)
                document.empty = isinstance(first, yaml.ScalarEvent) and first.value == "" and first.tag is None
                document.value = self._node(first, (), None)

    def _problem(self, event: yaml.Event, path: Path, message: str) -> None:
        self.document.problems.append(Problem(_mark(event.start_mark), message, path))

    def _node(self, event: yaml.Event, path: Path, key: Mark | None) -> Any:
        mark = _mark(event.start_mark)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _StopError(mark, "anchors (&name) and aliases (*name) are not allowed. Write the value out.")
        if len(path) > MAX_DEPTH:
            raise _StopError(mark, f"nested deeper than {MAX_DEPTH} levels. Flatten it.")
        plain = event.value if isinstance(event, yaml.ScalarEvent) and not _quoted(event) else None
        self.document.written[path] = Written(key or mark, mark, plain)
        if tag := getattr(event, "tag", None):
            shown = quote(tag.replace("tag:yaml.org,2002:", "!!"))
            self._problem(event, path, f"tag {shown} is not allowed. Write the plain value without a tag.")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path)
        assert isinstance(event, yaml.ScalarEvent)
        return self._scalar(event, path)

    def _sequence(self, path: Path) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self._node(event, (*path, len(items)), None))
        return items

    def _mapping(self, path: Path) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            mark = _mark(event.start_mark)
            if not isinstance(event, yaml.ScalarEvent) or event.tag or event.anchor:
                raise _StopError(mark, "a key must be a plain name. Write `name: value`.")
            name: str = event.value
            if name == "<<" and not _quoted(event):
                raise _StopError(mark, "merge keys (<<) are not allowed. Write the fields out.")
            if any("\ud800" <= c <= "\udfff" for c in name):
                raise _StopError(mark, f"{quote(name)} holds a character that is no text. Remove it.")
            if name in entries:
                self._skip_duplicate(event, (*path, name))
                continue
            entries[name] = self._node(next(self.events), (*path, name), mark)
        return entries

    def _skip_duplicate(self, event: yaml.Event, path: Path) -> None:
        first = self.document.written[path].key.line
        line = _mark(event.start_mark).line
        message = f"{dotted(path)} is given twice, on lines {first} and {line}. Keep one of them."
        self.document.problems.append(Problem(_mark(event.start_mark), message))
        depth = 0  # read past the second value; the first one counts
        while True:
            event = next(self.events)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth == 0:
                return

    def _scalar(self, event: yaml.ScalarEvent, path: Path) -> Any:
        value = event.value if _quoted(event) else resolve(event.value)
        if isinstance(value, int) and abs(value) > _MAX_INT:
            self._problem(event, path, f"{dotted(path)}: {shorten(event.value)} does not fit into 64 bits. Write less.")
            return None
        if isinstance(value, str) and ("\0" in value or any("\ud800" <= c <= "\udfff" for c in value)):
            self._problem(event, path, f"{dotted(path)}: {quote(value)} holds a character that is no text. Remove it.")
            return None
        return value


def _mark(mark: Any) -> Mark:
    return Mark(mark.line + 1, mark.column + 1)


def _quoted(event: yaml.ScalarEvent) -> bool:
    return event.style in ("'", '"', "|", ">")


def dotted(path: Path) -> str:
    """('optimizer', 'betas', 0) -> 'optimizer.betas[0]'; a name that is no plain word is quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += "." * bool(text) + (part if re.fullmatch(r"[\w<-]{1,40}", part) else quote(part))
    return text or "the value"


def shorten(text: str) -> str:
    """At most 40 characters, the middle left out."""
    return text if len(text) <= 40 else f"{text[:25]}…{text[-10:]}"


def quote(text: str) -> str:
    """In double quotes, on one line, without characters that a terminal would act on."""
    shown = shorten(text).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown) + '"'
