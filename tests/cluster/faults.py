"""Faults of ranks during training, and how the other ranks react.

    python tests/cluster/faults.py --cases 20
    python tests/cluster/faults.py stop stall --cases 3 --seed 7

    stop       SIGSTOP of a rank             kill      kill -9 of a rank
    exception  a bug raises in a rank        segfault  a rank dies in native code
    stall      the data loader of a rank never returns the next batch
    locked     native code in a rank holds the GIL, so that none of its threads runs
    sigterm    a signal stops the run, which then resumes from its checkpoint
    disk       no space, no permission or no device on one rank in a save

Each case draws a layout, a rank, a step and a phase. Delays of hangs count from train.hang_timeout on. The cases are
written to build/reliability/KIND.jsonl, one per line, from which docs/generate_reliability.py makes its tables.
tests/launch/test_faults.py runs one case of some kinds.
"""

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from faulty_ranks import Fault, FaultyRanks, RunResult
from rank_parent import become_rank_parent
from small_text import write_corpus

from toolkit.checkpoint.select import select_checkpoint
from toolkit.checkpoint.verify import verify
from toolkit.launch.health.heartbeat import PEER_FAILED

RESULTS = Path(__file__).parents[2] / "build" / "reliability"
HANG_TIMEOUT = 4
SLACK_SECONDS = 5.0
LAYOUTS = {
    "dp2-z0": (2, ["parallel.zero_stage=0"]),
    "dp2-z1": (2, ["parallel.zero_stage=1"]),
    "dp2-z2": (2, ["parallel.zero_stage=2"]),
    "dp2-z3": (2, ["parallel.zero_stage=3"]),
    "tp2-z1": (2, ["parallel.zero_stage=1", "parallel.tp=2"]),
    "pp2-z1": (2, ["parallel.zero_stage=1", "parallel.pp=2"]),
    "dp4-z1": (4, ["parallel.zero_stage=1"]),
    "dp2-tp2-z1": (4, ["parallel.zero_stage=1", "parallel.tp=2"]),
}
SCHEDULED = {"pp2-zbh1-z1": (2, ["parallel.zero_stage=1", "parallel.pp=2", "parallel.schedule=zb-h1"])}
"""Layouts whose ranks report the pass that they run, not the phases below."""
PHASES = ("data", "forward", "backward", "update", "fingerprint", "evaluate", "checkpoint")
LONG_PHASES = ("evaluate", "checkpoint")
CODES = {"stop": -9, "locked": -9, "kill": -9, "segfault": -11, "exception": 1, "stall": PEER_FAILED}
HANGS = ("stop", "locked", "stall")
SIZES = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 320}
Case = dict[str, Any]


