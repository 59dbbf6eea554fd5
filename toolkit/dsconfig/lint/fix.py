"""--fix: the smallest change of the text that mends a finding. Order, indentation and comments stay as they are."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from toolkit.dsconfig.lint.document import Document, NotAConfigError, Span
from toolkit.dsconfig.lint.finding import Edit, Finding, Path, Severity, dotted, shown

_MOST_ROUNDS = 200
_ORDER = list(Severity)


class Fixed(NamedTuple):
    """A mended text, and what was done to it."""

    text: str
    changes: list[str]


def fix(document: Document, lint: Callable[[str], tuple[Document, list[Finding]]]) -> Fixed:
    """Mend one finding after the other, looking again after each: one mend may answer several, or open another.

    `lint` reads a text and says what is wrong with it. A mend after which the file is worse is not taken.
    """
    text, changes = document.text, []
    tried: set[tuple[str, Path, str]] = set()
    for _ in range(_MOST_ROUNDS):
        document, findings = lint(text)
        open_ones = [one for one in findings if one.edits and _name(one) not in tried]
        if not open_ones:
            break
        finding = min(open_ones, key=lambda one: _precedence(document, one))
        tried.add(_name(finding))
        new = _apply_all(document, finding.edits)
        if new is None or new == text:
            continue
        try:
            _, after = lint(new)
        except NotAConfigError:
            continue
        if any(_name(one) == _name(finding) for one in after) or _worse(findings, after):
            continue
        text = new
        changes.append(f"{finding.rule.id} {_said(finding)}")
    return Fixed(text, changes)


def write(path: FilePath, text: str) -> None:
    """Replace a file at once: whoever reads it sees the old text or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode & 0o7777)
        os.replace(name, path)
    except BaseException:
        FilePath(name).unlink(missing_ok=True)
        raise


def _precedence(document: Document, finding: Finding) -> tuple[bool, int]:
    """New keys come last: another mend may bring them. Before that, what stops a run comes first."""
    brings = any(edit.kind == "set" and edit.path not in document.spans for edit in finding.edits)
    return brings and len(finding.edits) == 1, _ORDER.index(finding.severity)


def _name(finding: Finding) -> tuple[str, Path, str]:
    return finding.rule.id, finding.path, finding.message


def _worse(before: list[Finding], after: list[Finding]) -> bool:
    def count(findings: list[Finding], severity: str) -> int:
        return sum(finding.severity == severity for finding in findings)

    return count(after, "error") > count(before, "error")


def _said(finding: Finding) -> str:
    parts = []
    for edit in finding.edits:
        if edit.kind == "set":
            parts.append(f"{dotted(edit.path)} set to {shown(edit.value)}")
        elif edit.kind == "rename":
            parts.append(f"{dotted(edit.path)} renamed to {edit.value}")
        elif edit.kind == "remove":
            parts.append(f"{dotted(edit.path)} removed")
        else:
            parts.append("a character removed")
    return ", ".join(parts)


def _apply_all(document: Document, edits: tuple[Edit, ...]) -> str | None:
    """All edits of a finding, from the end of the text to its beginning; None where one of them has no place."""
    changes = [_change(document, edit) for edit in edits]
    if any(change is None for change in changes):
        return None
    text = document.text
    for start, end, new in sorted((change for change in changes if change), reverse=True):
        text = text[:start] + new + text[end:]
    return text


Change = tuple[int, int, str]


def _change(document: Document, edit: Edit) -> Change | None:
    if edit.kind == "cut":
        start, end = edit.value
        return start, end, ""
    span = document.spans.get(edit.path)
    if edit.kind == "set":
        if span is None:
            return _insert(document, edit.path, edit.value)
        return span.start, span.end, _written(document, edit.path, edit.value)
    if span is None:
        return None
    if edit.kind == "rename":
        new = str(edit.value)
        return span.key, span.key_end, json.dumps(new) if document.syntax == "json" else new
    if document.text[span.key] == '"' and document.syntax == "yaml" and _flow(document, edit.path[:-1]):
        return _remove_member(document.text, span)
    if document.syntax == "json" or _flow(document, edit.path[:-1]):
        return _remove_member(document.text, span)
    return _remove_lines(document.text, span)


