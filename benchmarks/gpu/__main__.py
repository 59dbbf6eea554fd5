"""The first hour on a GPU, in at most nine minutes: tests/gpu, then speed and memory beside targets, peers and plans.

    make gpu                            # sets up what is missing; writes benchmarks/results/gpu.md
    make gpu GPUS=8                     # the layouts over NCCL too
    make gpu-rehearsal                  # DSTK_REHEARSAL=cpu: tiny models on CPU ranks; writes build/gpu/rehearsal.md
    python benchmarks/gpu --only gpt2   # one of the models, without the tests

Each model trains three times, every time in new processes, with the same initial weights, batches and AdamW, in bf16:

    toolkit           the loop of recipes/train.py, with its loader and metrics, DeepSpeed ZeRO-2; compiled: with
                      train.compile, and model.loss: auto, which forms no full logits
    Trainer           transformers.Trainer, with the same DeepSpeed config
    torch, compiled   a loop as one would write it: fp32 weights under autocast, fused AdamW, torch.compile

Then one step of the toolkit is counted and the next one traced, of the 1B model, also compiled, of GPT-2 and in each
layout: kernels, waits of the host, copies and NCCL kernels beside what benchmarks/step_counts.py counts without a GPU,
and where the GPU's time goes.

Of Llama-3.1-8B, as many layers train as fit by the memory estimate, and once all of them by LoRA. A step is the median
of those after the first three. MFU counts 6 FLOPs a weight and token and 12 of attention (toolkit/estimate/flops.py),
over the data sheet's dense peak. Every step has a limit, and what no longer fits before the deadline is not run. The
exit code is 1 where something failed, and 0 otherwise: missed targets are in the table.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Before anything asks for GPUs: asking the driver itself would keep forks of this process from using them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from measure.table import publish_all
from measure.trainer_run import Tokens
from transformers import PreTrainedModel

from gpu import page
from gpu.budget import Budget, Outcome, State
from gpu.setups import ONE_GPU, SIDES, TINY, TOOLKIT, WARMUP, Setup, describe, fitted, layouts
from gpu.sides import Machine, built, machine, run_side
from gpu.traced import run_traced
from toolkit.config.recipe import Recipe
from toolkit.hardware import find_gpu, host_memory_bytes
from toolkit.launch.environment import local_device
from toolkit.launch.local_ranks import in_one_line, preload
from toolkit.launch.output import quiet
from toolkit.models.shape import ModelShape
from toolkit.planner.auto.ranks import RankDevice, cluster_of
from toolkit.planner.cluster import Cluster
from toolkit.planner.request import predict
from toolkit.planner.run_memory import model_config

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "gpu"
TEST_SECONDS = 220
"""At most: the tests take less where nothing hangs."""
RUN_SECONDS, LEAST_SECONDS = 100, 25
"""The limit of a run, and what has to be left for it to be started."""
PAGE_SECONDS = 5


def main() -> None:
    options = arguments()
    quiet(debug=False)
    if not options.rehearse and local_device().type == "cpu":
        sys.exit("error: no CUDA device is found. `make gpu-rehearsal` runs the same on CPU ranks.")
    hour = FirstHour(options=options, budget=Budget(options.seconds - PAGE_SECONDS))
    preload("gpt2", "llama")
    hour.ask_machine()
    if options.only:
        hour.prepare()
    else:
        hour.test()
    hour.train_all()
    hour.publish()
    sys.exit(page.failed(hour.speeds, hour.tests, hour.steps, hour.traces, peers=options.rehearse))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to use: 2, 4 or 8 add the layouts over NCCL")
    parser.add_argument("--seconds", type=float, default=540, help="until the page is written")
    parser.add_argument(
        "--without", choices=SIDES, action="append", default=[], help="a side not to train; may be given several times"
    )
    parser.add_argument("--only", metavar="NAME", help="the models whose name has this in it, and no tests")
    rehearse = os.environ.get("DSTK_REHEARSAL") == "cpu"
    parser.set_defaults(rehearse=rehearse)
    parser.add_argument("--output", type=Path, help="the page [benchmarks/results/gpu.md]")
    return parser.parse_args()


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A setup that fits, and what is known of it before it runs."""

    setup: Setup
    recipe: Recipe
    shape: ModelShape
    planned_seconds: float | None


