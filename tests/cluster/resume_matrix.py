"""Every layout resumes from a checkpoint of every layout: the table of differences.

    python tests/cluster/resume_matrix.py

Each layout resumes from step 4 of a run of 8 steps in one layout. The table shows the largest relative difference of a
loss from the uninterrupted run; in the same layout there must be none at all. The samples of each step must be the
same, in the same order. Leaves build/reliability/resume.json for docs/generate_reliability.py.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from rank_parent import become_rank_parent
from small_text import write_corpus

# isort: split
from train_script import train_here

from toolkit.config import dump_recipe
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy

LAYOUTS = (
    *("reference", "ddp", "fsdp", "dp2-z0", "dp2-z1", "dp4-z2", "dp2-z3", "dp2-z3-offload"),
    *("tp2-z1", "tp2-sp-dp2-z3", "pp2-z1", "tp2-pp2-z1", "u2-z2"),
)
STEPS, RESUMED_AT = 8, 4
BOUND = 1e-6
RESULT = Path(__file__).parents[2] / "build" / "reliability" / "resume.json"
Curve = list[tuple[float, str]]


def recipe_of(name: str, folder: Path) -> tuple[Recipe, int]:
    """A small recipe in one layout, and its number of ranks."""
    recipe = Recipe.model_validate_json(
        json.dumps(
            {
                "model": {
                    "name_or_path": "gpt2-tiny",
                    "overrides": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 320},
                },
                "data": {
                    "source": str(folder / "documents.jsonl"),
                    "tokenizer": "bpe-300",
                    "seq_len": 32,
                    "workers": 1,
                    "cache_dir": str(folder / "cache"),
                },
                "batch": {"global_batch_size": 16, "micro_batch_size": 4},
                "optimizer": {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1},
                "schedule": {"name": "cosine", "warmup_steps": 6},
                "train": {"steps": STEPS, "seed": 1, "grad_clip": 0.5},
                "checkpoint": {"every": RESUMED_AT, "keep": 2},
            }
        )
    )
    strategy = Strategy.parse(name)
    return strategy.apply(recipe, 2), strategy.world_size(2)


def curve(run: Path) -> Curve:
    """Loss and samples of each step."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(step["loss"], step["batch"]) for step in steps]


def train(run_ranks: Callable[..., Any], folder: Path, name: str, *arguments: str) -> None:
    """Run recipes/train.py in one layout."""
    recipe, world_size = recipe_of(name, folder)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    run_ranks(train_here, world_size, str(folder), ["--config", "recipe.yaml", *arguments], joined=False)


def difference(found: Curve, wanted: Curve) -> float:
    """The largest relative difference of a loss; infinite where the samples differ."""
    if [samples for _, samples in found] != [samples for _, samples in wanted]:
        return float("inf")
    return max(abs(loss - other) / abs(other) for (loss, _), (other, _) in zip(found, wanted, strict=True))


def row(run_ranks: Callable[..., Any], folder: Path, name: str) -> dict[str, float]:
    """The differences of all layouts, each resumed from a checkpoint of `name`."""
    train(run_ranks, folder, name, "run_dir=run")
    wanted = curve(folder / "run")[RESUMED_AT:]
    found = {}
    for other in LAYOUTS:
        train(run_ranks, folder, other, "run_dir=next", "--resume", f"run/step-{RESUMED_AT:08d}")
        found[other] = difference(curve(folder / "next"), wanted)
        shutil.rmtree(folder / "next")
    shutil.rmtree(folder / "run")
    return found


def is_right(table: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether the same layout repeats every bit, and every other stays within the bound."""
    return all(
        value == 0 if name == other else value <= BOUND
        for name, values in table.items()
        for other, value in values.items()
    )


def main() -> int:
    """Print the table row by row, and save it for docs/generate_reliability.py."""
    become_rank_parent()
    from toolkit.launch.local_ranks import run_ranks

    table: dict[str, dict[str, float]] = {}
    width = max(map(len, LAYOUTS))
    print(f"{'':{width}}  {'  '.join(f'{name:>8}' for name in LAYOUTS)}")
    with tempfile.TemporaryDirectory(prefix="resume-") as temporary:
        folder = Path(temporary)
        write_corpus(folder)
        for name in LAYOUTS:
            table[name] = row(run_ranks, folder, name)
            cells = "  ".join(f"{table[name][other]:{max(8, len(other))}.1e}" for other in LAYOUTS)
            print(f"{name:{width}}  {cells}", flush=True)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"date": datetime.now(tz=UTC).date().isoformat(), "table": table}, indent=1) + "\n")
    return 0 if is_right(table) else 1


if __name__ == "__main__":
    sys.exit(main())