def _flow(document: Document, path: Path) -> bool:
    """Whether a mapping is written in braces."""
    span = document.spans[path]
    return document.text[span.start : span.start + 1] == "{"


def _written(document: Document, path: Path, value: Any) -> str:
    """A value as the file's syntax has it."""
    if document.syntax == "yaml" and isinstance(value, str):
        plain = value.replace("_", "").isalnum() and value.lower() not in ("no", "off", "on", "yes", "y", "n", "true")
        return value if plain and not value[0].isdigit() else f"'{value}'"
    if isinstance(value, dict) and value and document.syntax == "json" and _is_indented(document):
        outer = _indentation(document, path)
        lines = json.dumps(value, indent=len(outer) // max(len(path), 1) or 2).split("\n")
        return ("\n" + outer).join(lines)
    return json.dumps(value, ensure_ascii=False)


def _is_indented(document: Document) -> bool:
    return "\n" in document.text.strip()


def _indentation(document: Document, path: Path) -> str:
    """The blanks before a key that stands first on its line; of its parent's keys where it does not stand yet."""
    span = document.spans.get(path)
    if span is None:
        siblings = [place for place in document.spans if len(place) == len(path) and place[:-1] == path[:-1]]
        span = document.spans[siblings[0]] if siblings else None
    if span is None:
        return "  " * len(path)
    line = document.text.rfind("\n", 0, span.key) + 1
    before = document.text[line : span.key]
    return before if not before.strip() else ""


def _insert(document: Document, path: Path, value: Any) -> Change | None:
    """A new key, after the last one of its section."""
    parent, text = path[:-1], document.text
    outer = document.spans.get(parent)
    if outer is None:
        return None
    name = str(path[-1])
    siblings = [place for place in document.spans if len(place) == len(path) and place[:-1] == parent]
    last = max((document.spans[place] for place in siblings), key=lambda span: span.end, default=None)
    if document.syntax == "yaml" and not _flow(document, parent):
        return _insert_line(document, path, value)
    member = f"{json.dumps(name) if document.syntax == 'json' else name}: {_written(document, path, value)}"
    if last is None:
        if text[outer.start : outer.start + 1] != "{":
            return None
        return outer.start + 1, outer.start + 1, member
    line = text.rfind("\n", 0, last.key) + 1
    own_line = not text[line : last.key].strip() and line > 0
    between = f",\n{text[line : last.key]}" if own_line else ", "
    return last.end, last.end, between + member


def _insert_line(document: Document, path: Path, value: Any) -> Change | None:
    """A new line before the first key of a block of YAML."""
    siblings = [place for place in document.spans if len(place) == len(path) and place[:-1] == path[:-1]]
    if not siblings:
        return None
    first = min(document.spans[place].key for place in siblings)
    line = document.text.rfind("\n", 0, first) + 1
    indentation = document.text[line:first]
    if indentation.strip():
        return None
    return first, first, f"{path[-1]}: {_written(document, path, value)}\n{indentation}"


def _remove_member(text: str, span: Span) -> Change:
    """A member of a JSON object, with its comma, and its line where nothing else stands on it."""
    start, end = span.key, span.end
    after = end + len(text[end:]) - len(text[end:].lstrip(" \t\r\n"))
    if text[after : after + 1] == ",":
        end = after + 1
    else:
        before = text[:start].rstrip(" \t\r\n")
        if before.endswith(","):
            return len(before) - 1, end, ""
    line = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end
    if not text[line:start].strip() and not text[end:line_end].strip() and line_end < len(text):
        return line, line_end + 1, ""
    while text[end : end + 1] == " ":
        end += 1
    return start, end, ""


def _remove_lines(text: str, span: Span) -> Change:
    """An entry of a block of YAML: its lines, with a comment behind the value."""
    line = text.rfind("\n", 0, span.key) + 1
    end = max(span.end, span.key_end)
    if end > line and text[end - 1] == "\n":  # the end of a block is the beginning of the next line
        return line, end, ""
    line_end = text.find("\n", end)
    return line, len(text) if line_end < 0 else line_end + 1, ""
