"""Train a shrunken copy of every recipe of the gallery in every kind of layout, and write down what came out.

    make gallery                                       # about ten minutes on two cores
    python tests/parity/gallery_matrix.py              # what was not tested yet with these versions
    python tests/parity/gallery_matrix.py 'llama lora' # again, groups whose name contains this

Each group (family, task, data) is one comparison with a plain process. Results go to docs/gallery_tests.json, which
docs/generate_gallery.py reads for the page. Exits with 1 if a layout trained something else.
"""

import datetime
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from rank_parent import become_rank_parent

# isort: split
from gallery_copies import GalleryRun, compare, groups
from generate_gallery import TESTS, cell_of

LIBRARIES = ("torch", "deepspeed", "transformers")


def main(pattern: str) -> int:
    """Run the groups; return how many layouts differ or failed."""
    become_rank_parent()
    failed = 0
    for name, layouts in groups().items():
        done = _known()
        if pattern not in name or (not pattern and all(cell_of(run) in done for run in layouts.values())):
            continue
        with tempfile.TemporaryDirectory(prefix="gallery-") as folder:
            first = next(iter(layouts.values()))
            found = compare(first.recipe, list(layouts), Path(folder))
        entries = {
            cell_of(run): _entry(run, result) for run, result in zip(layouts.values(), found.values(), strict=True)
        }
        _write(entries)
        wrong = {cell: entry["result"] for cell, entry in entries.items() if entry["result"] != "same"}
        failed += len(wrong)
        print(f"{name}: {len(entries)} layouts{f', {wrong}' if wrong else ''}", flush=True)
    return failed


def _entry(run: GalleryRun, result: str) -> dict[str, Any]:
    small = run.listed.strategy.shrunk()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": today, "ranks": small.world_size(1), "result": result}


def _versions() -> dict[str, str]:
    return {name: version(name).partition("+")[0] for name in LIBRARIES}


def _known() -> dict[str, Any]:
    """What was tested with the installed versions."""
    known: dict[str, Any] = json.loads(TESTS.read_text(encoding="utf-8")) if TESTS.exists() else {}
    return known["cells"] if known.get("versions") == _versions() else {}


def _write(entries: dict[str, Any]) -> None:
    """Add entries; those of other versions are dropped, and those of recipes that are gone."""
    wanted = {cell_of(run) for layouts in groups().values() for run in layouts.values()}
    cells = {cell: entry for cell, entry in sorted((_known() | entries).items()) if cell in wanted}
    TESTS.write_text(json.dumps({"versions": _versions(), "cells": cells}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1] if len(sys.argv) > 1 else "") else 0)
