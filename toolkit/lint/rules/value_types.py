"""DS2: values of a wrong type, out of range, or quoted."""

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from toolkit.config.source_text import Path
from toolkit.lint.finding import ERROR, WARNING, Edit, Violation, dotted, remove, set_to, shown
from toolkit.lint.key_schema import FACTS, Node, members, schema
from toolkit.lint.values import ValueProblem, allowed, is_number, problem
from toolkit.lint.view import View

_RULES = {
    "type": "DS201",
    "text": "DS202",
    "range": "DS203",
    "fraction": "DS204",
    "word": "DS205",
    "truth": "DS206",
    "null": "DS207",
}
_FACTS = FACTS["deepspeed"]


def check(view: View) -> Iterator[Violation]:
    """Check every value against the schema, and the few with rules of their own."""
    sections = _section((), view.config, {"section": "lenient", "keys": schema()["keys"]}, view)
    for violation in chain(sections, _clipping(view), _read_in_code(view)):
        overwritten = violation.path == ("steps_per_print",) and view.context.runner in ("trainer", "accelerate")
        yield violation._replace(severity=WARNING, effect="accelerate overwrites it.") if overwritten else violation


def _section(path: Path, config: Mapping[str, Any], node: Node, view: View) -> Iterator[Violation]:
    known = members(node)
    for key, value in config.items():
        child = known.get(key)
        here = (*path, key)
        if child is None or (here == ("bfloat16",) and view.get("bf16") is not None):
            continue
        if value == "auto" and (node["section"] == "strict" or "section" not in child):
            continue  # the rules of `auto`
        if "section" in child:
            if isinstance(value, Mapping):
                yield from _section(here, value, child, view)
            else:
                yield from _no_section(here, value, child, view)
        elif (wrong := problem(child, value)) is not None:
            yield _report(here, wrong, child, node["section"] == "strict", view)


def _no_section(path: Path, value: Any, node: Node, view: View) -> Iterator[Violation]:
    name = ".".join(map(str, path))
    if value is None and (name in _FACTS["null_is_a_section"] or "null" in node.get("types", [])):
        return
    if name == "datastates_ckpt" and value is False:
        return
    if name == "zero_optimization" and isinstance(value, bool):
        rule = "HF110" if view.context.runner in ("trainer", "accelerate") else "DS209"
        violation = Violation(rule, path, f"zero_optimization={shown(value)} is an old form")
        yield violation.setting({"stage": int(value)})
        return
    violation = Violation("DS208", path, f"{dotted(path)}={shown(value)} is not a section")
    if isinstance(value, bool) and "enabled" in node["keys"]:
        violation = violation.setting({"enabled": value})
    yield violation.removing() if value is None else violation


def _report(path: Path, wrong: ValueProblem, node: Node, strict: bool, view: View) -> Violation:
    """Report a wrong value, with what its reader does: reject it, convert it, or use it as it is."""
    name = ".".join(map(str, path))
    stopped_by_trainer = (
        view.context.runner == "trainer" and wrong.kind == "truth" and name in FACTS["trainer"]["arguments"]
    )
    refused = stopped_by_trainer or (wrong.refused if strict else _is_refused_in_use(name, wrong, view))
    edits: tuple[Edit, ...] = set_to(path, wrong.fixed) if wrong.is_fixable else ()
    if wrong.kind == "null":
        edits = remove(path)
    violation = Violation(_RULES[wrong.kind], path, f"{dotted(path)}: {wrong.message}")
    if wrong.kind == "fraction" and strict:
        return violation._replace(effect="DeepSpeed raises ValidationError.", severity=ERROR)
    effect: str | None = None
    if not refused:
        effect = _effect_of_use(name, wrong, strict, view)
    elif wrong.kind == "text" and strict:
        effect = "DeepSpeed raises ValidationError: the string spells no such number."
    elif stopped_by_trainer:
        effect = "The Trainer compares it with its own argument, and stops."
    elif wrong.kind == "truth":
        effect = "DeepSpeed raises when it reads or first uses it."
    fix = f"Write {allowed(node)}." if wrong.kind in ("type", "range", "word", "truth") and allowed(node) else None
    return violation._replace(effect=effect, fix=fix, severity=ERROR if refused else WARNING, edits=edits)


