"""What came out for published runs, as tables: errors, formulas of others, what did not fit, reasons, worst errors."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from measure.table import Sheet, verdict

from published.errors import ErrorSummary, FitSummary, relative_error
from published.formulas import FORMULAS
from published.rows import GIB
from published.sources import SOURCES, Outcome, peak_kind

MEDIAN_PERCENT, P95_PERCENT, STATIC_PERCENT = 3, 8, 1
RECALL_PERCENT, PRECISION_PERCENT = 95, 90
Pairs = list[tuple[float, float]]
_PEERS_OF_FIT = ("Megatron", "EleutherAI")
"""Formulas that count activations too."""


@dataclass(frozen=True, kw_only=True)
class _Line:
    """Rows that are summed up together."""

    source: str
    quantity: str
    trust: str
    outcomes: Sequence[Outcome]
    measured: Callable[[Outcome], float | None]
    predicted: Callable[[Outcome], float | None]
    formula: Callable[[Outcome, str], float | None]
    targets: tuple[float, float | None] | None

    def pairs(self, told: Callable[[Outcome], float | None]) -> Pairs:
        """(told, measured) of the rows that the estimate models too."""
        found = []
        for outcome in self.outcomes:
            value, measured = told(outcome), self.measured(outcome)
            if value is not None and measured and self.predicted(outcome) is not None:
                found.append((value, measured))
        return found


def _lines(found: Sequence[Outcome]) -> list[_Line]:
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in found:
        row = outcome.row
        if outcome.measured_peak is not None:
            groups.setdefault((row.source_id, peak_kind(row), row.trust), []).append(outcome)
    lines = [_peaks(source, kind, trust, members) for (source, kind, trust), members in groups.items()]
    statics: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in found:
        if outcome.measured_static is not None:
            statics.setdefault((outcome.row.source_id, outcome.row.trust), []).append(outcome)
    lines += [_statics(source, trust, members) for (source, trust), members in statics.items()]
    order = {name: number for number, name in enumerate(SOURCES)}
    lines.sort(key=lambda line: order.get(line.source, len(order)))
    aims = [
        o for o in found if o.row.trust == "A" and o.row.source_id in SOURCES and SOURCES[o.row.source_id].is_target
    ]
    pooled = [o for o in aims if o.measured_peak is not None and peak_kind(o.row) in ("allocated", "reserved")]
    still = [o for o in aims if o.measured_static is not None]
    return [*lines, _peaks("targets", "peak", "A", pooled), _statics("targets", "A", still)]


def _peaks(source: str, kind: str, trust: str, members: Sequence[Outcome]) -> _Line:
    def predicted(outcome: Outcome) -> float | None:
        return None if outcome.prediction is None else outcome.prediction.peak

    is_target = trust == "A" and (source == "targets" or (source in SOURCES and SOURCES[source].is_target))
    return _Line(
        source=source,
        quantity=kind,
        trust=trust,
        outcomes=members,
        measured=lambda outcome: outcome.measured_peak,
        predicted=predicted,
        formula=lambda outcome, name: outcome.formulas[name].peak,
        targets=(MEDIAN_PERCENT, P95_PERCENT) if is_target else None,
    )


def _statics(source: str, trust: str, members: Sequence[Outcome]) -> _Line:
    def predicted(outcome: Outcome) -> float | None:
        return None if outcome.prediction is None else outcome.prediction.static

    is_target = trust == "A" and (source == "targets" or (source in SOURCES and SOURCES[source].is_target))
    return _Line(
        source=source,
        quantity="static",
        trust=trust,
        outcomes=members,
        measured=lambda outcome: outcome.measured_static,
        predicted=predicted,
        formula=lambda outcome, name: outcome.formulas[name].static,
        targets=(STATIC_PERCENT, None) if is_target else None,
    )


def errors_sheet(found: Sequence[Outcome]) -> Sheet:
    """A line for each source, kind of measurement and trust; the last ones pool what the targets are about."""
    return Sheet(
        title="Memory of published runs: errors of the estimate, in percent",
        headings=["source", "measured", "trust", "runs", "not modelled", "median", "p95", "signed", "target"],
        rows=[_told(line) for line in _lines(found) if line.outcomes],
        text_columns=3,
    )


def _told(line: _Line) -> list[str]:
    own = ErrorSummary.of(line.pairs(line.predicted))
    runs = len(line.outcomes)
    if own is None:
        return [line.source, line.quantity, line.trust, str(runs), str(runs), "", "", "", ""]
    return [
        line.source,
        line.quantity,
        line.trust,
        str(runs),
        str(runs - own.count),
        f"{100 * own.median_absolute:.2f}",
        f"{100 * own.p95_absolute:.2f}",
        f"{100 * own.median_signed:+.2f}",
        _verdicts(own, line.targets),
    ]


def formulas_sheet(found: Sequence[Outcome]) -> Sheet:
    """The same lines, by each of the formulas."""
    rows = []
    for line in _lines(found):
        own = ErrorSummary.of(line.pairs(line.predicted))
        if own is not None:
            ours = f"{100 * own.median_absolute:.1f} / {100 * own.p95_absolute:.1f}"
            rows.append([line.source, line.quantity, line.trust, ours, *(_peer(line, name) for name in FORMULAS)])
    return Sheet(
        title="The same runs by the formulas of others: median / 95th percentile of errors, in percent",
        headings=["source", "measured", "trust", "estimate", *FORMULAS],
        rows=rows,
        text_columns=3,
    )


def _verdicts(own: ErrorSummary, targets: tuple[float, float | None] | None) -> str:
    if targets is None:
        return ""
    told = [verdict(100 * own.median_absolute, targets[0], at_most=True)]
    if targets[1] is not None:
        told.append("p95 " + verdict(100 * own.p95_absolute, targets[1], at_most=True))
    return ", ".join(told)


def _peer(line: _Line, name: str) -> str:
    theirs = ErrorSummary.of(line.pairs(lambda outcome: line.formula(outcome, name)))
    if theirs is None:
        return ""
    some = "" if theirs.count == len(line.pairs(line.predicted)) else f" of {theirs.count}"
    return f"{100 * theirs.median_absolute:.0f} / {100 * theirs.p95_absolute:.0f}{some}"


def fits_sheet(found: Sequence[Outcome]) -> Sheet:
    """Of the sources that also list runs that did not fit. A formula says so where its peak is beyond the GPU's GiB."""
    by_source: dict[str, list[Outcome]] = {}
    for outcome in found:
        if outcome.row.source_id in SOURCES and SOURCES[outcome.row.source_id].tells_fit:
            by_source.setdefault(outcome.row.source_id, []).append(outcome)
    headings = ["source", "runs", "did not fit", "not modelled", "recall", "precision", "target"]
    return Sheet(
        title="Does it fit? Recall and precision of 'does not fit', in percent; formulas: recall / precision",
        headings=[*headings, *_PEERS_OF_FIT],
        rows=[_told_fit(source, members) for source, members in by_source.items()],
    )


