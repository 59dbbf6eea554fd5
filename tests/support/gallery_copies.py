"""Shrunken copies of the gallery's recipes: the same family, format of data and kind of layout, in some seconds.

A copy has a tiny model, a small local corpus in the recipe's format with a tokenizer that has a chat template, and two
ranks for each axis that had more than one. Where the recipe starts from published weights, the copy starts from weights
that were saved as a model is published.
"""

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rank_parent import RANK_SECONDS
from small_chats import WORDS, write_chats, write_tokenizer

from toolkit.config.distill_section import DistillSection
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.errors import ToolkitError
from toolkit.launch.local_ranks import RankFailedError, run_ranks
from toolkit.model_init.build_model import load_config
from toolkit.models.shape import find_name
from toolkit.parity import ParityResult
from toolkit.parity.run.compare_strategies import for_comparison
from toolkit.parity.run.shrink import SEQ_LEN, shrink
from toolkit.parity.run.train_in_memory import train_in_memory

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
from generate_gallery import GalleryRun, cell_of, runs  # noqa: E402

from toolkit.config.gallery import gallery  # noqa: E402

STEPS = 6


def groups() -> dict[str, dict[str, GalleryRun]]:
    """Family, task and data -> kind of layout -> the first run of the gallery that is of it."""
    found: dict[str, dict[str, GalleryRun]] = {}
    for name in (name for name in gallery() if "/" in name):
        for run in runs(name):
            group, _, layout = cell_of(run).rpartition(" ")
            found.setdefault(group, {}).setdefault(layout, run)
    return found


def shrunken(recipe: Recipe, folder: Path) -> Recipe:
    """The copy of a recipe, with its corpus, tokenizer and weights in `folder`."""
    shape = find_name(recipe.model.name_or_path, tuned=True)
    small = shrink(recipe.changed({"model": {"name_or_path": shape, "init": "random"}}))
    writers = {
        "text": _write_texts,
        "chat": write_chats,
        "prompt_completion": _write_prompts,
        "preference": _write_pairs,
        "unpaired": _write_completions,
    }
    source = writers[recipe.data.format]
    data = {
        "source": str(source(folder / "rows.jsonl")),
        "subset": None,
        "split": "train",
        "text_field": "text",
        "tokenizer": str(write_tokenizer(folder / "tokenizer")),
        "seq_len": SEQ_LEN,
        "eval_fraction": 0.0,
        "format": recipe.data.format,
        "packing": recipe.data.packing,
        "document_masking": recipe.data.document_masking,
        "overlong": recipe.data.overlong,
        "bos": recipe.data.bos,
        "separator": recipe.data.separator,
        "train_on": recipe.data.train_on,
        "workers": 1,
        "cache_dir": str(folder / "cache"),
    }
    small = for_comparison(small, steps=STEPS, dropout=False).changed(
        {"data": data, "train": {"objective": recipe.train.objective, "distill": _teacher(recipe, small, folder)}}
    )
    if recipe.model.init == "pretrained":
        small = small.changed({"model": _saved(small, folder / "model")})
    return small.model_copy(update={"precision": "fp32"})


def compare(recipe: Recipe, layouts: Iterable[str], folder: Path) -> dict[str, str]:
    """Hold the copy in several kinds of layouts against one plain process: `same`, `differs` or `failed` for each."""
    small, found = shrunken(recipe, folder), {}
    plain = Strategy.parse("reference").apply(small, 1)
    (baseline,) = run_ranks(train_in_memory, 1, plain, joined=False)
    for layout in layouts:
        strategy = Strategy.parse(layout)
        own, size = strategy.apply(small, 1), strategy.world_size(1)
        try:
            result = ParityResult.of(run_ranks(train_in_memory, size, own, timeout_seconds=RANK_SECONDS)[0], baseline)
            found[layout] = "same" if result.passed else "differs"
        except (ToolkitError, RankFailedError) as error:
            print(f"{layout}: {error}")
            found[layout] = "failed"
    return found


def _saved(recipe: Recipe, folder: Path, seed: int = 0) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(load_config(recipe.model)).save_pretrained(folder)
    return {"name_or_path": str(folder), "init": "pretrained", "overrides": {}}


def _teacher(recipe: Recipe, small: Recipe, folder: Path) -> DistillSection | None:
    """The distillation of a recipe, from a model of the size of the copy with other weights."""
    section = recipe.train.distill
    if section is None:
        return None
    teacher = _saved(small, folder / "teacher", seed=1)["name_or_path"]
    return section.model_copy(update={"teacher": teacher, "top_k": 8})


def _write_texts(path: Path) -> Path:
    rng = random.Random(5)
    return _written(path, ({"text": " ".join(rng.choices(WORDS, k=rng.randint(3, 60)))} for _ in range(200)))


def _write_prompts(path: Path) -> Path:
    rng = random.Random(6)

    def words(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    return _written(path, ({"prompt": words(20), "completion": words(6)} for _ in range(200)))


def _write_pairs(path: Path) -> Path:
    """Pairs of short texts: a copy's samples have few places."""
    rng = random.Random(7)

    def words(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    return _written(path, ({"prompt": words(4), "chosen": words(5), "rejected": words(5)} for _ in range(200)))


def _write_completions(path: Path) -> Path:
    """Short completions, of which two of five are desirable."""
    rng = random.Random(8)

    def words(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    rows = ({"prompt": words(4), "completion": words(5), "label": number % 5 < 2} for number in range(200))
    return _written(path, rows)


def _written(path: Path, rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
