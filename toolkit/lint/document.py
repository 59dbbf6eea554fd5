"""ConfigDocument: the values of a config file, and the position of each of them in its text; read from JSON or YAML."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, Literal, NamedTuple

import yaml
from typing_extensions import override

from toolkit.config.source_text import Lines, Mark, Path
from toolkit.config.strict_yaml import YamlReader
from toolkit.errors import ConfigError
from toolkit.lint.finding import Edit, Violation, dotted, set_to, shown

MAX_BYTES = 1 << 20
MAX_DEPTH = 48
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[-+]?[A-Za-z_][A-Za-z_0-9.]*")
_STRING = re.compile(r'"((?:[^"\\\x00-\x1f]|\\.)*)"')
_SINGLE = re.compile(r"'([^'\\\n]*)'")
_BARE_KEY = re.compile(r"([^\s{}\[\],:\"'#/]+)[ \t]*:")
_BARE_STRING = re.compile(r"([A-Za-z_][^\n,{}\[\]]*?)[ \t]*(?=\r?\n)")
_BLANK = re.compile(r"[ \t\r\n]*")
_COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_LITERALS: dict[str, Any] = {"true": True, "false": False, "null": None}
_PYTHON: dict[str, Any] = {"True": True, "False": False, "None": None}
_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}

Syntax = Literal["json", "yaml"]


class Span(NamedTuple):
    """Offsets into the text at which a key and its value begin and end; an item of a list has no key."""

    key: int
    key_end: int
    start: int
    end: int


@dataclass(kw_only=True)
class ConfigDocument:
    """One config file as it was read: its text, its values, and the place of each value in the text."""

    file: str
    text: str
    syntax: Syntax
    value: Any = None
    spans: dict[Path, Span] = field(default_factory=dict)
    violations: list[tuple[int, Violation]] = field(default_factory=list)
    """Violations in the text itself, each with its offset."""

    @cached_property
    def _lines(self) -> Lines:
        return Lines(self.text)

    def mark(self, offset: int) -> Mark:
        return self._lines.mark(offset)

    def place(self, path: Path, *, key: bool = False) -> Mark:
        """Return the place of the value at `path`, or of its key for `key` and for a section; else of its parent."""
        while path and path not in self.spans:
            path = path[:-1]
        span = self.spans[path]
        is_section = self.text[span.start : span.start + 1] in ("{", "") or "\n" in self.text[span.start : span.end]
        return self.mark(span.key if key or is_section else span.start)


class NotAConfigError(ConfigError):
    """A file that cannot be read as a config: one line that says where and why."""


def error_at(document: ConfigDocument, offset: int, message: str) -> NotAConfigError:
    """An error at an offset of a text."""
    mark = document.mark(min(offset, len(document.text)))
    return NotAConfigError(f"{document.file}:{mark.line}:{mark.column}: {message}")


def read_json(text: str, file: str) -> ConfigDocument:
    """Read one JSON value. Raises NotAConfigError where the text is not JSON even with what is tolerated.

    It tolerates what people write by hand: comments, trailing commas, Python's True, False and None, NaN and Infinity.
    Each of these is reported.
    """
    return _JsonReader(ConfigDocument(file=file, text=text, syntax="json")).read()


class _JsonReader:
    def __init__(self, document: ConfigDocument) -> None:
        self.document = document
        self.text = document.text
        self.at = 0

    def read(self) -> ConfigDocument:
        if self.text.startswith("\ufeff"):
            self.at = 1
            self._report(0, "DS006", (), "the file begins with a byte order mark", (Edit("delete", (), (0, 1)),))
        self._skip()
        if self.at == len(self.text):
            raise self._bad("the file is empty. A DeepSpeed config is a JSON object.")
        self.document.value = self._value((), None)
        self._skip()
        if self.at < len(self.text):
            raise self._bad("something follows the end of the JSON value. Remove it.")
        return self.document

    def _bad(self, message: str) -> Exception:
        return error_at(self.document, self.at, message)

    def _report(self, offset: int, rule: str, path: Path, message: str, edits: tuple[Edit, ...] = ()) -> None:
        self.document.violations.append((offset, Violation(rule, path, message, edits=edits)))

    def _skip(self) -> None:
        """Skip blanks and comments."""
        while True:
            match = _BLANK.match(self.text, self.at)
            self.at = match.end() if match else self.at
            comment = _COMMENT.match(self.text, self.at)
            if comment is None:
                return
            if not any(
                violation.rule == "DS001" for _, violation in self.document.violations
            ):  # one finding a file is enough
                self._report(self.at, "DS001", (), "a comment in JSON")
            self.at = comment.end()

    def _value(self, path: Path, key: tuple[int, int] | None) -> Any:
        if len(path) > MAX_DEPTH:
            raise self._bad(f"nested deeper than {MAX_DEPTH} levels. A DeepSpeed config has 5.")
        start = self.at
        first = self.text[start : start + 1]
        if first == "{":
            value: Any = self._object(path)
        elif first == "[":
            value = self._array(path)
        elif first in ('"', "'"):
            value = self._string()
        else:
            value = self._scalar(path)
        key_start, key_end = key or (start, start)
        self.document.spans[path] = Span(key_start, key_end, start, self.at)
        return value

    def _elements(self, path: Path, end: str, missing_comma: str) -> Iterator[int]:
        """Step through an object or a list: yield the index of each element, at the element's offset."""
        self.at += 1
        comma: int | None = None
        after = self.at
        for index in count():
            self._skip()
            if self.text.startswith(end, self.at):
                if comma is not None:
                    edit = Edit("delete", (), (comma, comma + 1))
                    self._report(comma, "DS002", path, "a comma after the last value", (edit,))
                self.at += 1
                return
            if index and comma is None and "\n" not in self.text[after : self.at]:
                raise self._bad(missing_comma)
            if index and comma is None:
                self._hjson(path)
            yield index
            after = self.at
            self._skip()
            comma = self.at if self.text.startswith(",", self.at) else None
            if comma is not None:
                self.at += 1

    def _array(self, path: Path) -> list[Any]:
        elements = self._elements(path, "]", "a comma is missing before this value. Add it.")
        return [self._value((*path, index), None) for index in elements]

    def _object(self, path: Path) -> dict[str, Any]:
        members: dict[str, Any] = {}
        missing_comma = "a comma is missing before this key, or a brace after the last value. Add it."
        for _ in self._elements(path, "}", missing_comma):
            start = self.at
            if bare := _BARE_KEY.match(self.text, start):
                self._hjson(path)
                name = bare[1]
                self.at = bare.end(1)
            elif self.text.startswith(('"', "'"), start):
                name = self._string()
            else:
                raise self._bad("a key in double quotes, or }, is expected here.")
            key = start, self.at
            self._skip()
            if not self.text.startswith(":", self.at):
                raise self._bad(f"a colon is missing after the key {shown(name)}. Add it.")
            self.at += 1
            self._skip()
            here = (*path, name)
            members[name] = self._duplicate(here, key) if name in members else self._value(here, key)
        return members

    def _duplicate(self, path: Path, key: tuple[int, int]) -> Any:
        """Report a key that is given twice. The last value wins, as for Python's json; the first keeps its span."""
        line = self.document.mark(self.document.spans[path].key).line
        before = {place: span for place, span in self.document.spans.items() if place[: len(path)] == path}
        value = self._value(path, key)
        self.document.spans.update(before)
        self._report(key[0], "DS005", path, f"{dotted(path)} is given twice, first on line {line}")
        return value

    def _hjson(self, path: Path) -> None:
        """Report what only DeepSpeed's parser allows: one finding a file is enough."""
        if not any(violation.rule == "DS008" for _, violation in self.document.violations):
            self._report(self.at, "DS008", path, "Hjson, not JSON")

    def _string(self) -> str:
        if (single := _SINGLE.match(self.text, self.at)) is not None:
            self._hjson(())
            self.at = single.end()
            return single[1]
        match = _STRING.match(self.text, self.at)
        if match is None:
            why = "this string does not end on its line, or contains a control character"
            raise self._bad(f"{why}. Close or escape it.")
        try:
            text: str = json.loads(match[0])
        except ValueError:
            raise self._bad("this string contains an escape that JSON does not have.") from None
        self.at = match.end()
        return text

    def _scalar(self, path: Path) -> Any:
        start = self.at
        number = _NUMBER.match(self.text, start)
        if number is not None and self.text[number.end() : number.end() + 1] not in set("0123456789._+-"):
            self.at = number.end()
            digits = number[0]
            return int(digits) if digits.lstrip("-").isdigit() and len(digits) <= 40 else float(digits)
        word = _WORD.match(self.text, start)
        name = word[0] if word else ""
        for table in (_LITERALS, _PYTHON, _NOT_FINITE):
            if name in table:
                self.at = start + len(name)
                if table is _PYTHON:
                    message = f"{dotted(path)}: {name} is Python, not JSON"
                    self._report(start, "DS003", path, message, set_to(path, table[name]))
                elif table is _NOT_FINITE:
                    self._report(start, "DS004", path, f"{dotted(path)}: {name} is not a JSON number")
                return table[name]
        if (bare := _BARE_STRING.match(self.text, start)) is not None:
            self._hjson(path)
            self.at = bare.end(1)
            return bare[1]
        kinds = "an object, a list, a string in double quotes, a number, true, false"
        raise self._bad(f"a value is expected here: {kinds}.")


