"""Launchers that are killed or interrupted at a given moment; what is left of their processes, and what they say.

A launcher starts in a process group of its own, which gets the signal of Ctrl-C. All processes that come from it are
found by a variable of their environment.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from small_text import write_corpus

from toolkit.checkpoint.select import select_checkpoint
from toolkit.checkpoint.verify import verify
from toolkit.launch.spawn import free_port

DSTK = [sys.executable, "-m", "toolkit"]
TRAIN = ["train", "small.yaml", "--nproc", "2"]
KILLED = {
    "train": [*TRAIN, "--overwrite"],
    "restarts": [*TRAIN, "--overwrite", "--restarts", "3"],
    "compare": ["compare", "--recipe", "small.yaml", "--against", "z1", "--shrink", "--steps", "1000", "--reruns", "1"],
}
"""Arguments of `dstk` for each way in which it starts ranks."""
RESUMES = re.compile(r"error: stopped by .* after step \d+ of \d+; saved (\S+)\. Resume with --resume \S+\.")
NOTHING = re.compile(r"error: .*; nothing was saved yet\.")


def write_recipe(folder: Path, *, copies: int = 1, engine: str = "ddp") -> None:
    """Write small.yaml: a run that evaluates and saves often. Many `copies` of its text need several processes."""
    text = write_corpus(folder)
    text.write_text(text.read_text() * copies)
    sizes = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 320}
    recipe = {
        "model": {"name_or_path": "gpt2-tiny", "overrides": sizes},
        "data": {"source": str(text), "tokenizer": "bpe-300", "seq_len": 32, "eval_fraction": 0.1, "workers": 2},
        "batch": {"global_batch_size": 16, "micro_batch_size": 4},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "schedule": {"name": "constant"},
        "train": {"steps": 1000000, "eval_every": 3, "eval_samples": 16, "engine": engine},
        "checkpoint": {"every": 5},
        "parallel": {"zero_stage": 0 if engine == "ddp" else 2},
        "run_dir": "run",
    }
    (folder / "small.yaml").write_text(json.dumps(recipe))


@contextmanager
def started(folder: Path, *arguments: str, launcher: str = "") -> Iterator[subprocess.Popen[str]]:
    """`dstk` in `folder`, or another launcher; its processes that are left are killed in the end."""
    tools = {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    process = subprocess.Popen(
        ["env", "--default-signal=INT,TERM,USR1", *([launcher] if launcher else DSTK), *arguments],
        cwd=folder,
        env=os.environ | tools | {"DSTK_CACHE": str(folder / "cache")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in members(folder):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def members(folder: Path) -> list[int]:
    """The living processes that `started` has started in `folder`, directly or not."""
    mark, found = f"DSTK_CACHE={folder / 'cache'}\0".encode(), []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and mark in (process / "environ").read_bytes() + b"\0":
                    found.append(int(process.name))
            except OSError:
                continue
    return found


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What a kill -9 of the launcher left: how many processes it had, and the seconds that the last one outlived it."""

    processes: int
    seconds: float


def kill_launcher(
    folder: Path, arguments: list[str], moment: float, limit_seconds: float = 60, *, with_ranks: bool = False
) -> Kill:
    """Kill a launcher `moment` seconds after its start, or after that of its ranks, and wait for the end of these."""
    with started(folder, *arguments) as process:
        while with_ranks and len(members(folder)) < 2:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        time.sleep(moment)
        processes = len(members(folder)) - 1
        process.kill()
        process.wait()
        killed = time.monotonic()
        while members(folder) and time.monotonic() < killed + limit_seconds:
            time.sleep(0.05)
        return Kill(processes=processes, seconds=time.monotonic() - killed)


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """What Ctrl-C after `moment` seconds did. `saved`: it left a checkpoint; `problem`: what is wrong, or empty."""

    moment: float
    code: int
    errors: str
    saved: bool
    problem: str


