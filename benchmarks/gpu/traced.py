"""One step of a rank as the GPU's own trace has it, beside what benchmarks/measure/step_counter.py counts without one.

The trace is PyTorch's profiler (kineto): every kernel and copy that ran on the GPU, and every call of the CUDA runtime
that made the host wait. The step before the traced one is counted, in the same run. Compiled layers are not counted:
the operations inside of them are not dispatched one by one.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from measure.step_counter import CountedStep, StepCounts
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel
from typing_extensions import override

from gpu.setups import FIELDS
from gpu.sides import our_side, output_to
from toolkit import Callback
from toolkit.config.recipe import Recipe
from toolkit.engines import compiled_layers
from toolkit.launch.rank_environment import RankEnvironment, pick_device
from toolkit.step_metrics import StepMetrics
from toolkit.training.loop import TrainingRun

COUNTED_AFTER = 3
"""Steps before the counted one: DDP arranges its buckets in the third, and ZeRO-3 learns the order of its weights."""
STEPS = COUNTED_AFTER + 2
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize")
_BLOCKING_COPIES = ("cudaMemcpy", "hipMemcpy")
"""Copies whose call returns when they are done; the asynchronous ones have names of their own."""
_WAIT_OF_PROFILER = "cudaDeviceSynchronize"


@dataclass(kw_only=True)
class Trace:
    """What ran on the GPU in one step, and where the host waited for it."""

    kernels: int = 0
    """Kernels but those of collectives."""
    collectives: int = 0
    """Kernels of NCCL."""
    copies: Counter[str] = field(default_factory=Counter)
    """Copies of each direction, such as "HtoD", and memsets."""
    waits: Counter[str] = field(default_factory=Counter)
    """Calls of the CUDA runtime that return when the GPU is done, by name."""
    kernel_seconds: Counter[str] = field(default_factory=Counter)
    """Seconds of the kernels and copies of each name. Those of several streams can run at once."""
    busy_seconds: float = 0.0
    """Seconds in which some kernel or copy ran."""
    seconds: float = 0.0
    """From the first launch of the step to the end of its last kernel."""


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """A counted step, None with compiled layers, and the trace of the next one, None on a CPU."""

    counts: StepCounts | None
    trace: Trace | None


class TracedStep(Callback):
    """Traces one step of a run, from the end of step `after` to the end of the next one."""

    def __init__(self, after: int, *, on_gpu: bool) -> None:
        self._after = after
        self._on_gpu = on_gpu
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._profiler = profile(activities=activities)
        self.trace: Trace | None = None

    @override
    def on_step_end(self, run: TrainingRun, metrics: StepMetrics) -> None:
        if metrics.step == self._after:
            self._profiler.start()
        elif metrics.step == self._after + 1:
            self._profiler.stop()
            if self._on_gpu:
                self.trace = read_trace(self._profiler.events())  # type: ignore[no-untyped-call]


def read_trace(events: Iterable[Any]) -> Trace:
    """Sum up the profiler's events of one step.

    When the profiler stops it waits for the GPU itself: the last wait for the whole device is not of the step.
    """
    trace = Trace()
    spans = []
    starts = []
    for event in events:
        if event.is_user_annotation:
            continue  # a range that code has named, such as those that ProcessGroupNCCL puts around its kernels
        begin = event.time_range.start
        end = event.time_range.end
        if event.device_type == DeviceType.CUDA:
            spans.append((begin, end))
            trace.kernel_seconds[event.name] += 1e-6 * (end - begin)
            _add_device_event(trace, event.name)
        else:
            starts.append(begin)
            if event.name.startswith(_WAITS) or event.name in _BLOCKING_COPIES:
                trace.waits[event.name] += 1
    trace.waits -= Counter({_WAIT_OF_PROFILER: 1})
    trace.busy_seconds = 1e-6 * _union(spans)
    if spans:
        trace.seconds = 1e-6 * (max(end for _, end in spans) - min([*starts, spans[0][0]]))
    return trace


def _add_device_event(trace: Trace, name: str) -> None:
    if name.startswith("Memcpy"):
        trace.copies[name.split()[1]] += 1
    elif name.startswith("Memset"):
        trace.copies["memset"] += 1
    elif "nccl" in name.lower():
        trace.collectives += 1
    else:
        trace.kernels += 1


def _union(spans: list[tuple[float, float]]) -> float:
    """Return the length of what intervals cover together, in their unit."""
    covered = 0.0
    reached = float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def run_traced(side: str, recipe: Recipe, model: PreTrainedModel | None, folder: Path, backend: str) -> TracedRun:
    """Train a few steps on this rank with the loop of recipes/train.py; count one and trace the next one.

    `side`: one of the toolkit's. `model`: built already, where there is one. `backend`: of torch.compile. The seconds
    of each kernel are also written to kernels.json in `folder`.
    """
    here = RankEnvironment.detect()
    with output_to(folder / f"rank-{here.rank}.log"), mock.patch.dict(compiled_layers._OPTIONS, backend=backend):
        on_gpu = pick_device(here).type == "cuda"
        counted = CountedStep(COUNTED_AFTER)
        traced = TracedStep(COUNTED_AFTER + 1, on_gpu=on_gpu)
        changed = recipe.changed(FIELDS[side]).changed({"train": {"steps": STEPS}})
        callbacks: list[Callback] = [traced]
        if not changed.train.compile:
            callbacks.insert(0, counted)
        our_side(changed, model, callbacks)
        if traced.trace is not None and here.rank == 0:
            seconds = dict(traced.trace.kernel_seconds.most_common())
            (folder / "kernels.json").write_text(json.dumps(seconds, indent=1), encoding="utf-8")
        return TracedRun(counts=counted.result, trace=traced.trace)
