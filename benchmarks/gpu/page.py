"""benchmarks/results/gpu.md from what was measured: nothing here measures, so that tests can hand it any result."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from measure.table import Sheet

from gpu.budget import Outcome
from gpu.setups import ESTIMATE_TARGET, MFU_TARGET, OURS, TOOLKIT, TRAINER, TRAINER_TARGET, Setup
from toolkit.config.layout import Layout
from toolkit.estimate.flops import mfu
from toolkit.models.shape import ModelShape

NONE = "–"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One side of one setup. `outcome.value` is its gpu.sides.Run."""

    setup: Setup
    side: str
    outcome: Outcome
    shape: ModelShape | None = None
    peak_flops: float | None = None
    planned_seconds: float | None = None

    @property
    def seconds(self) -> float | None:
        """The median step."""
        return median(self.outcome.value.seconds) if self.outcome.state == "done" else None

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.seconds is None else self.setup.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """Of each GPU. None for adapters: the formula counts gradients of all weights."""
        if self.tokens_per_second is None or self.shape is None or self.peak_flops is None or "lora" in self.setup.more:
            return None
        return mfu(self.tokens_per_second / self.setup.ranks, self.shape, self.setup.seq_len, self.peak_flops)


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A step of one side of a setup that was counted and traced. `outcome.value` is its gpu.traced.TracedRun."""

    setup: Setup
    side: str
    outcome: Outcome

    @property
    def name(self) -> str:
        """The model, and which of the toolkit's sides where it is not the plain one."""
        return self.setup.label if self.side == TOOLKIT else f"{self.setup.label}, {self.side}"

    @property
    def layout(self) -> str:
        """The layout, as layout strings name it."""
        return str(Layout.resolve(self.setup.ranks, **self.setup.parallel))


def page(
    title: str,
    speeds: Sequence[Speed],
    tests: Sequence[dict[str, Any]],
    steps: dict[str, Outcome],
    traces: Sequence[Traced] = (),
) -> list[Sheet]:
    """The tables. `tests`: a line of tests/gpu each; `steps`: other steps by name; `traces`: of single steps."""
    one_gpu = [one for one in speeds if one.setup.ranks == 1]
    sheets = [targets(title, one_gpu, tests)]
    if one_gpu:
        sheets.append(training(one_gpu))
    if planned := [one for one in speeds if one.side == TOOLKIT]:
        sheets.append(plans(planned))
    if done := [traced for traced in traces if traced.outcome.state == "done"]:
        sheets.append(traced_steps(done))
        if on_gpu := [traced for traced in done if traced.outcome.value.trace is not None]:
            sheets.append(kernel_times(on_gpu))
    if measured := [test for test in tests if test["group"] == "memory"]:
        sheets.append(memory(measured))
    if tests:
        sheets.append(test_groups(tests))
    named = {f"trace of {traced.name}, {traced.layout}": traced.outcome for traced in traces}
    return sheets + problems(speeds, tests, steps | named)


def targets(title: str, speeds: Sequence[Speed], tests: Sequence[dict[str, Any]]) -> Sheet:
    """What was to be reached, and what was: by the faster of the toolkit's sides."""
    rows = []
    for setup in (one.setup for one in speeds if one.side == TOOLKIT):
        ours = [one for one in speeds if one.setup == setup and one.side in OURS]
        best = min(ours, key=lambda one: one.seconds or math.inf)
        if setup.has_target:
            measured = _reached(best.mfu, MFU_TARGET, "{:.1%}", best)
            rows.append([f"MFU of {setup.label}", f">= {MFU_TARGET:.0%}", *measured])
        if TRAINER in setup.sides:
            ratio = _ratio(best, _side(speeds, setup, TRAINER))
            name = f"{setup.label} against the Trainer"
            rows.append([name, f">= {TRAINER_TARGET:.2f}x", *_reached(ratio, TRAINER_TARGET, "{:.2f}x", best)])
    errors = [error for test in tests if (error := _error(test, "allocated")) is not None]
    worst = max(errors, key=abs, default=None)
    if worst is not None:
        name = f"estimated peak, the worst of {len(errors)} setups"
        verdict = "reached" if abs(worst) <= ESTIMATE_TARGET else "missed"
        rows.append([name, f"within {ESTIMATE_TARGET:.0%}", f"{worst:+.1%}", verdict])
    return Sheet(title=title, headings=("target", "wanted", "measured", ""), rows=rows)


