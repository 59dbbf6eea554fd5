"""Lint of files: read, look, mend, and follow a DeepSpeed config that a config of accelerate names."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.dsconfig.lint.document import Document, NotAConfigError
from toolkit.dsconfig.lint.files import find, is_config, name_of, parse, read_text
from toolkit.dsconfig.lint.finding import Finding
from toolkit.dsconfig.lint.fix import fix, write
from toolkit.dsconfig.lint.inspect import inspect, is_accelerate, within_accelerate
from toolkit.dsconfig.lint.rules import accelerate
from toolkit.dsconfig.lint.view import Facts, Runner

if TYPE_CHECKING:  # pydantic takes longer to import than a file to lint
    from toolkit.dsconfig.lint.beside import RecipeBeside


@dataclass(kw_only=True)
class Linted:
    """What was found, what was mended, and what could not be read."""

    findings: list[Finding] = field(default_factory=list)
    changes: dict[str, list[str]] = field(default_factory=dict)
    """File -> what --fix did to it."""
    problems: list[str] = field(default_factory=list)
    files: int = 0
    passed_over: int = 0
    """Files of a directory that are no config."""


@dataclass(frozen=True, kw_only=True)
class Linter:
    """How files are linted."""

    facts: Facts = field(default_factory=Facts)
    runner: Runner | None = None
    recipe: "RecipeBeside | None" = None
    ignored: frozenset[str] = frozenset()
    mends: bool = False

    def run(self, arguments: Iterable[str]) -> Linted:
        """Every file, each once. What cannot be read is a problem of that file alone."""
        linted = Linted()
        queue = [(path, below, self.facts, self.runner) for path, below in _found(arguments, linted)]
        seen: set[Path] = set()
        for path, below, facts, runner in queue:
            if (resolved := _resolved(path)) in seen:
                continue
            seen.add(resolved)
            try:
                named = self._file(path, below, facts, runner, linted)
            except NotAConfigError as error:
                if below and not str(error).startswith(f"{name_of(path)}:"):
                    raise
                linted.problems.append(str(error))
                continue
            if named is not None and named[0] not in [entry[0] for entry in queue if entry[1]]:
                queue.append((named[0], False, named[1], "accelerate"))
        return linted

    def look(self, document: Document, facts: Facts, runner: Runner | None) -> list[Finding]:
        """The findings of one document."""
        if self.recipe is not None and isinstance(document.value, dict) and not is_accelerate(document.value):
            conflicts = self.recipe.conflicts(document.value)
            facts = replace(facts, conflicts=conflicts, recipe=self.recipe.name)
        found = inspect(document, facts, runner=runner)
        return [finding for finding in found if finding.rule.id not in self.ignored]

    def _file(
        self, path: Path, below: bool, facts: Facts, runner: Runner | None, linted: Linted
    ) -> tuple[Path, Facts] | None:
        """One file; the DeepSpeed config that it names, and what it says about it."""
        document = parse(path, read_text(path))
        if below and not is_config(document):
            linted.passed_over += 1
            return None
        linted.files += 1
        findings = self.look(document, facts, runner)
        if self.mends and any(finding.edits for finding in findings):

            def again(text: str) -> tuple[Document, list[Finding]]:
                read = parse(path, text)
                return read, self.look(read, facts, runner)

            fixed = fix(document, again)
            if fixed.changes:
                _write(path, fixed.text)
                linted.changes[name_of(path)] = fixed.changes
                document, findings = again(fixed.text)
        linted.findings += findings
        if not is_accelerate(document.value):
            return None
        named = accelerate.config_file(document.value)
        target = accelerate.find(named, document.file) if named else None
        return (target, within_accelerate(document.value, facts)) if target else None


def _found(arguments: Iterable[str], linted: Linted) -> list[tuple[Path, bool]]:
    found: list[tuple[Path, bool]] = []
    for argument in arguments:
        try:
            found += [*find([argument])]
        except NotAConfigError as error:
            linted.problems.append(str(error))
    return found


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError):
        return path


def _write(path: Path, text: str) -> None:
    try:
        write(path.resolve(), text)
    except OSError as error:
        raise NotAConfigError(
            f"{name_of(path)}: cannot be written ({error.strerror}). Check its permissions."
        ) from None
