"""What a rule is, what it found, and how it would be mended."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

Path = tuple[str | int, ...]


class Severity(StrEnum):
    """`error`: the run stops. `warning`: it runs, but not as the file says. `info`: it runs, and could run better."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


ERROR, WARNING, INFO = Severity


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One kind of mistake. Its id never changes meaning."""

    id: str
    severity: Severity
    title: str
    """What is wrong."""
    effect: str
    """What DeepSpeed (or the program that starts it) does then."""
    mend: str
    """What to do."""
    example: Mapping[str, Any] | str
    """A config that breaks the rule: a DeepSpeed config, or the text of a file."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Facts without which the example is no mistake, as keyword arguments of `Facts`."""
    sources: tuple[str, ...] = ()
    """Public reports."""
    fixable: bool = False


class Edit(NamedTuple):
    """One change of a file: `set` a value (of a new key too), `rename` or `remove` a key."""

    kind: str
    path: Path
    value: Any = None


class Found(NamedTuple):
    """What the function behind a rule reports; what is left out is the rule's."""

    rule: str
    path: Path
    message: str
    effect: str | None = None
    mend: str | None = None
    severity: Severity | None = None
    edits: tuple[Edit, ...] = ()


class Mark(NamedTuple):
    """A place in a text, counted from 1 as editors do."""

    line: int
    column: int


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One mistake in one file."""

    rule: Rule
    file: str
    mark: Mark
    path: Path
    severity: Severity
    message: str
    effect: str
    mend: str
    edits: tuple[Edit, ...] = ()


def dotted(path: Path) -> str:
    """('optimizer', 'params', 'betas', 0) -> 'optimizer.params.betas[0]', safe to print."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += "." * bool(text) + printable(part)
    return text or "the file"


def printable(text: str, limit: int = 60) -> str:
    """On one line, shortened, without characters that a terminal would act on."""
    short = text if len(text) <= limit else f"{text[: limit - 15]}…{text[-14:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def shown(value: Any) -> str:
    """A value as a JSON file has it, shortened."""
    import json

    if isinstance(value, dict):
        return "{…}" if value else "{}"
    if isinstance(value, list) and len(str(value)) > 40:
        return "[…]"
    try:
        return printable(json.dumps(value, ensure_ascii=False), 48)
    except (TypeError, ValueError):
        return printable(str(value), 48)