def write_recipe(folder: Path) -> Path:
    """Write the recipe of a small run that evaluates and saves often."""
    recipe = {
        "model": {
            "name_or_path": "gpt2-tiny",
            "overrides": SIZES | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
        },
        "data": {
            "source": str(write_corpus(folder)),
            "tokenizer": "bpe-300",
            "seq_len": 32,
            "eval_fraction": 0.1,
            "workers": 1,
            "cache_dir": str(folder / "cache"),
        },
        "batch": {"global_batch_size": 16, "micro_batch_size": 2},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "train": {"steps": 10000, "eval_every": 3, "eval_samples": 16, "hang_timeout": HANG_TIMEOUT},
        "checkpoint": {"every": 4},
        "log": {"level": "warning"},
        "run_dir": "run",
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def run_rank_fault(kind: str, folder: Path, rng: random.Random) -> Case:
    """Run one random case."""
    layout = rng.choice([*LAYOUTS])
    fault = Fault(
        kind=kind,
        victim=rng.randrange(LAYOUTS[layout][0]),
        step=rng.randint(4, 12),
        phase="data" if kind == "stall" else rng.choice(PHASES),
    )
    return run_fault(fault, layout, folder)


def run_fault(fault: Fault, layout: str, folder: Path) -> Case:
    """Run one case: when the other ranks exited, and whether they named the rank and the step."""
    world_size, overrides = (LAYOUTS | SCHEDULED)[layout]
    shutil.rmtree(folder / "run", ignore_errors=True)
    result = FaultyRanks(folder, ["--config", "recipe.yaml", *overrides], world_size, fault).run()
    others = [seconds for rank, seconds in result.seconds.items() if rank != fault.victim]
    timeout = HANG_TIMEOUT * (3 if fault.phase in LONG_PHASES else 1) if fault.kind in HANGS else 0
    problems = [*_exit_problems(result, fault, world_size), *_message_problems(result, fault)]
    if (folder / "run" / "latest").exists() and (notices := select_checkpoint(folder / "run").notices):
        problems.append(f"the newest checkpoint is damaged: {notices}")
    return describe(fault, layout, result, problems) | {
        "timeout_seconds": timeout,
        "delay_seconds": round(max(others, default=0.0) - timeout, 2),
        "is_named": not _message_problems(result, fault),
        "line": "".join(result.error_lines),
    }


def describe(fault: Fault, layout: str, result: RunResult, problems: Sequence[str]) -> Case:
    """Return what is recorded for every case."""
    return {
        "fault": fault.kind,
        "layout": layout,
        "rank": fault.victim,
        "step": result.injected.get("step"),
        "phase": result.injected.get("phase"),
        "problem": "; ".join(problems),
    }


def _exit_problems(result: RunResult, fault: Fault, world_size: int) -> list[str]:
    if not result.injected:
        return [f"the fault was not injected: {result.stderr[-300:]}"]
    expected = dict.fromkeys(range(world_size), PEER_FAILED) | {fault.victim: CODES[fault.kind]}
    return [] if dict(result.codes) == expected else [f"exit codes {dict(result.codes)}"]


def _message_problems(result: RunResult, fault: Fault) -> list[str]:
    """What is wrong with the one error line, which has to name the rank and the step."""
    if len(result.error_lines) != 1:
        return [f"{len(result.error_lines)} error lines: {result.error_lines} {result.stderr[-300:]}"]
    found = re.match(r"error: rank (\d+) \(.*?\) (?:died )?in step (\d+)", result.error_lines[0])
    if found is None or int(found[1]) != fault.victim:
        return [f"rank {fault.victim} is not named: {result.error_lines[0]}"]
    if abs(int(found[2]) - result.injected["step"]) > 1:
        return [f"step {result.injected['step']} is not named: {result.error_lines[0]}"]
    if fault.kind == "stall" and ("thread prefetch" not in result.stderr or "in stalling" not in result.stderr):
        return ["the loader's stack is missing"]
    if fault.kind == "locked" and "in strike" not in result.stderr:
        return ["the stack is missing"]
    return []


def run_signal(folder: Path, rng: random.Random) -> Case:
    """Run one case: how long the checkpoint took, and whether the resumed run equals an uninterrupted one."""
    steps = 14
    layout = rng.choice([*LAYOUTS])
    world_size, overrides = LAYOUTS[layout]
    arguments = ["--config", "recipe.yaml", *overrides, f"train.steps={steps}", "train.hang_timeout=60"]
    reference = folder / f"reference-{layout}"
    if not reference.exists():
        FaultyRanks(folder, [*arguments, f"run_dir={reference.name}", "--overwrite"], world_size).run()
    fault = Fault(
        kind="sigterm",
        victim=rng.randrange(world_size),
        step=rng.randint(2, steps - 2),
        phase=rng.choice(PHASES),
        delay_seconds=rng.uniform(0.0, 0.03),
    )
    shutil.rmtree(folder / "run", ignore_errors=True)
    result = FaultyRanks(folder, arguments, world_size, fault).run(ends_with_first=True)
    problems = [] if result.injected else ["the signal was not sent"]
    delay = min(result.seconds.values(), default=0.0)
    if 75 not in result.codes.values():
        problems.append(f"exit codes {dict(result.codes)}: {result.stderr[-300:]}")
    else:
        problems += [str(finding) for finding in verify(select_checkpoint(folder / "run").path)]
        resumed = FaultyRanks(folder, [*arguments, "--resume", "auto"], world_size).run()
        problems += [] if set(resumed.codes.values()) == {0} else [f"resuming: {resumed.stderr[-300:]}"]
        problems += _differences(folder / "run", reference, steps)
    return describe(fault, layout, result, problems) | {"delay_seconds": round(delay, 2)}


def _differences(run: Path, reference: Path, steps: int) -> list[str]:
    def numbers(path: Path) -> list[Case]:
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if k not in ("seconds", "memory_bytes", "slow_ranks")} for line in lines]

    last = f"step-{steps:08d}"
    files = sorted(path.relative_to(reference / last) for path in (reference / last).rglob("*.safetensors"))
    same = [
        (run / last / file).exists() and (run / last / file).read_bytes() == (reference / last / file).read_bytes()
        for file in files
    ]
    differing = [str(file) for file, is_same in zip(files, same, strict=True) if not is_same]
    return (["the metrics differ"] if numbers(run) != numbers(reference) else []) + (
        [f"{', '.join(differing)} differ"] if differing or not files else []
    )


def run_disk_faults(folder: Path, cases: int) -> list[Case]:
    """All of tests/support/save_faults.py, as many as requested."""
    from save_faults import FAULTS, save_with_faults

    from toolkit.launch.local_ranks import run_ranks

    results = run_ranks(save_with_faults, 3, folder / "disk", False)
    found = []
    injected = [(number, where, victim) for number, where in FAULTS for victim in range(3)]
    for (number, where, victim), *seen in list(zip(injected, *results, strict=True))[:: max(1, len(injected) // cases)]:
        _, rank, _, left = seen[0]
        problems = [] if all(other == seen[0] for other in seen) else ["ranks disagree"]
        problems += [] if rank == victim else [f"rank {rank} is named"]
        problems += [] if left == ["latest", "step-00000001"] else [f"left: {left}"]
        found.append({"fault": "disk", "errno": number, "where": where, "rank": victim, "problem": "; ".join(problems)})
    return found


CAMPAIGNS: dict[str, Callable[[Path, random.Random], Case]] = {
    **{kind: partial(run_rank_fault, kind) for kind in CODES},
    "sigterm": run_signal,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="faults of ranks during training")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="of faults; the default is all")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    become_rank_parent()
    RESULTS.mkdir(parents=True, exist_ok=True)
    failures = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_recipe(folder)
        for kind in options.kinds or [*CAMPAIGNS, "disk"]:
            found = run_disk_faults(folder, options.cases) if kind == "disk" else []
            for number in range(0 if found else options.cases):
                case = CAMPAIGNS[kind](folder, random.Random(f"{kind}-{options.seed + number}"))
                found.append(case)
                print(json.dumps(case), flush=True)
            (RESULTS / f"{kind}.jsonl").write_text("".join(json.dumps(case) + "\n" for case in found))
            late = [case for case in found if case["fault"] in CODES and case["delay_seconds"] > SLACK_SECONDS]
            wrong = [case for case in found if case["problem"] or case in late]
            failures += len(wrong)
            delay = max((case.get("delay_seconds", 0.0) for case in found), default=0.0)
            failed = f"{len(wrong)} failed, {len(late)} of them late"
            print(f"{kind}: {len(found)} cases, {failed}; largest delay {delay:.1f} s", flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