def _told_fit(source: str, members: Sequence[Outcome]) -> list[str]:
    modelled = [o for o in members if o.prediction is not None and o.prediction.fits is not None]
    pairs = [(bool(o.prediction and o.prediction.fits), o.row.fits) for o in modelled]
    summary = FitSummary.of(pairs)
    told = []
    if summary.recall is not None:
        told.append("recall " + verdict(100 * summary.recall, RECALL_PERCENT, at_most=False))
    if summary.precision is not None:
        told.append("precision " + verdict(100 * summary.precision, PRECISION_PERCENT, at_most=False))
    return [
        source,
        str(len(members)),
        str(sum(not o.row.fits for o in members)),
        str(len(members) - len(pairs)),
        _percent(summary.recall),
        _percent(summary.precision),
        ", ".join(told),
        *(_peer_fit(modelled, name) for name in _PEERS_OF_FIT),
    ]


def _peer_fit(modelled: Sequence[Outcome], name: str) -> str:
    pairs = []
    for outcome in modelled:
        peak, size = outcome.formulas[name].peak, outcome.row.gpu_mem_gb
        if peak is not None and size is not None:
            pairs.append((peak <= size * GIB, outcome.row.fits))
    summary = FitSummary.of(pairs)
    return f"{_percent(summary.recall)} / {_percent(summary.precision)}" if pairs else ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def reasons_sheet(found: Sequence[Outcome], shapes: Counter[str]) -> Sheet:
    """Why rows are not modelled. `shapes`: rows that do not describe a model, by source."""
    counts = Counter((outcome.row.source_id, outcome.reason) for outcome in found if outcome.reason)
    for source, count in shapes.items():
        counts[source, "the row does not say which model ran"] += count
    order = {name: number for number, name in enumerate(SOURCES)}
    ranked = sorted(counts.items(), key=lambda entry: (order.get(entry[0][0], len(order)), -entry[1], entry[0][1]))
    return Sheet(
        title="Not modelled",
        headings=["source", "reason", "runs"],
        rows=[[source, reason, str(count)] for (source, reason), count in ranked],
        text_columns=2,
    )


def worst_sheet(found: Sequence[Outcome], count: int) -> Sheet:
    """The largest errors of each line."""
    told: dict[str, list[tuple[float, list[str]]]] = {}
    for line in _lines(found):
        if line.source == "targets":
            continue
        for outcome in line.outcomes:
            value, measured = line.predicted(outcome), line.measured(outcome)
            if value is not None and measured:
                error = relative_error(value, measured)
                cells = [line.source, outcome.row.row_id, line.quantity, outcome.row.model]
                figures = [f"{measured / GIB:.2f}", f"{value / GIB:.2f}", f"{100 * error:+.2f}"]
                told.setdefault(f"{line.source} {line.quantity}", []).append((abs(error), [*cells, *figures]))
    rows = [
        cells
        for entries in told.values()
        for _, cells in sorted(entries, key=lambda entry: entry[0], reverse=True)[:count]
    ]
    return Sheet(
        title="Largest errors",
        headings=["source", "run", "measured", "model", "GiB", "predicted GiB", "error %"],
        rows=rows,
        text_columns=4,
    )
