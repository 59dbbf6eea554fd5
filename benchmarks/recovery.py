"""What a restart costs: from checkpoints in the memory of hosts, beside one on disk, in turns.

    python benchmarks/recovery.py                 # five rounds: about two minutes
    python benchmarks/recovery.py --quick         # does it run? The figures mean nothing.
    python benchmarks/recovery.py --save          # also writes benchmarks/results/recovery.md

Two ranks stand for two hosts, each with a server of its own; ZeRO-2, fp32, GPT-2 of 6 layers x 384 with its vocabulary,
360 MB of weights and moments. A restart selects the newest checkpoint, hashes every file, and loads it into an engine.
`cold`: the files are not in the page cache. `one host lost`: the first rank reads all of it from the second host alone.
`stall`: what training waits for when a checkpoint in memory begins, and when it is found to be complete.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed  # noqa: F401  # before the ranks are forked
import torch
import torch.distributed as dist
from checkpoint import build, small
from measure.table import publish

from toolkit.config.recipe import Recipe
from toolkit.launch.local_ranks import run_ranks
from toolkit.launch.output import quiet
from toolkit.training.memory_checkpoints import HostMemoryRun
from toolkit.training.resume import AUTO, Resumed, resume

RANKS = 2
Seconds = dict[str, float]


def join(recipe: Recipe, launchers: list[int]) -> HostMemoryRun:
    """Join the memory of the hosts, each rank being on one of its own."""
    os.environ["LOCAL_RANK"] = "0"
    joined = HostMemoryRun.join(recipe, launchers[dist.get_rank()])
    assert joined is not None
    return joined


def save_both(recipe: Recipe, folder: Path, launchers: list[int]) -> Seconds:
    """Save to disk and to memory; the seconds of the latter."""
    memory = join(recipe, launchers)
    _, keeper = build(recipe)
    keeper.save(folder, 1, tokens=0, learning_rate=1e-4)
    in_memory = memory.checkpointer(keeper, keeper.check_lock)
    in_memory.save(folder, 1, tokens=0, learning_rate=1e-4, wait=False)  # takes the memory of later snapshots
    in_memory.finish()
    began = time.perf_counter()
    in_memory.save(folder, 2, tokens=0, learning_rate=1e-4, wait=False)
    stall = time.perf_counter() - began
    in_memory.finish()
    return {"stall": stall, "complete": time.perf_counter() - began}


def restart(recipe: Recipe, folder: Path, launchers: list[int], from_memory: bool) -> float:
    """The seconds in which the newest checkpoint is selected, verified and loaded."""
    memory = join(recipe, launchers)
    _, keeper = build(recipe)
    dist.barrier()
    began = time.perf_counter()
    found: Resumed | None
    if from_memory:
        found = memory.resume(AUTO, folder / "nowhere")
    else:
        found = resume(str(folder), recipe, strict=True)
    assert found is not None
    keeper.restore(found.saved, found.state)
    dist.barrier()
    return time.perf_counter() - began


def drop_from_page_cache(folder: Path) -> None:
    """Have the next reader read the disk."""
    for path in folder.rglob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round of a small model")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/recovery.md")
    options = parser.parse_args()
    quiet(debug=False)
    torch.set_num_threads(1)
    processes = [subprocess.Popen(["sleep", "100000"]) for _ in range(RANKS)]
    launchers = [process.pid for process in processes]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = (2, 64) if options.quick else (6, 384)
        recipe = small(folder, *shape).changed({"checkpoint": {"memory_every": 1}})
        run = folder / "run"
        saves = run_ranks(save_both, RANKS, recipe, run, launchers, timeout_seconds=900)
        times: dict[str, list[float]] = {}

        def measure(what: str, hosts: list[int], from_memory: bool, prepare: Callable[[], None] = lambda: None) -> None:
            prepare()
            seconds = run_ranks(restart, len(hosts), recipe, run, hosts, from_memory, timeout_seconds=900)
            times.setdefault(what, []).append(max(seconds))

        for _ in range(1 if options.quick else options.rounds):
            measure("disk, cold", launchers, False, lambda: drop_from_page_cache(run))
            measure("disk, in the page cache", launchers, False)
            measure("memory", launchers, True)
            measure("memory, one host lost", launchers[1:], True)
    for process in processes:
        process.kill()
    cold = statistics.median(times["disk, cold"])
    rows = []
    for what, seconds in times.items():
        middle = statistics.median(seconds)
        milliseconds = (f"{1e3 * value:,.0f}" for value in (middle, min(seconds), max(seconds)))
        rows.append([what, *milliseconds, f"{middle / cold:.2f}x"])
    for what in ("stall", "complete"):
        rows.append([f"a checkpoint in memory: {what}", f"{1e3 * max(save[what] for save in saves):,.0f}", "", "", ""])
    publish(
        "recovery",
        title="A restart from the memory of hosts, and from disk",
        headings=("restart from", "ms", "least", "most", "of disk, cold"),
        rows=rows,
        notes=[
            "GPT-2 of 6 layers x 384, vocabulary 50,257, ZeRO-2 on two ranks, fp32: 360 MB of weights and moments.",
            "Each file is on two hosts; all share two cores and the loopback network.",
        ],
        save=options.save,
    )


if __name__ == "__main__":
    main()
