"""A YAML file and command-line overrides -> Recipe, and back. All problems are reported together, in order of line."""

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from toolkit.config import layouts
from toolkit.config import recipe_rules as rules
from toolkit.config.field_errors import explain, free_values, kind, meant_field, spell_field
from toolkit.config.gallery import find_recipe
from toolkit.config.layouts import ListedLayout
from toolkit.config.recipe import Recipe
from toolkit.config.recipe_schema import allowed, fields, flat_fields, is_section, lookup, upgrade_recipe
from toolkit.config.section import Section
from toolkit.config.source_text import Path, dotted, quote, undotted
from toolkit.config.strict_yaml import WrittenValue, parse, resolve
from toolkit.errors import LayoutError, RecipeError, Refusal, nearest
from toolkit.files import open_regular, printable, reason_of

MAX_BYTES = 1 << 20
_MAX_PROBLEMS = 100
_COMMENT = re.compile(r"(?<=\s)#.*", re.DOTALL)
_LAYOUT = -2
"""Sort key of problems that the layout sets, in the place of an override's index."""


def load_recipe(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    layout: str | None = None,
    stored: bool = False,
) -> Recipe:
    """Read a recipe; `overrides` are `section.key=value`, the last one of a key counts and `key=null` is its default.

    An override of `data.source` also unsets what the file says of its source and has no effect for that one.
    `layout`: the name of one that the recipe lists, or a layout such as `dp8-z3`. It takes the place of `parallel`, and
    overrides come after it. Without either, the recipe's layout for `world_size` ranks is used.

    Raises RecipeError that holds every problem of the file, of the overrides and between fields, one line each. With
    `world_size`, also whether layout and batch fit that many ranks. `stored`: a run directory's recipe.yaml, which may
    have field names of earlier versions.
    """
    name = os.fspath(path)
    draft = _Draft(name=name, overrides=overrides)
    draft.read(_read(name))
    if stored:
        draft.values = upgrade_recipe(draft.values)
    layouts.spell_out_auto(draft.values)
    draft.choose_layout(layout, world_size)
    for index in range(len(overrides)):
        draft.override(index)
        layouts.spell_out_auto(draft.values)
    draft.close_plan()
    draft.follow_source()
    recipe = draft.decode() if draft.complete else None
    refusals = rules.recipe_conflicts(recipe, world_size) if recipe is not None and not draft.problems else []
    for refusal in refusals:
        draft.refuse(undotted(refusal.field), refusal, str(draft.with_unset(refusal, world_size)))
    if recipe is None or draft.problems:
        raise RecipeError(draft.lines(), draft.refusals)
    return recipe


