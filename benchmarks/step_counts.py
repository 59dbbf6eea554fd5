"""What one training step asks of a device, counted: operations, host reads, bytes, casts, collectives.

    python benchmarks/step_counts.py                    # all models and layouts: about five minutes
    python benchmarks/step_counts.py --models llama --layouts dp2-z1 tp2-z1 --lines
    python benchmarks/step_counts.py --save             # also writes benchmarks/results/step_counts.md

No time is measured: benchmarks/measure/step_counter.py says what is counted, and why it says more about a GPU than the
seconds of a CPU. Every layout trains with the loop of recipes/train.py on gloo ranks that are forked on this machine,
in bf16 with four micro-batches a step and rank; the fourth step is counted, on rank 0, in a pipeline on its last stage.
Beside them are two peers with the same model, tokens and optimizer:

    plain PyTorch   autocast, backward, clip_grad_norm_, AdamW.step, loss.item() in every micro-batch, one process
    Trainer         transformers.Trainer with the toolkit's DeepSpeed config of the same stage

The second table has the collectives of each layout beside their closed forms (docs/step-counts.md derives them), and
the third the lines of code that make the host wait.
"""

import argparse
import importlib
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import deepspeed
import torch
import torch.distributed as dist
from measure.closed_forms import StepFacts, collective_rows
from measure.our_run import CPU, make_recipe
from measure.rounds import silently
from measure.step_counter import BACKWARD, FORWARD, PHASES, UPDATE, CountedStep, StepCounts
from measure.table import Sheet, publish_all
from measure.trainer_run import Tokens, trainer_run

from toolkit import Job, TrainOptions, train
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.tokens.token_cache import prepare
from toolkit.engines.optimizer import parameter_groups
from toolkit.launch.local_ranks import preload, run_ranks
from toolkit.launch.output import quiet
from toolkit.model_init.build_model import build_model

MICRO_BATCHES = 4
STEPS = 5
SEQ_LEN = 64
# Wide enough beside the vocabulary that both stages of a pipeline have decoder layers.
_VOCABULARY = {"vocab_size": 4096}
_DECODER = _VOCABULARY | {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "name_or_path": "gpt2-tiny",
        "overrides": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 1024} | _VOCABULARY,
    },
    "llama": {
        "name_or_path": "llama-tiny",
        "overrides": _DECODER | {"intermediate_size": 1024},
    },
    "qwen3_moe": {
        "name_or_path": "qwen3-30b-a3b",
        "overrides": _DECODER
        | {
            "moe_intermediate_size": 512,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    },
}
LAYOUTS = (
    *("reference", "dp2-ddp", "dp2-z0", "dp2-z1", "dp2-z2", "dp2-z3", "dp2-z1-recompute", "dp2-z1-lora"),
    *("tp2-z1", "tp2-z1-sp", "tp2-z1-sp-recompute", "pp2-z1", "tp2-pp2-z1", "tp2-pp2-dp2-z1", "u2-z3"),
)
OF_EXPERTS = ("dp2-ep2-z2",)
PEERS = ("plain PyTorch", "Trainer dp2-z1", "Trainer dp2-z2", "Trainer dp2-z3")
HEADINGS = (
    *("model", "side", "operations", "forward", "backward", "update", "host reads", "counter reads"),
    *("KiB moved", "in update", "copies", "casts", "repeated", "norm calls", "collectives"),
)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", default=None, help="sides, as the table names them")
    parser.add_argument("--quick", action="store_true", help="one model and three sides")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/step_counts.md")
    options = parser.parse_args()
    quiet(debug=False)
    import_all()
    models = ["llama"] if options.quick else options.models
    rows, collectives, reads = [], [], []
    with tempfile.TemporaryDirectory() as name:
        for model in models:
            sides = options.layouts or [*LAYOUTS, *(OF_EXPERTS if model == "qwen3_moe" else ()), *PEERS]
            if options.quick:
                sides = ["dp2-z1", "tp2-z1-sp", "plain PyTorch"]
            for side in sides:
                counts, facts = count(Path(name), model, side)
                rows.append([model, side, *figures(counts)])
                strategy = None if facts is None else Strategy.parse(side.removesuffix("-lora"))
                collectives += [[model, side, *row] for row in collective_rows(strategy, counts, facts)]
                reads += [[model, side, *row] for row in read_lines(counts)]
    sheets = [
        Sheet(title="One step of a rank, counted", headings=HEADINGS, rows=rows, text_columns=2),
        Sheet(
            title="Collectives of a step",
            headings=("model", "side", "collective", "ranks", "calls", "async", "KiB", "closed form, KiB", "ratio"),
            rows=collectives,
            text_columns=3,
        ),
        Sheet(
            title="Where the host waits for the device",
            headings=("model", "side", "phase", "line", "operation", "a step"),
            rows=reads,
            text_columns=5,
        ),
    ]
    note = (
        f"bf16, 4 layers x 64, {SEQ_LEN} tokens a sample, one sample a micro-batch, {MICRO_BATCHES} micro-batches; "
        "rank 0, in a pipeline its last stage. The reference is fp32."
    )
    command = " ".join(["python benchmarks/step_counts.py", *map(shlex.quote, sys.argv[1:])])
    publish_all("step_counts", sheets=sheets, notes=[note], save=options.save, command=command)


def import_all() -> None:
    """Import once what the ranks need, which are forked from this process."""
    importlib.import_module("toolkit.engines.pipeline_engine")
    importlib.import_module("toolkit.engines.ulysses_engine")
    importlib.import_module("toolkit.engines.accelerate_engine")
    preload(*MODELS)