def _is_refused_in_use(name: str, wrong: ValueProblem, view: View) -> bool:
    """Return whether DeepSpeed fails on a value that it does not validate, when it first uses it."""
    if name == "flops_profiler.profile_step" and view.is_on("flops_profiler.enabled"):
        return True
    if name == "data_types.buffer_dtype" and view.precision != "fp32":
        return True
    if name == "gradient_predivide_factor":
        return view.stage == 0  # ZeRO reduces elsewhere
    if wrong.kind == "truth" and name in _FACTS["truth_is_a_number"] and not isinstance(view.get(name), str):
        return False
    if wrong.kind == "type" and not wrong.refused:  # true as a number
        return False
    return name in _FACTS["checked_in_use"] and wrong.kind != "fraction"


def _effect_of_use(name: str, wrong: ValueProblem, strict: bool, view: View) -> str:
    """Say what DeepSpeed makes of a wrong value that it does not reject."""
    if strict:
        return "DeepSpeed converts it silently."
    if wrong.kind == "truth" and isinstance(view.get(name), str):
        return "DeepSpeed does not check it here: any non-empty string counts as true."
    return "DeepSpeed silently uses it as it is."


def _clipping(view: View) -> Iterator[Violation]:
    value = view.number("gradient_clipping")
    if value is not None and (math.isnan(value) or value < 0):
        message = f"gradient_clipping={shown(value)} switches clipping off"
        yield Violation("DS210", ("gradient_clipping",), message).setting(0.0)


def _read_in_code(view: View) -> Iterator[Violation]:
    """Check the values that DeepSpeed validates in code."""
    for name in ("steps_per_print", "sequence_parallel_size"):
        if is_number(number := view.get(name)) and number == 0:
            yield Violation("DS203", (name,), f"{name}: 0 is not a whole number, at least 1")
    name = "sequence_parallel_size"
    if view.has(name) and view.get(name) is None:
        yield Violation("DS207", (name,), f"{name}: null, but a whole number is needed").removing()
    for name in _FACTS["not_empty"]:
        if view.has(name) and not view.get(name):
            yield Violation("DS203", tuple(name.split(".")), f"{name}: a directory name is needed")
    fp32_modules = view.get("data_types.keep_in_fp32_modules", "auto")
    if fp32_modules != "auto" and not (
        isinstance(fp32_modules, list) and all(isinstance(name, str) for name in fp32_modules)
    ):
        path = ("data_types", "keep_in_fp32_modules")
        yield Violation("DS201", path, f'{dotted(path)}: {shown(fp32_modules)} is not "auto" or a list of names')
    modules = view.get("torch_autocast.lower_precision_safe_modules")
    if isinstance(modules, list) and not all(isinstance(name, str) and "." in name for name in modules):
        path = ("torch_autocast", "lower_precision_safe_modules")
        yield Violation("DS201", path, f"{dotted(path)}: each name must be that of a class with its package")
    if view.get("expert_parallel.load_balance_coeff") is not None:
        path = ("expert_parallel", "load_balance_coeff")
        yield Violation("DS203", path, f"{dotted(path)}: only null is supported")
    if view.is_on("fp16.enabled") and not view.number("fp16.loss_scale", 0):
        for key in ("loss_scale_window", "min_loss_scale"):
            if (view.number(f"fp16.{key}", 1) or 0) <= 0:
                message = f"fp16.{key}: {shown(view.get(f'fp16.{key}'))} is not more than 0"
                yield Violation("DS203", ("fp16", key), message)
