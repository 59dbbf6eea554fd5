"""The four plots of a comparison: loss and gradient norm, and how far each lies from the baseline's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from toolkit.parity.tolerance import relative
from toolkit.report.chart import Band, Chart, Line, Mark, Point, line_points
from toolkit.report.numerals import difference, english_list, plural, scientific
from toolkit.report.palette import COOL, WARM

Curve = Mapping[str, Any]

_DASHES: tuple[tuple[float, ...], ...] = ((), (6, 3), (2, 2.5), (9, 3, 2, 3))
_STRIPE = 7.0
_MOST_TOLERANCES = 3
_MANY = 12


@dataclass(frozen=True, kw_only=True)
class Look:
    """How one strategy is drawn wherever it appears."""

    key: str
    tone: str
    dash: tuple[float, ...]
    differs: bool


def looks(strategies: Sequence[Curve]) -> list[Look]:
    """Cool colours for strategies that are the same, warm ones for those that are not."""
    found: list[Look] = []
    counts = {True: 0, False: 0}
    for index, strategy in enumerate(strategies):
        differs = strategy["verdict"] != "same"
        tones = WARM if differs else COOL
        round_, place = divmod(counts[differs], len(tones))
        counts[differs] += 1
        found.append(Look(key=f"k{index}", tone=tones[place], dash=_DASHES[round_ % len(_DASHES)], differs=differs))
    return found


def comparison_charts(comparison: Mapping[str, Any]) -> list[Chart]:
    """Loss, its difference, gradient norm, its difference."""
    charts = []
    for field, bound, name, noun, unit in (
        ("losses", "loss", "loss", "loss", "nats per token"),
        ("grad_norms", "grad_norm", "grad-norm", "gradient norm", "norm of the whole gradient, before clipping"),
    ):
        charts.append(_overlay(comparison, field, files=field.replace("_", "-"), noun=noun, unit=unit))
        charts.append(_differences(comparison, field, bound, files=f"{name}-difference", noun=noun))
    return charts


def _overlay(comparison: Curve, field: str, *, files: str, noun: str, unit: str) -> Chart:
    baseline, strategies = comparison["baseline"], comparison["strategies"]
    equal = [look for strategy, look in _looked(strategies) if not look.differs]
    lines = [
        Line(label=baseline["label"], points=line_points(baseline[field]), tone="reference", key="reference", width=8)
    ]
    # What differs is drawn first: it shows from where it leaves the others.
    for strategy, look in sorted(_looked(strategies), key=lambda pair: not pair[1].differs):
        # Equal curves lie on each other: their dashes alternate, so that each of them shows.
        striped = not look.differs and len(equal) > 1
        place = equal.index(look) if striped else 0
        lines.append(
            Line(
                label=strategy["label"],
                points=line_points(strategy[field]),
                tone=look.tone,
                key=look.key,
                dash=(_STRIPE, _STRIPE * (len(equal) - 1)) if striped else (),
                offset=-_STRIPE * place,
                width=2.6,
                labelled=look.differs,
            )
        )
    values = [value for value in baseline[field] if value is not None]
    course = f"That of {baseline['label']} goes from {values[0]:.4f} to {values[-1]:.4f}. " if values else ""
    caption = f"The grey band is {baseline['label']}."
    if len(equal) > 1:
        caption += " Equal curves lie on each other, so their colours alternate."
    return Chart(
        name=files,
        title=noun.capitalize(),
        unit=unit,
        caption=caption,
        description=f"{noun.capitalize()} of each step of {plural(len(strategies), 'strategy', 'strategies')}. "
        f"{course}{_verdicts(strategies)}",
        lines=tuple(lines),
    )


def _differences(comparison: Curve, field: str, bound: str, *, files: str, noun: str) -> Chart:
    baseline, strategies = comparison["baseline"], comparison["strategies"]
    reruns = comparison.get("reruns") or []
    lines = [
        Line(
            label=f"rerun: {rerun['label']}",
            points=relative_points(rerun[field], baseline[field]),
            tone="rerun",
            key=f"rerun{index}",
            width=1.2,
        )
        for index, rerun in enumerate(reruns)
    ]
    marks, spans = [], []
    for strategy, look in _looked(strategies):
        points = relative_points(strategy[field], baseline[field])
        lines.append(
            Line(
                label=strategy["label"],
                points=points,
                tone=look.tone,
                key=look.key,
                dash=look.dash,
                width=2.2 if look.differs else 1.5 if len(strategies) <= _MANY else 0.9,
                labelled=look.differs,
            )
        )
        known = [value for _, value in points if value is not None]
        if known and not look.differs:
            spans.append(max(known))
        limits = (strategy.get("tolerance") or {}).get(bound) or []
        beyond = first_beyond(points, limits)
        if beyond is not None:
            marks.append(Mark(step=beyond[0], value=beyond[1], tone=look.tone, key=look.key))
    bands = tuple(_bands(strategies, bound, len(baseline[field])))
    caption = f"|{noun} − baseline| / baseline, on a logarithmic axis."
    if bands:
        caption += " What lies below the dashed line is within the tolerance."
    if marks:
        caption += " A ring marks the first step beyond it."
    if reruns:
        caption += (
            f" Grey: {baseline['label']} again, rounding differently ({english_list([r['label'] for r in reruns])})."
        )
    largest = f" Strategies that are the same differ by {difference(max(spans))} at most." if spans else ""
    return Chart(
        name=files,
        title=f"Difference of the {noun}",
        unit="relative difference",
        caption=caption,
        description=f"Relative difference of the {noun} from {baseline['label']} at each step.{largest} "
        f"{_verdicts(strategies)}",
        lines=tuple(lines),
        bands=bands,
        marks=tuple(marks),
        log=True,
    )


def relative_points(values: Sequence[float | None], baseline: Sequence[float | None]) -> tuple[Point, ...]:
    """|value - baseline| / |baseline| of the steps that both have; a gap where one of them was not finite."""
    return line_points(
        [
            None if value is None or wanted is None else relative(value, wanted)
            for value, wanted in zip(values, baseline, strict=False)
        ]
    )


def first_beyond(points: Sequence[Point], limits: Sequence[float | None]) -> tuple[int, float] | None:
    """The first step whose difference is larger than its bound; the last bound holds for all later steps."""
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    for step, value in points:
        if value is not None and value > known[min(step, len(known)) - 1]:
            return step, value
    return None


def _bands(strategies: Sequence[Curve], bound: str, steps: int) -> Iterator[Band]:
    """The tolerances: each one, or where there are many, the tightest and the loosest."""
    found: dict[tuple[float, ...], None] = {}
    for strategy in strategies:
        limits = [limit for limit in (strategy.get("tolerance") or {}).get(bound) or [] if limit is not None]
        if limits and steps:
            found[tuple(limits[min(step, len(limits) - 1)] for step in range(steps))] = None
    tolerances = sorted(found)
    if len(tolerances) > _MOST_TOLERANCES:
        ends: list[tuple[Callable[..., float], str]] = [(max, "loosest tolerance"), (min, "tightest tolerance")]
        for index, (choose, label) in enumerate(ends):
            limits = [choose(column) for column in zip(*tolerances, strict=True)]
            yield Band(label=label, points=tuple(enumerate(limits, start=1)), filled=index == 0)
        return
    for index, tolerance in enumerate(reversed(tolerances)):
        constant = all(a == b for a, b in pairwise(tolerance))
        label = f"tolerance {scientific(tolerance[0])}" if constant else "tolerance"
        yield Band(label=label, points=tuple(enumerate(tolerance, start=1)), filled=index == 0)


def _looked(strategies: Sequence[Curve]) -> Iterator[tuple[Curve, Look]]:
    yield from zip(strategies, looks(strategies), strict=True)


def _verdicts(strategies: Sequence[Curve]) -> str:
    differing = [strategy["label"] for strategy in strategies if strategy["verdict"] == "differs"]
    failed = [strategy["label"] for strategy in strategies if strategy["verdict"] == "failed"]
    parts = [f"{english_list(differing)} {'differs' if len(differing) == 1 else 'differ'}."] if differing else []
    parts += [f"{english_list(failed)} failed and has no curve."] if failed else []
    return " ".join(parts) or "All of them stay within their tolerance."
