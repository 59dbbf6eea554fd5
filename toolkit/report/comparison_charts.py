"""The plots of a comparison: loss, gradient norm, and their differences from the baseline."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.parity.tolerance import relative
from toolkit.report.chart import COOL, DASHES, WARM, Band, Chart, Line, Point, RingMark, line_points, stripe
from toolkit.units import difference, english_list, plural, scientific

Curve = Mapping[str, Any]
"""A strategy, a baseline or a rerun of comparison.json, or the whole of it."""

_MOST_TOLERANCES = 3
"""Tolerances that are drawn each; of more only the loosest and the tightest."""
_MANY = 12
"""Strategies from which on lines are thin."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Color and dash pattern with which one strategy is drawn everywhere in the report."""

    key: str
    tone: str
    dash: tuple[float, ...]
    differs: bool

    def line(self, strategy: Curve, points: tuple[Point, ...], **options: Any) -> Line:
        """Return a curve of the strategy; it has its label if the strategy differs."""
        labelled = self.differs
        return Line(label=strategy["label"], points=points, tone=self.tone, key=self.key, labelled=labelled, **options)


def looks(strategies: Sequence[Curve]) -> list[Look]:
    """Assign cool colors to strategies that are the same and warm colors to the others."""
    assigned: list[Look] = []
    counts = {True: 0, False: 0}
    for index, strategy in enumerate(strategies):
        differs = strategy["result"] != "same"
        tones = WARM if differs else COOL
        round_, place = divmod(counts[differs], len(tones))
        counts[differs] += 1
        assigned.append(Look(key=f"k{index}", tone=tones[place], dash=DASHES[round_ % len(DASHES)], differs=differs))
    return assigned


def comparison_charts(comparison: Mapping[str, Any]) -> list[Chart]:
    """Return the plots of loss, its difference, gradient norm, and its difference."""
    norm = "norm of the whole gradient, before clipping"
    charts = [
        _overlay(comparison, "losses", files="losses", noun="loss", unit="nats per token"),
        _differences(comparison, "losses", "loss", files="loss-difference", noun="loss"),
        _overlay(comparison, "grad_norms", files="grad-norms", noun="gradient norm", unit=norm),
        _differences(comparison, "grad_norms", "grad_norm", files="grad-norm-difference", noun="gradient norm"),
    ]
    return charts if comparison["baselines"][0]["grad_norms"] else charts[:2]


def _overlay(comparison: Curve, field: str, *, files: str, noun: str, unit: str) -> Chart:
    baselines = comparison["baselines"]
    strategies = comparison["strategies"]
    steps = comparison.get("steps")
    equal = [look for strategy, look in _looked(strategies) if not look.differs]
    bands = [
        (line_points(baseline[field], steps), baseline["label"], f"reference{index}")
        for index, baseline in enumerate(baselines)
    ]
    lines = [Line(label=label, points=points, tone="reference", key=key, width=8) for points, label, key in bands]
    # Strategies that differ are drawn first: the others show where they leave.
    for strategy, look in sorted(_looked(strategies), key=lambda pair: not pair[1].differs):
        # Equal curves overlap: their dashes alternate so that each is visible.
        striped = not look.differs and len(equal) > 1
        dashes = stripe(equal.index(look), len(equal)) if striped else {}
        points = line_points(strategy[field], steps)
        lines.append(look.line(strategy, points, **dashes, width=2.6))
    values = [value for value in baselines[0][field] if value is not None]
    course = f"That of {baselines[0]['label']} goes from {values[0]:.4f} to {values[-1]:.4f}. " if values else ""
    names = english_list([baseline["label"] for baseline in baselines])
    caption = f"The gray band is {names}." if len(baselines) == 1 else f"The gray bands are {names}."
    if len(equal) > 1:
        caption += " Equal curves overlap, so their colors alternate."
    return Chart(
        name=files,
        title=noun.capitalize(),
        unit=unit,
        caption=caption,
        description=f"{noun.capitalize()} of each step of {plural(len(strategies), 'strategy', 'strategies')}. "
        f"{course}{_outcomes(strategies)}",
        lines=tuple(lines),
    )


@dataclass(frozen=True, kw_only=True)
class _Rerun:
    """A baseline that ran again, rounding differently."""

    curve: Curve
    baseline: Curve


