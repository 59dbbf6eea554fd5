"""A YAML file and command-line overrides -> Recipe, and back. All problems are reported together, in order of line."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml
from pydantic import ValidationError

from toolkit.errors import RecipeError, nearest
from toolkit.recipe import Recipe
from toolkit.recipe_file import rules
from toolkit.recipe_file.explain import explain, free_values, kind
from toolkit.recipe_file.schema import allowed, fields, is_section, lookup
from toolkit.recipe_file.strict_yaml import Path, Written, dotted, parse, quote, resolve

MAX_BYTES = 1 << 20
_MAX_PROBLEMS = 100


def load(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, world_size: int | None = None) -> Recipe:
    """Read a recipe; `overrides` are `section.key=value`, the last one of a key counts and `key=null` is its default.

    Raises RecipeError that holds every problem of the file, of the overrides and between fields, one line each. With
    `world_size`, also whether layout and batch fit that many ranks.
    """
    name = os.fspath(path)
    draft = _Draft(name=name, overrides=overrides)
    draft.read(_read(name))
    for index in range(len(overrides)):
        draft.override(index)
    recipe = draft.decode() if draft.complete else None
    if recipe is not None and not draft.findings:
        for where, message in rules.findings(recipe, world_size):
            draft.report(where, message)
    if recipe is None or draft.findings:
        raise RecipeError(draft.lines())
    return recipe


def dump(recipe: Recipe) -> str:
    """The recipe with every field written out, as YAML that `load` reads back equal."""
    text: str = yaml.dump(
        recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120
    )
    return text


def _read(name: str) -> str:
    def refuse(problem: str) -> RecipeError:
        return RecipeError(f"{name}: {problem}")

    try:
        with open(name, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        siblings = sorted(found.name for found in FilePath(name).parent.glob("*.yaml"))
        raise refuse(f"there is no such file.{nearest(FilePath(name).name, siblings)}") from None
    except IsADirectoryError:
        raise refuse("this is a directory; a recipe is a YAML file. Name one.") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise refuse(f"the file cannot be read: {reason}.") from None
    if len(data) > MAX_BYTES:
        raise refuse("this file is larger than 1 MiB; a recipe is a page of YAML. Name another file.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise RecipeError(f"{name}:{line}:{column}: this is not UTF-8 text. Save the file as UTF-8.") from None


@dataclass(frozen=True, order=True)
class _Finding:
    """Sorts by place: the file by line, then the overrides in the order given."""

    override: int
    line: int
    column: int
    text: str


@dataclass(kw_only=True)
class _Draft:
    """The values of a file under its overrides, where each comes from, and the problems found so far."""

    name: str
    overrides: Sequence[str]
    values: dict[str, Any] = field(default_factory=dict)
    written: dict[Path, Written] = field(default_factory=dict)
    overridden: dict[Path, int] = field(default_factory=dict)
    faulty: set[Path] = field(default_factory=set)
    findings: list[_Finding] = field(default_factory=list)
    complete: bool = True
    untold: int = 0
    """Problems beyond the number that anyone reads."""

    def read(self, text: str) -> None:
        document = parse(text)
        for problem in document.problems:
            self._add(-1, problem.mark.line, problem.mark.column, problem.message)
        self.faulty = {problem.path for problem in document.problems if problem.path is not None}
        self.written = document.written
        self.complete = document.complete
        if not document.complete:
            return
        if document.empty or document.value is None:
            self._add(-1, 1, 1, f"the file is empty. A recipe has the sections {', '.join(_required())}.")
        elif not isinstance(document.value, dict):
            sections = ", ".join(_required())
            self.report((), f"{kind(document.value)} is given; a recipe is a mapping of sections ({sections}).")
        else:
            self.values = document.value
        self.complete = bool(self.values) or isinstance(document.value, dict)

    def override(self, index: int) -> None:
        """Put one `section.key=value` over the file's values."""
        key, equals, text = self.overrides[index].partition("=")
        names = tuple(key.split("."))
        if not equals or not all(names):
            return self._add(
                index, 0, 0, "an override has the form section.key=value. Write for instance train.steps=10."
            )
        document = parse(text)
        for problem in document.problems:
            self._add(index, 0, 0, problem.message)
        if document.problems:
            return None
        if document.empty:
            return self._add(index, 0, 0, f"nothing follows the =. Write {key}=null to go back to the default.")
        section = self._section(names, index)
        if section is None:
            return None
        self._forget(names)
        self.overridden[names] = index
        self.written.update({names + below: place for below, place in document.written.items()})
        if document.value is None and lookup(names) is not None:
            section.pop(names[-1], None)
        else:
            section[names[-1]] = document.value
        return None

    def decode(self) -> Recipe | None:
        """The recipe, or None after reporting what is wrong with its fields."""
        for section in fields(()):
            if section in self.values and self.values[section] is None and is_section(lookup((section,)) or {}):
                self.values[section] = {}  # a section whose lines are all commented out
        model = self.values.get("model")
        if isinstance(model, dict):
            if model.get("overrides", {}) is None:
                model["overrides"] = {}
            for path, message in free_values(model.get("overrides"), ("model", "overrides")):
                self.report(path, message)
        try:
            return Recipe.model_validate_json(json.dumps(self.values))
        except ValidationError as error:
            told = error.errors(include_url=False)[:_MAX_PROBLEMS]
            self.untold = error.error_count() - len(told)
            for details in told:
                path, message = explain(details, self.written)
                if not any(path[:end] in self.faulty for end in range(len(path) + 1)):
                    self.report(path, message, at_key=details["type"] == "extra_forbidden")
        return None

    def report(self, path: Path, message: str, *, at_key: bool = False) -> None:
        """Add a problem at a field: where its value stands, or at its key, or at the section that should hold it."""
        prefixes = [path[:end] for end in range(len(path), -1, -1)]
        for prefix in prefixes:
            if prefix in self.overridden:
                return self._add(self.overridden[prefix], 0, 0, message)
        known = next((prefix for prefix in prefixes if prefix in self.written), None)
        if known is None:
            return self._add(-1, 1, 1, message)
        place = self.written[known]
        # At the value; at the name where that is what is wrong, or where the value is a block below its name.
        at_value = known == path and not at_key and place.key.line == place.value.line
        mark = place.value if at_value else place.key
        return self._add(-1, mark.line, mark.column, message)

    def lines(self) -> list[str]:
        """Every problem once, sorted by place."""
        lines = [finding.text for finding in sorted(set(self.findings))]
        more = len(lines[_MAX_PROBLEMS:]) + self.untold
        return lines if not more else [*lines[:_MAX_PROBLEMS], f"{self.name}: and {more} problems more."]

    def _add(self, override: int, line: int, column: int, message: str) -> None:
        prefix = f"override {_one_line(self.overrides[override])}" if override >= 0 else f"{self.name}:{line}:{column}"
        self.findings.append(_Finding(override, line, column, f"{prefix}: {message}"))

    def _section(self, names: tuple[str, ...], index: int) -> dict[str, Any] | None:
        """The mapping that holds the last of `names`, made where the file has none; None after reporting a problem."""
        mapping = self.values
        for end in range(1, len(names)):
            prefix = names[:end]
            schema = lookup(prefix)
            if schema and not is_section(schema) and schema.get("type") != "object":
                self._add(index, 0, 0, f"{dotted(names)} is not a field: {dotted(prefix)} is {allowed(schema)}.")
                return None
            inner = mapping.get(names[end - 1])
            if inner is None:
                inner = mapping[names[end - 1]] = {}
                if prefix not in self.written:
                    self.overridden.setdefault(prefix, index)
            if not isinstance(inner, dict):
                if schema == {}:
                    self._add(index, 0, 0, f"{dotted(prefix)} is {kind(inner)}, so it has no field {names[end]}.")
                return None  # a section that is no mapping is reported by its type
            mapping = inner
        return mapping

    def _forget(self, path: Path) -> None:
        """Drop what is known of the value that an override replaces."""
        self.written = {known: place for known, place in self.written.items() if known[: len(path)] != path}
        self.overridden = {known: place for known, place in self.overridden.items() if known[: len(path)] != path}
        self.faulty = {known for known in self.faulty if known[: len(path)] != path}


def _required() -> list[str]:
    required: list[str] = (lookup(()) or {})["required"]
    return required


def _one_line(text: str) -> str:
    return text if text.isprintable() and len(text) <= 200 else quote(text)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever our reader would take for something else than a string; writes lists on one line."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None if isinstance(resolve(text), str) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)