def training(speeds: Sequence[Speed]) -> Sheet:
    """A line for each side of each setup."""
    rows = []
    for one in speeds:
        ours = _side(speeds, one.setup, TOOLKIT)
        ratio = _ratio(ours, one) if one.side != TOOLKIT else None
        peak = one.outcome.value.peak_bytes if one.outcome.state == "done" else 0
        rows.append(
            [
                one.setup.label if one.side == TOOLKIT else "",
                one.side,
                f"{one.tokens_per_second:,.0f}" if one.tokens_per_second else one.outcome.state,
                f"{one.mfu:.1%}" if one.mfu is not None else NONE,
                f"{peak / 2**30:.1f}" if peak else NONE,
                f"{ratio:.2f}x" if ratio else NONE,
            ]
        )
    headings = ("model, bf16", "side", "tokens/s", "MFU", "peak, GiB", "toolkit is")
    notes = ["A batch is " + "; ".join(dict.fromkeys(_batch(one.setup) for one in speeds)) + "."]
    return Sheet(title="Speed of training", headings=headings, rows=rows, text_columns=2, notes=notes)


def plans(speeds: Sequence[Speed]) -> Sheet:
    """The step that `dstk plan` expects, beside the step that was taken."""
    rows = []
    for one in speeds:
        planned, seconds = one.planned_seconds, one.seconds
        ratio = f"{seconds / planned:.2f}x" if seconds and planned else NONE
        rows.append(
            [
                one.setup.label,
                str(Layout.resolve(one.setup.ranks, **one.setup.parallel)),
                f"{planned * 1e3:,.0f}" if planned else NONE,
                f"{seconds * 1e3:,.0f}" if seconds else one.outcome.state,
                ratio,
                f"{one.mfu:.1%}" if one.mfu is not None else NONE,
            ]
        )
    headings = ("model", "layout", "planned, ms", "measured, ms", "measured / planned", "MFU")
    return Sheet(title="Steps beside their plans", headings=headings, rows=rows, text_columns=2)


def traced_steps(traces: Sequence[Traced]) -> Sheet:
    """What a step asks of rank 0's GPU: as counted in one step, and as the trace of the next one has it."""
    rows = []
    for traced in traces:
        counts = traced.outcome.value.counts
        trace = traced.outcome.value.trace
        operations, reads, collectives = NONE, NONE, NONE
        if counts is not None:
            operations = f"{counts.total_operations:,}"
            reads = str(sum(counts.host_reads.values()))
            collectives = str(sum(counts.collectives.values()))
        row = [traced.name, traced.layout, operations]
        if trace is None:
            row += [NONE, reads, NONE, collectives, NONE, NONE, NONE]
        else:
            waits = ", ".join(f"{count} {name}" for name, count in trace.waits.most_common()) or "0"
            copies = ", ".join(f"{count} {kind}" for kind, count in trace.copies.most_common()) or "0"
            busy = f"{trace.busy_seconds / trace.seconds:.0%}" if trace.seconds else NONE
            row += [f"{trace.kernels:,}", reads, waits, collectives, str(trace.collectives), copies, busy]
        rows.append(row)
    return Sheet(
        title="A step, counted and traced",
        headings=(
            "model",
            "layout",
            "operations",
            "kernels",
            "host reads",
            "waits",
            "collectives",
            "NCCL kernels",
            "copies",
            "GPU busy",
        ),
        rows=rows,
        text_columns=2,
        notes=["Counted: operations, host reads, collectives (docs/step-counts.md). Traced: all other columns."],
    )


KERNELS = {
    "compiled": ("triton_",),
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas"),
    "update": ("multi_tensor_apply", "adam"),
    "collectives": ("nccl",),
    "copies, fills": ("memcpy", "memset", "copy_kernel", "fillfunctor", "catarray"),
}
"""Parts of the names of kernels, by what they do. The first that fits counts; what fits none is called other."""
_OTHER = "other"


def kernel_times(traces: Sequence[Traced]) -> Sheet:
    """Milliseconds of the traced step by what its kernels do. What runs on several streams at once counts twice."""
    rows = []
    for traced in traces:
        trace = traced.outcome.value.trace
        seconds: Counter[str] = Counter()
        for name, spent in trace.kernel_seconds.items():
            seconds[kind_of_kernel(name)] += spent
        idle = trace.seconds - trace.busy_seconds
        values = [*(seconds[kind] for kind in (*KERNELS, _OTHER)), idle, trace.seconds]
        rows.append([traced.name, traced.layout, *(f"{1e3 * value:,.1f}" for value in values)])
    headings = ("model", "layout", *KERNELS, _OTHER, "idle", "step")
    return Sheet(title="Where the GPU's time goes, ms", headings=headings, rows=rows, text_columns=2)


