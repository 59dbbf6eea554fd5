"""The layouts that a recipe lists (`8xH100: dp8-z3`), and which of them a run takes.

An entry's name is a number of GPUs and their kind; its value one layout or several, the preferred one first, each in
the form of `Strategy`. `--layout` takes a name or such a layout.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from toolkit.config.layout import Layout
from toolkit.config.strategy import Strategy
from toolkit.errors import LayoutError, nearest

_NAME = re.compile(r"([1-9]\d{0,6})x(\S+)")


@dataclass(frozen=True, kw_only=True)
class FreeLayout:
    """A layout that is not an entry of a recipe's list."""

    text: str
    """The layout as it is written: `dp8-z3-recompute-m4`."""
    strategy: Strategy

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """The fields of a recipe that the layout sets, by section."""
        return self.strategy.sections(self.strategy.dp)


@dataclass(frozen=True, kw_only=True)
class ListedLayout(FreeLayout):
    """One layout of an entry in a recipe's list."""

    name: str
    """Name of the entry: `8xH100`."""
    ranks: int
    gpu: str


def listed(name: str, text: str) -> ListedLayout:
    """Read one layout of an entry. Raises LayoutError where its ranks are not those that the name says."""
    field = f"layouts.{name}"
    match = _NAME.fullmatch(name)
    if match is None:
        raise LayoutError.of(field, text, "a layout is named by a number of GPUs and their kind", "write 8xH100")
    strategy = _parse(text, field)
    ranks = int(match[1])
    dp, rest = divmod(ranks, strategy.model_size)
    if rest or strategy.dp not in (None, dp) or (strategy.engine == "reference" and ranks > 1):
        needed = strategy.world_size(strategy.model_size)

        if strategy.dp is None and strategy.engine != "reference":
            reason = f"it needs a multiple of {needed} ranks, and the name says {ranks}"
        else:
            reason = f"it needs {needed} ranks, and the name says {ranks}"
        raise LayoutError.of(field, text, reason, "write the same number")
    strategy = replace(strategy, dp=None if strategy.engine == "reference" else dp)
    return ListedLayout(name=name, text=text, strategy=strategy, ranks=ranks, gpu=match[2])


def spell_out_auto(values: dict[str, Any]) -> None:
    """`parallel: auto` in a recipe's values is short for a section, in which overrides may set fields."""
    if values.get("parallel") == "auto":
        values["parallel"] = {"auto": True}


def is_open(values: dict[str, Any]) -> bool:
    """Whether a plan is asked for; where every field is given, there is none any more."""
    section = values.get("parallel")
    batch = values.get("batch")
    if not isinstance(section, dict) or section.get("auto") is not True or not isinstance(batch, dict):
        return False
    is_whole = {field.name for field in fields(Layout)} - {"dp"} <= section.keys()
    section["auto"] = not is_whole or batch.get("micro_batch_size") is None
    return bool(section["auto"])


def texts(value: Any) -> list[str]:
    """The layouts of an entry as it stands in a file; none for what is neither a text nor a list of texts."""
    values = value if isinstance(value, list) else [value]
    return values if all(isinstance(text, str) for text in values) else []


def choose(entries: Mapping[str, list[str]], asked: str | None, world_size: int | None) -> FreeLayout | None:
    """The layout that `--layout` asks for; else the one entry for so many ranks, or the first where none are said.

    Raises LayoutError for what is neither an entry nor a layout.
    """
    if asked == "":
        raise LayoutError.of("--layout", asked, "no layout is named empty", "name one, such as dp8-z3")
    if asked is None:
        firsts = [listed(name, values[0]) for name, values in entries.items() if values]
        fitting = [entry for entry in firsts if entry.ranks == world_size]
        if world_size is None:
            return firsts[0] if firsts else None
        return fitting[0] if len(fitting) == 1 else None
    if entries.get(asked):
        return listed(asked, entries[asked][0])
    if Strategy.reads(asked):
        return FreeLayout(text=asked, strategy=_parse(asked, "--layout"))
    reason = "it is neither an entry of the recipe's layouts nor a layout such as dp8-z3"
    known = f"the recipe lists {', '.join(entries) or 'none'}"
    raise LayoutError.of("--layout", asked, f"{reason}; {known}", nearest(asked, list(entries)).strip() or "name one")


def _parse(text: str, field: str) -> Strategy:
    try:
        return Strategy.parse(text)
    except LayoutError as error:
        refusal = error.as_refusal()
        raise LayoutError(replace(refusal, settings=((field, text), *refusal.settings[1:]))) from None
