"""The toolkit's layouts beside those of the Hugging Face Trainer: who agrees with one process, and at what cost.

    python benchmarks/trainer_layouts.py                 # all layouts, five rounds: about half an hour
    python benchmarks/trainer_layouts.py --losses        # the loss of each step alone, which no other load changes
    python benchmarks/trainer_layouts.py --pairs tp2     # one pair
    python benchmarks/trainer_layouts.py --quick         # does it run? The figures mean nothing.
    python benchmarks/trainer_layouts.py --save          # also writes trainer_layouts.md and trainer_losses.md

Both sides of a pair train the same model from the same weights on the same samples, in fp32, with AdamW and clipping,
on forked gloo ranks with one thread each. The Trainer shards with transformers' own DistributedConfig, or uses DDP;
it is the one that `dstk compare --against trainer:…` holds against one process.

    apart       largest relative difference of a step's loss from plain PyTorch in one process
    tokens/s    median over the counted steps of all rounds; a round runs each side in turn
    peak        largest resident memory of a rank, above what it had before it built the model
    sent        bytes that collectives of rank 0 send in one step, counted, and how many calls they are
    resume      a run that was saved half way, and goes on from there: how far its losses are from those of the run that
                was not interrupted; or that it refuses

A page of its own has the loss of each step in every layout, beside that of one process.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch.distributed as dist
from measure.our_run import CPU, Stamps, make_recipe, our_run
from measure.peak import with_peak
from measure.rounds import silently
from measure.step_counter import CountedStep, StepCounter, StepCounts
from measure.table import Sheet, publish, publish_all
from measure.trainer_run import StampCallback
from rich.console import Console

from toolkit import Callback, Job, TrainOptions, train
from toolkit.config.recipe import Recipe
from toolkit.config.strategy import Strategy
from toolkit.launch.local_ranks import preload, run_ranks
from toolkit.launch.output import quiet
from toolkit.parity.run.trainer_run import make_trainer

PAIRS = {
    "dp2": (("dp2-ddp", "dp2-z1"), "trainer:ddp", "llama"),
    "fsdp2": (("dp2-fsdp", "dp2-z3"), "trainer:dp2-fsdp2", "llama"),
    "tp2": (("tp2-dp1-z1", "tp2-dp1-z1-sp"), "trainer:tp2-dp1", "llama"),
    "tp2-dp2": (("tp2-dp2-z1-sp", "tp2-dp2-z3"), "trainer:tp2-dp2-fsdp2", "llama"),
    "ep2": (("dp2-ep2-z1",), "trainer:ep2-dp2", "qwen3_moe"),
}
_DECODER = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "name_or_path": "llama-tiny",
        "overrides": _DECODER | {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
    },
    "qwen3_moe": {
        "name_or_path": "qwen3-30b-a3b",
        "overrides": _DECODER
        | {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 256,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    },
}
REFERENCE = "one process"
HEADINGS = ("model", "layout", "ranks", "apart", "tokens/s", "ratio", "peak MiB", "sent KiB", "calls", "resume")
SEQ_LEN = 128
GLOBAL_BATCH = 8
WARMUP = 3
_COUNTED_AFTER = 3


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the rounds of one side gave."""

    losses: list[float]
    seconds: list[float]
    peak_bytes: int
    counts: StepCounts
    resume: str


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument("--steps", type=int, default=20, help="steps of a run")
    parser.add_argument("--quick", action="store_true", help="one short round of one pair")
    parser.add_argument("--losses", action="store_true", help="one run of each side, for the loss of each step alone")
    parser.add_argument("--save", action="store_true", help="write the pages in benchmarks/results")
    options = parser.parse_args()
    quiet(debug=False)
    preload(*MODELS)
    steps = WARMUP + 3 if options.quick else options.steps
    pairs = ["tp2"] if options.quick else options.pairs
    rows: list[list[str]] = []
    losses: dict[str, dict[str, list[float]]] = {}
    for pair in pairs:
        with tempfile.TemporaryDirectory() as name:
            losses_of = losses.setdefault(PAIRS[pair][2], {})
            if options.losses:
                add_losses(Path(name), pair, steps, losses_of)
            else:
                rows += rows_of(Path(name), pair, steps, 1 if options.quick else options.rounds, losses_of)
    sizes = f"fp32, {SEQ_LEN} tokens a sample, {GLOBAL_BATCH} samples a step"
    if not options.losses:
        publish(
            "trainer_layouts",
            title="Layouts of the toolkit and of the Trainer",
            headings=HEADINGS,
            rows=rows,
            text_columns=2,
            notes=[f"{sizes}; ratio: tokens/s over the Trainer's"],
            save=options.save,
        )
    publish_all(
        "trainer_losses",
        sheets=[loss_sheet(model, of_layouts) for model, of_layouts in losses.items()],
        notes=[sizes],
        save=options.save,
        command="python benchmarks/trainer_layouts.py --losses --save",
    )


