"""train.profile: a trace of some steps for Perfetto, a memory snapshot, and a table of where their time goes.

In the run directory: profile/terms.json (the table, of every rank), and of the ranks of the first replica
profile/trace-rank0.json.gz, … and on GPUs profile/memory-rank0.pickle, … (https://pytorch.org/memory_viz).
"""

import gzip
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from typing_extensions import override

from toolkit.config.layout import Layout
from toolkit.engines.base import StepResult
from toolkit.phases import PhaseReporter
from toolkit.report.trace_terms import (
    ALL,
    COMMUNICATION,
    FOLDER,
    GROUP,
    PHASE,
    TERMS,
    TERMS_FILE,
    TraceTerms,
    trace_terms,
)
from toolkit.training.callback import Action, Callback
from toolkit.training.loop import TrainingRun

_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
)
"""Methods of a process group that torch.distributed calls. Releases of PyTorch have some of them alone: those called
`_single` are new in 2.13."""


class Profiler(Callback):
    """Traces the steps of train.profile. It is also the run's phase reporter, which it passes on to the watchdog."""

    def __init__(self, report_phase: PhaseReporter) -> None:
        self._report_phase = report_phase
        self._trace: profile | None = None
        self._active = ExitStack()
        self._phase: record_function | None = None

    def report_phase(self, phase: str, step: int | None = None) -> None:
        """Pass a phase on, and begin its range in the trace."""
        self._report_phase(phase, step)
        if self._trace is not None:
            self._begin_range(phase)

    @override
    def on_step_begin(self, run: TrainingRun) -> None:
        section = run.recipe.train.profile
        if section is None or run.step + 1 != section.start or self._trace is not None:
            return
        on_gpu = run.engine.device.type == "cuda"
        if on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
            torch.cuda.synchronize()
        activities = [ProfilerActivity.CPU]
        if on_gpu:
            activities.append(ProfilerActivity.CUDA)
        self._trace = profile(activities=activities)
        with _quiet_stderr():
            self._trace.start()
        self._active.enter_context(named_collectives())
        self._begin_range("data")

    @override
    def on_after_update(self, run: TrainingRun, result: StepResult) -> Literal[Action.RETRY] | None:
        section = run.recipe.train.profile
        if section is not None and self._trace is not None and run.step + 1 >= section.start + section.steps - 1:
            self._finish(run)
        return None

    def _begin_range(self, phase: str) -> None:
        self._end_range()
        self._phase = record_function(PHASE + phase)
        self._phase.__enter__()  # type: ignore[no-untyped-call]

    def _end_range(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def _finish(self, run: TrainingRun) -> None:
        """Stop, and write what was found. A collective call."""
        assert self._trace is not None
        section = run.recipe.train.profile
        layout = run.job.layout
        device = run.engine.device
        assert section is not None
        if device.type == "cuda":
            torch.cuda.synchronize()
        self._end_range()
        self._active.close()
        with _quiet_stderr():
            self._trace.stop()
        trace = self._trace
        self._trace = None
        rank = dist.get_rank() if dist.is_initialized() else 0
        folder = run.directory.path / FOLDER if run.directory is not None else None
        # A trace is of some megabytes: one replica's show what all do.
        keeps = folder is not None and layout.coordinate(rank).data == 0
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "trace.json"
            trace.export_chrome_trace(str(path))
            content = path.read_bytes()
        terms = trace_terms(json.loads(content), group_kinds(layout))
        every = _of_all_ranks(terms, device)
        if keeps and folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"trace-rank{rank}.json.gz").write_bytes(gzip.compress(content, compresslevel=3))
        if device.type == "cuda":
            if keeps and folder is not None:
                snapshot = str(folder / f"memory-rank{rank}.pickle")
                torch.cuda.memory._dump_snapshot(snapshot)  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        if rank == 0 and folder is not None:
            names = [*TERMS, *(ALL + name for name in COMMUNICATION)]
            table = {name: [round(row[number], 6) for row in every] for number, name in enumerate(names)}
            text = json.dumps({"start": section.start, "steps": section.steps, "seconds": table}, indent=1)
            (folder / TERMS_FILE).write_text(text + "\n", encoding="utf-8")
            run.progress.say(_describe(every, section.start, section.steps, folder))


def _of_all_ranks(terms: TraceTerms, device: torch.device) -> list[list[float]]:
    """Return, for each rank, the seconds of TERMS, then those of all communication of each kind. A collective call."""
    seconds = [*terms.terms.values(), *(terms.communication.get(name, 0.0) for name in COMMUNICATION)]
    if not dist.is_initialized():
        return [seconds]
    local = torch.tensor(seconds, dtype=torch.float64, device=device)
    rows = local.new_empty(dist.get_world_size(), len(seconds))
    dist.all_gather_into_tensor(rows.view(-1), local)
    return [[float(value) for value in row] for row in rows.tolist()]


def _describe(every: list[list[float]], start: int, steps: int, folder: Path) -> str:
    whole = sum(sum(row[: len(TERMS)]) for row in every)
    shares = {name: sum(row[number] for row in every) / whole for number, name in enumerate(TERMS)}
    words = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    return f"steps {start} to {start + steps - 1} profiled: {words}. Traces are in {folder}"


def group_kinds(layout: Layout) -> dict[str, str]:
    """The kind of every process group of this rank, by its name: what the toolkit calls it, or by its ranks.

    DeepSpeed's own groups have no description. Ranks that differ in their replica alone exchange data, and so on.
    """
    if not dist.is_initialized():
        return {}
    kinds = {}
    for group, name in dist.distributed_c10d._world.pg_names.items():
        places = [layout.coordinate(rank) for rank in dist.get_process_group_ranks(group)]
        axes = [axis for axis in ("pipe", "data", "model") if len({getattr(place, axis) for place in places}) > 1]
        model = "sequence" if layout.ulysses > 1 else "tensor"
        kind = "world"
        if group.group_desc in COMMUNICATION:
            kind = group.group_desc
        elif len(axes) == 1:
            kind = {"pipe": "pipeline", "data": "data", "model": model}[axes[0]]
        kinds[str(name)] = kind
    return kinds


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Suppress the two lines that torch 2.13's tracer writes to the file of stderr, which no log level suppresses."""
    sys.stderr.flush()
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


@contextmanager
def named_collectives() -> Iterator[None]:
    """Mark each collective with the name of its group, which traces of gloo lack; NCCL's have it."""

    def marked(call: Any) -> Any:
        def run(group: Any, *arguments: Any, **keywords: Any) -> Any:
            with record_function(GROUP + str(group.group_name)):
                return call(group, *arguments, **keywords)

        return run

    with ExitStack() as patches:
        for name in _COLLECTIVES:
            call = getattr(dist.ProcessGroup, name, None)
            if call is not None:
                patches.enter_context(mock.patch.object(dist.ProcessGroup, name, marked(call)))
        yield
