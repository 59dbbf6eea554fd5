"""Every layout resumes from a checkpoint of every layout: the tables of differences, of a dense model and of a mixture.

    python tests/cluster/resume_matrix.py

Each layout resumes from step 4 of a run of 8 steps in one layout. The table shows the largest relative difference of a
loss from the uninterrupted run; in the same layout there must be none at all. The samples of each step must be the
same, in the same order. Leaves build/reliability/resume.json for docs/generate_reliability.py.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
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
MIXTURES = (
    *("reference", "dp2-z1", "dp4-ep2-z1", "dp4-ep4-z2", "dp4-ep2-z3", "pp2-dp2-ep2-z1"),
    *("tp2-dp2-ep2-z1-sp", "tp2-dp2-ep2-z3", "tp2-z3-inner", "tp2-pp2-z1"),
)
"""Of a mixture of experts, in a table of its own."""
STEPS, RESUMED_AT = 8, 4
BOUND = 1e-6
RESULT = Path(__file__).parents[2] / "build" / "reliability" / "resume.json"
Curve = list[tuple[float, str]]


DENSE: dict[str, Any] = {
    "name_or_path": "gpt2-tiny",
    "overrides": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 320},
}
MIXTURE: dict[str, Any] = {
    "name_or_path": "mixtral-8x7b",
    "overrides": {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 320,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
    },
    "router_aux_loss": {"coefficient": 0.01, "scope": "global"},
}


def recipe_of(name: str, folder: Path, model: dict[str, Any]) -> tuple[Recipe, int]:
    """A small recipe in one layout, and its number of ranks."""
    recipe = Recipe.model_validate_json(
        json.dumps(
            {
                "model": model,
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


def train(run_ranks: Callable[..., Any], folder: Path, model: dict[str, Any], name: str, *arguments: str) -> None:
    """Run recipes/train.py in one layout."""
    recipe, world_size = recipe_of(name, folder, model)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    run_ranks(train_here, world_size, str(folder), ["--config", "recipe.yaml", *arguments], joined=False)


def difference(found: Curve, wanted: Curve) -> float:
    """The largest relative difference of a loss; infinite where the samples differ."""
    if [samples for _, samples in found] != [samples for _, samples in wanted]:
        return float("inf")
    return max(abs(loss - other) / abs(other) for (loss, _), (other, _) in zip(found, wanted, strict=True))


def row(
    run_ranks: Callable[..., Any], folder: Path, model: dict[str, Any], layouts: Sequence[str], name: str
) -> dict[str, float]:
    """The differences of all layouts, each resumed from a checkpoint of `name`."""
    train(run_ranks, folder, model, name, "run_dir=run")
    wanted = curve(folder / "run")[RESUMED_AT:]
    found = {}
    for other in layouts:
        train(run_ranks, folder, model, other, "run_dir=next", "--resume", f"run/step-{RESUMED_AT:08d}")
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


def table_of(
    run_ranks: Callable[..., Any], folder: Path, model: dict[str, Any], layouts: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Print a table row by row, and return it."""
    table: dict[str, dict[str, float]] = {}
    width = max(map(len, layouts))
    print(f"{'':{width}}  {'  '.join(f'{name:>8}' for name in layouts)}")
    for name in layouts:
        table[name] = row(run_ranks, folder, model, layouts, name)
        cells = "  ".join(f"{table[name][other]:{max(8, len(other))}.1e}" for other in layouts)
        print(f"{name:{width}}  {cells}", flush=True)
    return table


def main() -> int:
    """Print both tables, and save them; docs/generate_reliability.py reads the first."""
    become_rank_parent()
    from toolkit.launch.local_ranks import run_ranks

    with tempfile.TemporaryDirectory(prefix="resume-") as temporary:
        folder = Path(temporary)
        write_corpus(folder)
        tables = {
            "table": table_of(run_ranks, folder, DENSE, LAYOUTS),
            "mixtures": table_of(run_ranks, folder, MIXTURE, MIXTURES),
        }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"date": datetime.now(tz=UTC).date().isoformat(), **tables}, indent=1) + "\n")
    return 0 if all(map(is_right, tables.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
