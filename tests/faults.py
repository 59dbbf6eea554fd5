"""Faults of ranks while they train, and what the others make of them.

    python tests/faults.py --cases 20
    python tests/faults.py stop stall --cases 3 --seed 7

    stop       SIGSTOP of a rank             kill      kill -9 of a rank
    exception  a bug raises in a rank        segfault  a rank dies in native code
    stall      the loader of a rank never gives the next batch
    locked     native code in a rank keeps the interpreter's lock, so that none of its threads runs
    sigterm    a signal asks for an end, and the run goes on from its checkpoint
    disk       no room, no permission or no device on one rank in a save

Each case draws a layout, a rank, a step and a phase. Delays are those beyond train.hang_timeout where that is waited
for. The cases are written to build/reliability/KIND.jsonl, one a line, from which docs/generate_reliability.py makes
its tables. tests/recipes/test_faults.py runs one case of a kind.
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

sys.path.insert(0, str(Path(__file__).parent / "distributed"))
sys.path.insert(0, str(Path(__file__).parent))
from faulty_ranks import Ended, Fault, FaultyRanks
from rank_parent import become_rank_parent
from small_text import write_corpus

from toolkit.checkpoint.choose import choose
from toolkit.checkpoint.verify import verify
from toolkit.train.watchdog.entry import PEER_FAILED

RESULTS = Path(__file__).parents[1] / "build" / "reliability"
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
PHASES = ("data", "forward", "backward", "update", "digest", "evaluate", "checkpoint")
LONG_PHASES = ("evaluate", "checkpoint")
CODES = {"stop": -9, "locked": -9, "kill": -9, "segfault": -11, "exception": 1, "stall": PEER_FAILED}
HANGS = ("stop", "locked", "stall")
SIZES = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 320}
Case = dict[str, Any]


def write_recipe(folder: Path) -> Path:
    """A small run that evaluates and saves often."""
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
        "batch": {"global_size": 16, "micro_size": 2},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "train": {"steps": 10000, "eval_every": 3, "eval_samples": 16, "hang_timeout": HANG_TIMEOUT},
        "checkpoint": {"every": 4},
        "log": {"level": "warning"},
        "run_dir": "run",
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def fault_of_a_rank(kind: str, folder: Path, chance: random.Random) -> Case:
    """One case, drawn by chance."""
    layout = chance.choice([*LAYOUTS])
    fault = Fault(
        kind=kind,
        victim=chance.randrange(LAYOUTS[layout][0]),
        step=chance.randint(4, 12),
        phase="data" if kind == "stall" else chance.choice(PHASES),
    )
    return outcome(fault, layout, folder)


def outcome(fault: Fault, layout: str, folder: Path) -> Case:
    """How long the others went on, and whether they named the rank and the step."""
    world_size, overrides = LAYOUTS[layout]
    shutil.rmtree(folder / "run", ignore_errors=True)
    ended = FaultyRanks(folder, ["--config", "recipe.yaml", *overrides], world_size, fault).run()
    others = [seconds for rank, seconds in ended.seconds.items() if rank != fault.victim]
    timeout = HANG_TIMEOUT * (3 if fault.phase in LONG_PHASES else 1) if fault.kind in HANGS else 0
    problems = [*_wrong_end(ended, fault, world_size), *_wrong_words(ended, fault)]
    if (folder / "run" / "latest").exists() and (notices := choose(folder / "run").notices):
        problems.append(f"the newest checkpoint is damaged: {notices}")
    return described(fault, layout, ended, problems) | {
        "timeout_seconds": timeout,
        "delay_seconds": round(max(others, default=0.0) - timeout, 2),
        "is_named": not _wrong_words(ended, fault),
        "line": "".join(ended.lines),
    }


def described(fault: Fault, layout: str, ended: Ended, problems: Sequence[str]) -> Case:
    """What every case tells."""
    return {
        "fault": fault.kind,
        "layout": layout,
        "rank": fault.victim,
        "step": ended.struck.get("step"),
        "phase": ended.struck.get("phase"),
        "problem": "; ".join(problems),
    }


def _wrong_end(ended: Ended, fault: Fault, world_size: int) -> list[str]:
    if not ended.struck:
        return [f"the fault never came: {ended.errors[-300:]}"]
    wanted = dict.fromkeys(range(world_size), PEER_FAILED) | {fault.victim: CODES[fault.kind]}
    return [] if dict(ended.codes) == wanted else [f"exit codes {dict(ended.codes)}"]


def _wrong_words(ended: Ended, fault: Fault) -> list[str]:
    """What is wrong with the one line that names the culprit."""
    if len(ended.lines) != 1:
        return [f"{len(ended.lines)} error lines: {ended.lines} {ended.errors[-300:]}"]
    found = re.match(r"error: rank (\d+) \(.*?\) (?:died )?in step (\d+)", ended.lines[0])
    if found is None or int(found[1]) != fault.victim:
        return [f"rank {fault.victim} is not named: {ended.lines[0]}"]
    if abs(int(found[2]) - ended.struck["step"]) > 1:
        return [f"step {ended.struck['step']} is not named: {ended.lines[0]}"]
    if fault.kind == "stall" and ("thread prefetch:" not in ended.errors or "in stalling" not in ended.errors):
        return ["the loader's stack is missing"]
    if fault.kind == "locked" and "in strike" not in ended.errors:
        return ["the stack is missing"]
    return []


def signal_of_a_rank(folder: Path, chance: random.Random) -> Case:
    """One case: how long the checkpoint took, and whether the run that goes on is the one that was never stopped."""
    steps = 14
    layout = chance.choice([*LAYOUTS])
    world_size, overrides = LAYOUTS[layout]
    arguments = ["--config", "recipe.yaml", *overrides, f"train.steps={steps}", "train.hang_timeout=60"]
    whole = folder / f"whole-{layout}"
    if not whole.exists():
        FaultyRanks(folder, [*arguments, f"run_dir={whole.name}", "--overwrite"], world_size).run()
    fault = Fault(
        kind="sigterm",
        victim=chance.randrange(world_size),
        step=chance.randint(2, steps - 2),
        phase=chance.choice(PHASES),
        delay_seconds=chance.uniform(0.0, 0.03),
    )
    shutil.rmtree(folder / "run", ignore_errors=True)
    ended = FaultyRanks(folder, arguments, world_size, fault).run(ends_with_first=True)
    problems = [] if ended.struck else ["the signal never came"]
    delay = min(ended.seconds.values(), default=0.0)
    if 75 not in ended.codes.values():
        problems.append(f"exit codes {dict(ended.codes)}: {ended.errors[-300:]}")
    else:
        problems += [str(finding) for finding in verify(choose(folder / "run").path)]
        on = FaultyRanks(folder, [*arguments, "--resume", "auto"], world_size).run()
        problems += [] if set(on.codes.values()) == {0} else [f"going on: {on.errors[-300:]}"]
        problems += _differences(folder / "run", whole, steps)
    return described(fault, layout, ended, problems) | {"delay_seconds": round(delay, 2)}


def _differences(run: Path, whole: Path, steps: int) -> list[str]:
    def numbers(path: Path) -> list[Case]:
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if k not in ("seconds", "memory_bytes")} for line in lines]

    last = f"step-{steps:08d}"
    files = sorted(path.relative_to(whole / last) for path in (whole / last).rglob("*.safetensors"))
    same = [
        (run / last / file).exists() and (run / last / file).read_bytes() == (whole / last / file).read_bytes()
        for file in files
    ]
    differing = [str(file) for file, is_same in zip(files, same, strict=True) if not is_same]
    return (["the metrics differ"] if numbers(run) != numbers(whole) else []) + (
        [f"{', '.join(differing)} differ"] if differing or not files else []
    )


def faults_of_disks(folder: Path, cases: int) -> list[Case]:
    """All of tests/distributed/test_checkpoint_commit.py, as many as asked for."""
    from test_checkpoint_commit import FAULTS, save_with_faults

    from toolkit.train.local_ranks import run_ranks

    results = run_ranks(save_with_faults, 3, folder / "disk", False)
    found = []
    planted = [(number, where, victim) for number, where in FAULTS for victim in range(3)]
    for (number, where, victim), *seen in list(zip(planted, *results, strict=True))[:: max(1, len(planted) // cases)]:
        _, rank, _, left = seen[0]
        problems = [] if all(other == seen[0] for other in seen) else ["ranks do not agree"]
        problems += [] if rank == victim else [f"rank {rank} is named"]
        problems += [] if left == ["latest", "step-00000001"] else [f"left: {left}"]
        found.append({"fault": "disk", "errno": number, "where": where, "rank": victim, "problem": "; ".join(problems)})
    return found


CAMPAIGNS: dict[str, Callable[[Path, random.Random], Case]] = {
    **{kind: partial(fault_of_a_rank, kind) for kind in CODES},
    "sigterm": signal_of_a_rank,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="faults of ranks while they train")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="of the faults; all where none is named")
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    become_rank_parent()
    RESULTS.mkdir(parents=True, exist_ok=True)
    bad = 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_recipe(folder)
        for kind in options.kinds or [*CAMPAIGNS, "disk"]:
            found = faults_of_disks(folder, options.cases) if kind == "disk" else []
            for number in range(0 if found else options.cases):
                case = CAMPAIGNS[kind](folder, random.Random(f"{kind}-{options.seed + number}"))
                found.append(case)
                print(json.dumps(case), flush=True)
            (RESULTS / f"{kind}.jsonl").write_text("".join(json.dumps(case) + "\n" for case in found))
            late = [case for case in found if case["fault"] in CODES and case["delay_seconds"] > SLACK_SECONDS]
            wrong = [case for case in found if case["problem"] or case in late]
            bad += len(wrong)
            delay = max((case.get("delay_seconds", 0.0) for case in found), default=0.0)
            failed = f"{len(wrong)} failed, {len(late)} of them late"
            print(f"{kind}: {len(found)} cases, {failed}; largest delay {delay:.1f} s", flush=True)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
