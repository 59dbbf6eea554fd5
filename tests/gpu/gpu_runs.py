"""Training runs of tests/gpu: each in processes of its own, forked from one that has imported everything."""

import json
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from allocations import LiveBytes
from gpu_cells import Spec, base, concurrent_ranks, on_cpu

from toolkit import Job, TrainOptions, train
from toolkit.config import load_recipe
from toolkit.config.recipe import Recipe
from toolkit.errors import PreemptedError
from toolkit.estimate.breakdown import MemoryBreakdown
from toolkit.hardware import host_memory_bytes
from toolkit.launch.local_ranks import Outcome, in_one_line, run_jobs
from toolkit.launch.rank_environment import RankEnvironment, pick_device
from toolkit.planner.auto.ranks import RankDevice, cluster_of
from toolkit.planner.run_memory import memory_request
from toolkit.step_metrics import StepMetrics
from toolkit.training.callback import Callback
from toolkit.training.loop import TrainingRun


def limit_seconds() -> int:
    """Of a run: one that hangs on a GPU must not take the time of all others; a CPU may be busy."""
    return 240 if on_cpu() else 90


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of rank 0."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    device: str
    device_bytes: int
    allocated: int
    """The peak after the first step; on CPUs of what operations returned."""
    reserved: int

    def then(self, rest: "Result") -> "Result":
        """This, and the steps after a restart."""
        return replace(rest, losses=self.losses + rest.losses, norms=self.norms + rest.norms)


class Watch(Callback):
    """Keeps the losses and the peak, from the second step on: building an engine may need more, and is not estimated.

    With `stops_at` the run ends after that step, as a signal ends it.
    """

    def __init__(self, live: LiveBytes | None, stops_at: int) -> None:
        self._live, self._stops_at = live, stops_at
        self._steps: list[StepMetrics] = []

    def on_step_end(self, run: TrainingRun, metrics: StepMetrics) -> None:
        self._steps.append(metrics)
        if run.step == self._stops_at:
            run.request_stop()
        if run.step > 1:
            return
        if self._live is not None:
            self._live.start_peak()
        elif run.engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(run.engine.device)

    def result(self, device: torch.device) -> Result:
        on_gpu = device.type == "cuda"
        return Result(
            losses=tuple(step.loss for step in self._steps),
            norms=tuple(step.grad_norm for step in self._steps),
            device=torch.cuda.get_device_name(device) if on_gpu else "cpu",
            device_bytes=torch.cuda.mem_get_info(device)[1] if on_gpu else host_memory_bytes(),
            allocated=torch.cuda.max_memory_allocated(device) if on_gpu else self._live.peak_bytes if self._live else 0,
            reserved=torch.cuda.max_memory_reserved(device) if on_gpu else 0,
        )


class Runs:
    """Runs start when the first result is asked for, as many at a time as there is room, in their order."""

    def __init__(self, folder: Path, corpus: Path, device: str, specs: Sequence[Spec]) -> None:
        self._specs, self._device = list(dict.fromkeys(specs)), device
        (folder / "base.yaml").write_text(json.dumps(base(corpus, folder / "cache")))
        self._folder = folder
        self._found: dict[Spec, Outcome] = {}
        self._ended = self._run()

    def recipe(self, spec: Spec) -> Recipe:
        return load_recipe(self._folder / "base.yaml", spec.overrides, world_size=spec.ranks)

    def result(self, spec: Spec) -> Result:
        """Wait for it. Raises AssertionError with one line where it failed."""
        while spec not in self._found:
            done, outcome = next(self._ended)
            self._found[done] = outcome
        outcome = self._found[spec]
        if isinstance(outcome, Exception):
            raise AssertionError(in_one_line(outcome)) from outcome
        found: Result = outcome[0]
        return found

    def close(self) -> None:
        """End what runs."""
        self._ended.close()

    def _run(self) -> Generator[tuple[Spec, Outcome], None, None]:
        cores = concurrent_ranks(self._device)
        calls = [(self._call(spec, resumes=False), spec.ranks) for spec in self._specs]
        for number, outcome, _ in run_jobs(calls, cores=cores, timeout_seconds=limit_seconds(), joined=False):
            spec = self._specs[number]
            if spec.stops_at and isinstance(outcome, list):
                again = [(self._call(spec, resumes=True), spec.ranks)]
                ((_, rest, _),) = run_jobs(again, cores=cores, timeout_seconds=limit_seconds(), joined=False)
                outcome = [outcome[0].then(rest[0])] if isinstance(rest, list) else rest
            yield spec, outcome

    def _call(self, spec: Spec, *, resumes: bool) -> Callable[[], Result]:
        folder = self._folder / f"run-{self._specs.index(spec)}"
        return partial(train_cell, self.recipe(spec), spec, folder, resumes=resumes)


def train_cell(recipe: Recipe, spec: Spec, folder: Path, *, resumes: bool) -> Result:
    """On a rank: train, and say what came out."""
    folder.mkdir(parents=True, exist_ok=True)
    here = RankEnvironment.detect()
    log = os.open(folder / f"rank-{here.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    recipe = recipe.model_copy(update={"run_dir": str(folder / "run")})
    device = pick_device(here)
    live = LiveBytes() if spec.measures_memory and device.type == "cpu" else None
    watch = Watch(live, 0 if resumes else spec.stops_at)
    options = TrainOptions(resume="auto" if resumes else None)
    with live or nullcontext(), suppress(PreemptedError):
        train(Job.of(recipe, spec.ranks), [watch], options, in_memory=not spec.stops_at)
    return watch.result(device)


def estimate(recipe: Recipe, found: Result) -> MemoryBreakdown:
    """What `dstk memory` says of the run on the device that it had."""
    layout, host = recipe.layout(1), host_memory_bytes()
    here = RankDevice(host="", device=found.device, memory_bytes=found.device_bytes, host_memory_bytes=host)
    device = cluster_of([here])[0].gpu
    (stage,) = memory_request(recipe, layout, recipe.resolve_batch(layout), gpu=device).stages()
    # On a CPU there is no cuBLAS.
    return stage.replayed() if found.device != "cpu" else replace(stage, workspace=0).replayed()