@dataclass(kw_only=True)
class FirstHour:
    """What was found so far."""

    options: argparse.Namespace
    budget: Budget
    machine: Machine | None = None
    ready: list[Ready] = field(default_factory=list)
    speeds: list[page.Speed] = field(default_factory=list)
    traces: list[page.Traced] = field(default_factory=list)
    tests: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[str, Outcome] = field(default_factory=dict)

    def ask_machine(self) -> None:
        """In a rank: this process must not initialize CUDA, or its forks could not."""
        outcome = self.budget.on_ranks(machine, 1, needs=0, limit=60)
        self.steps["a matrix product"], self.machine = outcome, outcome.value

    def test(self) -> None:
        """Run tests/gpu in a process of its own; its lines are there even if it has to be ended.

        Meanwhile estimates and plans are made, which need recordings that take some seconds.
        """
        results = FOLDER / "tests.jsonl"
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text("")
        environment = os.environ | {"DSTK_GPU_RESULTS": str(results), "DSTK_GPUS": str(self.options.gpus)}
        if not self.options.rehearse:
            environment["TRITON_INTERPRET"] = "0"  # the tests of Liger's kernels on CPUs set it to 1
        command = [sys.executable, "-m", "pytest", "tests/gpu/test_gpu.py", "-q", "-p", "no:cacheprovider"]

        def run(seconds: float) -> None:
            end = time.monotonic() + seconds
            with (FOLDER / "tests.log").open("w") as log:
                tests = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
            try:
                self.prepare()
                code = tests.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"did not end in {seconds:.0f} s: see {FOLDER / 'tests.log'}") from None
            finally:
                tests.kill()
            if code not in (0, 1):
                raise RuntimeError(f"pytest exits with {code}: see {FOLDER / 'tests.log'}")

        self.say("tests/gpu")
        limit = self.budget.left if self.options.rehearse else TEST_SECONDS
        self.steps["tests/gpu"] = self.budget.attempt(run, needs=LEAST_SECONDS, limit=limit)
        lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
        self.tests = list({(line["group"], line["name"]): line for line in lines}.values())

    def setups(self) -> Sequence[Setup]:
        tiny, gpus = self.options.rehearse, self.options.gpus
        several = layouts(gpus, tiny=tiny) if gpus > 1 else []
        found = [*several, *(TINY if tiny else ONE_GPU)]
        wanted = (self.options.only or "").lower()
        return [setup for setup in found if wanted in f"{setup.label} {setup.model}".lower()]

    @property
    def cluster(self) -> Cluster | None:
        if self.machine is None:
            return None
        rank = RankDevice(
            host="", device=self.machine.device, memory_bytes=self.machine.memory_bytes,
            host_memory_bytes=host_memory_bytes(),
        )  # fmt: skip
        return cluster_of([rank] * self.options.gpus)[0]

    def prepare(self) -> None:
        """What of each setup fits, and the step that is planned."""
        folder, cluster = FOLDER / "runs", self.cluster
        folder.mkdir(parents=True, exist_ok=True)
        for setup in self.setups():
            try:
                if cluster is None:
                    raise RuntimeError("the GPU does not answer")
                self.ready.append(ready(fitted(setup, folder, cluster.gpu), folder, cluster))
            except Exception as error:  # whatever it is becomes a line of the page
                state: State = "not run" if isinstance(error, MemoryError) else "failed"
                self.add(setup, Outcome(state=state, reason=in_one_line(error)))

    def train_all(self) -> None:
        """Train and trace every setup. Whatever one raises becomes a line of the page."""
        for ready in self.ready:
            setup = ready.setup
            try:
                # Made once: every rank is a fork of this process, and has it already.
                model = built(ready.recipe) if setup.ranks == 1 and self.budget.left >= LEAST_SECONDS else None
                self.train(ready, model)
            except Exception as error:
                self.add(setup, Outcome(state="failed", reason=in_one_line(error)))
                continue
            for side in setup.traced:
                self.trace(ready, side, model)

    def train(self, ready: Ready, model: PreTrainedModel | None) -> None:
        """Every side of a setup; one that fails leaves the others alone."""
        setup, recipe = ready.setup, ready.recipe
        gpu = find_gpu(self.machine.device) if self.machine else None
        if self.budget.left < LEAST_SECONDS:
            self.add(setup, Outcome(state="not run", reason="no time was left"))
            return
        self.say(describe(setup))
        tokens = Tokens(recipe) if setup.sides != (TOOLKIT,) else None
        for number, side in enumerate(setup.sides):
            if side in self.options.without:
                continue
            where = FOLDER / "runs" / f"{setup.label}-{setup.ranks}-{number}".replace(" ", "-").replace(",", "")
            call = partial(run_side, side, recipe, model, tokens, where, WARMUP, self.backend)
            limit = self.budget.left if self.options.rehearse else RUN_SECONDS
            outcome = self.budget.on_ranks(call, setup.ranks, needs=LEAST_SECONDS, limit=limit)
            speed = page.Speed(
                setup=setup, side=side, outcome=outcome, shape=ready.shape,
                peak_flops=gpu.bf16_flops if gpu else None, planned_seconds=ready.planned_seconds,
            )  # fmt: skip
            self.speeds.append(speed)
            self.say(f"  {side}: {outcome.reason or f'{speed.tokens_per_second:,.0f} tokens/s'}")

    def trace(self, ready: Ready, side: str, model: PreTrainedModel | None) -> None:
        """Count and trace a step of one side of a setup on its ranks."""
        setup = ready.setup
        where = FOLDER / "runs" / f"trace-{setup.label}-{len(self.traces)}".replace(" ", "-").replace(",", "")
        limit = self.budget.left if self.options.rehearse else RUN_SECONDS
        call = partial(run_traced, side, ready.recipe, model, where, self.backend)
        self.say(f"  trace of {side}")
        outcome = self.budget.on_ranks(call, setup.ranks, needs=LEAST_SECONDS, limit=limit)
        self.traces.append(page.Traced(setup=setup, side=side, outcome=outcome))

    @property
    def backend(self) -> str:
        """What torch.compile uses: a rehearsal shows that it runs, for which nothing needs to be compiled."""
        return "eager" if self.options.rehearse else "inductor"

    def add(self, setup: Setup, outcome: Outcome) -> None:
        self.speeds += [page.Speed(setup=setup, side=side, outcome=outcome) for side in setup.sides]

    def say(self, text: str) -> None:
        print(f"{self.budget.used:4.0f} s  {text}", file=sys.stderr, flush=True)

    def publish(self) -> None:
        """Write and print the page."""
        found, rehearse = self.machine, self.options.rehearse
        name = "no GPU" if found is None else f"{max(1, self.options.gpus)} x {found.device}"
        title = f"A rehearsal on CPU ranks: {name}" if rehearse else f"The first hour on {name}"
        notes = (
            ["Tiny models on busy cores: that it runs is what it shows, its figures mean nothing."] if rehearse else []
        )
        notes.append(f"{self.budget.used:.0f} of {self.budget.seconds:.0f} s")
        if found is not None and not rehearse:
            facts = f"{found.device}, {found.memory_bytes / 2**30:.1f} GiB, {found.count} in the machine"
            notes.append(f"{facts}; CUDA {found.cuda}, NCCL {found.nccl}, driver {found.driver}")
        target = FOLDER / "rehearsal.md" if rehearse else ROOT / "benchmarks" / "results" / "gpu.md"
        gpus = f" GPUS={self.options.gpus}" if self.options.gpus > 1 else ""
        publish_all(
            "gpu",
            sheets=page.page(title, self.speeds, self.tests, self.steps, self.traces),
            notes=notes,
            save=True,
            path=self.options.output or target,
            command="make gpu-rehearsal" if rehearse else f"make gpu{gpus}",
        )


def ready(setup: Setup, folder: Path, cluster: Cluster) -> Ready:
    """Plan its step. Raises ToolkitError where it cannot be trained, and has no plan where only that is not known."""
    recipe = setup.recipe(folder)
    layout = recipe.layout(setup.ranks)
    planned = predict(recipe, layout, recipe.resolve_batch(layout), cluster).seconds
    return Ready(
        setup=setup, recipe=recipe, shape=ModelShape.from_config(model_config(recipe)), planned_seconds=planned
    )


if __name__ == "__main__":
    main()