def count(folder: Path, model: str, side: str) -> tuple[StepCounts, StepFacts | None]:
    """Train a side on fresh ranks; return the counts of the fourth step, and the model's sizes."""
    alone, recipe, ranks = place(folder, model, side)
    function: Callable[[], Any]
    if side == "plain PyTorch":
        function = partial(plain_pytorch, recipe)
    elif side.startswith("Trainer"):
        function = partial(trainer_counts, recipe, Tokens(alone), folder)
    else:
        function = partial(our_counts, recipe)
    results: list[tuple[StepCounts, StepFacts | None]] = run_ranks(silently, ranks, function, timeout_seconds=1800)
    return results[-1] if "pp2" in side else results[0]


def place(folder: Path, model: str, side: str) -> tuple[Recipe, Recipe, int]:
    """Return the recipe of one process, that of a side, and the side's number of ranks."""
    name = side.removeprefix("Trainer ")
    parts = [part for part in name.split("-") if part != "lora"]
    strategy = Strategy.parse("reference" if side == "plain PyTorch" else "-".join(parts))
    ranks = strategy.world_size(1)
    section = dict(MODELS[model])
    if "lora" in name:
        section = {"name_or_path": saved(folder, model), "init": "pretrained"}
        section["lora"] = {"r": 4, "alpha": 16, "targets": ["all-linear"]}
    replicas = ranks // strategy.model_size
    recipe = make_recipe(
        folder,
        model=section,
        seq_len=SEQ_LEN,
        precision="fp32" if "reference" in parts and side != "plain PyTorch" else "bf16",
        batch={"global_batch_size": MICRO_BATCHES * replicas, "micro_batch_size": 1},
        train={"steps": STEPS, "engine": "deepspeed"},
    )
    if side == "plain PyTorch":
        return recipe, recipe, 1
    return recipe, strategy.apply(recipe, ranks), ranks


def saved(folder: Path, model: str) -> str:
    """Save a model with random weights, which adapters need: they are for published ones."""
    path = folder / f"weights-{model}"
    if not path.exists():
        recipe = make_recipe(
            folder, model=MODELS[model], seq_len=SEQ_LEN, batch={"global_batch_size": 1}, train={"steps": 1}
        )
        build_model(recipe, eos_id=prepare(recipe.data, progress=False).eos_id).save_pretrained(path)
    return str(path)


def our_counts(recipe: Recipe) -> tuple[StepCounts, StepFacts | None]:
    """Count a step of the toolkit's loop on this rank."""
    step = CountedStep()
    train(Job.of(recipe, dist.get_world_size()), [step], TrainOptions(overwrite=True))
    assert step.result is not None
    return step.result, step.facts


def trainer_counts(recipe: Recipe, tokens: Tokens, folder: Path) -> tuple[StepCounts, StepFacts | None]:
    """Count a step of the Trainer on this rank. Its update is what DeepSpeed's `step` does."""
    step = CountedStep()
    kind = deepspeed.DeepSpeedEngine

    def counted(method: Any, part: str) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            step.counter.part = part
            try:
                return method(*arguments, **keywords)
            finally:
                step.counter.part = FORWARD

        return call

    backward = mock.patch.object(kind, "backward", counted(kind.backward, BACKWARD))
    with backward, mock.patch.object(kind, "step", counted(kind.step, UPDATE)):
        trainer_run(recipe, tokens, folder / f"trainer-{dist.get_rank()}", CPU, log=step.step_ended)
    assert step.result is not None
    return step.result, None


def plain_pytorch(recipe: Recipe) -> tuple[StepCounts, StepFacts | None]:
    """Count a step of the loop that everybody writes, in one process."""
    tokens = prepare(recipe.data, progress=False)
    model: Any = build_model(recipe, eos_id=tokens.eos_id).train()
    section = recipe.optimizer
    groups = parameter_groups(model.named_parameters(), section)
    optimizer = torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps)
    loader = MicroBatchLoader.open(Job.of(recipe, 1), tokens, rank=0)
    step = CountedStep()
    with loader.prefetch() as ahead:
        for number in range(STEPS):
            total = 0.0
            step.counter.part = FORWARD
            for batch in loader.micro_batches(number, ahead):
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(
                        input_ids=batch.input_ids, labels=batch.labels, shift_labels=batch.labels, use_cache=False
                    )
                (output.loss / MICRO_BATCHES).backward()
                total += output.loss.item()
            step.counter.part = UPDATE
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            step.step_ended(total)
    assert step.result is not None
    return step.result, None


def figures(counts: StepCounts) -> list[str]:
    """One row of the first table."""
    phases = [counts.operations[phase] for phase in PHASES]
    moved = sum(counts.bytes_moved.values())
    numbers = [counts.total_operations, *phases, sum(counts.host_reads.values()), counts.counter_reads]
    numbers += [moved // 1024, counts.bytes_moved[UPDATE] // 1024, counts.copies, counts.casts, counts.repeated_casts]
    numbers += [counts.norm_calls, sum(counts.collectives.values())]
    return [f"{number:,}" for number in numbers]


def read_lines(counts: StepCounts) -> list[list[str]]:
    """One row for each line that reads, most frequent first."""
    return [
        [read.phase, f"`{read.place}`", read.operation, str(times)] for read, times in counts.host_reads.most_common()
    ]


if __name__ == "__main__":
    main()
