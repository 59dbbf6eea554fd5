"""Saving and loading a checkpoint against DeepSpeed's own, same engine and ranks, in turns.

    python benchmarks/checkpoint.py                # five rounds: about three minutes
    python benchmarks/checkpoint.py --quick        # does it run? The figures mean nothing.
    python benchmarks/checkpoint.py --save         # also writes benchmarks/results/checkpoint.md

ZeRO-2 on two ranks, fp32, GPT-2 of 6 layers x 384 with its vocabulary: weights and Adam's moments are 360 MB. Ours is
safetensors under Hugging Face names, hashed, fsynced and verified; DeepSpeed's is a pickle a rank, neither hashed nor
synced: when it returns its bytes are in the page cache. `+ sync`: each rank then fsyncs what it wrote. `+ sha256`: and
hashes it, which is the work that ours does. `load` includes our verification of every byte. `another layout`: the
checkpoint of two ranks is loaded by one. DeepSpeed needs `ds_to_universal` for that; ours is read as it is. `stall`:
what training waits for where we save asynchronously: the copy, and the poll that finds the checkpoint committed.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import deepspeed  # noqa: F401  # before the ranks are forked
import torch
import torch.distributed as dist
from measure.our_run import make_recipe
from measure.table import publish, target_met

from toolkit.checkpoint.names import hash_file
from toolkit.config.job import Job
from toolkit.config.recipe import Recipe
from toolkit.data.samples.loader import MicroBatchLoader
from toolkit.data.tokens.corpora import prepare_all
from toolkit.engines.base import Engine
from toolkit.engines.factory import create_engine
from toolkit.files import sync
from toolkit.launch.local_ranks import run_ranks
from toolkit.launch.output import quiet
from toolkit.training.checkpointing import Checkpointer
from toolkit.training.preflight import check_model, deepspeed_config
from toolkit.training.resume import resume

CPU = torch.device("cpu")
RANKS = 2
STALL = "stall of an asynchronous save"
TARGETS = {
    "save": 1.2,
    "save, theirs + sync": None,
    "save, theirs + sync + sha256": None,
    "load": None,
    "load in another layout": 0.5,
    STALL: 0.15,
}
Seconds = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--quick", action="store_true", help="one round of a small model")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/checkpoint.md")
    options = parser.parse_args()
    quiet(debug=False)
    torch.set_num_threads(1)
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = (2, 64) if options.quick else (6, 384)
        recipe = small(folder, *shape)
        ours, theirs = both(run_ranks(measure, RANKS, recipe, folder, rounds, timeout_seconds=900)[0])
        to_universal(folder)
        ours["load in another layout"], theirs["load in another layout"] = [], []
        for _ in range(rounds):
            theirs["load in another layout"].append(
                timed(lambda: to_universal(folder)) + run_ranks(load_universal, 1, recipe, folder)[0]
            )
            ours["load in another layout"].append(run_ranks(load_ours, 1, recipe, folder)[0])
    theirs[STALL] = ours["save"]
    rows = []
    for what, target in TARGETS.items():
        ratios = sorted(a / b for a, b in zip(ours[what], theirs[what], strict=True))
        middle = statistics.median(ratios)
        rows.append(
            [
                what,
                f"{statistics.median(ours[what]) * 1e3:.0f}",
                f"{statistics.median(theirs[what]) * 1e3:.0f}",
                *(f"{ratio:.2f}x" for ratio in (middle, ratios[0], ratios[-1])),
                "" if target is None else target_met(middle, target, at_most=True),
            ]
        )
    publish(
        "checkpoint",
        title="A checkpoint of two ranks: ours against DeepSpeed's",
        headings=("what", "ours, ms", "theirs, ms", "ratio", "smallest", "largest", "target"),
        rows=rows,
        notes=[
            "GPT-2 of 6 layers x 384, vocabulary 50,257, ZeRO-2, fp32: 360 MB of weights and moments.",
            "The last row is compared with our own synchronous save.",
            "Hashing alone keeps a core busy for 110 ms a rank: 180 MB of sha256 at 1.7 GB/s. Theirs has none.",
        ],
        save=options.save,
    )


def small(folder: Path, layers: int, hidden: int) -> Recipe:
    return make_recipe(
        folder,
        model={"name_or_path": "gpt2", "overrides": {"n_layer": layers, "n_embd": hidden, "n_head": hidden // 64}},
        seq_len=64,
        batch={"global_batch_size": 4, "micro_batch_size": 1},
        parallel={"zero_stage": 2},
        train={"steps": 3},
    )


def build(recipe: Recipe, **settings: Any) -> tuple[Engine, Checkpointer]:
    """An engine that has taken a step: its optimizer has states."""
    job = Job.of(recipe, dist.get_world_size())
    corpus = prepare_all(recipe.data, progress=False)
    config = deepspeed_config(job, check_model(recipe, CPU), CPU)
    engine = create_engine(job, CPU, (config or {}) | settings, eos_id=corpus.eos_id)
    loader = MicroBatchLoader.open(job, corpus, rank=dist.get_rank())
    with loader.prefetch() as ahead:
        engine.train_step(loader.micro_batches(0, ahead), target_tokens=loader.target_tokens(0), learning_rate=1e-4)
    keeper = Checkpointer(job=job, engine=engine, tokenizer=corpus.tokenizer(), corpus=corpus)
    return engine, keeper


def measure(recipe: Recipe, folder: Path, rounds: int) -> dict[str, Seconds]:
    """On every rank: both sides' seconds, of this rank."""
    engine, keeper = build(recipe)
    found: dict[str, Seconds] = {"ours": {}, "theirs": {}}

    def note(side: str, what: str, work: Callable[[], Any]) -> None:
        found[side].setdefault(what, []).append(together(work))

    inner: Any = engine.engine  # type: ignore[attr-defined]
    for number in range(rounds + 1):
        shutil.rmtree(folder / "theirs", ignore_errors=True) if dist.get_rank() == 0 else None
        note("ours", "save", lambda: keeper.save(folder / "ours", 1, tokens=1, learning_rate=1e-4))
        note("theirs", "save", lambda: inner.save_checkpoint(str(folder / "theirs"), tag="step"))
        for what, hashed in (("save, theirs + sync", False), ("save, theirs + sync + sha256", True)):
            shutil.rmtree(folder / "theirs") if dist.get_rank() == 0 else None
            note("theirs", what, partial(save_theirs, inner, folder / "theirs", hashed=hashed))
            found["ours"][what] = found["ours"]["save"]
        note("ours", "load", lambda: restore(keeper, recipe, folder / "ours"))
        note("theirs", "load", lambda: inner.load_checkpoint(str(folder / "theirs"), tag="step"))
        note("ours", STALL, lambda: keeper.save(folder / "aside", 1, tokens=1, learning_rate=1e-4, wait=False))
        found["ours"][STALL][-1] += last_poll(keeper)
        if number == 0:  # the first round warms caches up
            found = {"ours": {}, "theirs": {}}
    return found


