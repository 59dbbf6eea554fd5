"""DS1: unknown, removed, renamed and misplaced keys."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from toolkit.config.source_text import Path
from toolkit.lint.finding import ERROR, INFO, WARNING, Edit, Severity, Violation, dotted, remove, rename
from toolkit.lint.key_schema import FACTS, Node, homes, lookup, members, misspelled, schema
from toolkit.lint.values import problem
from toolkit.lint.view import View

_FACTS = FACTS["deepspeed"]
_COMMENT_NAMES = ("comment", "comments", "note", "notes", "description")
_NEAR = 0.75
_REMOTE = 0.6
"""Similarity of two keys (difflib's ratio) of which one is probably the other, or may be."""


def check(view: View) -> Iterator[Violation]:
    """Check every key against the schema."""
    yield from _section((), view.config, {"section": "lenient", "keys": schema()["keys"]}, view)
    yield from _without_effect(view)


def _section(path: Path, config: Mapping[str, Any], node: Node, view: View) -> Iterator[Violation]:
    known = members(node)
    removed = schema()["removed"]
    for key, value in config.items():
        here = (*path, key)
        if ".".join(map(str, here)) in removed:
            off = not value or (isinstance(value, dict) and not value.get("enabled", True))
            message = f"{dotted(here)} belongs to a feature that was removed"
            yield Violation("DS104", here, message, edits=remove(here) if off else ())
            continue
        if key in _FACTS["old_names"] and not path:
            yield from _old(here, value, view)
            if key not in known or view.get(_FACTS["old_names"][key]) is not None:
                continue  # it is not read
        if key in known:
            yield from _known(here, key, config, known[key])
            if ".".join(map(str, here)) in schema()["unread"] and value != known[key].get("default"):
                yield Violation("DS114", here, f"{dotted(here)} has no effect").removing()
            child = known[key]
            if child.get("section") in ("strict", "lenient") and isinstance(value, Mapping):
                yield from _section(here, value, child, view)
        else:
            yield _unknown(here, value, node, view)


def _old(path: Path, value: Any, view: View) -> Iterator[Violation]:
    new = _FACTS["old_names"][path[0]]
    can_rename = path[0] == "bfloat16" and not view.has("bf16")
    ignored = "; bf16 is given too, and is used" if path[0] == "bfloat16" and not can_rename else ""
    message = f"{path[0]} is the old name of {new}{ignored}"
    yield Violation("DS108", path, message, edits=rename(path, "bf16") if can_rename else ())


def _known(path: Path, key: str, config: Mapping[str, Any], node: Node) -> Iterator[Violation]:
    name = node.get("name")
    if name and name != key and name in config:
        yield Violation("DS107", (*path[:-1], name), f"{dotted(path)} is given as {name} too")
    old = node.get("deprecated")
    if not old:
        return
    by = old["by"]
    replacement = next(
        (alternative for alternative in config if alternative in (by, f"stage3_{by}") and old["moved"]), None
    )
    if replacement is not None and config[key] != "auto":
        yield Violation("DS106", path, f"{dotted(path)} is given together with {replacement}").removing()
        return
    message = f"{dotted(path)} is deprecated: {by.replace('gather_16bit', 'stage3_gather_16bit')} replaces it"
    yield Violation("DS105", path, message, edits=_replacement(path, config[key], by))


def _replacement(path: Path, value: Any, by: str) -> tuple[Edit, ...]:
    """Return what --fix writes for a deprecated key."""
    if not isinstance(value, bool):
        return ()
    if not value:
        return remove(path)
    if by in ("offload_optimizer", "offload_param"):
        return (Edit("remove", path), Edit("set", (*path[:-1], by), {"device": "cpu"}))
    if by == "gather_16bit_weights_on_model_save":
        return rename(path, f"stage3_{by}")
    return ()


def _unknown(path: Path, value: Any, node: Node, view: View) -> Violation:
    """Report a key that the schema does not have, by what it most likely is."""
    key = str(path[-1])
    is_at_top = len(path) == 1
    is_strict = node["section"] == "strict"
    severity = ERROR if is_strict and value != "auto" else WARNING
    if key.startswith(("_", "//", "#")) or key.lower() in _COMMENT_NAMES:
        return _violation("DS113", path, f"{dotted(path)} is read as a key", severity if is_strict else INFO)
    if is_at_top and (deepspeed_name := _FACTS["foreign_names"].get(key)):
        message = f"{key} is not a key of DeepSpeed; its name there is {deepspeed_name}"
        return _violation("DS109", path, message, severity)
    if path[0] == "pipeline" and key in _FACTS["unused_by_pipelines"]:
        return Violation("DS112", path, f"{dotted(path)} has no effect").removing()
    is_near_another = bool(get_close_matches(key, members(node), n=1, cutoff=_NEAR))
    home = None if is_near_another and is_at_top else _home(path, value)
    if home is not None:
        return _misplaced(path, value, home, severity, view)
    return _misspelled(path, node, severity, view)


def _misplaced(path: Path, value: Any, home: tuple[str, ...], severity: Severity, view: View) -> Violation:
    """Report a key that belongs in another section, and move it there if it is not there yet."""
    target = (*home, str(path[-1]))
    section = view.get(".".join(home)) if home else {}
    can_move = isinstance(section, Mapping) and not view.has(".".join(target))
    edits: tuple[Edit, ...] = (Edit("remove", path), Edit("set", target, value)) if can_move else ()
    where = dotted(home) if home else "the top level"
    return _violation("DS110", path, f"{dotted(path)} belongs in {where}", severity, edits)


def _misspelled(path: Path, node: Node, severity: Severity, view: View) -> Violation:
    """Report a key with the one that may be meant; rename it where only that can be meant."""
    key = str(path[-1])
    is_at_top = len(path) == 1
    if node["section"] == "strict":
        rule = "DS102"
    else:
        rule = "DS101" if is_at_top else "DS103"
    section = view.config if is_at_top else view.get(".".join(map(str, path[:-1])))
    known = members(node)
    meant = misspelled(key, known, section)
    closest = get_close_matches(key, known, n=1, cutoff=_NEAR) or get_close_matches(key, known, n=1, cutoff=_REMOTE)
    guess = meant or _FACTS["other_spellings"].get(key) or next(iter(closest), None)
    hint = f". Did you mean {guess}?" if guess else ""
    edits = rename(path, meant) if meant else ()
    return _violation(rule, path, f"{dotted(path)} is not a key of DeepSpeed{hint}", severity, edits)


def _violation(rule: str, path: Path, message: str, severity: Severity, edits: tuple[Edit, ...] = ()) -> Violation:
    effect = None
    if severity is ERROR and rule != "DS102":
        effect = "DeepSpeed raises ValidationError: this section takes no other keys."
    elif rule == "DS102" and severity is WARNING:
        effect = 'DeepSpeed drops it, because its value is "auto".'
    return Violation(rule, path, message, effect=effect, severity=severity, edits=edits)


def _home(path: Path, value: Any) -> tuple[str, ...] | None:
    """Return the section that a misplaced key belongs to, if there is only one."""
    key = str(path[-1])
    section = str(path[0]) if len(path) == 2 else ""
    if key in _FACTS["inside_params"].get(section, ()):
        return (section, "params")
    here = ".".join(map(str, path[:-1]))
    sections = [name for name in homes().get(key, []) if name != here]
    if len(sections) != 1 or key in path[:-1]:
        return None
    home = tuple(part for part in sections[0].split(".") if part)
    node = lookup((*home, key)) or {}
    value_fits = isinstance(value, Mapping) if "section" in node else problem(node, value) is None
    return home if value_fits else None


def _without_effect(view: View) -> Iterator[Violation]:
    """Report the keys of zero_optimization that the stage does not use, as one finding."""
    zero = view.section("zero_optimization")
    stage = view.stage
    idle = [key for key, value in zero.items() if _is_idle(key, value, view)]
    if idle and isinstance(zero.get("stage", 0), int):
        rest = f" and {len(idle) - 1} more" if len(idle) > 1 else ""
        verb = "has" if len(idle) == 1 else "have"
        where = f"under ZeRO-{stage}" if stage else "without ZeRO"
        edits = tuple(Edit("remove", ("zero_optimization", key)) for key in idle)
        path = ("zero_optimization", idle[0])
        yield Violation("DS111", path, f"{dotted(path)}{rest} {verb} no effect {where}", edits=edits)


def _is_idle(key: str, value: Any, view: View) -> bool:
    """Return whether a key of zero_optimization has a value of its own that the stage does not use."""
    node = members(schema()["keys"]["zero_optimization"]).get(key, {})
    has_rules = key in _FACTS["with_rules_of_their_own"] or key.startswith("zero_")
    is_saved_by_accelerate = view.is_tensor_parallel and "gather_" in key
    if not node or has_rules or is_saved_by_accelerate:
        return False
    is_of_stage_3 = key.startswith("stage3_") or "name" in node or key in _FACTS["only_stage_3"]
    if view.stage == 0:
        is_unread = True
    elif view.stage == 3:
        is_unread = key in _FACTS["only_stages_1_and_2"]
    else:
        is_unread = is_of_stage_3
    return is_unread and (value != node.get("default") or key.startswith("stage3_"))
