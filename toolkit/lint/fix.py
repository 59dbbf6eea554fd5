"""--fix: the smallest change of the text that fixes a finding. Order, indentation and comments are kept."""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from toolkit.config.source_text import Path
from toolkit.lint.document import ConfigDocument, NotAConfigError, Span, read_json, read_yaml
from toolkit.lint.finding import Edit, Finding, Severity, dotted, shown

_MOST_ROUNDS = 200
_ORDER = list(Severity)


Lint = Callable[[str], tuple[ConfigDocument, list[Finding]]]
"""Reads a text and returns its findings."""


class Fixed(NamedTuple):
    """A fixed text, and the changes that were made."""

    text: str
    changes: list[str]


def fix(document: ConfigDocument, lint: Lint) -> Fixed:
    """Fix one finding at a time and lint again after each: one fix may resolve several findings.

    A fix after which lint finds an error or a warning that was not there is applied only with the fixes of those.
    """
    text = document.text
    changes = []
    tried: set[tuple[str, Path, str]] = set()
    for _ in range(_MOST_ROUNDS):
        document, findings = lint(text)
        open_findings = [finding for finding in findings if finding.edits and _identity(finding) not in tried]
        if not open_findings:
            break
        finding = min(open_findings, key=partial(_priority, document))
        tried.add(_identity(finding))
        fixed = _fix_one(document, finding, _rules(findings), lint)
        if fixed is not None:
            tried.discard(_identity(finding))  # a later fix may bring it back
            text = fixed.text
            changes += fixed.changes
    return Fixed(text, changes)


def _fix_one(
    document: ConfigDocument, finding: Finding, known: Counter[str], lint: Lint, depth: int = 3
) -> Fixed | None:
    """Fix a finding, and what this reveals; None if then something is found that is not among the known rules."""
    try:
        new = _apply_all(document, finding.edits)
        if new is None or new == document.text:
            return None
        document, after = lint(new)
    except NotAConfigError:
        return None
    if _identity(finding) in map(_identity, after):
        return None
    change = f"{finding.rule.id} {_description(finding)}"
    revealed = _rules(after) - known
    if not revealed:
        return Fixed(new, [change])
    following = next(
        (consequence for consequence in after if consequence.edits and consequence.rule.id in revealed), None
    )
    rest = _fix_one(document, following, known, lint, depth - 1) if following and depth else None
    return rest and Fixed(rest.text, [change, *rest.changes])


def write(path: FilePath, text: str) -> None:
    """Replace a file atomically: a reader sees the old text or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode & 0o7777)
        os.replace(name, path)
    except BaseException:
        FilePath(name).unlink(missing_ok=True)
        raise


def _priority(document: ConfigDocument, finding: Finding) -> tuple[bool, int]:
    """Sort key: new keys come last, as another fix may add them; before that, errors come first."""
    adds_key = any(edit.kind == "set" and edit.path not in document.spans for edit in finding.edits)
    return adds_key and len(finding.edits) == 1, _ORDER.index(finding.severity)


def _identity(finding: Finding) -> tuple[str, Path, str]:
    return finding.rule.id, finding.path, finding.message


def _rules(findings: list[Finding]) -> Counter[str]:
    """Count the errors and warnings of each rule. Their messages change with their neighbors."""
    return Counter(finding.rule.id for finding in findings if finding.severity is not Severity.INFO)


def _description(finding: Finding) -> str:
    texts = {
        "set": "{0} set to {1}",
        "rename": "{0} renamed to {2}",
        "remove": "{0} removed",
        "delete": "a character removed",
    }
    described = (texts[edit.kind].format(dotted(edit.path), shown(edit.value), edit.value) for edit in finding.edits)
    return ", ".join(described)


def _apply_all(document: ConfigDocument, edits: tuple[Edit, ...]) -> str | None:
    """Apply all edits of a finding, each to the text that the one before left; None if one of them does not apply."""
    read = read_json if document.syntax == "json" else read_yaml
    for edit in edits:
        change = _change(document, edit)
        if change is None:
            return None
        start, end, new = change
        document = read(document.text[:start] + new + document.text[end:], document.file)
    return document.text


Change = tuple[int, int, str]


def _change(document: ConfigDocument, edit: Edit) -> Change | None:
    if edit.kind == "delete":
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
    if document.syntax == "json" or _flow(document, edit.path[:-1]):
        return _remove_member(document.text, span)
    return _remove_lines(document.text, span)


def _flow(document: ConfigDocument, path: Path) -> bool:
    """Return whether a mapping is written in braces."""
    span = document.spans[path]
    return document.text[span.start : span.start + 1] == "{"


def _written(document: ConfigDocument, path: Path, value: Any) -> str:
    """Return a value in the syntax of the file."""
    if document.syntax == "yaml" and isinstance(value, str):
        plain = value.replace("_", "").isalnum() and value.lower() not in ("no", "off", "on", "yes", "y", "n", "true")
        return value if plain and not value[0].isdigit() else f"'{value}'"
    if isinstance(value, dict) and value and document.syntax == "json" and "\n" in document.text.strip():
        outer = _indentation(document, path)
        lines = json.dumps(value, indent=len(outer) // max(len(path), 1) or 2).split("\n")
        return ("\n" + outer).join(lines)
    return json.dumps(value, ensure_ascii=False)


def _indentation(document: ConfigDocument, path: Path) -> str:
    """Return the indentation of a key that begins its line; of its siblings if it is not in the text yet."""
    span = document.spans.get(path)
    if span is None:
        siblings = _siblings(document, path)
        if not siblings:
            return "  " * len(path)
        span = siblings[0]
    line = document.text.rfind("\n", 0, span.key) + 1
    before = document.text[line : span.key]
    return before if not before.strip() else ""


def _siblings(document: ConfigDocument, path: Path) -> list[Span]:
    return [span for place, span in document.spans.items() if len(place) == len(path) and place[:-1] == path[:-1]]


def _insert(document: ConfigDocument, path: Path, value: Any) -> Change | None:
    """Insert a key after the last one of its section."""
    parent = path[:-1]
    text = document.text
    outer = document.spans.get(parent)
    if outer is None:
        return None
    name = str(path[-1])
    last = max(_siblings(document, path), key=lambda span: span.end, default=None)
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


def _insert_line(document: ConfigDocument, path: Path, value: Any) -> Change | None:
    """Insert a line before the first key of a block of YAML."""
    siblings = _siblings(document, path)
    if not siblings:
        return None
    first = min(span.key for span in siblings)
    line = document.text.rfind("\n", 0, first) + 1
    indentation = document.text[line:first]
    if indentation.strip():
        return None
    return first, first, f"{path[-1]}: {_written(document, path, value)}\n{indentation}"


def _remove_member(text: str, span: Span) -> Change:
    """Remove a member of a JSON object with its comma, and its line if nothing else is on it."""
    start = span.key
    end = span.end
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
    """Remove an entry of a block of YAML: its lines, with a comment after the value."""
    line = text.rfind("\n", 0, span.key) + 1
    end = max(span.end, span.key_end)
    if end > line and text[end - 1] == "\n":  # the end of a block is the beginning of the next line
        return line, end, ""
    line_end = text.find("\n", end)
    return line, len(text) if line_end < 0 else line_end + 1, ""