def _differences(comparison: Curve, field: str, bound: str, *, files: str, noun: str) -> Chart:
    strategies = comparison["strategies"]
    steps = comparison.get("steps")
    baselines = {baseline["label"]: baseline for baseline in comparison["baselines"]}
    reruns = [_Rerun(curve=rerun, baseline=baseline) for baseline in baselines.values() for rerun in baseline["reruns"]]
    lines = _rerun_lines(reruns, field, steps)
    marks: list[RingMark] = []
    largest_of_equal: list[float] = []
    for strategy, look in _looked(strategies):
        points = relative_points(strategy[field], baselines[strategy["baseline"]][field], steps)
        lines.append(look.line(strategy, points, dash=look.dash, width=_width(look, count=len(strategies))))
        known = [value for _, value in points if value is not None]
        if known and not look.differs:
            largest_of_equal.append(max(known))
        beyond = first_beyond(points, _limits(strategy, bound))
        if beyond is not None:
            marks.append(RingMark(step=beyond[0], value=beyond[1], tone=look.tone, key=look.key))
    names = english_list([*baselines])
    longest = max(len(baseline[field]) for baseline in baselines.values())
    bands = tuple(_bands(strategies, bound, steps or range(1, longest + 1)))
    caption = f"|{noun} − baseline| / baseline, on a logarithmic axis."
    if bands:
        caption += " Everything below the dashed line is within the tolerance."
    if marks:
        caption += " A ring marks the first step beyond it."
    if reruns:
        labels = dict.fromkeys(rerun.curve["label"] for rerun in reruns)
        caption += f" Gray: {names} again, rounding differently ({english_list(list(labels))})."
    description = f"Relative difference of the {noun} from {names} at each step."
    if largest_of_equal:
        description += f" Strategies that are the same differ by {difference(max(largest_of_equal))} at most."
    return Chart(
        name=files,
        title=f"Difference of the {noun}",
        unit="relative difference",
        caption=caption,
        description=f"{description} {_outcomes(strategies)}",
        lines=tuple(lines),
        bands=bands,
        marks=tuple(marks),
        log=True,
    )


def _rerun_lines(reruns: Sequence[_Rerun], field: str, steps: Sequence[int] | None) -> list[Line]:
    """Return the differences of each rerun from its baseline."""
    lines = []
    for index, rerun in enumerate(reruns):
        points = relative_points(rerun.curve[field], rerun.baseline[field], steps)
        label = f"rerun: {rerun.curve['label']}"
        lines.append(Line(label=label, points=points, tone="rerun", key=f"rerun{index}", width=1.2))
    return lines


def _width(look: Look, *, count: int) -> float:
    """Return the width of a strategy's line, one of `count`: those that differ are wider."""
    if look.differs:
        return 2.2
    return 1.5 if count <= _MANY else 0.9


def _limits(strategy: Curve, bound: str) -> Sequence[float | None]:
    """Return a strategy's bounds of each step; empty where it has none."""
    tolerance: Curve = strategy.get("tolerance") or {}
    return tolerance.get(bound) or []


def relative_points(
    values: Sequence[float | None], baseline: Sequence[float | None], steps: Sequence[int] | None = None
) -> tuple[Point, ...]:
    """Return |value - baseline| / |baseline| of the steps that both have; a gap if one of them was not finite."""
    pairs = zip(values, baseline, strict=False)
    gaps = [None if value is None or wanted is None else relative(value, wanted) for value, wanted in pairs]
    return line_points(gaps, steps)


def first_beyond(points: Sequence[Point], limits: Sequence[float | None]) -> tuple[int, float] | None:
    """Return the first step whose difference exceeds its bound; the last bound applies to all later steps."""
    known = [limit for limit in limits if limit is not None]
    if not known:
        return None
    for place, (step, value) in enumerate(points):
        if value is not None and value > known[min(place, len(known) - 1)]:
            return step, value
    return None


def _bands(strategies: Sequence[Curve], bound: str, steps: Sequence[int]) -> Iterator[Band]:
    """Yield each tolerance, or the tightest and the loosest of many."""
    distinct: dict[tuple[float, ...], None] = {}
    for strategy in strategies:
        limits = [limit for limit in _limits(strategy, bound) if limit is not None]
        if limits and steps:
            # The last bound applies to all later steps.
            distinct[tuple(limits[min(place, len(limits) - 1)] for place in range(len(steps)))] = None
    labelled: list[tuple[str, tuple[float, ...]]] = []
    if len(distinct) > _MOST_TOLERANCES:
        of_steps = list(zip(*distinct, strict=True))
        labelled.append(("loosest tolerance", tuple(map(max, of_steps))))
        labelled.append(("tightest tolerance", tuple(map(min, of_steps))))
    else:
        for limits_of_steps in sorted(distinct, reverse=True):
            is_constant = len(set(limits_of_steps)) == 1
            label = f"tolerance {scientific(limits_of_steps[0])}" if is_constant else "tolerance"
            labelled.append((label, limits_of_steps))
    for index, (label, limits_of_steps) in enumerate(labelled):
        yield Band(label=label, points=tuple(zip(steps, limits_of_steps, strict=True)), filled=index == 0)


def _looked(strategies: Sequence[Curve]) -> Iterator[tuple[Curve, Look]]:
    """Yield each strategy with its look."""
    yield from zip(strategies, looks(strategies), strict=True)


def _outcomes(strategies: Sequence[Curve]) -> str:
    """Return sentences on the strategies that are not the same, or that all are."""
    differing = _labels_of(strategies, "differs")
    failed = _labels_of(strategies, "failed")
    unclear = _labels_of(strategies, "cannot tell")
    sentences = []
    if differing:
        verb = "differs" if len(differing) == 1 else "differ"
        sentences.append(f"{english_list(differing)} {verb}.")
    if failed:
        sentences.append(f"{english_list(failed)} failed and has no curve.")
    if unclear:
        sentences.append(f"{english_list(unclear)} cannot be told from rounding.")
    if not sentences:
        return "All of them stay within their tolerance."
    return " ".join(sentences)


def _labels_of(strategies: Sequence[Curve], result: str) -> list[str]:
    """Return the labels of the strategies with this result."""
    return [strategy["label"] for strategy in strategies if strategy["result"] == result]
