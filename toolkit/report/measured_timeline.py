"""The timeline of a pipeline's last traced step, from the traces of train.profile: which pass ran when on every rank.

A trace has a range for each pass that a scheduled pipeline reports (`toolkit/engines/scheduled_pipeline.py`), and
others for waiting and reductions. Clocks of one machine are compared, so all ranks must have been on one.
"""

import gzip
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from toolkit.config.pipeline_schedules import PASS_NAMES, Operation, Pass, Schedule
from toolkit.config.simulate_schedule import ScheduleCosts, Timeline, simulate
from toolkit.errors import ReportError
from toolkit.files import decode_json, reason_of
from toolkit.report.recorded_run import RecordedRun, read_runs
from toolkit.report.trace_terms import FOLDER, PHASE

_KINDS: dict[str, Pass] = {name: kind for kind, name in PASS_NAMES.items()}
_RANGE = re.compile(rf"{PHASE}pipeline: ({'|'.join(_KINDS)}) of micro-batch (\d+) in stage (\d+)")
_MICROSECONDS = 1e6


def read_timelines(run: Path) -> tuple[Timeline, Timeline]:
    """Return the measured timeline of a run, and the simulated one with the mean times of its passes, in seconds.

    Raises ReportError for a run without a schedule of the toolkit's own or without its traces.
    """
    return timelines_of(read_runs([str(run)])[0])


def timelines_of(recorded: RecordedRun) -> tuple[Timeline, Timeline]:
    """Return what `read_timelines` does of a run that has been read. Raises ReportError."""
    run = recorded.folder
    recipe = recorded.recipe
    layout = recorded.layout
    if recipe is None or layout is None or layout.schedule is None:
        reason = "it is not the run of a pipeline with a schedule of the toolkit's own"
        raise ReportError.of("--run", str(run), reason, "train with parallel.schedule and train.profile")
    micro_batches = recipe.resolve_batch(layout).accumulation
    kind = layout.schedule
    schedule = layout.table(micro_batches)
    starts = []
    ends = []
    for rank, order in enumerate(schedule.orders):
        passes = _passes(run, layout.rank(pipe=rank), len(order))
        if [operation for operation, _, _ in passes] != list(order):
            number = layout.rank(pipe=rank)
            reason = f"rank {number} ran passes that differ from the schedule {kind}, or in a different order"
            raise ReportError.of("--run", str(run), reason, "report it as a bug")
        starts.append([start for _, start, _ in passes])
        ends.append([end for _, _, end in passes])
    begin = min(map(min, starts))
    costs = _costs(schedule, starts, ends)
    measured = Timeline(
        schedule=schedule,
        costs=costs,
        starts=tuple([start - begin for start in each] for each in starts),
        ends=tuple([end - begin for end in each] for each in ends),
    )
    return measured, simulate(schedule, costs)


def _passes(run: Path, rank: int, count: int) -> list[tuple[Operation, float, float]]:
    """Return the last `count` passes in the trace of a rank, with begin and end in seconds."""
    path = run / FOLDER / f"trace-rank{rank}.json.gz"
    try:
        trace = decode_json(gzip.decompress(path.read_bytes()).decode())
    except (OSError, ValueError) as error:
        reason = f"{path.name} cannot be read ({reason_of(error)})"
        raise ReportError.of("--run", str(run), reason, "train with train.profile") from error
    if any(event.get("cat") == "kernel" for event in trace["traceEvents"]):
        reason = "a trace of a GPU shows when passes were launched, not when they ran"
        raise ReportError.of("--run", str(run), reason, "look at the trace in Perfetto")
    return sorted(_ranges(trace), key=lambda timed_pass: timed_pass[1])[-count:]


def _ranges(trace: Mapping[str, Any]) -> Iterator[tuple[Operation, float, float]]:
    base = float(trace.get("baseTimeNanoseconds", 0)) / 1e3
    for event in trace["traceEvents"]:
        match = _RANGE.fullmatch(event.get("name", ""))
        if match is not None and "dur" in event:
            start = (base + float(event["ts"])) / _MICROSECONDS
            operation = (_KINDS[match[1]], int(match[3]), int(match[2]))
            yield operation, start, start + float(event["dur"]) / _MICROSECONDS


def _costs(schedule: Schedule, starts: list[list[float]], ends: list[list[float]]) -> ScheduleCosts:
    """Return the mean times of each stage's passes; a whole backward pass counts as half B and half W."""
    took: dict[tuple[Pass, int], list[float]] = {}
    for order, begun, done in zip(schedule.orders, starts, ends, strict=True):
        for (kind, stage, _), start, end in zip(order, begun, done, strict=True):
            took.setdefault((kind, stage), []).append(end - start)

    def mean(kind: Pass, stage: int) -> float:
        if kind in "BW" and not schedule.splits_backward:
            return fmean(took["D", stage]) / 2
        return fmean(took[kind, stage])

    stages = range(len(schedule.rank_of))
    return ScheduleCosts(
        forward=[mean("F", stage) for stage in stages],
        backward=[mean("B", stage) for stage in stages],
        weight=[mean("W", stage) for stage in stages],
    )
