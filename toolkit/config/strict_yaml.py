"""YAML, read strictly: every value keeps its position, and nothing in the text is executed, guessed or dropped.

Scalars follow YAML 1.2's core schema, so `1e-4` is a number and `no`, `12:30` and `2024-01-01` are strings. Tags,
anchors, aliases, merge keys, duplicate keys and a second document are problems: with them a file means more than it
shows.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml
from typing_extensions import override

from toolkit.config.source_text import Lines, Mark, Path, dotted, quote, shorten

# Not ruamel.yaml: it takes 22 times as long, stops at the first duplicate key, reads dates, octals, tags and aliases,
# and `lint` must see what PyYAML sees anyway.
# libyaml's parser is thirty times faster than PyYAML's own; both produce the same events.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_INT = 2**63 - 1
_NUMBER = r"[0-9]+(?:_[0-9]+)*"
_EXPONENT = r"[eE][-+]?[0-9]+"
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)")
_FLOAT = re.compile(rf"[-+]?(?:(?:{_NUMBER}\.[0-9]*|\.[0-9]+)(?:{_EXPONENT})?|{_NUMBER}{_EXPONENT})")
_WORDS: dict[str, bool | float | None] = {
    "": None,
    **dict.fromkeys(("~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **{sign + word: float(sign + "inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")},
}


class WrittenValue(NamedTuple):
    """A value in the text: the positions of its key and of the value, and the spelling of an unquoted scalar."""

    key: Mark
    value: Mark
    plain: str | None = None


class YamlProblem(NamedTuple):
    """A mistake in a YAML text, with its place; `path` is None where no value is meant (a syntax error)."""

    mark: Mark
    message: str
    path: Path | None = None


@dataclass(kw_only=True)
class YamlDocument:
    """The values of a YAML text with their positions, and what is wrong with the text."""

    value: Any = None
    written: dict[Path, WrittenValue] = field(default_factory=dict)
    problems: list[YamlProblem] = field(default_factory=list)
    complete: bool = True
    """False where reading had to stop: missing fields may be in the part that was not read."""
    empty: bool = True


class _StopError(Exception):
    def __init__(self, mark: Mark, message: str) -> None:
        super().__init__(message)
        self.problem = YamlProblem(mark, message)


def parse(text: str, *, limits_integers: bool = True) -> YamlDocument:
    """Read one document. Problems are collected, never raised.

    Whole numbers beyond 64 bits are problems, unless `limits_integers` leaves them to the bounds of the fields.
    """
    bad = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if bad:
        advice = "Remove it, or write it as an escape in quotes."
        message = f"character U+{ord(bad[0]):04X} is not allowed in YAML. {advice}"
        mark = Lines(text).mark(bad.start())
        return YamlDocument(problems=[YamlProblem(mark, message)], complete=False, empty=False)
    reader = _StrictReader(text, limits_integers=limits_integers)
    document = reader.document
    try:
        document.value = reader.read()
    except _StopError as stop:
        document.problems.append(stop.problem)
        document.complete = document.empty = False
    except yaml.MarkedYAMLError as error:
        mark = _mark(error.problem_mark or error.context_mark)
        details = ", ".join(part for part in (error.context, error.problem) if part)
        line = dict(enumerate(text.split("\n"), start=1)).get(mark.line, "")
        hint = " Indent with spaces, not tabs." if "\t" in line else ""
        document.problems.append(YamlProblem(mark, f"this is not YAML: {' '.join(details.split())}.{hint}"))
        document.complete = document.empty = False
    return document


def resolve(plain: str) -> bool | int | float | str | None:
    """The value of an unquoted scalar. A whole number of 400 characters or less keeps its value; 1e400 is infinite."""
    if plain in _WORDS:
        return _WORDS[plain]
    if _INT.fullmatch(plain):
        # int() is quadratic in the length and refuses thousands of digits; no float is as large as 10^400
        return int(plain) if len(plain) <= 400 else (-1 if plain[0] == "-" else 1) * 10**400
    if _FLOAT.fullmatch(plain):
        return float(plain)
    return plain


class YamlReader(ABC):
    """Recursive descent over the events of PyYAML's parser, so that every value keeps its position in the text.

    Reads one document of bounded depth. Subclasses decide what a scalar is worth, what is recorded of each node, and
    what becomes of a duplicate key.
    """

    max_depth = 32

    def __init__(self, text: str) -> None:
        self.events: Iterator[Any] = iter(yaml.parse(text, Loader=_LOADER))

    @abstractmethod
    def stop(self, event: Any, message: str) -> Exception:
        """The error that ends reading at an event."""

    def begin(self, event: Any, path: Path, key: Any) -> None:  # noqa: B027 - a hook
        """Look at a node before its children are read. `key` is the event of its name, None in a list."""

    def end(self, event: Any, path: Path, key: Any, value: Any, last: Any) -> None:  # noqa: B027 - a hook
        """Look at a node after its children were read; `last` is its last event."""

    @abstractmethod
    def scalar(self, event: Any, path: Path) -> Any:
        """The value of a scalar."""

    def alias(self, event: Any) -> Any:
        """The value of an alias, where they are allowed."""
        raise self.stop(event, "anchors (&name) and aliases (*name) are not allowed. Write the value out.")

    @abstractmethod
    def duplicate(self, event: Any, path: Path) -> bool:
        """Report a key that is given twice; whether the second value is read and counts."""

    def read(self) -> Any:
        """The value of the text, None where it holds no document."""
        value = None
        documents = 0
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise self.stop(event, "a second document begins here. A file holds one; remove it.")
                value = self._node(next(self.events), (), None)
        return value

    def _node(self, event: Any, path: Path, key: Any) -> Any:
        if len(path) > self.max_depth:
            raise self.stop(event, f"nested deeper than {self.max_depth} levels. Flatten it.")
        self.begin(event, path, key)
        value: Any
        last = event
        if isinstance(event, yaml.MappingStartEvent):
            value, last = self._mapping(path)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not isinstance(last := next(self.events), yaml.SequenceEndEvent):
                value.append(self._node(last, (*path, len(value)), None))
        elif isinstance(event, yaml.ScalarEvent):
            value = self.scalar(event, path)
        else:
            assert isinstance(event, yaml.AliasEvent)
            value = self.alias(event)
        self.end(event, path, key, value, last)
        return value

    def _mapping(self, path: Path) -> tuple[dict[str, Any], Any]:
        entries: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent) or event.tag or event.anchor:
                raise self.stop(event, "a key must be a plain name. Write `name: value`.")
            name: str = event.value
            if name == "<<" and not is_quoted(event):
                raise self.stop(event, "merge keys (<<) are not allowed. Write the fields out.")
            if name not in entries or self.duplicate(event, (*path, name)):
                entries[name] = self._node(next(self.events), (*path, name), event)
        return entries, event


def is_quoted(event: Any) -> bool:
    """Whether a scalar is a string whatever it spells."""
    return event.style in ("'", '"', "|", ">")


class _StrictReader(YamlReader):
    def __init__(self, text: str, *, limits_integers: bool) -> None:
        super().__init__(text)
        self.limits_integers = limits_integers
        self.document = YamlDocument()

    @override
    def stop(self, event: Any, message: str) -> Exception:
        return _StopError(_mark(event.start_mark), message)

    @override
    def begin(self, event: Any, path: Path, key: Any) -> None:
        if getattr(event, "anchor", None):
            self.alias(event)
        tag = getattr(event, "tag", None)
        plain = event.value if isinstance(event, yaml.ScalarEvent) and not is_quoted(event) else None
        if not path:
            self.document.empty = plain == "" and tag is None
        if path and isinstance(path[-1], str) and any("\ud800" <= c <= "\udfff" for c in path[-1]):
            raise self.stop(key or event, f"{quote(path[-1])} contains an invalid character. Remove it.")
        self.document.written[path] = WrittenValue(_mark((key or event).start_mark), _mark(event.start_mark), plain)
        if tag:
            shown = quote(tag.replace("tag:yaml.org,2002:", "!!"))
            self._problem(event, path, f"tag {shown} is not allowed. Write the plain value without a tag.")

    @override
    def duplicate(self, event: Any, path: Path) -> bool:
        mark = _mark(event.start_mark)
        lines = f"{self.document.written[path].key.line} and {mark.line}"
        message = f"{dotted(path)} is given twice, on lines {lines}. Keep one of them."
        self.document.problems.append(YamlProblem(mark, message))
        depth = 0  # read past the second value; the first one counts
        while True:
            event = next(self.events)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth == 0:
                return False

    @override
    def scalar(self, event: Any, path: Path) -> Any:
        value = event.value if is_quoted(event) else resolve(event.value)
        if self.limits_integers and isinstance(value, int) and abs(value) > _MAX_INT:
            self._problem(event, path, f"{dotted(path)}: {shorten(event.value)} does not fit into 64 bits. Write less.")
            return None
        if isinstance(value, str) and ("\0" in value or any("\ud800" <= c <= "\udfff" for c in value)):
            self._problem(event, path, f"{dotted(path)}: {quote(value)} contains an invalid character. Remove it.")
            return None
        return value

    def _problem(self, event: Any, path: Path, message: str) -> None:
        self.document.problems.append(YamlProblem(_mark(event.start_mark), message, path))


def _mark(mark: Any) -> Mark:
    return Mark(mark.line + 1, mark.column + 1)
