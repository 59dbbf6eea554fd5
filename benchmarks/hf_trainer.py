"""Tokens per second on two ranks: this toolkit against the Hugging Face Trainer, both with DeepSpeed ZeRO-2 in fp32.

    python benchmarks/hf_trainer.py                     # both sizes, five rounds: about a quarter of an hour
    python benchmarks/hf_trainer.py --sizes small --rounds 3
    python benchmarks/hf_trainer.py --quick             # does it run? The figures mean nothing.
    python benchmarks/hf_trainer.py --save              # also writes benchmarks/results/hf_trainer.md

All sides get the same model with the same initial weights, the same DeepSpeed config (the toolkit's: buckets, PyTorch's
AdamW, clipping, accumulation), the same tokens in the same order on the same rank, and one thread a rank. All log every
step and draw a live progress bar.

    Trainer   transformers.Trainer with TrainingArguments(deepspeed=…) and its default data loader, over a torch Dataset
              of tensors in memory with labels=input_ids. It shifts the labels itself, so the last position of a sample
              has no target, but counts that position when it divides: its loss is (s - 1) / s of ours, s = seq_len.
    toolkit   the loop of recipes/train.py, with its loader from the token cache and its metrics file.
    Trainer, memory kept
              the Trainer after the toolkit's `keep_freed_memory`, which no user of it has: shows how much of the
              difference is memory that goes back to the kernel and is cleared again in every step.

A round forks two ranks for each side in turn, so that a machine that slows down slows all. The first steps of a run are
not counted. Prints medians of all counted steps, and of the ratios to the Trainer in the same round the median, the
smallest and the largest.
"""

import argparse
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from measure.our_run import CPU, Stamps, make_recipe, our_run
from measure.rounds import Side, Times, alternate
from measure.table import publish, target_met
from measure.trainer_run import Tokens, trainer_run

from toolkit.config.recipe import Recipe
from toolkit.launch.output import quiet
from toolkit.model_init.freed_memory import keep_freed_memory

RANKS = 2
TARGET = 1.10
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SIZES: dict[str, dict[str, Any]] = {
    # The model, batch and sample length of recipes/demo.yaml: overhead counts.
    "small": {
        "model": {"name_or_path": "gpt2-tiny"},
        "seq_len": 128,
        "batch": {"global_batch_size": 16, "micro_batch_size": 8},
    },
    # Half of GPT-2's layers at half its width, with its whole vocabulary: computation dominates.
    "medium": {
        "model": {"name_or_path": "gpt2", "overrides": {"n_layer": 6, "n_embd": 384, "n_head": 6} | NO_DROPOUT},
        "seq_len": 256,
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
    },
}
STEPS = {"small": 60, "medium": 9}
WARMUP = {"small": 10, "medium": 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument("--quick", action="store_true", help="one short round of the small size")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/hf_trainer.md")
    options = parser.parse_args()
    quiet(debug=False)
    rows: list[list[str]] = []
    notes: list[str] = []
    for size in ["small"] if options.quick else options.sizes:
        steps = WARMUP[size] + 5 if options.quick else STEPS[size]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            recipe = make_recipe(folder, **SIZES[size], parallel={"zero_stage": 2}, train={"steps": steps})
            times = alternate(
                sides(recipe, folder), ranks=RANKS, rounds=1 if options.quick else options.rounds, warmup=WARMUP[size]
            )
        rows += table_rows(size, recipe, times)
        notes.append(loss_note(size, recipe, times))
    publish(
        "hf_trainer",
        title="Two ranks, ZeRO-2, fp32: toolkit and Hugging Face Trainer",
        headings=("size", "side", "ms a step", "tokens/s", "ratio", "smallest", "largest", "target"),
        rows=rows,
        text_columns=2,
        notes=notes,
        save=options.save,
    )


def sides(recipe: Recipe, folder: Path) -> dict[str, Side]:
    tokens = Tokens(recipe)
    return {
        "Trainer": partial(trainer_side, recipe, tokens, folder, memory_kept=False),
        "toolkit": partial(our_run, recipe),
        "Trainer, memory kept": partial(trainer_side, recipe, tokens, folder, memory_kept=True),
    }


def trainer_side(recipe: Recipe, tokens: Tokens, folder: Path, *, memory_kept: bool) -> Stamps:
    """Train on this rank with the Trainer."""
    if memory_kept:
        keep_freed_memory()
    return trainer_run(recipe, tokens, folder, CPU)


def table_rows(size: str, recipe: Recipe, times: dict[str, Times]) -> list[list[str]]:
    tokens = recipe.batch.global_batch_size * recipe.data.seq_len
    rows = []
    for side, measured in times.items():
        ratios = times["Trainer"].over(measured)
        middle = statistics.median(ratios)
        rows.append(
            [
                size,
                side,
                f"{measured.median * 1e3:.1f}",
                f"{tokens / measured.median:,.0f}",
                *(f"{ratio:.2f}x" for ratio in (middle, ratios[0], ratios[-1])),
                target_met(middle, TARGET, at_most=False) if side == "toolkit" else "",
            ]
        )
    return rows


def loss_note(size: str, recipe: Recipe, times: dict[str, Times]) -> str:
    """Do both train the same model? The Trainer's losses are scaled to the targets that it counts but leaves out."""
    seq_len = recipe.data.seq_len
    theirs = [loss * seq_len / (seq_len - 1) for loss in times["Trainer"].losses]
    ours = times["toolkit"].losses
    difference = max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
    return (
        f"{size}: the loss falls from {ours[0]:.3f} to {ours[-1]:.3f} in {len(ours)} steps; Trainer and toolkit are at "
        f"most {difference:.2%} apart."
    )


if __name__ == "__main__":
    main()
