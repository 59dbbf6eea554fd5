"""Write what the gallery's recipes say about themselves: the head of each, and docs/recipes-gallery.md.

    python docs/generate_gallery.py

The head of a recipe has its launch line and a row for each of its layouts, with the columns of COLUMNS; the text
between them is written by hand. The page also says when and how each layout was tested, from docs/gallery_tests.json
that `make gallery` writes.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit.config import load_recipe, recipe_layouts
from toolkit.config.gallery import TASKS, gallery, task_of
from toolkit.config.layouts import ListedLayout
from toolkit.config.recipe import Recipe
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.hardware import Gpu, gpu
from toolkit.models.shape import published_parameters
from toolkit.planner.costs import cost_of
from toolkit.planner.request import predict
from toolkit.planner.run_memory import memory_request, model_config
from toolkit.planner.step_time import StepTime
from toolkit.units import format_count, plural

PAGE = Path(__file__).with_name("recipes-gallery.md")
TESTS = Path(__file__).with_name("gallery_tests.json")
BEGIN, END = "<!-- recipes: written by docs/generate_gallery.py -->", "<!-- end of recipes -->"
_ROW = "#   "
"""A line of the table in a recipe's head begins so."""


@dataclass(frozen=True, kw_only=True)
class GalleryRun:
    """A recipe in one of its layouts."""

    name: str
    path: Path
    listed: ListedLayout

    @cached_property
    def recipe(self) -> Recipe:
        """As `dstk train NAME --layout …` loads it."""
        asked = self.listed.name if self.is_first else self.listed.text
        return load_recipe(self.path, world_size=self.listed.ranks, layout=asked)

    @property
    def is_first(self) -> bool:
        """Whether the name of its entry means this layout."""
        return self.listed == next(one for one in recipe_layouts(self.path) if one.name == self.listed.name)

    @cached_property
    def gpu(self) -> Gpu:
        """The GPU that the entry names."""
        return gpu(self.listed.gpu)

    @cached_property
    def memory(self) -> MemoryBreakdown:
        """The stage that takes most, as `dstk memory` calculates it."""
        layout = self.recipe.layout(self.listed.ranks)
        return memory_request(self.recipe, layout, self.recipe.resolve_batch(layout), gpu=self.gpu).peak()

    @cached_property
    def step(self) -> StepTime | None:
        """The predicted step; None for engines other than DeepSpeed's."""
        if self.recipe.train.engine != "deepspeed":
            return None
        layout = self.recipe.layout(self.listed.ranks)
        return predict(self.recipe, layout, self.recipe.resolve_batch(layout), self.gpu)

    @property
    def tokens_per_second(self) -> str:
        """Of each GPU, to two digits: the prediction is no better."""
        return "" if self.step is None else f"{float(f'{self.step.tokens_per_second_per_gpu:.2g}'):,.0f}"

    @property
    def usd_per_billion_tokens(self) -> str:
        """At the catalogue's price of the GPU."""
        usd = None if self.step is None else cost_of(self.step, self.gpu, 1e9).usd
        return "" if usd is None else f"{float(f'{usd:.2g}'):,.0f}"


COLUMNS: dict[str, Callable[[GalleryRun], str]] = {
    "--layout": lambda run: run.listed.name if run.is_first else "",
    "is": lambda run: run.listed.text,
    "GiB of each GPU": lambda run: f"{run.memory.total / 2**30:.1f} of {run.gpu.memory_bytes / 2**30:.1f}",
    "GiB of the host for each": lambda run: f"{run.memory.host.total / 2**30:.0f}" if run.memory.host.total else "",
    "tokens/s of each": lambda run: run.tokens_per_second,
    "$ per 1e9 tokens": lambda run: run.usd_per_billion_tokens,
}
"""Head and content of each column of a recipe's table; one without content is left out."""


def runs(name: str) -> list[GalleryRun]:
    """A recipe of the gallery in each of its layouts."""
    path = gallery()[name]
    return [GalleryRun(name=name, path=path, listed=listed) for listed in recipe_layouts(path)]


