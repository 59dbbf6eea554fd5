"""The keys that DeepSpeed reads, as docs/generate_lint_schema.py found them in the installed DeepSpeed; and facts about
keys that no declaration has, of DeepSpeed, the Trainer and accelerate, collected by hand in key_facts.json."""

import json
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.config.source_text import Path as ConfigPath

Node = dict[str, Any]
"""`types`, `words`, `default`, bounds (`gt`, `ge`, `lt`, `le`), `deprecated`, `name` (a second spelling); or a section:
`section` says how its keys are validated (`strict`: by DeepSpeed, `lenient`: not at all, `open`: by their user), `keys`
has them."""


FACTS: dict[str, Any] = json.loads(Path(__file__).with_name("key_facts.json").read_text(encoding="utf-8"))
"""Program -> its facts. `checked_in_use` of DeepSpeed: keys outside of the declared sections that it fails on, also on
the word auto; other values it uses there as they are. `foreign_names`: what other programs call its keys. `auto` of the
Trainer and accelerate: the keys whose `auto` they replace."""


@cache
def schema() -> Node:
    """Return the whole file."""
    read: Node = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
    return read


def version() -> str:
    """Return the version of DeepSpeed that the schema describes."""
    text: str = schema()["deepspeed"]
    return text


def version_of(text: str) -> tuple[int, ...]:
    """'0.18.2' -> (0, 18, 2). Raises ValueError."""
    return tuple(int(part) for part in text.split(".")[:3])


def members(node: Node) -> dict[str, Node]:
    """Return the keys of a section, under each of their spellings."""
    keys: dict[str, Node] = node.get("keys", {})
    return keys | {child["name"]: child for child in keys.values() if "name" in child}


def lookup(path: ConfigPath) -> Node | None:
    """Return the node of a key; None for an unknown key."""
    node: Node = {"section": "lenient", "keys": schema()["keys"]}
    for part in path:
        if not isinstance(part, str) or part not in (known := members(node)):
            return None
        node = known[part]
    return node


def misspelled(key: str, known: Iterable[str], taken: Iterable[str] = ()) -> str | None:
    """Return the key that a misspelled one must mean: nearly the same words with the same digits, in any case.

    `warmup_min_lr` is not `warmup_min_ratio`, nor `beta1` `betas`: another word is another quantity.
    """
    spelled = {name.lower(): name for name in known}
    for close in get_close_matches(key.lower(), spelled, n=1, cutoff=0.75):
        words = close.split("_")
        near = all(get_close_matches(word, words, n=1, cutoff=0.75) for word in key.lower().split("_"))
        glued = key.lower().replace("_", "") == close.replace("_", "")
        same_digits = "".join(filter(str.isdigit, key)) == "".join(filter(str.isdigit, close))
        if (near or glued) and same_digits and spelled[close] not in taken:
            return spelled[close]
    return None


@cache
def homes() -> dict[str, list[str]]:
    """Return the sections that have each key ("" is the top level)."""
    sections: dict[str, list[str]] = {}
    for section, key in _walk("", {"keys": schema()["keys"]}):
        sections.setdefault(key, []).append(section)
    return sections


def _walk(section: str, node: Node) -> Iterator[tuple[str, str]]:
    for key, child in members(node).items():
        yield section, key
        yield from _walk(f"{section}.{key}".lstrip("."), child)


def optimizer(name: str) -> Node | None:
    """Return the entry of an optimizer type: DeepSpeed's own names in any case, PyTorch's as they are spelled."""
    table: Node = schema()["optimizers"]
    key = name.lower() if name.lower() in table["names"] else name
    kind: Node | None = table["types"].get(key)
    return kind


def optimizer_names() -> list[str]:
    """Return every optimizer type, DeepSpeed's own under their usual spelling."""
    types = schema()["optimizers"]["types"]
    return list(dict.fromkeys([*FACTS["deepspeed"]["optimizer_names"], *(name for name in types if name[0].isupper())]))


def scheduler(name: str) -> Node | None:
    """Return the parameters of a scheduler type: name -> default, or "required"."""
    kind: Node | None = schema()["schedulers"]["types"].get(name)
    return kind


def scheduler_names() -> list[str]:
    """Return every scheduler type."""
    return list(schema()["schedulers"]["types"])
