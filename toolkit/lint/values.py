"""Whether DeepSpeed would accept a value for a key, and how it would convert it.

Sections that DeepSpeed declares are validated by pydantic, which converts what it can: "true" is true, "500" is 500, 1
is true. Other sections are not validated, and the value is used as it is.
"""

import math
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

from toolkit.lint.finding import shown
from toolkit.lint.key_schema import Node

_INT_TEXT = re.compile(r"\s*[-+]?[0-9]+(?:_[0-9]+)*(?:\.0*)?\s*")
_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE = frozenset({"0", "off", "f", "false", "n", "no"})
_MISSING: Any = object()

_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "list": "a list",
    "object": "an object",
    "null": "null",
}
_BOUNDS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}


class ValueProblem(NamedTuple):
    """Why a value is wrong. `kind`: type, text, fraction, range, word, truth, null."""

    kind: str
    message: str
    refused: bool
    """Whether DeepSpeed rejects the value; otherwise it converts the value, or uses it as it is."""
    fixed: Any = _MISSING

    @property
    def is_fixable(self) -> bool:
        """Whether exactly one value can have been intended."""
        return self.fixed is not _MISSING


def allowed(node: Node) -> str:
    """'a whole number from 0' or 'none, cpu or nvme'."""
    if node.get("words"):
        words = [str(word) for word in node["words"]]
        return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    kinds = [_NAMES[kind] for kind in node.get("types", ["object"]) if kind in _NAMES]
    bounds = [f"{text} {node[bound]}" for bound, text in _BOUNDS.items() if bound in node]
    return " or ".join(kinds) + (", " + " and ".join(bounds) if bounds else "")


def problem(node: Node, value: Any) -> ValueProblem | None:
    """Return what is wrong with `value` for a key that is not a section; None if it is as declared."""
    kinds = node.get("types", ["any"])
    if "any" in kinds or (value is None and "null" in kinds):
        return None
    if value is None:
        return ValueProblem("null", f"null, but {allowed(node)} is needed", True)
    wanted = [kind for kind in kinds if kind != "null"]
    if len(wanted) > 1:  # a union: fine if one of them accepts it
        problems = [problem({**node, "types": [kind]}, value) for kind in wanted]
        return None if None in problems else problems[0]
    wrong = _CHECKS[wanted[0]](node, value) if wanted else None
    return wrong or _word(node, value) or _range(node, value)


def as_number(text: Any) -> int | float | None:
    """Return the finite number that a string spells, as an int if it is whole."""
    if not isinstance(text, str) or len(text) > 40 or "_" in text:
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 2**53 and _INT_TEXT.fullmatch(text) else number


def is_number(value: Any) -> TypeGuard[int | float]:
    """Return whether a value is a number, not true or false."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong(node: Node, value: Any) -> ValueProblem:
    return ValueProblem("type", f"{shown(value)} is not {allowed({**node, 'words': None})}", True)


def _counted(value: bool, number: float) -> ValueProblem:
    return ValueProblem("type", f"{shown(value)} counts as {number}", False, number)


def _int(node: Node, value: Any) -> ValueProblem | None:
    if node.get("exact") and isinstance(value, str):
        return _wrong(node, value)
    if isinstance(value, bool):
        if node.get("no_truth"):
            return _wrong(node, value)
        return _range(node, int(value)) or _counted(value, int(value))
    if isinstance(value, float):
        if not math.isfinite(value) or not value.is_integer():
            return ValueProblem("fraction", f"{shown(value)} is not a whole number", True)
        return None
    if isinstance(value, str):
        return _spelled(node, value, bool(_INT_TEXT.fullmatch(value)) and value.strip()[-1:] != ".")
    return None if isinstance(value, int) else _wrong(node, value)


def _float(node: Node, value: Any) -> ValueProblem | None:
    if node.get("finite") and isinstance(value, (str, float)) and not math.isfinite(_as_float(value)):
        return _wrong(node, value)
    if isinstance(value, bool):
        if node.get("no_truth"):
            return _wrong(node, value)
        return _range(node, float(value)) or _counted(value, float(value))
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return _spelled(node, value, False)
        return _spelled(node, value, _range(node, number) is None)
    return None if isinstance(value, (int, float)) else _wrong(node, value)


def _as_float(value: str | float) -> float:
    try:
        return float(value)
    except ValueError:
        return 0.0


def _spelled(node: Node, value: str, converted: bool) -> ValueProblem:
    number = as_number(value)
    if number is None and not converted:
        return _wrong(node, value)
    whole = "int" in node.get("types", [])
    fixed: Any = _MISSING
    if number is not None and (not whole or float(number).is_integer()):
        fixed = int(number) if whole else number
        converted = converted and not _range(node, fixed)
    return ValueProblem("text", f"{shown(value)} is a string, not a number", not converted, fixed)


def _bool(node: Node, value: Any) -> ValueProblem | None:
    if isinstance(value, bool):
        return None
    if is_number(value) and value in (0, 1):
        return ValueProblem("truth", f"{shown(value)} counts as {'true' if value else 'false'}", False, bool(value))
    if isinstance(value, str) and (lower := value.lower()) in _TRUE | _FALSE:
        return ValueProblem("truth", f"{shown(value)} is a string, not true or false", False, lower in _TRUE)
    return _wrong(node, value)


def _typed(kind: type) -> Callable[[Node, Any], ValueProblem | None]:
    return lambda node, value: None if isinstance(value, kind) else _wrong(node, value)


def _list(node: Node, value: Any) -> ValueProblem | None:
    if not isinstance(value, list):
        return _wrong(node, value)
    items = node.get("items")
    return next((wrong for element in value if items and (wrong := problem(items, element))), None)


def _python(node: Node, value: Any) -> ValueProblem | None:
    return ValueProblem("type", f"{shown(value)}: only a Python script can set this, with an object of torch", True)


def _declared_word(node: Node, value: Any) -> ValueProblem | None:
    words = node["words"]
    if isinstance(value, bool) and int(value) in words:
        return _counted(value, int(value))
    if isinstance(value, str) and as_number(value) in words:
        return ValueProblem("text", f"{shown(value)} is a string, not a number", False, as_number(value))
    return None


def _word(node: Node, value: Any) -> ValueProblem | None:
    words = node.get("words")
    if not words:
        return None
    spelled = value
    if node.get("any_case") and isinstance(value, str):
        spelled = next((word for word in words if str(word).lower() == value.lower()), value)
    if not isinstance(value, (str, int, float)) or spelled not in words:
        return ValueProblem("word", f"{shown(value)} is not {allowed(node)}", True)
    return None


def _range(node: Node, value: Any) -> ValueProblem | None:
    if not is_number(value):
        return None
    if any(bound in node and not getattr(operator, bound)(value, node[bound]) for bound in _BOUNDS):
        return ValueProblem("range", f"{shown(value)} is not {allowed(node)}", True)
    return None


_CHECKS = {
    "int": _int,
    "float": _float,
    "bool": _bool,
    "str": _typed(str),
    "list": _list,
    "object": _typed(dict),
    "word": _declared_word,
    "python": _python,
}
