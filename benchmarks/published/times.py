"""What the time model says of each published run, beside what was measured, and which layout it would have chosen."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from measure.table import Sheet

from published import time_reader
from published.reader import RefusedError
from published.rows import Row
from toolkit.errors import ToolkitError
from toolkit.planner.step_time import StepTime, predict_step

DEVELOPMENT = frozenset(
    {"megatron_sc21_t1", "torchtitan_202412", "mpt_llmfoundry", "vtrain_single", "nanotron_ultrascale",
     "alpa_v100", "ds_azure_zero3"}
)  # fmt: skip
"""Sources that were looked at while the global constants were chosen; all others were held out until they stood."""
COMMON_MFU = 0.4
"""What people plan with who have no other number."""


@dataclass(frozen=True, kw_only=True)
class TimedRun:
    """One run; seconds of a step."""

    row: Row
    refused: str = ""
    measured: float = 0.0
    predicted: StepTime | None = None
    layout: str = ""

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        assert self.predicted is not None
        return self.predicted.seconds / self.measured - 1

    @property
    def group(self) -> tuple[str, ...]:
        """Runs that share it differ in how they are spread, and in kernels."""
        return tuple(self.row[name] for name in ("model", "gpu", "n_gpus", "global_batch", "seq_len"))


def timed_runs(rows: Iterable[Row]) -> list[TimedRun]:
    """Of every row, refused ones included."""
    return [_timed(row) for row in rows]


def _timed(row: Row) -> TimedRun:
    try:
        request = time_reader.read(row)
        predicted = predict_step(request)
    except (RefusedError, ToolkitError) as error:
        return TimedRun(row=row, refused=str(error))
    measured = time_reader.measured_seconds(row, request)
    return TimedRun(row=row, measured=measured, predicted=predicted, layout=str(request.layout))


def errors_sheet(found: Sequence[TimedRun]) -> Sheet:
    """A line for each source: the time model, and two planners that know nothing but one MFU."""
    rows = []
    for source in dict.fromkeys(run.row["source_id"] for run in found):
        mine = [run for run in found if run.row["source_id"] == source]
        told = [run for run in mine if run.predicted is not None]
        if not told:
            rows.append([source, _half(source), str(len(mine)), str(len(mine)), *[""] * 5])
            continue
        utilization = median(_mfu(run) for run in told)
        within = mean(abs(run.error) <= 0.1 for run in told)
        figures = [
            mean(abs(run.error) for run in told),
            median(run.error for run in told),
            within,
            mean(abs(_mfu(run) / COMMON_MFU - 1) for run in told),
            mean(abs(_mfu(run) / utilization - 1) for run in told),
        ]
        shown = [f"{100 * x:+.1f}" if number == 1 else f"{100 * x:.1f}" for number, x in enumerate(figures)]
        rows.append([source, _half(source), str(len(mine)), str(len(mine) - len(told)), *shown])
    return Sheet(
        title="Published step times, by the function that `dstk plan --layout` calls: errors in percent",
        headings=["source", "half", "rows", "refused", "mean absolute", "median signed", "within 10 %",
                  "40 % MFU", "the source's median MFU"],
        rows=rows,
        text_columns=2,
    )  # fmt: skip


def ranking_sheet(found: Sequence[TimedRun]) -> Sheet:
    """Sources that ran a model in several layouts: the throughput of the first choice, as a share of the best one's."""
    rows = []
    for source in dict.fromkeys(run.row["source_id"] for run in found):
        groups: dict[tuple[str, ...], list[TimedRun]] = defaultdict(list)
        for run in found:
            if run.row["source_id"] == source and run.predicted is not None:
                groups[run.group].append(run)
        several = [group for group in groups.values() if len(group) > 1]
        if len(several) < 2:
            continue
        halves: dict[bool, list[float]] = {False: [], True: []}
        for group in several:
            halves[_held_out(group[0].group)].append(_share_of_best(group))
        shares = halves[False] + halves[True]
        parts = [f"{100 * mean(half):.1f}" if half else "" for half in halves.values()]
        random = mean(mean(min(run.measured for run in group) / run.measured for run in group) for group in several)
        runs = sum(map(len, several))
        rows.append(
            [
                source,
                str(len(several)),
                str(runs),
                *(f"{100 * x:.1f}" for x in (mean(shares), min(shares), random)),
                *parts,
            ]
        )
    return Sheet(
        title="The first choice among runs of one model, GPUs and batch: its throughput in percent of the best run's",
        headings=[
            "source",
            "groups",
            "runs",
            "mean",
            "worst group",
            "a random run",
            "development groups",
            "held-out groups",
        ],
        rows=rows,
    )


def worst_sheet(found: Sequence[TimedRun], count: int) -> Sheet:
    """The largest errors of each source."""
    rows = []
    for source in dict.fromkeys(run.row["source_id"] for run in found):
        mine = [run for run in found if run.row["source_id"] == source and run.predicted is not None]
        for run in sorted(mine, key=lambda run: -abs(run.error))[:count]:
            name = [source, run.row["row_id"], run.row["model"], run.layout]
            rows.append([*name, f"{run.measured:.3f}", f"{100 * run.error:+.1f}"])
    return Sheet(
        title="Largest errors", headings=["source", "run", "model", "layout", "seconds", "%"], rows=rows, text_columns=4
    )


def _share_of_best(group: Sequence[TimedRun]) -> float:
    chosen = min(group, key=lambda run: run.predicted.seconds if run.predicted else 0.0)
    return min(run.measured for run in group) / chosen.measured


def _mfu(run: TimedRun) -> float:
    assert run.predicted is not None
    return run.predicted.mfu * run.predicted.seconds / run.measured


def _held_out(group: tuple[str, ...]) -> bool:
    """Half of the groups, by a hash: nobody looked at them while mechanisms that change the ranking were added."""
    return hashlib.sha256("|".join(group).encode()).digest()[0] % 2 == 0


def _half(source: str) -> str:
    return "development" if source in DEVELOPMENT else "held out"
