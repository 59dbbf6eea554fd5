"""Rules without code: a row of rules.json has the condition, or the merge with a recipe found the conflict (RC)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.lint.finding import TABLE, Violation
from toolkit.lint.view import View


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Condition in which a rule that needs no code of its own reports a key: every field that is set must hold."""

    keys: tuple[str, ...]
    """Dotted keys; each is tested and reported by itself."""
    value: str | tuple[Any, ...] | None = None
    """`written`, `on` or `off` (a switch, as pydantic reads it), or the values that are reported."""
    above: float = -math.inf
    below: float = math.inf
    """The value of the key must lie between `above` and `below`; a value that is not a number counts as 0."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages in which the key is reported."""
    precision: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    """Other keys and what each must be, as for `value`."""
    without: str | None = None
    """Another key that must not be written."""
    offload: str | None = None
    """`optimizer` or `param`, which must be offloaded."""
    pipeline: bool = False
    """Whether the key is reported with pipeline stages only."""
    experts: bool = False
    """Whether the key is reported only where ranks share out experts."""
    nodes: int | None = None
    min_gpus: int = 0
    not_for: tuple[str, ...] = ()
    """Runners whose configs are right."""
    since: tuple[int, ...] = ()
    """The first version of DeepSpeed in which the key is reported."""
    before: tuple[int, ...] = (1 << 30,)
    """The first version of DeepSpeed in which the key is not reported any more, because the bug is fixed."""
    message: str = "{key} is on"
    """`{key}`, `{name}` (its last part), `{value}`, `{stage}`, `{gpus}` and `{version}` are filled in."""
    edit: Mapping[str, Any] = field(default_factory=dict)
    """What --fix does with the key: `{"remove": true}` or `{"set": value}`; empty without a fix."""


def _read_condition(row: Mapping[str, Any]) -> Condition:
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Condition(**fields)


CONDITIONS: tuple[tuple[str, Condition], ...] = tuple(
    (row["id"], _read_condition(when)) for rows in TABLE.values() for row in rows for when in row.get("when", ())
)
"""Conditions of the rules that only state facts: id and condition."""


def check(view: View) -> Iterator[Violation]:
    """Report every key that fulfills the condition of a rule, and every conflict with the recipe."""
    for rule, condition in CONDITIONS:
        if _applies(condition, view):
            for key in condition.keys:
                yield from _report(rule, condition, key, view)
    for path, message in view.context.conflicts:
        yield Violation("RC102" if path == ("scheduler",) else "RC101", path, message).removing()


def _applies(condition: Condition, view: View) -> bool:
    context = view.context
    return (
        view.stage in condition.stages
        and condition.since <= context.deepspeed < condition.before
        and (condition.precision is None or view.precision == condition.precision)
        and all(_is(view, key, wanted) for key, wanted in condition.where.items())
        and (condition.nodes is None or context.nodes == condition.nodes)
        and (condition.without is None or view.get(condition.without) is None)
        and (condition.offload is None or view.offload(condition.offload) != "none")
        and (view.has_pipeline or not condition.pipeline)
        and (view.has_experts or not condition.experts)
        and (context.gpus or 0) >= condition.min_gpus
        and context.runner not in condition.not_for
    )


def _is(view: View, key: str, wanted: Any) -> bool:
    key = _written_key(view, key)
    if isinstance(wanted, str):
        return view.has(key) if wanted == "written" else view.is_on(key) is (wanted == "on")
    value = view.get(key)
    return any(type(value) is type(allowed) and value == allowed for allowed in wanted)


def _written_key(view: View, key: str) -> str:
    return key.replace("bf16.", f"{view.bf16}.", 1) if key.startswith("bf16.") else key


def _report(rule: str, condition: Condition, key: str, view: View) -> Iterator[Violation]:
    key = _written_key(view, key)
    if condition.value is not None and not (view.has(key) and _is(view, key, condition.value)):
        return
    if not condition.above < (view.number(key) or 0) < condition.below:
        return
    path = tuple(key.split("."))
    version = ".".join(map(str, view.context.deepspeed))
    known = {"key": key, "name": path[-1], "value": view.get(key), "stage": view.stage, "gpus": view.context.gpus}
    violation = Violation(rule, path, condition.message.format(**known, version=version))
    if condition.edit:
        violation = violation.removing() if "remove" in condition.edit else violation.setting(condition.edit["set"])
    yield violation
