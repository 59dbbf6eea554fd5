"""Keys that DeepSpeed parses and no code of it reads, for toolkit/lint/schema.json.

A key becomes an attribute of a config object of the same name: a field of a declared section, or what
`self.name = …` sets in a file of configs. It is read if any code loads an attribute of that name or has the name as a
string, except constants and a getter of one line that is not called itself.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed

_NOT_READERS = ("constants.py",)
_Place = tuple[str, str]
"""A file, and the innermost function ("" at the top)."""


def unread(keys: Mapping[str, Any]) -> list[str]:
    """Return those of the schema's keys, dotted, that nothing reads."""
    source = _Source()
    for file in Path(deepspeed.__file__).parent.rglob("*.py"):
        source.add(ast.parse(file.read_text(encoding="utf-8")), file.name)
    names = (path for path, node in _walk((), keys) if "deprecated" not in node and path[-1] in source.declared)
    return sorted(".".join(path) for path in names if not source.reads(path[-1]))


def _walk(section: tuple[str, ...], keys: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    for key, node in keys.items():
        yield (*section, key), node
        yield from _walk((*section, key), node.get("keys", {}))


class _Source:
    def __init__(self) -> None:
        self.declared: set[str] = set()
        """Names of attributes of config objects."""
        self.uses: dict[str, set[_Place]] = defaultdict(set)
        self.getters: dict[str, bool] = {}
        """Function -> whether every one of this name is `return self.…`."""

    def add(self, node: ast.AST, file: str, function: str = "") -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
            one_line = len(node.body) == 1 and isinstance(node.body[0], ast.Return)
            self.getters[function] = one_line and self.getters.get(function, True)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and "config" in file:
            self.declared.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            self.uses[node.attr].add((file, function))
        elif isinstance(node, ast.Attribute) and "config" in file:
            self.declared.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and file not in _NOT_READERS:
            self.uses[node.value].add((file, function))
        for child in ast.iter_child_nodes(node):
            self.add(child, file, function)

    def reads(self, name: str, seen: frozenset[str] = frozenset()) -> bool:
        for file, function in self.uses[name]:
            is_getter = file == "engine.py" and self.getters.get(function, False)
            if not is_getter or (function not in seen | {name} and self.reads(function, seen | {function})):
                return True
        return False