def kind_of_kernel(name: str) -> str:
    """What a kernel of this name does: a key of KERNELS, or "other"."""
    lower = name.lower()
    return next((kind for kind, parts in KERNELS.items() if any(part in lower for part in parts)), _OTHER)


def memory(tests: Sequence[dict[str, Any]]) -> Sheet:
    """Estimated and measured peaks, in GiB."""
    rows = []
    for test in tests:
        row = [test["name"]]
        for kind in ("allocated", "reserved"):
            found, expected = test.get(kind), test.get(f"estimated_{kind}")
            error = _error(test, kind)
            row += [f"{expected / 2**30:.3f}" if expected else NONE, f"{found / 2**30:.3f}" if found else NONE]
            row.append(f"{error:+.1%}" if error is not None else test["outcome"] if not found else NONE)
        rows.append(row)
    headings = ("setup", "allocated: estimate", "measured", "off", "reserved: estimate", "measured", "off")
    return Sheet(title="Memory beside its estimate, GiB", headings=headings, rows=rows)


def test_groups(tests: Sequence[dict[str, Any]]) -> Sheet:
    """How many tests of each group passed."""
    rows = []
    for group in dict.fromkeys(test["group"] for test in tests):
        counts = Counter(test["outcome"] for test in tests if test["group"] == group)
        rows.append([group, *(str(counts[name]) if counts[name] else NONE for name in _OUTCOMES)])
    return Sheet(title="Tests", headings=("tests/gpu", *_OUTCOMES), rows=rows)


_OUTCOMES = ("passed", "failed", "skipped", "not run")


def problems(speeds: Sequence[Speed], tests: Sequence[dict[str, Any]], steps: dict[str, Outcome]) -> list[Sheet]:
    """What failed, was skipped or did not fit in the time, each with its reason on one line."""
    found = [(name, outcome.state, outcome.reason) for name, outcome in steps.items()]
    found += [(f"{one.setup.label}: {one.side}", one.outcome.state, one.outcome.reason) for one in speeds]
    found += [(f"test {test['group']}: {test['name']}", test["outcome"], test["reason"]) for test in tests]
    rows = [list(one) for one in found if one[1] not in ("done", "passed")]
    order = ("failed", "skipped", "not run")
    rows.sort(key=lambda row: order.index(row[1]))
    rows = [[name, state, " ".join(reason.replace("|", "/").split())[:160]] for name, state, reason in rows]
    headings = ("what", "state", "why")
    return [Sheet(title="Failed, skipped and not run", headings=headings, rows=rows, text_columns=3)] if rows else []


def failed(
    speeds: Sequence[Speed],
    tests: Sequence[dict[str, Any]],
    steps: dict[str, Outcome],
    traces: Sequence[Traced] = (),
    *,
    peers: bool = False,
) -> bool:
    """Whether anything of ours failed, with `peers` of theirs too. What was not run for lack of time has not."""
    outcomes = [*steps.values(), *(traced.outcome for traced in traces)]
    outcomes += [one.outcome for one in speeds if peers or one.side == TOOLKIT]
    return any(one.state == "failed" for one in outcomes) or any(test["outcome"] == "failed" for test in tests)


def _side(speeds: Sequence[Speed], setup: Setup, side: str) -> Speed | None:
    return next((one for one in speeds if one.setup == setup and one.side == side), None)


def _ratio(ours: Speed | None, other: Speed | None) -> float | None:
    if ours is None or other is None or ours.seconds is None or other.seconds is None:
        return None
    return other.seconds / ours.seconds


def _reached(value: float | None, target: float, form: str, one: Speed) -> list[str]:
    if value is None:
        return [NONE if one.outcome.state == "done" else one.outcome.state, NONE]
    return [form.format(value), "reached" if value >= target else "missed"]


def _error(test: dict[str, Any], kind: str) -> float | None:
    """Estimated over measured, less one; None where one of them is not known."""
    found, expected = test.get(kind), test.get(f"estimated_{kind}")
    return expected / found - 1 if found and expected else None


def _batch(setup: Setup) -> str:
    micro_batches = f"{setup.accumulation} x " if setup.accumulation > 1 else ""
    return f"{micro_batches}{setup.micro_batch_size} x {setup.seq_len} tokens for {setup.label}"