def loss_sheet(model: str, of_layouts: Mapping[str, Sequence[float]]) -> Sheet:
    """The loss of each step, a column a layout."""
    steps = zip(*of_layouts.values(), strict=True)
    return Sheet(
        title=f"Loss of each step of the toolkit and of the Trainer: {model}",
        headings=("step", *of_layouts),
        rows=[[str(step), *(f"{loss:.6f}" for loss in losses)] for step, losses in enumerate(steps, start=1)],
        text_columns=0,
    )


def rows_of(folder: Path, pair: str, steps: int, rounds: int, losses_of: dict[str, list[float]]) -> list[list[str]]:
    """Run both sides of a pair and the reference, and return the rows of the pair.

    Adds to `losses_of` the losses of each layout's steps, under the layout's name, and those of one process.
    """
    recipe, sides = sides_of(folder, pair, steps)
    theirs = PAIRS[pair][1]
    model = PAIRS[pair][2]
    losses = reference_losses(recipe)
    losses_of.setdefault(REFERENCE, losses)
    runs: dict[str, list[list[tuple[Stamps, int]]]] = {side.text: [] for side in sides}
    for number in range(rounds):
        for side in sides:
            say(f"{side.text}: round {number + 1} of {rounds}")
            runs[side.text].append(time_side(folder, recipe, side))
    measured = {side.text: measured_of(folder, recipe, side, runs[side.text]) for side in sides}
    slow = statistics.median(measured[theirs].seconds)
    rows = []
    for side in sides:
        result = measured[side.text]
        middle = statistics.median(result.seconds)
        apart = max(abs(a / b - 1) for a, b in zip(result.losses, losses, strict=True))
        losses_of[side.text] = result.losses
        rows.append(
            [
                model,
                side.text,
                str(side.world_size(2)),
                f"{apart:.1e}",
                f"{GLOBAL_BATCH * SEQ_LEN / middle:,.0f}",
                f"{slow / middle:.2f}",
                f"{result.peak_bytes / 2**20:.0f}",
                f"{sum(result.counts.collective_bytes.values()) / 2**10:,.0f}",
                str(sum(result.counts.collectives.values())),
                result.resume,
            ]
        )
    return rows


def sides_of(folder: Path, pair: str, steps: int) -> tuple[Recipe, list[Strategy]]:
    """What both sides of a pair train, and the sides, the Trainer's first."""
    ours, theirs, model = PAIRS[pair]
    batch = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": 2}
    recipe = make_recipe(folder, model=MODELS[model], seq_len=SEQ_LEN, batch=batch, train={"steps": steps})
    return recipe, Strategy.parse_list(",".join([theirs, *ours]))


def reference_losses(recipe: Recipe) -> list[float]:
    """The losses of plain PyTorch in one process."""
    reference = partial(our_run, recipe.changed({"train": {"engine": "reference"}}))
    stamps: Stamps = run_ranks(silently, 1, reference, timeout_seconds=1800)[0]
    return stamps.losses


def add_losses(folder: Path, pair: str, steps: int, losses_of: dict[str, list[float]]) -> None:
    """Run both sides of a pair once, for their losses alone."""
    recipe, sides = sides_of(folder, pair, steps)
    if REFERENCE not in losses_of:
        losses_of[REFERENCE] = reference_losses(recipe)
    for side in sides:
        say(side.text)
        losses_of[side.text] = time_side(folder, recipe, side)[0][0].losses


def say(text: str) -> None:
    """Print what runs now."""
    Console(stderr=True, highlight=False).print(text, style="dim")


