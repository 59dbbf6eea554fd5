"""Peak memory of a rank over the length of a sequence, with one to eight ranks that share it, beside the estimate.

    python benchmarks/context_memory.py           # about twenty minutes
    python benchmarks/context_memory.py --quick   # does it run? The figures mean nothing.
    python benchmarks/context_memory.py --save    # also writes benchmarks/results/context_memory.md

A small Llama trains in fp32 under ZeRO-1, on samples of packed documents that do not see each other, one sample in a
micro-batch; ranks are forked gloo ranks with one thread each. One rank alone has the toolkit's attention too
(`model.attn_implementation: blocks`), so that no side makes a mask.

    measured     most bytes of live tensors at any moment of two steps, from the building of the model on, of all ranks;
                 what a kernel allocates and frees within is not seen
    estimate     what `dstk memory` says that PyTorch allocates, with kernels of a CPU, which compute no scores
    per position bytes that the row has more than the one above, for each position that a rank has more there: if a
                 term grew with the square of the length, this would double from row to row
"""

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import deepspeed  # noqa: F401  # before the ranks are forked
from allocations import LiveBytes  # type: ignore[import-not-found]
from measure.our_run import make_recipe, our_run
from measure.rounds import silently
from measure.table import publish
from rich.console import Console

from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.estimate.memory_request import MemoryRequest
from toolkit.launch.local_ranks import preload, run_ranks
from toolkit.launch.output import quiet
from toolkit.planner.run_memory import memory_request

RANKS = (1, 2, 4, 8)
LENGTHS = (2048, 4096, 8192, 16384)
LAYERS = 4
HIDDEN = 128


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short sequences")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/context_memory.md")
    options = parser.parse_args()
    quiet(debug=False)
    preload("llama")
    lengths = (128, 256) if options.quick else LENGTHS
    with tempfile.TemporaryDirectory() as name:
        rows = [row for ranks in RANKS for row in rows_of(Path(name), ranks, lengths)]
    publish(
        "context_memory",
        title="Peak memory of a rank over the length of a sequence",
        headings=("layout", "tokens of a sample", "measured MiB", "per position", "estimate MiB", "per position"),
        rows=rows,
        notes=[f"Llama of {LAYERS} layers x {HIDDEN}, fp32, ZeRO-1, documents apart"],
        save=options.save,
    )


def rows_of(folder: Path, ranks: int, lengths: tuple[int, ...]) -> list[list[str]]:
    """Train on sequences of each length with this number of ranks, and return the rows of the table."""
    measured: list[int] = []
    estimated: list[int] = []
    for length in lengths:
        Console(stderr=True, highlight=False).print(f"cp{ranks}: {length:,} tokens", style="dim")
        recipe = recipe_of(folder, ranks, length)
        job = Job.of(recipe, ranks)
        measured.append(max(run_ranks(live_peak, ranks, recipe, timeout_seconds=1800)))
        estimated.append(max(stage.allocated for stage in _request(recipe, job).stages()))
    positions = [length // ranks for length in lengths]
    columns = [
        [f"cp{ranks}-z1"] * len(lengths),
        [f"{length:,}" for length in lengths],
        mebibytes(measured),
        slopes(measured, positions),
        mebibytes(estimated),
        slopes(estimated, positions),
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _request(recipe: Recipe, job: Job) -> MemoryRequest:
    """Ask for the memory of the recipe with kernels of a CPU."""
    request = memory_request(recipe, job.layout, job.batch)
    computation = replace(request.setup.computation, device="cpu")
    return replace(request, setup=replace(request.setup, computation=computation))


def live_peak(recipe: Recipe) -> int:
    """Train on this rank; return the most bytes of tensors that were live at once."""
    with LiveBytes() as memory:
        silently(partial(our_run, recipe))
    return int(memory.peak_bytes)


def recipe_of(folder: Path, ranks: int, length: int) -> Recipe:
    """The recipe of two steps on sequences of this length."""
    model: dict[str, Any] = {
        "name_or_path": "llama-tiny",
        "overrides": {
            "hidden_size": HIDDEN,
            "intermediate_size": 3 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "vocab_size": 4096,
            "max_position_embeddings": LENGTHS[-1],
        },
    }
    if ranks == 1:
        model["attn_implementation"] = "blocks"
    recipe = make_recipe(
        folder,
        model=model,
        seq_len=length,
        precision="fp32",
        batch={"global_batch_size": 1, "micro_batch_size": 1},
        parallel={"cp": ranks, "zero_stage": 1},
        train={"steps": 2, "engine": "deepspeed"},
    )
    return recipe.changed({"data": {"document_masking": True}})


def mebibytes(sizes: list[int]) -> list[str]:
    """Return bytes in MiB."""
    return [f"{size / 2**20:,.0f}" for size in sizes]


def slopes(sizes: list[int], positions: list[int]) -> list[str]:
    """Return how many bytes each row has for a position more than the row above."""
    ends = zip(pairwise(sizes), pairwise(positions), strict=True)
    return ["", *(f"{(after - before) / (last - first):,.0f}" for (before, after), (first, last) in ends)]


if __name__ == "__main__":
    main()
