"""Lint of one document: which config it holds, who starts it, and what every rule says."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from toolkit.dsconfig.lint.document import Document, NotAConfigError
from toolkit.dsconfig.lint.finding import Edit, Finding, Found, Mark, Path, Severity
from toolkit.dsconfig.lint.rules import CHECKS, RULES, accelerate
from toolkit.dsconfig.lint.rules.auto import REPLACED
from toolkit.dsconfig.lint.view import Facts, Runner, View

_ORDER = list(Severity)


def is_accelerate(value: Any) -> bool:
    """Whether a mapping is a config file of accelerate."""
    return isinstance(value, Mapping) and bool(
        {"distributed_type", "deepspeed_config", "compute_environment", "main_training_function"} & value.keys()
    )


def inspect(document: Document, facts: Facts, *, runner: Runner | None = None) -> list[Finding]:
    """Every finding of a document, in the order of the text. Raises NotAConfigError for what is no config at all.

    `runner` is who starts the run; None guesses it from the file.
    """
    if not isinstance(document.value, Mapping):
        kind = {list: "a list", str: "a text", type(None): "empty"}.get(type(document.value), "a single value")
        raise NotAConfigError(f"{document.file}: {kind}, but a config is an object with keys. Name another file.")
    found = [_place(document, item, offset) for offset, item in document.found if item.rule != "DS005"]
    if is_accelerate(document.value):
        found += _accelerate(document, facts)
    else:
        facts = replace(facts, runner=runner or guess_runner(document.value, facts))
        found += [_place(document, item) for item in examine(document.value, facts)]
    twice = [item for _, item in document.found if item.rule == "DS005"]
    found += [_place(document, _given_twice(item, facts.runner)) for item in twice]
    once = {(finding.rule.id, finding.mark, finding.message): finding for finding in found}
    return sorted(once.values(), key=lambda finding: (finding.mark, _ORDER.index(finding.severity), finding.rule.id))


def examine(config: Mapping[str, Any], facts: Facts) -> Iterator[Found]:
    """What the rules say about a DeepSpeed config."""
    view = View(config, facts)
    for check in CHECKS:
        yield from check(view)
    if facts.runner in ("trainer", "accelerate"):
        yield from accelerate.check_config(config, facts.mixed_precision, from_file=True)


def guess_runner(config: Mapping[str, Any], facts: Facts) -> Runner:
    """The Trainer where its arguments are given, or where the file has `auto` that it replaces; else a script."""
    if facts.recipe is not None:
        return "toolkit"
    if facts.trainer:
        return "trainer"
    view = View(config, facts)
    return "trainer" if any(view.get(name) == "auto" for name in REPLACED["trainer"]) else "deepspeed"


def _accelerate(document: Document, facts: Facts) -> list[Finding]:
    """The file of accelerate, and the DeepSpeed config that follows from its keys."""
    value = document.value
    found = [_place(document, item) for item in accelerate.check(document, facts.gpus)]
    if accelerate.config_file(value) is not None or not isinstance(value.get("deepspeed_config"), Mapping):
        return found
    derived = accelerate.derive(value)
    facts = within_accelerate(value, facts)
    view = View(derived.config, facts)
    for check in CHECKS:
        for item in check(view):
            if item.rule.startswith("DS1") or (item.rule, item.path) == ("DS709", ()):
                continue  # names are accelerate's own
            edits = tuple(
                edit._replace(path=origin) for edit in item.edits if (origin := derived.origin.get(edit.path))
            )
            edits = edits if len(edits) == len(item.edits) and all(edit.kind != "rename" for edit in edits) else ()
            path = item.path
            while path not in derived.origin:
                path = path[:-1]
            found.append(_place(document, item._replace(path=derived.origin[path], edits=edits)))
    return found


def within_accelerate(value: Mapping[str, Any], facts: Facts) -> Facts:
    """What a config of accelerate says about the DeepSpeed config that it starts."""
    precision = value.get("mixed_precision")
    ranks = value.get("num_processes")
    gpus = facts.gpus or (ranks if isinstance(ranks, int) and ranks > 0 else None)
    word = precision if isinstance(precision, str) else None
    return replace(facts, runner="accelerate", gpus=gpus, mixed_precision=word)


def _given_twice(item: Found, runner: Runner) -> Found:
    if runner in ("trainer", "accelerate"):
        return item._replace(severity=Severity.WARNING, effect="JSON readers keep the last one and say nothing.")
    return item


_AT_THE_KEY = ("DS1", "AC1")


def _place(document: Document, item: Found, offset: int | None = None) -> Finding:
    rule = RULES[item.rule]
    at_key = rule.id.startswith(_AT_THE_KEY) or rule.id == "DS005"
    mark: Mark = document.place(item.path, key=at_key) if offset is None else document.mark(offset)
    edits: tuple[Edit, ...] = item.edits
    path: Path = item.path
    return Finding(
        rule=rule,
        file=document.file,
        mark=mark,
        path=path,
        severity=item.severity or rule.severity,
        message=item.message,
        effect=item.effect or rule.effect,
        mend=item.mend or rule.mend,
        edits=edits,
    )
