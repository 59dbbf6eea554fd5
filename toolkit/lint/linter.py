"""Lint files: find, read safely, check, fix, and follow the DeepSpeed config that a config of accelerate names."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.source_text import printable, shorten
from toolkit.files import read_text, reason_of
from toolkit.lint.document import MAX_BYTES, ConfigDocument, NotAConfigError, read_json, read_yaml
from toolkit.lint.finding import RULES, Edit, Finding, Severity, Violation
from toolkit.lint.fix import fix, write
from toolkit.lint.key_schema import schema
from toolkit.lint.other_programs import check as check_other
from toolkit.lint.other_programs import find, named_config, other_program
from toolkit.lint.rules import CHECKS
from toolkit.lint.rules import accelerate_file as accelerate
from toolkit.lint.rules.auto_values import REPLACED
from toolkit.lint.values import is_number
from toolkit.lint.view import LintContext, Runner, View

if TYPE_CHECKING:  # pydantic takes longer to import than a file to lint
    from toolkit.lint.recipe_context import RecipeContext

_YAML = (".yaml", ".yml")
_SUFFIXES = (".json", *_YAML)
_MOST_FILES = 2000
_TYPICAL_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "bf16", "fp16")


@dataclass(kw_only=True)
class LintResult:
    """The findings, the fixes, and the files that could not be read."""

    findings: list[Finding] = field(default_factory=list)
    changes: dict[str, list[str]] = field(default_factory=dict)
    """The changes that --fix made, by the name of the file."""
    problems: list[str] = field(default_factory=list)
    files: int = 0
    skipped_files: int = 0
    """Number of files in a directory that are not configs."""


@dataclass(frozen=True, kw_only=True)
class Linter:
    """Lints files with the same options."""

    context: LintContext = field(default_factory=LintContext)
    runner: Runner | None = None
    recipe: "RecipeContext | None" = None
    ignored: frozenset[str] = frozenset()
    fixes: bool = False

    def run(self, arguments: Iterable[str]) -> LintResult:
        """Lint every file once. A file that cannot be read is reported, and the others are linted."""
        result = LintResult()
        queue = [(path, in_directory, self.context, self.runner) for path, in_directory in _listed(arguments, result)]
        seen: set[Path] = set()
        for path, in_directory, context, runner in queue:
            if (resolved := _resolved(path)) in seen:
                continue
            seen.add(resolved)
            try:
                named = self._file(path, in_directory, context, runner, result)
            except NotAConfigError as error:
                if in_directory and not str(error).startswith(f"{name_of(path)}:"):
                    raise
                result.problems.append(str(error))
                continue
            if named is not None and named[0] not in [entry[0] for entry in queue if entry[1]]:
                queue.append((named[0], False, *named[1:]))
        return result

    def lint(self, document: ConfigDocument, context: LintContext, runner: Runner | None) -> list[Finding]:
        if self.recipe is not None and isinstance(document.value, dict) and not is_accelerate(document.value):
            conflicts = self.recipe.conflicts(document.value)
            context = replace(context, conflicts=conflicts, recipe=self.recipe.name)
        findings = check_document(document, context, runner=runner)
        return [finding for finding in findings if finding.rule.id not in self.ignored]

    def _file(
        self, path: Path, in_directory: bool, context: LintContext, runner: Runner | None, result: LintResult
    ) -> tuple[Path, LintContext, Runner | None] | None:
        """Lint one file. Return the DeepSpeed config that it names, with the context and the runner for it."""
        document = parse(path, read_config_text(path))
        if in_directory and not is_config(document):
            result.skipped_files += 1
            return None
        result.files += 1
        findings = self.lint(document, context, runner)
        if self.fixes and any(finding.edits for finding in findings):

            def again(text: str) -> tuple[ConfigDocument, list[Finding]]:
                read = parse(path, text)
                return read, self.lint(read, context, runner)

            fixed = fix(document, again)
            if fixed.changes:
                _write(path, fixed.text)
                result.changes[name_of(path)] = fixed.changes
                document, findings = again(fixed.text)
        result.findings += findings
        if not is_accelerate(document.value):
            program = other_program(document)
            _, config_path = named_config(document) or ("", None)
            if program is None or config_path is None:
                return None
            trainer = program["arguments"] | context.trainer
            return config_path, replace(context, trainer=trainer), runner or program.get("runner")
        named = accelerate.config_file(document.value)
        target = find(named, document.file) if named else None
        return (target, within_accelerate(document.value, context), "accelerate") if target else None


def _listed(arguments: Iterable[str], result: LintResult) -> list[tuple[Path, bool]]:
    """Return the files, and whether each was found in a directory. A directory without any is a problem."""
    files: list[tuple[Path, bool]] = []
    for argument in arguments:
        path = Path(argument)
        try:
            files += _below(path) if path.is_dir() else [(path, False)]
        except NotAConfigError as error:
            result.problems.append(str(error))
    return files


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError):
        return path


def _write(path: Path, text: str) -> None:
    try:
        write(path.resolve(), text)
    except OSError as error:
        reason = f"cannot be written ({error.strerror}). Check its permissions."
        raise NotAConfigError(f"{name_of(path)}: {reason}") from None


def _below(folder: Path) -> list[tuple[Path, bool]]:
    paths = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "node_modules")
        paths += [Path(root) / name for name in sorted(names) if name.lower().endswith(_SUFFIXES)]
        if len(paths) > _MOST_FILES:
            raise NotAConfigError(f"{name_of(folder)}: more than {_MOST_FILES} files. Name a folder with fewer.")
    if not paths:
        raise NotAConfigError(f"{name_of(folder)}: no *.json, *.yaml or *.yml in this directory. Name another one.")
    return [(path, True) for path in paths]


def name_of(path: Path) -> str:
    """Return a path that is safe to print."""
    return printable(shorten(str(path), 200))


def read_config_text(path: Path) -> str:
    """Read a small regular file. Raises NotAConfigError for anything else."""
    try:
        text = read_text(path, max_bytes=MAX_BYTES, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise NotAConfigError(f"{name_of(path)}: cannot be read ({reason_of(error)}). Give a config's path.") from None
    if "\0" in text:
        raise NotAConfigError(f"{name_of(path)}: a binary file. Give a JSON or YAML file.")
    return text


def parse(path: Path, text: str) -> ConfigDocument:
    """Parse a text as JSON or YAML by the suffix of its name. Raises NotAConfigError if it is neither."""
    name = name_of(path)
    return read_yaml(text, name) if path.suffix.lower() in _YAML else read_json(text, name)


def is_config(document: ConfigDocument) -> bool:
    """Return whether a file that was found in a directory is a config, not some other JSON or YAML."""
    value = document.value
    if not isinstance(value, dict) or document.syntax == "yaml" or is_accelerate(value):
        return is_accelerate(value)
    # Other files have a train_batch_size too, such as the Trainer's trainer_state.json.
    known = value.keys() & schema()["keys"].keys()
    return bool(known & set(_TYPICAL_KEYS)) and 2 * len(known) >= len(value)


_ORDER = list(Severity)


def is_accelerate(value: Any) -> bool:
    """Return whether a mapping is a config file of accelerate."""
    if not isinstance(value, Mapping):
        return False
    typical_keys = {"distributed_type", "compute_environment", "main_training_function"} & value.keys()
    return bool(typical_keys) or isinstance(value.get("deepspeed_config"), Mapping)


def check_document(document: ConfigDocument, context: LintContext, *, runner: Runner | None = None) -> list[Finding]:
    """Return every finding of a document, in the order of the text. Raises NotAConfigError for other files.

    `runner` is who starts the run; None: it is guessed from the file.
    """
    if not isinstance(document.value, Mapping):
        kind = {list: "a list", str: "a string", type(None): "empty"}.get(type(document.value), "a single value")
        raise NotAConfigError(f"{document.file}: {kind}, but a config is an object with keys. Name another file.")
    explicit = runner
    if is_accelerate(document.value):
        findings = _accelerate(document, context)
    elif (program := other_program(document)) is not None:
        return [_place(document, check_other(document, program))]
    else:
        inference = _INFERENCE.search(document.file.rpartition("/")[2]) is not None
        context = replace(context, runner=runner or guess_runner(document.value, context), inference=inference)
        findings = [_place(document, violation) for violation in check_config(document.value, context)]
    for offset, violation in document.violations:
        if not (explicit == "deepspeed" and violation.rule in _HJSON):
            place = None if violation.rule == "DS005" else offset
            findings.append(_place(document, _for_reader(violation, context.runner), place))
    unique = {(finding.rule.id, finding.mark, finding.message): finding for finding in findings}
    return sorted(unique.values(), key=lambda finding: (finding.mark, _ORDER.index(finding.severity), finding.rule.id))


def check_config(config: Mapping[str, Any], context: LintContext) -> Iterator[Violation]:
    """Apply every rule to a DeepSpeed config."""
    view = View(config, context)
    for check in CHECKS:
        yield from check(view)
    if context.runner in ("trainer", "accelerate"):
        yield from accelerate.check_config(config, context.mixed_precision, from_file=True)


def guess_runner(config: Mapping[str, Any], context: LintContext) -> Runner:
    """Guess the Trainer if its arguments are given or a batch size is `auto`; else a script.

    In an optimizer or scheduler, an `auto` that DeepSpeed computes with is the Trainer's too, unless the file fixes the
    total batch. An `auto` elsewhere says nothing: DeepSpeed drops it and trains.
    """
    if context.recipe is not None:
        return "toolkit"
    view = View(config, context)
    if context.trainer or view.has_auto_batch:
        return "trainer"
    in_params = (name for name in REPLACED["trainer"] if ".params." in name)
    fixed = is_number(view.get("train_batch_size"))
    return "trainer" if not fixed and any(view.get(name) == "auto" for name in in_params) else "deepspeed"


def _accelerate(document: ConfigDocument, context: LintContext) -> list[Finding]:
    """Lint a file of accelerate, and the DeepSpeed config that accelerate derives from its keys."""
    value = document.value
    findings = [_place(document, violation) for violation in accelerate.check(document, context.gpus)]
    read = isinstance(value.get("deepspeed_config"), Mapping) and value.get("distributed_type") in ("DEEPSPEED", None)
    if accelerate.config_file(value) is not None or not read:
        return findings
    derived = accelerate.derive(value)
    context = within_accelerate(value, context)
    view = View(derived.config, context)
    for check in CHECKS:
        for violation in check(view):
            if violation.rule.startswith("DS1") or (violation.rule, violation.path) == ("DS709", ()):
                continue  # names are accelerate's own
            findings.append(_place(document, _as_written(violation, derived)))
    return findings


def _as_written(violation: Violation, derived: accelerate.Derived) -> Violation:
    """Return a violation of a derived config at the key of accelerate's file from which its value comes.

    Its edits are kept where all of them change a value that has a key there.
    """
    edits: tuple[Edit, ...] = ()
    if all(edit.path in derived.origin and edit.kind != "rename" for edit in violation.edits):
        edits = tuple(edit._replace(path=derived.origin[edit.path]) for edit in violation.edits)
    path = violation.path
    while path not in derived.origin:
        path = path[:-1]
    return violation._replace(path=derived.origin[path], edits=edits)


def within_accelerate(value: Mapping[str, Any], context: LintContext) -> LintContext:
    """Add what a config of accelerate says about the DeepSpeed config that it starts."""
    precision = value.get("mixed_precision")
    ranks = value.get("num_processes")
    gpus = context.gpus or (ranks if isinstance(ranks, int) and ranks > 0 else None)
    word = precision if isinstance(precision, str) else None
    return replace(context, runner="accelerate", gpus=gpus, mixed_precision=word)


_HJSON = ("DS001", "DS002", "DS006", "DS008")
"""Rules about texts that DeepSpeed's own parser allows, and a parser of JSON does not."""
_INFERENCE = re.compile("infer|eval|predict|generat", re.IGNORECASE)


def _for_reader(violation: Violation, runner: Runner) -> Violation:
    """Add what the parser of a runner does with the text."""
    if violation.rule == "DS005" and runner in ("trainer", "accelerate"):
        return violation._replace(severity=Severity.WARNING, effect="JSON parsers silently keep the last one.")
    if violation.rule in _HJSON and runner == "deepspeed":
        return violation._replace(severity=Severity.INFO)
    return violation


def _place(document: ConfigDocument, violation: Violation, offset: int | None = None) -> Finding:
    rule = RULES[violation.rule]
    at_key = rule.id.startswith(("DS1", "AC1")) or rule.id == "DS005"
    return Finding(
        rule=rule,
        file=document.file,
        mark=document.place(violation.path, key=at_key) if offset is None else document.mark(offset),
        path=violation.path,
        severity=violation.severity or rule.severity,
        message=violation.message,
        effect=violation.effect or rule.effect,
        fix=violation.fix or rule.fix,
        edits=violation.edits,
    )