def with_head(name: str, text: str) -> str:
    """The text of a recipe with a new head."""
    lines = text.splitlines()
    end = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    written = [line for line in lines[2:end] if not line.startswith(_ROW)]
    while written and written[-1] == "#":
        written.pop()
    own = runs(name)
    command = f"# dstk train {name.rpartition('/')[2]} --layout {own[0].listed.name}"
    if own[0].listed.ranks > 8:
        nodes = own[0].listed.ranks // 8
        command = (
            f"# dstk config {name.rpartition('/')[2]} --layout {own[0].listed.name} --nodes {nodes} --gpus-per-node 8"
        )
        command += " --launcher slurm"
    schema = "# yaml-language-server: $schema=../recipe.schema.json"
    return "\n".join([command, schema, *written, "#", *_table(own), *lines[end:]]) + "\n"


def _table(own: list[GalleryRun]) -> Iterator[str]:
    columns = [[head, *(cell(run) for run in own)] for head, cell in COLUMNS.items()]
    columns = [column for column in columns if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        yield _ROW + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def page(current: str) -> str:
    """The gallery's page with new tables between the markers."""
    before, _, rest = current.partition(BEGIN)
    _, _, after = rest.partition(END)
    names = [name for name in gallery() if "/" in name]
    families = dict.fromkeys(name.partition("/")[0] for name in names)
    layouts = sum(len(recipe_layouts(gallery()[name])) for name in names)
    versions = _tests().get("versions", {})
    tested = f" Tested with {', '.join(f'{name} {version}' for name, version in versions.items())}." if versions else ""
    parts = [f"{len(names)} recipes with {layouts} layouts.{tested}"]
    for family in families:
        parts.append(f"## {family}")
        parts.append(_page_table([name for name in names if name.startswith(f"{family}/")]))
    return f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}"


def _page_table(names: list[str]) -> str:
    tested = _tests()
    rows = ["| recipe | what | layout | GiB of each GPU | tested |", "|---|---|---|---|---|"]
    for name in names:
        for number, (run, memory) in enumerate(zip(runs(name), _memory_of_head(name), strict=True)):
            link = f"[{name.rpartition('/')[2]}](../recipes/{name}.yaml)" if number == 0 else ""
            what = _what(run) if number == 0 else ""
            words = f"`{run.listed.name}`: {run.listed.text}" if run.is_first else run.listed.text
            rows.append(f"| {link} | {what} | {words} | {memory} | {_tested(run, tested)} |")
    return "\n".join(rows)


def _memory_of_head(name: str) -> list[str]:
    """The memory of each layout as the head of the recipe has it, which another test holds against the estimate."""
    rows = [line for line in gallery()[name].read_text(encoding="utf-8").splitlines() if line.startswith(_ROW)]
    return [re.findall(r"[\d.]+ of [\d.]+", line)[0] for line in rows[1:]]


def _what(run: GalleryRun) -> str:
    count = published_parameters(run.recipe.model.name_or_path)
    size = "" if count is None else f"{format_count(count)}, "
    return f"{size}{TASKS[task_of(run.name)]} on {run.recipe.data.source}"


def _tests() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(TESTS.read_text(encoding="utf-8")) if TESTS.exists() else {}
    return known


def _tested(run: GalleryRun, tested: dict[str, Any]) -> str:
    found = tested.get("cells", {}).get(cell_of(run))
    if found is None:
        return "not yet"
    return f"{found['date']}: {cell_of(run).rpartition(' ')[2]}, {plural(found['ranks'], 'rank')}, {found['result']}"


def cell_of(run: GalleryRun) -> str:
    """What decides the shrunken copy of a run: family, task, format of the data, and kind of layout."""
    recipe, config = run.recipe, model_config(run.recipe)
    packing = "-padded" * (recipe.data.packing == "padded")
    other = "" if recipe.optimizer.name == "adamw" else f"-{recipe.optimizer.name}"
    kind = f"{config['model_type']} {task_of(run.name)} {recipe.data.format}{packing}{other}"
    return f"{kind} {run.listed.strategy.shrunk().text}"


if __name__ == "__main__":
    for one, file in gallery().items():
        if "/" in one:
            file.write_text(with_head(one, file.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