def time_side(folder: Path, recipe: Recipe, side: Strategy) -> list[tuple[Stamps, int]]:
    """Run one side once; return stamps and peak of each rank."""
    ranks = side.world_size(2)
    applied = side.apply(recipe, ranks)
    run = partial(their_times, applied, side, folder) if side.trainer else partial(our_run, applied)
    every: list[tuple[Stamps, int]] = run_ranks(with_peak, ranks, run, timeout_seconds=1800)
    return every


def measured_of(folder: Path, recipe: Recipe, side: Strategy, runs: Sequence[Sequence[tuple[Stamps, int]]]) -> Measured:
    """Count a step of one side, and resume it, beside its timed runs."""
    ranks = side.world_size(2)
    applied = side.apply(recipe, ranks)
    say(f"{side.text}: counts and resume")
    counted = partial(their_counts, applied, side, folder) if side.trainer else partial(our_counts, applied)
    resumed = partial(their_resume, applied, side, folder) if side.trainer else partial(our_resume, applied, folder)
    first_ranks = [run[0][0] for run in runs]
    return Measured(
        losses=first_ranks[0].losses,
        seconds=[second for stamps in first_ranks for second in stamps.step_seconds(WARMUP)],
        peak_bytes=max(peak for run in runs for _, peak in run),
        counts=run_ranks(silently, ranks, counted, timeout_seconds=1800)[0],
        resume=run_ranks(silently, ranks, resumed, timeout_seconds=1800)[0],
    )


def their_times(recipe: Recipe, side: Strategy, folder: Path) -> Stamps:
    """Train with the Trainer on this rank."""
    callback = StampCallback()
    make_trainer(recipe, side, folder / side.text, CPU, callbacks=[callback]).train()
    return callback.stamps


def our_counts(recipe: Recipe) -> StepCounts:
    """Count a step of the toolkit on this rank."""
    step = CountedStep(after=_COUNTED_AFTER)
    train(Job.of(recipe, dist.get_world_size()), [step], TrainOptions(overwrite=True))
    return step.outcome[0]


def their_counts(recipe: Recipe, side: Strategy, folder: Path) -> StepCounts:
    """Count a step of the Trainer on this rank."""
    counter = StepCounter()
    counts: list[StepCounts] = []
    logged: list[float] = []

    def log(loss: float) -> None:
        logged.append(loss)
        if len(logged) == _COUNTED_AFTER:
            counter.start()
        elif len(logged) == _COUNTED_AFTER + 1:
            counts.append(counter.stop())

    make_trainer(recipe, side, folder / side.text, CPU, callbacks=[StampCallback(log)]).train()
    return counts[0]


def our_resume(recipe: Recipe, folder: Path) -> str:
    """Train with a checkpoint half way, and again from there."""
    half = recipe.train.steps // 2
    saving = recipe.changed({"checkpoint": {"every": half, "keep": 8}}).model_copy(
        update={"run_dir": str(folder / "whole")}
    )
    whole = Stamps()
    train(Job.of(saving, dist.get_world_size()), [whole], TrainOptions(overwrite=True))
    rest = Stamps()
    again = saving.model_copy(update={"run_dir": str(folder / "again")})
    options = TrainOptions(resume=str(folder / "whole" / f"step-{half:08d}"), overwrite=True)
    callbacks: list[Callback] = [rest]
    train(Job.of(again, dist.get_world_size()), callbacks, options)
    return apart(whole.losses[half:], rest.losses)


def their_resume(recipe: Recipe, side: Strategy, folder: Path) -> str:
    """Train with a checkpoint of the Trainer half way, and again from there, where it allows that."""
    half = recipe.train.steps // 2
    place = folder / f"{side.text}-resume"
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": half}
    whole = StampCallback()
    try:
        make_trainer(recipe, side, place, CPU, callbacks=[whole], **saving).train()
        rest = StampCallback()
        resumed = make_trainer(recipe, side, place, CPU, callbacks=[rest])
        resumed.train(resume_from_checkpoint=str(place / "output" / f"checkpoint-{half}"))
    except ValueError as error:
        return "refused" if "not supported" in str(error) else str(error)[:40]
    return apart(whole.stamps.losses[half:], rest.stamps.losses)


def apart(whole: list[float], rest: list[float]) -> str:
    """The largest relative difference of the losses of an interrupted run."""
    gap = max(abs(a / b - 1) for a, b in zip(rest, whole, strict=True))
    return f"{gap:.0e}" if gap else "bit for bit"


if __name__ == "__main__":
    main()