def interrupt(folder: Path, moment: float, *arguments: str) -> Interruption:
    """Press Ctrl-C `moment` seconds after `dstk train … --resume auto` began to import what it needs.

    It resumes from what earlier ones have saved. (Before that, Python's own start ends with a traceback of Python's.)
    """
    before = newest(folder / "run")
    if not before:
        shutil.rmtree(folder / "run", ignore_errors=True)  # a run without a checkpoint is not resumed
    with started(folder, *TRAIN, "--resume", "auto", *arguments) as process:
        while len(set(re.findall(r"lib-dynload/\S+", Path(f"/proc/{process.pid}/maps").read_text()))) < 2:
            time.sleep(0.001)
        time.sleep(moment)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=150)
        left = members(folder)
    # `dstk` ends the line of the terminal that shows ^C.
    lines, after = errors.removeprefix("\n").splitlines(), newest(folder / "run")
    problems = [f"{len(left)} processes are left"] * bool(left)
    saved = RESUMES.fullmatch(lines[0]) if len(lines) == 1 else None
    if saved is not None:
        expected = 75
        path = folder / saved[1]
        problems += [f"{path} is damaged: {damage}" for damage in verify(path)]
        if (folder / "run" / "latest").read_text().strip() != path.name:
            problems.append(f"{path.name} is not the newest")
        if after <= before:
            problems.append(f"step {after} is not newer than {before}")
    else:
        expected = 130
        if len(lines) != 1 or not NOTHING.fullmatch(lines[0]):
            problems.append(f"{len(lines)} lines")
        if after != before:
            problems.append(f"the newest checkpoint was that of step {before}, and is that of {after}")
    # Python ends by SIGINT where it came in code that `exec` runs, as of dataclasses; shells report both alike.
    code = 128 - process.returncode if process.returncode < 0 else process.returncode
    if code != expected:
        problems.append(f"exit code {code}")
    return Interruption(moment=moment, code=code, errors=errors, saved=saved is not None, problem="; ".join(problems))


def newest(run: Path) -> int:
    """The step of the newest complete checkpoint of a run, which nothing is wrong with; 0 where it has none."""
    if not any(run.glob("step-*")):
        return 0
    chosen = select_checkpoint(run)
    assert chosen.notices == (), chosen.notices
    return int(chosen.path.name.removeprefix("step-"))


def first_step(folder: Path) -> float:
    """Seconds from the start of a run until it has taken a step."""
    begin = time.monotonic()
    with started(folder, *TRAIN) as process:
        wait_for_step(process, folder)
    return time.monotonic() - begin


def wait_for_step(process: subprocess.Popen[str], folder: Path) -> None:
    """Wait until a new run has taken a step."""
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


SCRIPT = Path(__file__).parents[2] / "recipes" / "train.py"
OTHERS = {
    "deepspeed": ["--num_gpus", "2"],
    "torchrun": ["--nproc_per_node", "2"],
    "accelerate": ["launch", "--use_deepspeed", "--num_processes", "2"],
}
"""Launchers that are not ours, and their arguments."""
PORT_FLAGS = {"deepspeed": "--master_port", "accelerate": "--main_process_port", "torchrun": "--master_port"}
"""Their default is one port for all: another test beside this one may use it."""


def end_launcher(folder: Path, launcher: str, number: signal.Signals, *, group: bool = False) -> tuple[str, str]:
    """Signal a launcher, or its process group, when its ranks train; return what is wrong, and the line they print."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    port = f"{PORT_FLAGS[launcher]}={free_port()}"
    arguments = [*OTHERS[launcher], port, str(SCRIPT), "--config", "small.yaml"]
    with started(folder, *arguments, launcher=launcher) as process:
        wait_for_step(process, folder)
        (os.killpg if group else os.kill)(process.pid, number)
        _, errors = process.communicate(timeout=150)  # until the last rank has closed it
        deadline = time.monotonic() + 10
        while (left := members(folder)) and time.monotonic() < deadline:
            time.sleep(0.05)
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    problems = [f"{len(left)} processes are left"] * bool(left)
    if len(lines) != 1 or not RESUMES.fullmatch(lines[0]):
        problems.append(f"not one line on how to resume: {lines}")
    if not newest(folder / "run"):
        problems.append("no checkpoint")
    return "; ".join(problems), "".join(lines)