def load_rounded(
    path: str | os.PathLike[str],
    overrides: Sequence[str],
    *,
    world_size: int | None,
    rounds: bool,
    layout: str | None = None,
) -> tuple[Recipe, str | None]:
    """Load a recipe as `load_recipe` does; return it and a note.

    With `rounds`, a global batch that is not a multiple of the micro-batches becomes the next multiple, which the note
    says; without a change it is None."""
    try:
        return load_recipe(path, overrides, world_size=world_size, layout=layout), None
    except RecipeError as error:
        settings = dict(
            setting for refusal in error.refusals for setting in refusal.settings if not isinstance(setting, str)
        )
        sizes = [settings.get(name) for name in ("batch.global_batch_size", "batch.micro_batch_size", "parallel.dp")]
        if not rounds or len(error.problems) > 1 or None in sizes:
            raise
    size, micro, dp = map(int, filter(None, sizes))
    rounded = -(-size // (micro * dp)) * micro * dp
    note = f"batch.global_batch_size is {rounded} here, not {size}: the next multiple of {micro} samples x dp {dp}."
    overrides = [*overrides, f"batch.global_batch_size={rounded}"]
    return load_recipe(path, overrides, world_size=world_size, layout=layout), note


def recipe_layouts(path: str | os.PathLike[str]) -> list[ListedLayout]:
    """The layouts that a recipe lists. Raises RecipeError where it cannot be read, LayoutError for a wrong one."""
    document = parse(_read(os.fspath(path)))
    listed = document.value.get("layouts") if isinstance(document.value, dict) else None
    entries = listed if isinstance(listed, dict) else {}
    return [layouts.listed(name, text) for name, value in entries.items() for text in layouts.texts(value)]


def dump_recipe(recipe: Recipe, *, defaults: bool = True) -> str:
    """The recipe as YAML that `load` reads back equal, with every field, or only those that differ from their
    defaults."""
    values = recipe.model_dump(mode="json", exclude_defaults=not defaults)
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


def overrides_between(start: Recipe, wanted: Recipe) -> list[str]:
    """The overrides that make `wanted` of `start`, as `load_recipe` reads them.

    Checkpoints and the log, which change nothing of what is trained, stay as they are in `start`.
    """
    without = {"checkpoint", "log", "layouts"}
    before = flat_fields(start.model_dump(mode="json", exclude=without))
    after = flat_fields(wanted.model_dump(mode="json", exclude=without))
    return [f"{field}={_in_yaml(value)}" for field, value in after.items() if before.get(field) != value]


def _in_yaml(value: Any) -> str:
    """A value as JSON, which is YAML; a string without quotes where it is read as the same string."""
    is_plain = isinstance(value, str) and re.fullmatch(r"[\w./~+-]+", value) and resolve(value) == value
    return value if is_plain else json.dumps(value)


def _read(name: str) -> str:
    try:
        with open_regular(find_recipe(name), follow=True) as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        path = FilePath(name)
        if path.is_symlink():
            raise RecipeError(
                f"{name}: this is a link to {path.readlink()}, which does not exist. Repair it."
            ) from None
        siblings = sorted(sibling.name for sibling in path.parent.glob("*.yaml"))
        raise RecipeError(f"{name}: there is no such file.{nearest(path.name, siblings)}") from None
    except IsADirectoryError:
        raise RecipeError(f"{name}: this is a directory; a recipe is a YAML file. Name one.") from None
    except (OSError, ValueError) as error:
        raise RecipeError(f"{printable(name)}: the file cannot be read: {reason_of(error)}.") from None
    if len(data) > MAX_BYTES:
        raise RecipeError(f"{name}: this file is larger than 1 MiB; a recipe is a page of YAML. Name another file.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise RecipeError(f"{name}:{line}:{column}: this is not UTF-8 text. Save the file as UTF-8.") from None


@dataclass(kw_only=True)
class _Draft:
    """The values of a file with its overrides applied, the origin of each, and the problems found so far."""

    name: str
    overrides: Sequence[str]
    values: dict[str, Any] = field(default_factory=dict)
    written: dict[Path, WrittenValue] = field(default_factory=dict)
    overridden: dict[Path, int] = field(default_factory=dict)
    faulty: set[Path] = field(default_factory=set)
    refusals: list[Refusal] = field(default_factory=list)
    """Refusals of fields and of conflicts between them, among the problems."""
    problems: list[tuple[int, int, int, str]] = field(default_factory=list)
    """Override, line, column and text: they sort the layout first, the file by line, then the overrides as given."""
    complete: bool = True
    layout: str = ""
    """The layout that was chosen."""
    unlisted: int = 0
    """The number of problems that are not listed."""

    def read(self, text: str) -> None:
        document = parse(text, limits_integers=False)
        for problem in document.problems:
            self._add(-1, *problem.mark, problem.message)
        self.faulty = {problem.path for problem in document.problems if problem.path is not None}
        self.written = document.written
        self.complete = document.complete
        if not document.complete:
            return
        sections = ", ".join(name for name, field in Recipe.model_fields.items() if field.is_required())
        if document.empty or document.value is None:
            self._add(-1, 1, 1, f"the file is empty. A recipe has the sections {sections}.")
        elif not isinstance(document.value, dict) and () not in self.faulty:
            self.report((), f"{kind(document.value)} is given; a recipe is a mapping of sections ({sections}).")
        self.complete = isinstance(document.value, dict)
        self.values = document.value if isinstance(document.value, dict) else {}

    def close_plan(self) -> None:
        """Report a missing micro-batch, which is needed without a plan."""
        path = ("batch", "micro_batch_size")
        batch = self.values.get("batch")
        if layouts.is_open(self.values) or not isinstance(batch, dict) or path in self.faulty:
            return
        if batch.get(path[1]) is not None:
            return
        known = {*fields(("batch",))}  # from the JSON Schema, which takes as long to build as all else here
        if all(meant_field(("batch", key)) != path for key in batch.keys() - known):
            error = ErrorDetails(type="int_type" if path[1] in batch else "missing", loc=path, msg="", input=None)
            self.refuse(*explain(error, self.written))

    def choose_layout(self, asked: str | None, world_size: int | None) -> None:
        """Set the fields of the layout that is asked for, or that the recipe lists for so many ranks."""
        listed = self.values.get("layouts", {})
        if not isinstance(listed, dict):
            return
        entries = {name: self._layouts(name, value) for name, value in listed.items()}
        self.values["layouts"] = {}
        if self.problems:
            return
        decided = "parallel" in self.values or any(
            re.match(r"parallel\b|train\.engine=", override) for override in self.overrides
        )
        if asked is None and (decided or not entries):
            return
        try:
            chosen = layouts.choose(entries, asked, world_size)
        except LayoutError as error:
            self.problems.append((_LAYOUT, 0, 0, str(error)))
            return
        if isinstance(chosen, ListedLayout):
            self.values["layouts"] = {chosen.name: chosen.text}
        if chosen is not None:
            self.layout = asked or chosen.text
            for section, fields in chosen.sections.items():
                self._take(section, fields)

    def _layouts(self, name: str, value: Any) -> list[str]:
        """The layouts of an entry, each of which can be read; none after reporting a problem."""
        texts = layouts.texts(value)
        if not texts:
            self.report(("layouts", name), f"layouts.{name} is {kind(value)}; a layout or a list of them is allowed.")
        for text in texts:
            try:
                layouts.listed(name, text)
            except LayoutError as error:
                self.refuse(("layouts", name), error.as_refusal(), str(error))
        return texts

    def _take(self, section: str, fields: dict[str, Any]) -> None:
        """Let a layout's fields replace those of the file: all of `parallel`, and single ones of other sections."""
        known = self.values.get(section, {})
        if section == "parallel":  # a plan is left the micro-batch
            known = {"auto": True} if layouts.is_open(self.values) else {}
        if isinstance(known, dict):
            self.values[section] = known | fields
            for path in [(section,)] if section == "parallel" else [(section, name) for name in fields]:
                self._forget(path)
                self.overridden[path] = _LAYOUT

    def override(self, index: int) -> None:
        """Apply one `section.key=value` to the file's values."""
        key, equals, text = self.overrides[index].partition("=")
        names = tuple(key.split("."))
        if not equals or not all(names):
            message = "an override has the form section.key=value. Write for instance train.steps=10."
            return self._add(index, 0, 0, message)
        document = parse(text, limits_integers=False)
        if document.problems:
            for problem in document.problems:
                self._add(index, 0, 0, problem.message)
            return None
        if document.empty:
            return self._add(index, 0, 0, f"nothing follows the =. Write {key}=null to restore the default.")
        plain = document.written[()].plain
        if plain is not None and plain != text.strip() and (comment := _COMMENT.search(text)):
            left_out = quote(comment[0])
            message = f"{left_out} is a comment in YAML, which would be left out. Write the value in double quotes."
            return self._add(index, 0, 0, message)
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

    def follow_source(self) -> None:
        """Forget what the file says of its own source and has no meaning for another one that an override names."""
        data = self.values.get("data")
        if ("data", "source") in self.overridden and isinstance(data, dict) and isinstance(data.get("source"), str):
            for name in rules.ignored_by_source(data["source"]):
                if ("data", name) not in self.overridden:
                    data.pop(name, None)

    def decode(self) -> Recipe | None:
        """The recipe, or None after reporting what is wrong with its fields."""
        for name, declared in Recipe.model_fields.items():
            annotation = declared.annotation
            is_group = isinstance(annotation, type) and issubclass(annotation, Section)
            if is_group and name in self.values and self.values[name] is None:
                self.values[name] = {}  # a section whose lines are all commented out
        model = self.values.get("model")
        if isinstance(model, dict):
            if model.get("overrides", {}) is None:
                model["overrides"] = {}
            for path, refusal in free_values(model.get("overrides"), ("model", "overrides"), self.written):
                self.refuse(path, refusal)
        try:
            return Recipe.model_validate_json(json.dumps(self.values))
        except ValidationError as error:
            details = error.errors(include_url=False)
            unknown = [tuple(detail["loc"]) for detail in details if detail["type"] == "extra_forbidden"]
            meant = {meant_field(path) for path in unknown}
            details = [detail for detail in details if detail["type"] != "missing" or tuple(detail["loc"]) not in meant]
            self.unlisted = max(0, len(details) - _MAX_PROBLEMS)
            details = details[:_MAX_PROBLEMS]
            for detail in details:
                path, refusal = explain(detail, self.written)
                if not any(path[:end] in self.faulty for end in range(len(path) + 1)):
                    self.refuse(path, refusal, at_key=detail["type"] == "extra_forbidden")
        return None

    def with_unset(self, refusal: Refusal, world_size: int | None) -> Refusal:
        """Advise first to unset a field of the file that an override contradicts, if that helps."""
        remedy = tuple(setting for setting in refusal.remedy if setting != "remove it")
        to_set = {setting[0] for setting in remedy if not isinstance(setting, str)}
        names = [setting[0] for setting in refusal.settings if not isinstance(setting, str)]
        overridden = {name for name in names for path in self.overridden if f"{name}.".startswith(f"{dotted(path)}.")}
        for name in names if overridden else ():
            section, _, key = name.partition(".")
            if name in overridden | to_set or (section, key) not in self.written:
                continue
            values = self.values | {section: {k: v for k, v in self.values[section].items() if k != key}}
            with suppress(ValidationError):  # a field that must be given
                left = rules.recipe_conflicts(Recipe.model_validate_json(json.dumps(values)), world_size)
                same = (refusal.field, refusal.reason)
                if all(conflict.field != name and (conflict.field, conflict.reason) != same for conflict in left):
                    return replace(refusal, remedy=((name, "null"), *remedy))
        return refusal

    def refuse(self, path: Path, refusal: Refusal, message: str = "", *, at_key: bool = False) -> None:
        """Add a refusal of a field's value, with its message where that is not as `spell_field` has it."""
        self.refusals.append(refusal)
        self.report(path, message or refusal.render(spell_field), at_key=at_key)

    def report(self, path: Path, message: str, *, at_key: bool = False) -> None:
        """Add a problem at a field: at its value, at its key, or at the section that should hold it."""
        prefixes = [path[:end] for end in range(len(path), -1, -1)]
        for prefix in prefixes:
            if prefix in self.overridden:
                return self._add(self.overridden[prefix], 0, 0, message)
        known = next((prefix for prefix in prefixes if prefix in self.written), None)
        if known is None:
            return self._add(-1, 1, 1, message)
        written = self.written[known]
        # At the value; at the name where that is what is wrong, or where the value is a block below its name.
        at_value = known == path and not at_key and written.key.line == written.value.line
        mark = written.value if at_value else written.key
        return self._add(-1, *mark, message)

    def lines(self) -> list[str]:
        """Every problem once, sorted by position."""
        lines = [text for *_, text in sorted(set(self.problems))]
        more = len(lines[_MAX_PROBLEMS:]) + self.unlisted
        return lines if not more else [*lines[:_MAX_PROBLEMS], f"{self.name}: and {more} more problems."]

    def _add(self, override: int, line: int, column: int, message: str) -> None:
        prefix = f"{self.name}:{line}:{column}"
        if override >= 0:
            text = self.overrides[override]
            prefix = f"override {text if text.isprintable() and len(text) <= 200 else quote(text)}"
        elif override == _LAYOUT:
            prefix = f"layout {self.layout}"
        self.problems.append((override, line, column, f"{prefix}: {message}"))

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
                return None  # a section that is not a mapping is reported by its type
            mapping = inner
        return mapping

    def _forget(self, path: Path) -> None:
        """Drop what is known of the value that an override replaces."""
        self.written = {known: place for known, place in self.written.items() if known[: len(path)] != path}
        self.overridden = {known: place for known, place in self.overridden.items() if known[: len(path)] != path}
        self.faulty = {known for known in self.faulty if known[: len(path)] != path}


class _Dumper(yaml.SafeDumper):
    """Quotes strings that our reader would not read as strings; writes lists on one line."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None if isinstance(resolve(text), str) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(
    list, lambda dumper, items: dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)
)
