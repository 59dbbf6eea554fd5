"""Terms of the time of traced steps, from a trace of torch.profiler: they add up to the window.

At each moment the first of these counts that applies: a kernel of the optimizer, another kernel, communication of each
kind of group, copies, and nothing (`idle`). So communication counts where nothing computes meanwhile, as in the time
model (docs/time-model.md); what is hidden behind computing is listed beside it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from toolkit.files import read_json_object

COMMUNICATION = ("tensor", "context", "expert", "pipeline", "data", "sequence", "world")
TERMS = ("compute", *COMMUNICATION, "optimizer", "copies", "idle")
FOLDER = "profile"
"""The folder of traces in a run directory."""
TERMS_FILE = "terms.json"
"""The file of terms in it."""
ALL = "all "
"""Prefix of the name of a kind of communication: all of it, hidden or not."""
PHASE = "phase "
"""Prefix of a range in a trace that is a phase of the step."""
GROUP = "group "
"""Prefix of a range in a trace that is a collective of the group of that name."""

Intervals = NDArray[np.float64]
"""[n, 2]: begin and end, in microseconds."""


@dataclass(frozen=True, kw_only=True)
class TraceTerms:
    """Seconds of the traced window by term, which add up to it, and of all communication by kind of group."""

    terms: dict[str, float]
    communication: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of the window."""
        return sum(self.terms.values())


@dataclass(frozen=True, kw_only=True)
class ProfiledSteps:
    """profile/terms.json of a run: the seconds of each rank by term, and of all its communication by kind."""

    start: int
    steps: int
    seconds: Mapping[str, Sequence[float]]

    @classmethod
    def read(cls, run: Path) -> Self | None:
        """Read the terms in a run directory; None where no step was profiled."""
        try:
            profiled = cls(**read_json_object(run / FOLDER / TERMS_FILE, follow=True))
            return profiled if all(profiled.seconds[name] for name in TERMS) and profiled.steps else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    @property
    def last(self) -> int:
        """The last step."""
        return self.start + self.steps - 1

    @property
    def busiest(self) -> int:
        """The rank that computes longest, for which others wait."""
        work = [sum(pair) for pair in zip(self.seconds["compute"], self.seconds["optimizer"], strict=True)]
        return work.index(max(work))

    def step(self, rank: int | None = None) -> dict[str, float]:
        """One step of a rank by term, or the mean of all ranks."""
        return {name: self._of(name, rank) for name in TERMS}

    def hidden(self, name: str) -> float:
        """Communication of a kind that is hidden behind computing, in a step, mean of all ranks; 0 for other terms."""
        return self._of(ALL + name, None) - self._of(name, None) if name in COMMUNICATION else 0.0

    def _of(self, name: str, rank: int | None) -> float:
        each = self.seconds[name]
        return (sum(each) / len(each) if rank is None else each[rank]) / self.steps


def trace_terms(trace: Mapping[str, Any], kinds: Mapping[str, str]) -> TraceTerms:
    """Read a Chrome trace, of a GPU's stream or of CPU ranks. `kinds`: the kind of each process group, by its name.

    The window is from the begin of the first phase to the end of the last.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    phases = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"].removeprefix(PHASE)) for e in events if e["name"].startswith(PHASE)
    )
    window = np.array([[phases[0][0], max(end for _, end, _ in phases)]])
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    intervals = _of_gpu(events, kinds, phases) if on_gpu else _of_cpu(events, kinds, phases)
    terms: dict[str, float] = {}
    covered = np.empty((0, 2))
    length = 0.0
    for name in ("optimizer", "compute", *COMMUNICATION, "copies"):
        covered = _union(np.concatenate([covered, _within(intervals.get(name, ()), window)]))
        total = float((covered[:, 1] - covered[:, 0]).sum())
        terms[name] = (total - length) / 1e6
        length = total
    terms["idle"] = float(window[0, 1] - window[0, 0] - length) / 1e6
    whole = {name: _within(intervals.get(name, ()), window) for name in COMMUNICATION}
    sums = {name: float(np.diff(_union(each)).sum()) / 1e6 for name, each in whole.items()}
    return TraceTerms(
        terms={name: terms[name] for name in TERMS}, communication={name: s for name, s in sums.items() if s}
    )


IntervalsByTerm = dict[str, list[tuple[float, float]]]


def _of_gpu(events: Sequence[Mapping[str, Any]], kinds: Mapping[str, str], phases: Sequence[Any]) -> IntervalsByTerm:
    """Kernels and copies of a GPU. One belongs to the phase in which the host launched it."""
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    intervals: IntervalsByTerm = {}
    for event in events:
        arguments = event.get("args", {})
        if event.get("cat") in ("gpu_memcpy", "gpu_memset"):
            name = "copies"
        elif event.get("cat") != "kernel":
            continue
        elif "nccl" in event["name"].lower():
            name = kinds.get(str(arguments.get("Process Group Name", "")), "world")
        else:
            name = _term_of(launched.get(arguments.get("correlation"), event["ts"]), phases)
        intervals.setdefault(name, []).append((event["ts"], event["ts"] + event["dur"]))
    return intervals


def _of_cpu(events: Sequence[Mapping[str, Any]], kinds: Mapping[str, str], phases: Sequence[Any]) -> IntervalsByTerm:
    """Operations of a CPU rank, and of the threads in which gloo communicates.

    A trace does not name the groups of gloo's operations. They begin in the order of the calls, whose marks do; where
    there are other numbers of them, which operation a call began is not known, and all count as of the whole world.
    """
    intervals: IntervalsByTerm = {}
    calls = sorted((e["ts"], e["name"].removeprefix(GROUP)) for e in events if e["name"].startswith(GROUP))
    sent = sorted((e["ts"], e["dur"]) for e in events if e["name"].startswith("gloo:"))
    groups = [group for _, group in calls]
    if len(calls) != len(sent):
        groups = [""] * len(sent)
    for group, (begin, length) in zip(groups, sent, strict=True):
        intervals.setdefault(kinds.get(group, "world"), []).append((begin, begin + length))
    for event in events:
        # Kernels: what encloses them, such as autograd's functions, may wait for other ranks.
        if (
            event.get("cat") == "cpu_op"
            and not event["name"].startswith(("c10d::", "autograd::"))
            and "::" in event["name"]
        ):
            intervals.setdefault(_term_of(event["ts"], phases), []).append((event["ts"], event["ts"] + event["dur"]))
    return intervals


def _term_of(moment: float, phases: Sequence[tuple[float, float, str]]) -> str:
    phase = next((name for begin, end, name in phases if begin <= moment < end), "")
    return "optimizer" if phase == "update" else "compute"


def _within(intervals: Iterable[tuple[float, float]], window: Intervals) -> Intervals:
    """Return the parts of the intervals that lie in the window."""
    clipped = np.clip(np.array(list(intervals), dtype=np.float64).reshape(-1, 2), window[0, 0], window[0, 1])
    not_empty: Intervals = clipped[clipped[:, 1] > clipped[:, 0]]
    return not_empty


def _union(intervals: Intervals) -> Intervals:
    """Merge intervals into those that cover the same moments without overlapping, in order."""
    if not len(intervals):
        return intervals
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    ends = np.maximum.accumulate(ordered[:, 1])
    starts = np.concatenate([[True], ordered[1:, 0] > ends[:-1]])
    last = np.concatenate([starts[1:], [True]])
    return np.stack([ordered[starts, 0], ends[last]], axis=1)
