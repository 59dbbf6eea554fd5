"""Findings as text for people, as JSON for programs, and as annotations of GitHub."""

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from toolkit.lint.finding import Finding, Rule, Severity
from toolkit.units import plural

_COLORS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "blue"}
_INDENT = "    "
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def text(findings: Sequence[Finding], style: Any, width: int | None = None) -> list[str]:
    """One block a finding, wrapped at `width`. `style(text, **how)` colors, as click's does."""
    lines = []
    for finding in findings:
        place = style(f"{finding.file}:{finding.mark.line}:{finding.mark.column}", bold=True)
        word = style(str(finding.severity), fg=_COLORS[finding.severity], bold=True)
        fixable = style(" [--fix]", fg="green") if finding.edits else ""
        lines.append(f"{place}: {word} {style(finding.rule.id, fg='cyan')}: {finding.message}{fixable}")
        lines += _wrapped(finding.effect, width)
        fix = _wrapped(f"fix: {finding.fix}", width)
        lines += [fix[0].replace("fix:", style("fix:", fg="green"), 1), *fix[1:]]
        lines += [style(f"{_INDENT}see {source}", dim=True) for source in finding.rule.sources]
    return lines


def _wrapped(line: str, width: int | None) -> list[str]:
    if width is None:
        return [_INDENT + line]
    return textwrap.wrap(line, width, initial_indent=_INDENT, subsequent_indent=_INDENT, break_long_words=False)


def summary(findings: Sequence[Finding], files: int) -> str:
    """'3 files: 1 error, 2 warnings, 0 infos (2 can be fixed with --fix)'."""
    count = Counter(finding.severity for finding in findings)
    fixable = sum(bool(finding.edits) for finding in findings)
    head = f"{plural(files, 'file')}: "
    if not findings:
        return head + "nothing found"
    counts = ", ".join(plural(count[severity], str(severity)) for severity in Severity if count[severity])
    return head + counts + (f" ({fixable} can be fixed with --fix)" if fixable else "")


def as_json(findings: Sequence[Finding], files: int, version: str) -> str:
    """Render everything as JSON, for a program."""
    entries = [
        {
            "file": finding.file,
            "line": finding.mark.line,
            "column": finding.mark.column,
            "rule": finding.rule.id,
            "severity": finding.severity,
            "path": list(finding.path),
            "message": finding.message,
            "effect": finding.effect,
            "fix": finding.fix,
            "sources": list(finding.rule.sources),
            "fixable": bool(finding.edits),
        }
        for finding in findings
    ]
    return json.dumps({"deepspeed": version, "files": files, "findings": entries}, indent=2, ensure_ascii=False)


def github(findings: Sequence[Finding]) -> list[str]:
    """Workflow commands, which GitHub shows at the line of a pull request."""
    lines = []
    for finding in findings:
        place = f"file={_property(finding.file)},line={finding.mark.line},col={finding.mark.column}"
        body = _data(f"{finding.message}\n{finding.effect}\n{finding.fix}")
        lines.append(f"::{_LEVELS[finding.severity]} {place},title={_property(finding.rule.id)}::{body}")
    return lines


def catalogue(groups: Sequence[tuple[str, Sequence[Rule]]], style: Any) -> list[str]:
    """Render the rules, one a line."""
    lines = []
    for title, rules in groups:
        lines.append(style(title, bold=True))
        for rule in rules:
            word = style(f"{rule.severity:<7}", fg=_COLORS[rule.severity])
            lines.append(f"  {style(rule.id, fg='cyan')}  {word}  {rule.title}{' [--fix]' if rule.fixable else ''}")
    return lines


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