def last_poll(keeper: Checkpointer) -> float:
    """Seconds of the call that finds the checkpoint committed."""
    while True:
        time.sleep(0.02)
        start = time.perf_counter()
        if keeper.poll() is not None:
            return time.perf_counter() - start


def save_theirs(engine: Any, folder: Path, *, hashed: bool) -> None:
    """DeepSpeed's save, then this rank's files on the disk, and read and hashed."""
    engine.save_checkpoint(str(folder), tag="step")
    rank = dist.get_rank()
    files = [*(folder / "step").glob(f"*zero_pp_rank_{rank}_*"), *(folder / "step").glob(f"mp_rank_{rank:02d}_*")]
    assert files
    for path in files:
        sync(path)
        if hashed:
            hash_file(path)


def restore(keeper: Checkpointer, recipe: Recipe, run: Path) -> None:
    found = resume(str(run), recipe, strict=True)
    assert found is not None
    keeper.restore(found.saved, found.state)


def load_ours(recipe: Recipe, folder: Path) -> float:
    """On one rank."""
    _, keeper = build(recipe)
    return together(lambda: restore(keeper, recipe, folder / "ours"))


def load_universal(recipe: Recipe, folder: Path) -> float:
    """On one rank."""
    engine, _ = build(recipe, checkpoint={"load_universal": True})
    inner: Any = engine.engine  # type: ignore[attr-defined]
    return together(lambda: inner.load_checkpoint(str(folder), tag="universal"))


def to_universal(folder: Path) -> None:
    """DeepSpeed's own conversion, with one process a core."""
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(folder / "universal", ignore_errors=True)
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(folder / "theirs" / "step"),
            output_folder=str(folder / "universal"),
            num_extract_workers=2,
            num_merge_workers=2,
            keep_temp_folder=False,
            strict=False,
            inject_missing_state=True,
        )
    )


def together(work: Callable[[], Any]) -> float:
    dist.barrier()
    return timed(lambda: (work(), dist.barrier()))


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def both(found: dict[str, Seconds]) -> tuple[Seconds, Seconds]:
    return found["ours"], found["theirs"]


if __name__ == "__main__":
    main()
