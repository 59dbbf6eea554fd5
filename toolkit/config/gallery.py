"""The gallery: the recipes that come with the toolkit, found by name in a checkout and where pip installed them."""

import contextlib
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from toolkit.errors import RecipeError, RunError, nearest

TASKS: Mapping[str, str] = {
    "pretrain": "pretraining from random weights",
    "continue": "continued pretraining of a model",
    "finetune": "full fine-tuning",
    "lora": "LoRA",
    "dpo": "preference tuning by DPO",
    "orpo": "preference tuning by ORPO",
    "kto": "preference tuning by KTO",
    "simpo": "preference tuning by SimPO",
    "distill": "distillation",
    "long": "long context",
}
"""The last word of a recipe's name, and what it means."""


def find_recipes() -> Path:
    """Return the directory of recipes and train.py: beside the package in a checkout, under share/ when installed.

    Raises RunError if neither exists.
    """
    parent = Path(__file__).resolve().parents[2]
    # A checkout, or pip --target.
    folders = [parent / "recipes", parent / "share" / "deepspeed-megatron-toolkit" / "recipes"]
    with contextlib.suppress(metadata.PackageNotFoundError):
        # pip knows where its scheme puts share/: not below sys.prefix with --user, or in Debian's own Python.
        files = metadata.files("deepspeed-megatron-toolkit") or []
        folders += [Path(str(file.locate())).parent for file in files if file.match("recipes/train.py")]
    for folder in folders:
        if (folder / "train.py").is_file():
            return folder.resolve()
    raise RunError(f"recipes/train.py is neither in {folders[0]} nor installed. Install the toolkit again.")


@cache
def gallery() -> Mapping[str, Path]:
    """Every recipe of the gallery by its name, `family/model-task`, and the demo."""
    folder = find_recipes()
    recipes = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.yaml")}
    return dict(sorted(recipes.items(), key=lambda entry: _in_order(entry[0])))


def task_of(name: str) -> str:
    """The task of a recipe; empty for one whose name ends with none."""
    last = name.rpartition("-")[2]
    return last if last in TASKS else ""


def find_recipe(name: str) -> Path:
    """The file of a recipe: a path, or a name of the gallery, whose family may be left out.

    A path that does not exist is returned as it is, for who reads it to say so. Raises RecipeError for a name that is
    not known.
    """
    path = Path(name)
    if not name or path.suffix in (".yaml", ".yml") or name.startswith((".", "/", "~")) or _exists(path):
        return path
    known = gallery()
    if name in known:
        return known[name]
    matches = [whole for whole in known if whole.rpartition("/")[2] == name]
    if len(matches) == 1:
        return known[matches[0]]
    if "/" in name and name.partition("/")[0] not in {whole.partition("/")[0] for whole in known}:
        return path
    several = f" Did you mean {' or '.join(matches)}?" if matches else ""
    short = {whole.rpartition("/")[2] for whole in known}
    hint = several or nearest(name, short if "/" not in name else known, most=3) or " `dstk ls` lists the recipes."
    raise RecipeError(f"{name}: neither a file nor a recipe of the gallery.{hint}")


def _exists(path: Path) -> bool:
    try:
        return path.exists() or path.is_symlink()
    except (OSError, ValueError):
        return True


def _in_order(name: str) -> list[tuple[int, float, str]]:
    """Sort numbers by size, and those of parameters in billions: 560m before 1.7b, and that before 14b."""
    name = re.sub(r"(\d+)m\b", lambda millions: f"{int(millions[1]) / 1000:.4f}b", name)
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return [(0, float(part), "") if part[:1].isdigit() else (1, 0.0, part) for part in parts if part]
