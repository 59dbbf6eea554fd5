"""Schema: the keys that DeepSpeed reads, as docs/generate_lint_schema.py found them in the installed DeepSpeed."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.dsconfig.lint.finding import Path as ConfigPath

Node = dict[str, Any]
"""`types`, `words`, `default`, bounds (`gt`, `ge`, `lt`, `le`), `deprecated`, `name` (a second spelling); or a section:
`section` says who checks its keys (`strict`: DeepSpeed, `lenient`: nobody, `open`: who uses it), `keys` has them."""


@cache
def schema() -> Node:
    """The whole file."""
    read: Node = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
    return read


def version() -> str:
    """The DeepSpeed that the schema describes."""
    text: str = schema()["deepspeed"]
    return text


def version_of(text: str) -> tuple[int, ...]:
    """'0.18.2' -> (0, 18, 2). Raises ValueError."""
    return tuple(int(part) for part in text.split(".")[:3])


def members(node: Node) -> dict[str, Node]:
    """The keys of a section, under each of their spellings."""
    keys: dict[str, Node] = node.get("keys", {})
    return keys | {child["name"]: child for child in keys.values() if "name" in child}


def lookup(path: ConfigPath) -> Node | None:
    """The node of a key; None for a key that is not known."""
    node: Node = {"section": "lenient", "keys": schema()["keys"]}
    for part in path:
        if not isinstance(part, str) or part not in (known := members(node)):
            return None
        node = known[part]
    return node


@cache
def homes() -> dict[str, list[str]]:
    """Key -> the sections that have it ("" is the top level)."""
    found: dict[str, list[str]] = {}
    for section, key in _walk("", {"keys": schema()["keys"]}):
        found.setdefault(key, []).append(section)
    return found


def _walk(section: str, node: Node) -> Iterator[tuple[str, str]]:
    for key, child in members(node).items():
        yield section, key
        yield from _walk(f"{section}.{key}".lstrip("."), child)


def optimizer(name: str) -> Node | None:
    """What DeepSpeed knows of an optimizer type: its own names in any case, PyTorch's as they are spelled."""
    table: Node = schema()["optimizers"]
    key = name.lower() if name.lower() in table["names"] else name
    kind: Node | None = table["types"].get(key)
    return kind


def optimizer_names() -> list[str]:
    """Every optimizer type that can be written, DeepSpeed's own under their usual spelling."""
    own = {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "lamb": "Lamb", "lion": "Lion", "muon": "Muon"}
    own |= {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}
    return list(
        dict.fromkeys([*own.values(), *(name for name in schema()["optimizers"]["types"] if name[0].isupper())])
    )


def scheduler(name: str) -> Node | None:
    """The parameters of a scheduler type: name -> default, or "required"."""
    kind: Node | None = schema()["schedulers"]["types"].get(name)
    return kind


def scheduler_names() -> list[str]:
    """Every scheduler type."""
    return list(schema()["schedulers"]["types"])
