"""JSON with places: every key and value keeps its span in the text.

Reads strict JSON, and beyond it what people write by hand: comments, trailing commas, Python's True, False and None,
NaN and Infinity. Each of these is reported; anything else that is not JSON is an error.
"""

import json
import re
from typing import Any

from toolkit.dsconfig.lint.document import MAX_DEPTH, Document, Span, bad_text
from toolkit.dsconfig.lint.finding import Edit, Found, Path, dotted, shown

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[-+]?[A-Za-z_][A-Za-z_0-9.]*")
_STRING = re.compile(r'"((?:[^"\\\x00-\x1f]|\\.)*)"')
_BLANK = re.compile(r"[ \t\r\n]*")
_COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_LITERALS: dict[str, Any] = {"true": True, "false": False, "null": None}
_PYTHON: dict[str, Any] = {"True": True, "False": False, "None": None}
_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def read_json(text: str, file: str) -> Document:
    """Read one value. Raises NotAConfigError where the text is no JSON even with what is tolerated."""
    reader = _Reader(text, file)
    return reader.read()


class _Reader:
    def __init__(self, text: str, file: str) -> None:
        self.text, self.file, self.at = text, file, 0
        self.document = Document(file=file, text=text, syntax="json")

    def read(self) -> Document:
        if self.text.startswith("\ufeff"):
            self.at = 1
            self._report(0, "DS006", (), "the file begins with a byte order mark", (Edit("cut", (), (0, 1)),))
        self._skip()
        if self.at == len(self.text):
            raise self._bad("the file is empty. A DeepSpeed config is a JSON object.")
        self.document.value = self._value((), None)
        self._skip()
        if self.at < len(self.text):
            raise self._bad("something follows the end of the JSON value. Remove it.")
        return self.document

    def _bad(self, message: str, offset: int | None = None) -> Exception:
        return bad_text(self.file, self.text, self.at if offset is None else offset, message)

    def _report(self, offset: int, rule: str, path: Path, message: str, edits: tuple[Edit, ...] = ()) -> None:
        self.document.found.append((offset, Found(rule, path, message, edits=edits)))

    def _skip(self) -> None:
        """Over blanks and comments."""
        while True:
            match = _BLANK.match(self.text, self.at)
            self.at = match.end() if match else self.at
            comment = _COMMENT.match(self.text, self.at)
            if comment is None:
                return
            if not any(found.rule == "DS001" for _, found in self.document.found):  # one finding a file is enough
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
        elif first == '"':
            value = self._string()
        else:
            value = self._scalar(path)
        key_start, key_end = key or (start, start)
        self.document.spans[path] = Span(key_start, key_end, start, self.at)
        return value

    def _object(self, path: Path) -> dict[str, Any]:
        members: dict[str, Any] = {}
        self.at += 1
        comma = None
        while True:
            self._skip()
            if self.text[self.at : self.at + 1] == "}":
                self._trailing(comma, path)
                self.at += 1
                return members
            if members and comma is None:
                raise self._bad("a comma is missing before this key, or a brace after the last value. Add it.")
            start = self.at
            if self.text[start : start + 1] != '"':
                raise self._bad("a key in double quotes, or }, is expected here.")
            name = self._string()
            end = self.at
            self._skip()
            if self.text[self.at : self.at + 1] != ":":
                raise self._bad(f"a colon is missing after the key {shown(name)}. Add it.")
            self.at += 1
            self._skip()
            comma = self._member(members, path, name, (start, end))

    def _member(self, members: dict[str, Any], path: Path, name: str, key: tuple[int, int]) -> int | None:
        """Read a value into `members`; the offset of the comma after it."""
        here = (*path, name)
        if name in members:
            first = self.document.spans[here]
            before = {place: span for place, span in self.document.spans.items() if place[: len(here)] == here}
            value = self._value(here, key)
            self.document.spans.update(before)  # the first one keeps its place
            line = self.document.mark(first.key).line
            self._report(key[0], "DS005", here, f"{dotted(here)} is given twice, first on line {line}")
        else:
            value = self._value(here, key)
        members[name] = value  # the last one counts, as for Python's json
        return self._comma()

    def _array(self, path: Path) -> list[Any]:
        items: list[Any] = []
        self.at += 1
        comma = None
        while True:
            self._skip()
            if self.text[self.at : self.at + 1] == "]":
                self._trailing(comma, path)
                self.at += 1
                return items
            if items and comma is None:
                raise self._bad("a comma is missing before this value. Add it.")
            items.append(self._value((*path, len(items)), None))
            comma = self._comma()

    def _comma(self) -> int | None:
        self._skip()
        if self.text[self.at : self.at + 1] != ",":
            return None
        self.at += 1
        return self.at - 1

    def _trailing(self, comma: int | None, path: Path) -> None:
        if comma is not None:
            edit = Edit("cut", (), (comma, comma + 1))
            self._report(comma, "DS002", path, "a comma after the last value", (edit,))

    def _string(self) -> str:
        match = _STRING.match(self.text, self.at)
        if match is None:
            raise self._bad("this string has no end on its line, or holds a control character. Close or escape it.")
        try:
            text: str = json.loads(match[0])
        except ValueError:
            raise self._bad("this string holds an escape that JSON does not know.") from None
        self.at = match.end()
        return text

    def _scalar(self, path: Path) -> Any:
        start = self.at
        number = _NUMBER.match(self.text, start)
        if number is not None and self.text[number.end() : number.end() + 1] not in set("0123456789._+-"):
            self.at = number.end()
            digits = number[0]
            if not digits.lstrip("-").isdigit():
                return float(digits)
            return int(digits) if len(digits) <= 40 else float(digits)
        word = _WORD.match(self.text, start)
        name = word[0] if word else ""
        for table in (_LITERALS, _PYTHON, _NOT_FINITE):
            if name in table:
                self.at = start + len(name)
                if table is _PYTHON:
                    message = f"{dotted(path)}: {name} is Python, not JSON"
                    self._report(start, "DS003", path, message, (Edit("set", path, table[name]),))
                elif table is _NOT_FINITE:
                    self._report(start, "DS004", path, f"{dotted(path)}: {name} is no number of JSON")
                return table[name]
        raise self._bad("a value is expected here: an object, a list, a text in double quotes, a number, true, false.")
