"""Outcomes as tables: errors by source and by kind of setup, results, and what was refused."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from measure.table import Sheet

from published.errors import ErrorSummary, FitSummary
from published.outcomes import Outcome

_PEERS = "plain formulas: median"


def errors_sheet(found: Sequence[Outcome]) -> Sheet:
    """A line for each source and kind of measurement: ours and the plain formulas on the same rows."""
    rows = []
    for source in dict.fromkeys(outcome.row["source_id"] for outcome in found):
        mine = [outcome for outcome in found if outcome.row["source_id"] == source]
        for kind in dict.fromkeys(outcome.kind for outcome in mine):
            measured = [outcome for outcome in mine if outcome.kind == kind and outcome.measured_peak]
            rows += _line(source, kind, measured, _peak)
        rows += _line(source, "static", [outcome for outcome in mine if outcome.measured_static], _static)
    return Sheet(
        title="Published runs, by the estimate that `dstk memory` prints and by the plain formulas: errors in percent",
        headings=["source", "measured", *_HEADINGS],
        rows=rows,
        text_columns=2,
    )


def setups_sheet(found: Sequence[Outcome]) -> Sheet:
    """The same by kind of setup, all sources together."""
    rows = []
    for setup in sorted({outcome.setup for outcome in found} - {""}):
        for kind in ("allocated", "reserved", "nvidia-smi"):
            rows += _line(
                setup, kind, [o for o in found if (o.setup, o.kind) == (setup, kind) and o.measured_peak], _peak
            )
    return Sheet(title="By kind of setup", headings=["setup", "measured", *_HEADINGS], rows=rows, text_columns=2)


_HEADINGS = [
    "rows",
    "configurations",
    "refused",
    "median",
    "p95",
    "signed",
    "within 10 %",
    _PEERS,
    "p95",
    "within 10 %",
]


def _peak(outcome: Outcome) -> tuple[float | None, float | None, float | None]:
    return outcome.measured_peak, outcome.peak, outcome.plain_peak


def _static(outcome: Outcome) -> tuple[float | None, float | None, float | None]:
    return outcome.measured_static, outcome.static, outcome.plain_static


def _line(
    name: str,
    kind: str,
    members: Sequence[Outcome],
    figures: Callable[[Outcome], tuple[float | None, float | None, float | None]],
) -> list[list[str]]:
    if not members:
        return []
    told = [figures(outcome) for outcome in members if not outcome.refused]
    ours = ErrorSummary.of([(said, measured) for measured, said, _ in told if measured and said is not None])
    plain = ErrorSummary.of([(said, measured) for measured, _, said in told if measured and said is not None])
    refused = sum(bool(outcome.refused) for outcome in members)
    counts = [len(members), len({outcome.configuration for outcome in members}), refused]
    return [[name, kind, *map(str, counts), *_summary(ours, signed=True), *_summary(plain)]]


def _summary(errors: ErrorSummary | None, *, signed: bool = False) -> list[str]:
    if errors is None:
        return [""] * (4 if signed else 3)
    figures = [f"{100 * errors.median_absolute:.1f}", f"{100 * errors.p95_absolute:.1f}"]
    return figures + ([f"{100 * errors.median_signed:+.1f}"] if signed else []) + [f"{100 * errors.within:.0f}"]


def results_sheet(found: Sequence[Outcome]) -> Sheet:
    """Sources that list runs without room. Recall and precision of both results, in percent."""
    told = {outcome.row["source_id"] for outcome in found if not outcome.did_fit}
    rows = []
    for source in sorted(told):
        mine = [outcome for outcome in found if outcome.row["source_id"] == source]
        judged = [outcome for outcome in mine if outcome.result]
        fits = FitSummary.of([(outcome.result == "fits", outcome.did_fit) for outcome in judged])
        lacks = FitSummary.of([(outcome.result != "does not fit", outcome.did_fit) for outcome in judged])
        counts = [len(mine), sum(not o.did_fit for o in mine), len(mine) - len(judged)]
        tight = sum(outcome.result == "tight" for outcome in judged)
        rates = [_percent(x) for x in (fits.fit_recall, fits.fit_precision, lacks.recall, lacks.precision)]
        rows.append([source, *map(str, counts), str(tight), *rates])
    return Sheet(
        title="Does it fit? In percent; `tight` counts as neither result",
        headings=["source", "rows", "did not fit", "refused", "tight", "`fits`: recall", "precision",
                  "`does not fit`: recall", "precision"],
        rows=rows,
    )  # fmt: skip


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def refusals_sheet(found: Iterable[Outcome]) -> Sheet:
    """Every reason, with the column and its value."""
    counts = Counter((outcome.row["source_id"], outcome.refused) for outcome in found if outcome.refused)
    rows = [[source, reason, str(count)] for (source, reason), count in counts.most_common()]
    return Sheet(title="Refused", headings=["source", "column and value", "rows"], rows=rows, text_columns=2)


def worst_sheet(found: Sequence[Outcome], count: int) -> Sheet:
    """The largest errors of each source."""
    rows = []
    for source in dict.fromkeys(outcome.row["source_id"] for outcome in found):
        mine = [
            (o.peak / o.measured_peak - 1, o)
            for o in found
            if o.row["source_id"] == source and o.peak and o.measured_peak
        ]
        for error, outcome in sorted(mine, key=lambda pair: -abs(pair[0]))[:count]:
            rows.append([source, outcome.row["row_id"], outcome.row["model"], outcome.kind, f"{100 * error:+.1f}"])
    return Sheet(
        title="Largest errors", headings=["source", "run", "model", "measured", "%"], rows=rows, text_columns=4
    )
