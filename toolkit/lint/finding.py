"""Rules as rules.json has them, their findings, and the edits that fix them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from toolkit.config import source_text
from toolkit.config.source_text import Mark, Path, printable, shorten


class Severity(StrEnum):
    """`error`: the run stops. `warning`: it runs, but not as the file says. `info`: it runs, and could run better."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


ERROR, WARNING, INFO = Severity


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One kind of mistake, a row of rules.json. Its id never changes meaning."""

    id: str
    severity: Severity
    title: str
    effect: str
    """Effect of the mistake on DeepSpeed, or on the program that starts it."""
    fix: str
    example: Mapping[str, Any] | str
    """A config that breaks the rule: a DeepSpeed config, or the text of a file."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts that must be known beside the example, as options of `dstk lint`: layout, model, gpus, runner (`--for`),
    …"""
    near: Mapping[str, Any] | str
    """A config close to the example that does not break the rule."""
    near_facts: Mapping[str, Any] | None = None
    """Facts that replace `facts` for `near`; None: the same facts."""
    claim: str
    """Result of a run of the example: the reader `raises`, the key is `ignored`, the result is the `same` as that of
    `near`, or it `changes`; else why no run on a CPU shows it. An error can be run."""
    sources: tuple[str, ...] = ()
    fixable: bool = False


def _read_rule(row: dict[str, Any]) -> Rule:
    known = {name: value for name, value in row.items() if name != "when"}
    return Rule(**known | {"severity": Severity(row["severity"]), "sources": tuple(row.get("sources", ()))})


TABLE = json.loads(FilePath(__file__).with_name("rules.json").read_text(encoding="utf-8"))
"""The content of rules.json: the title of each group of rules -> its rows."""
GROUPS = tuple((title, tuple(_read_rule(row) for row in rows)) for title, rows in TABLE.items())
"""The rules in the order of the documentation, with the title of each group."""
RULES: Mapping[str, Rule] = {rule.id: rule for _, rules in GROUPS for rule in rules}
"""Every rule by its id."""


class Edit(NamedTuple):
    """One change of a file: `set` a value (of a new key too), `rename` or `remove` a key."""

    kind: str
    path: Path
    value: Any = None


def set_to(path: Path, value: Any) -> tuple[Edit, ...]:
    """The edit that writes a value, under a new key if need be."""
    return (Edit("set", path, value),)


def rename(path: Path, name: str) -> tuple[Edit, ...]:
    """The edit that renames a key."""
    return (Edit("rename", path, name),)


def remove(path: Path) -> tuple[Edit, ...]:
    """The edit that removes a key with its value."""
    return (Edit("remove", path),)


class Violation(NamedTuple):
    """A check's report; None stands for the text or severity of the rule."""

    rule: str
    path: Path
    message: str
    effect: str | None = None
    fix: str | None = None
    severity: Severity | None = None
    edits: tuple[Edit, ...] = ()

    def setting(self, value: Any) -> "Violation":
        """Return the violation with a fix: another value at the same path."""
        return self._replace(edits=set_to(self.path, value))

    def removing(self) -> "Violation":
        """Return the violation with a fix: the key is removed."""
        return self._replace(edits=remove(self.path))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One mistake in one file, with its position."""

    rule: Rule
    file: str
    mark: Mark
    path: Path
    severity: Severity
    message: str
    effect: str
    fix: str
    edits: tuple[Edit, ...] = ()


def dotted(path: Path) -> str:
    """('optimizer', 'params', 'betas', 0) -> 'optimizer.params.betas[0]', safe to print."""
    return source_text.dotted(path) if path else "the file"


def shown(value: Any) -> str:
    """Return a value as JSON, shortened."""
    if isinstance(value, dict):
        return "{…}" if value else "{}"
    if isinstance(value, list) and len(str(value)) > 40:
        return "[…]"
    try:
        return printable(shorten(json.dumps(value, ensure_ascii=False), 48))
    except (TypeError, ValueError):
        return printable(shorten(str(value), 48))
