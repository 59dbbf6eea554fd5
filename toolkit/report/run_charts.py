"""The plots of training runs: loss, learning rate, gradient norm, throughput, MFU, memory."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.report.chart import DASHES, Band, Chart, Event, Line, Point, running_mean, stripe
from toolkit.report.recorded_run import RecordedRun
from toolkit.step_metrics import StepMetrics
from toolkit.units import english_list

TONES = ("cool0", "warm0", "cool1", "warm1", "warm2", "cool2", "cool3", "warm3", "cool4")
_SPEED_WINDOW = 20
"""Steps, as in the progress line of a run."""
_TEXTS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "templates" / "run_charts.json").read_text())
_GIB = 2**30
_MIB = 2**20
_VISIBLE = 0.005
"""Share of an axis: curves that are nearer to each other hide each other."""
_STRIPED_WIDTH = 2.2
_FEWEST_POINTS = 2

_OBJECTIVE: dict[str, dict[str, str]] = {
    "rewards": {"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
    "margins": {"rewards/margins": "margin"},
    "accuracies": {"rewards/accuracies": "accuracy"},
    "kl": {"kl": "KL"},
    "token-loss": {"token_loss": "token loss", "divergence": "divergence"},
}
"""Charts of an objective: the metrics in each, and the words for them."""

Value = Callable[[StepMetrics], float | None]


def tone(index: int) -> str:
    """Return the color of a run."""
    return TONES[index % len(TONES)]


def dash(index: int) -> tuple[float, ...]:
    """Return the dash pattern of a run: colors repeat after nine runs."""
    return DASHES[index // len(TONES) % len(DASHES)]


def run_charts(runs: Sequence[RecordedRun], estimates: Sequence[int | None] = ()) -> list[Chart]:
    """Return all charts that have data. `estimates`: the estimated peak of each run in bytes."""
    by_name = [_by_name(runs, "sources", "source_loss"), _by_name(runs, "validation-sets", "eval_losses")]
    charts = [
        _loss(runs),
        *by_name,
        *(_chart(name, _of_objective(runs, fields)) for name, fields in _OBJECTIVE.items()),
        _learning_rate(runs),
        _gradient_norm(runs),
        _chart("router-loss", _plain(runs, lambda step: step.router_aux_loss)),
        _chart("router-z-loss", _plain(runs, lambda step: step.router_z_loss)),
        _chart("expert-load", _plain(runs, lambda step: step.expert_load)),
        _throughput(runs),
        _mfu(runs),
        _memory(runs, estimates),
    ]
    return [chart for chart in charts if any(value is not None for line in chart.lines for _, value in line.points)]


def _points(run: RecordedRun, value: Value) -> tuple[Point, ...]:
    """Return a point for each step, with None where the value is absent or not finite."""
    return tuple((step.step, _finite(value(step))) for step in run.log.steps)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _known(run: RecordedRun, value: Value) -> tuple[tuple[int, float], ...]:
    """Return the points without missing values, for fields that only some steps have."""
    return tuple((step, known) for step, known in _points(run, value) if known is not None)


def _loss(runs: Sequence[RecordedRun]) -> Chart:
    trained = _smoothed(runs, [_points(run, lambda step: step.loss) for run in runs], _window(runs), noun="loss")
    held_out = {}
    for index, run in enumerate(runs):
        line = _line(index, f"{run.label}, held out", _known(run, lambda step: step.eval_loss))
        if len(runs) == 1:
            line = replace(line, label="held out", tone="warm0")
        held_out[line.key] = replace(line, dots=True, dash=(2, 2.5) if len(runs) > 1 else ())
    # In the legend, a run's held-out curve follows its training curve.
    lines = [
        curve for line in trained for curve in (line, held_out.get(line.key)) if curve is not None and curve.points
    ]
    ends = _ends(runs, lambda step: step.loss)
    has_rewards = any("logps/chosen" in (step.objective or {}) for run in runs for step in run.log.steps)
    unit = {"unit": "of a pair or completion"} if has_rewards else {}
    return _chart("loss", lines, ends, caption=_caption(lines, "loss"), events=_events(runs), **unit)


def _by_name(runs: Sequence[RecordedRun], chart: str, field: str) -> Chart:
    """Plot the loss of each source or validation set of each run."""
    values = [(run, getattr(step, field) or {}, step.step) for run in runs for step in run.log.steps]
    pairs = dict.fromkeys((run.label, name) for run, losses, _ in values for name in losses)
    lines = []
    for index, (label, name) in enumerate(pairs):
        of_name = [(step, losses[name]) for run, losses, step in values if run.label == label and name in losses]
        points = tuple((step, _finite(loss)) for step, loss in of_name)
        window = _window(runs) if field == "source_loss" and len(points) >= 2 * _window(runs) else 1
        line = _line(index, name if len(runs) == 1 else f"{label}, {name}", running_mean(points, window))
        lines.append(replace(line, dots=field == "eval_losses"))
    return _chart(chart, lines)


def _of_objective(runs: Sequence[RecordedRun], fields: Mapping[str, str]) -> list[Line]:
    """Plot metrics of an objective, or of a distillation, by the words for them; running means where they are long."""
    lines: list[Line] = []
    window = _window(runs)
    for run in runs:
        for field, words in fields.items():
            values = [(step.step, _finite((step.objective or {}).get(field))) for step in run.log.steps]
            points = tuple((step, value) for step, value in values if value is not None)
            if points:
                is_long = window >= 2 and len(points) >= 2 * window
                label = words if len(runs) == 1 else f"{run.label}, {words}"
                lines.append(_line(len(lines), label, running_mean(points, window) if is_long else points))
    return lines


def _learning_rate(runs: Sequence[RecordedRun]) -> Chart:
    return _chart("learning-rate", _plain(runs, lambda step: step.lr), _ends(runs, lambda step: step.lr))


def _gradient_norm(runs: Sequence[RecordedRun]) -> Chart:
    points = [_points(run, lambda step: None if step.skipped else step.grad_norm) for run in runs]
    lines = _smoothed(runs, points, _window(runs), noun="norm")
    ends = _ends(runs, lambda step: step.grad_norm)
    caption = _caption(lines, "grad-norm")
    log = _has_spikes(lines)
    return _chart("grad-norm", lines, ends, caption=caption, events=_events(runs), log=log)


def _throughput(runs: Sequence[RecordedRun]) -> Chart:
    points = [_known(run, lambda step: step.tokens_per_second) for run in runs]
    lines = _smoothed(runs, points, _SPEED_WINDOW, noun="speed")
    return _chart("throughput", lines, _ends(runs, lambda step: step.tokens_per_second))


def _mfu(runs: Sequence[RecordedRun]) -> Chart:
    lines = []
    for index, run in enumerate(runs):
        speed = running_mean(_known(run, lambda step: step.tokens_per_second), _SPEED_WINDOW)
        shares = [(step, run.mfu(value)) for step, value in speed if value is not None]
        if points := tuple((step, 100 * share) for step, share in shares if share is not None):
            lines.append(_line(index, run.label, points))
    gpus = sorted({run.gpu.name for run in runs if run.gpu is not None})
    caption = _TEXTS["mfu"]["caption"].format(window=_SPEED_WINDOW, gpus=", ".join(gpus))
    return _chart("mfu", lines, caption=caption)


def _memory(runs: Sequence[RecordedRun], estimates: Sequence[int | None]) -> Chart:
    """Plot peak memory, and the estimate of a single run."""
    peak = max((step.memory_bytes or 0 for run in runs for step in run.log.steps), default=0)
    unit, name = (_GIB, "GiB") if peak >= _GIB else (_MIB, "MiB")
    estimate = estimates[0] if len(estimates) == 1 else None
    steps = [step.step for run in runs for step in run.log.steps]
    level = () if estimate is None else tuple((step, estimate / unit) for step in steps)
    lines = _plain(runs, lambda step: None if step.memory_bytes is None else step.memory_bytes / unit)
    bands = (Band(label="estimate", points=level, filled=False),) if level else ()
    return _chart("memory", lines, unit=_TEXTS["memory"]["unit"].format(unit=name), bands=bands)


def _plain(runs: Sequence[RecordedRun], value: Value) -> tuple[Line, ...]:
    return tuple(_line(index, run.label, _known(run, value)) for index, run in enumerate(runs))


def _line(index: int, label: str, points: tuple[Point, ...], *, width: float = 1.6) -> Line:
    return Line(label=label, points=points, tone=tone(index), key=f"k{index}", dash=dash(index), width=width)


def _smoothed(
    runs: Sequence[RecordedRun], points_of: Sequence[tuple[Point, ...]], window: int, *, noun: str
) -> list[Line]:
    """Return the values and their running mean; only the mean for several runs, if they are long enough."""
    lines = []
    alone = len(runs) == 1
    for index, (run, points) in enumerate(zip(runs, points_of, strict=True)):
        is_long = window >= 2 and len(points) >= 2 * window
        if alone and is_long:
            lines.append(Line(label=f"{noun} of a step", points=points, tone="rerun", key="raw", width=1))
        label = run.label
        if alone:
            label = f"mean of {window} steps" if is_long else noun
        if is_long:
            lines.append(_line(index, label, running_mean(points, window), width=2.2))
        else:
            lines.append(_line(index, label, points, width=1.6))
    return lines


def _events(runs: Sequence[RecordedRun]) -> tuple[Event, ...]:
    """Return ticks on the step axis for a single run; for several, one could not tell which run they belong to."""
    if len(runs) != 1:
        return ()
    run = runs[0]
    skipped = [Event(step=step.step, kind="warning") for step in run.log.steps if step.skipped]
    return tuple(skipped + [Event(step=restart.at, kind="differs") for restart in run.log.restarts])[:400]


def _chart(name: str, lines: Sequence[Line], ends: str = "", **more: Any) -> Chart:
    texts = _TEXTS[name] | {"description": _TEXTS[name]["description"] + ends} | more
    striped, sentence = _striped(lines)
    texts["caption"] = f"{texts.get('caption', '')}{sentence}".strip()
    return Chart(name=name, lines=tuple(striped), **texts)


def _striped(lines: Sequence[Line]) -> tuple[list[Line], str]:
    """Let curves that would hide each other alternate along their course, and say how far apart they are."""
    values = [value for line in lines for _, value in line.points if value is not None]
    visible = _VISIBLE * (max(values) - min(values)) if values else 0.0
    groups: list[list[Line]] = []
    apart: dict[str, float] = {}
    for line in lines:
        for group in groups:
            distance = _distance(group[0], line)
            if distance is not None and distance <= visible:
                group.append(line)
                apart[group[0].label] = max(distance, apart.get(group[0].label, 0.0))
                break
        else:
            groups.append([line])
    striped: dict[int, Line] = {}
    sentences = []
    for group in groups:
        for place, line in enumerate(group):
            wide = max(line.width, _STRIPED_WIDTH)
            look = {} if len(group) == 1 else stripe(place, len(group)) | {"width": wide}
            striped[id(line)] = replace(line, **look)
        if len(group) > 1:
            names = english_list([line.label for line in group])
            most = apart[group[0].label]
            within = f"equal within {most:.1e}" if most else "equal"
            sentences.append(f" {names} are {within}, so their colors alternate.")
    return [striped[id(line)] for line in lines], "".join(sentences)


def _distance(line: Line, other: Line) -> float | None:
    """The most that two curves differ in a step; None where they have other steps, or too few to lie on each other."""
    first = dict(line.points)
    second = dict(other.points)
    if len(first) < _FEWEST_POINTS or first.keys() != second.keys() or line.dots != other.dots:
        return None
    distances = [0.0]
    for step, value in first.items():
        there = second[step]
        if (value is None) != (there is None):
            return None
        if value is not None and there is not None:
            distances.append(abs(value - there))
    return max(distances)


def _caption(lines: Sequence[Line], name: str) -> str:
    means = sorted({line.label for line in lines if line.label.startswith("mean of")})
    return f"{'Faint: each step. Strong: the ' + means[0] + '. ' if means else ''}{_TEXTS[name]['caption']}"


def _window(runs: Sequence[RecordedRun]) -> int:
    """Return the number of steps in a running mean: the same for all runs."""
    return max(1, max(len(run.log.steps) for run in runs) // 30)


def _has_spikes(lines: Sequence[Line]) -> bool:
    """Whether a few values would flatten all others on a linear axis."""
    values = sorted(value for line in lines for _, value in line.points if value is not None)
    return bool(values) and values[0] > 0 and values[-1] > 8 * values[len(values) // 2]


def _ends(runs: Sequence[RecordedRun], value: Value) -> str:
    sentences = []
    for run in runs:
        known = _known(run, value)
        if known:
            (first, start), (last, end) = known[0], known[-1]
            sentences.append(f"{run.label}: from {start:.4g} at step {first} to {end:.4g} at step {last}.")
    return " ".join(sentences)