def read_yaml(text: str, file: str) -> ConfigDocument:
    """Read one YAML document. Raises NotAConfigError for a text that is not YAML, or that
    uses more of YAML than a config needs.

    The values are those that accelerate sees. It reads its config with PyYAML's safe loader, that is as YAML 1.1: an
    unquoted `no` is false, `1e-4` is a string.
    """
    document = ConfigDocument(file=file, text=text, syntax="yaml")
    try:
        document.value = _AccelerateReader(document).read()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        details = " ".join(", ".join(part for part in (error.context, error.problem) if part).split())
        raise error_at(document, mark.index if mark else 0, f"not YAML: {details}.") from None
    except yaml.YAMLError as error:
        raise error_at(document, 0, f"not YAML: {' '.join(str(error).split())[:120]}.") from None
    return document


class _AccelerateReader(YamlReader):
    max_depth = MAX_DEPTH

    def __init__(self, document: ConfigDocument) -> None:
        super().__init__(document.text)
        self.document = document
        self.scalars = yaml.SafeLoader("")
        self.anchors: dict[str, Any] = {}

    @override
    def stop(self, event: Any, message: str) -> Exception:
        return error_at(self.document, event.start_mark.index, message)

    @override
    def end(self, event: Any, path: Path, key: Any, value: Any, last: Any) -> None:
        if getattr(event, "anchor", None) and not isinstance(event, yaml.AliasEvent):
            self.anchors[event.anchor] = value
        start = event.start_mark.index
        end = last.end_mark.index
        has_brace = last.start_mark.index < end
        if isinstance(last, yaml.MappingEndEvent) and not has_brace:
            # A block ends where its last value does; the parser's own end is after the blank lines that follow.
            children = [(*path, name) for name in value]
            end = self.document.spans[children[-1]].end if children else 0
        first = (key.start_mark.index, key.end_mark.index) if key else (start, start)
        self.document.spans[path] = Span(*first, start, end)

    @override
    def duplicate(self, event: Any, path: Path) -> bool:
        first = self.document.mark(self.document.spans[path].key).line
        message = f"{dotted(path)} is given twice, first on line {first}"
        self.document.violations.append((event.start_mark.index, Violation("DS005", path, message)))
        return True

    @override
    def alias(self, event: Any) -> Any:
        if event.anchor not in self.anchors:
            raise self.stop(event, f"*{event.anchor} is used before &{event.anchor} is given.")
        return self.anchors[event.anchor]

    @override
    def scalar(self, event: Any, path: Path) -> Any:
        tag = event.tag or self.scalars.resolve(  # type: ignore[no-untyped-call]
            yaml.ScalarNode, event.value, event.implicit
        )
        node = yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark)
        try:
            value = self.scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError):
            raise self.stop(event, "this value cannot be read. Quote it if it is a string.") from None
        return value if isinstance(value, (str, int, float, bool, type(None))) else event.value
