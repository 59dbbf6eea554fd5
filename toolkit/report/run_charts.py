"""The plots of training runs: loss, learning rate, gradient norm, throughput, MFU, memory."""

from collections.abc import Callable, Sequence

from toolkit.report.chart import Band, Chart, Event, Line, Point
from toolkit.report.memory_estimate import estimated_bytes
from toolkit.report.training_log import Step
from toolkit.report.training_run import TrainingRun

TONES = ("cool0", "warm0", "cool1", "warm1", "warm2", "cool2", "cool3", "warm3", "cool4")
_SPEED_WINDOW = 20
"""Steps, as in the progress line of a run."""
_GIB, _MIB = 2**30, 2**20

Value = Callable[[Step], float | None]


def tone(index: int) -> str:
    """The colour of a run."""
    return TONES[index % len(TONES)]


def dash(index: int) -> tuple[float, ...]:
    """The dashes of a run: colours come again after nine of them."""
    return ((), (6, 3), (2, 2.5), (9, 3, 2, 3))[index // len(TONES) % 4]


def run_charts(runs: Sequence[TrainingRun]) -> list[Chart]:
    """The charts that have anything to show."""
    charts = [_loss(runs), _learning_rate(runs), _gradient_norm(runs), _throughput(runs), _mfu(runs), _memory(runs)]
    return [chart for chart in charts if any(value is not None for line in chart.lines for _, value in line.points)]


def running_mean(points: Sequence[Point], window: int) -> tuple[Point, ...]:
    """The mean of the last `window` values at each step; a step without a value stays without."""
    known: list[float] = []
    means: list[Point] = []
    for step, value in points:
        if value is None:
            means.append((step, None))
            continue
        known.append(value)
        recent = known[-window:]
        means.append((step, sum(recent) / len(recent)))
    return tuple(means)


def _points(run: TrainingRun, value: Value) -> tuple[Point, ...]:
    return tuple((step.step, value(step)) for step in run.log.steps)


def _known(run: TrainingRun, value: Value) -> tuple[Point, ...]:
    """Without the steps that have no value: a field that is only sometimes there leaves no gaps."""
    return tuple((step, found) for step, found in _points(run, value) if found is not None)


def _loss(runs: Sequence[TrainingRun]) -> Chart:
    lines: list[Line] = []
    for index, run in enumerate(runs):
        points = _points(run, lambda step: step.loss)
        lines += _smoothed(index, run, points, _window(runs), alone=len(runs) == 1, what="loss")
        held_out = _known(run, lambda step: step.eval_loss)
        if held_out:
            lines.append(
                Line(
                    label="held out" if len(runs) == 1 else f"{run.label}, held out",
                    points=held_out,
                    tone="warm0" if len(runs) == 1 else tone(index),
                    key=f"k{index}",
                    dash=() if len(runs) == 1 else (2, 2.5),
                    dots=True,
                )
            )
    return Chart(
        name="loss",
        title="Loss",
        unit="nats per token",
        caption=_caption(lines, "Dots are the validation loss on held-out text."),
        description="Training and validation loss over steps. " + _ends(runs, lambda step: step.loss),
        lines=tuple(lines),
        events=_events(runs),
    )


def _learning_rate(runs: Sequence[TrainingRun]) -> Chart:
    return Chart(
        name="learning-rate",
        title="Learning rate",
        unit="per update",
        caption="As the schedule set it for each step.",
        description="Learning rate over steps. " + _ends(runs, lambda step: step.lr),
        lines=_plain(runs, lambda step: step.lr),
        numbers="scientific",
        from_zero=True,
    )


def _gradient_norm(runs: Sequence[TrainingRun]) -> Chart:
    lines: list[Line] = []
    for index, run in enumerate(runs):
        points = _points(run, lambda step: None if step.skipped else step.grad_norm)
        lines += _smoothed(index, run, points, _window(runs), alone=len(runs) == 1, what="norm")
    return Chart(
        name="grad-norm",
        title="Gradient norm",
        unit="norm of the whole gradient, before clipping",
        caption=_caption(lines, "Steps whose update was skipped have none."),
        description="Gradient norm over steps. " + _ends(runs, lambda step: step.grad_norm),
        lines=tuple(lines),
        events=_events(runs),
        from_zero=True,
        log=_has_spikes(lines),
    )


def _throughput(runs: Sequence[TrainingRun]) -> Chart:
    lines: list[Line] = []
    for index, run in enumerate(runs):
        points = _known(run, lambda step: step.tokens_per_second)
        lines += _smoothed(index, run, points, _SPEED_WINDOW, alone=len(runs) == 1, what="speed")
    return Chart(
        name="throughput",
        title="Throughput",
        unit="tokens per second, all ranks",
        caption="Without validation and snapshots, which are not part of a step.",
        description="Tokens per second over steps. " + _ends(runs, lambda step: step.tokens_per_second),
        lines=tuple(lines),
        numbers="count",
        from_zero=True,
    )


def _mfu(runs: Sequence[TrainingRun]) -> Chart:
    lines = []
    for index, run in enumerate(runs):
        speed = running_mean(_known(run, lambda step: step.tokens_per_second), _SPEED_WINDOW)
        shares = [(step, run.mfu(value)) for step, value in speed if value is not None]
        points = tuple((step, 100 * share) for step, share in shares if share is not None)
        if points:
            lines.append(Line(label=run.label, points=points, tone=tone(index), key=f"k{index}", dash=dash(index)))
    gpus = sorted({run.gpu.name for run in runs if run.gpu is not None})
    return Chart(
        name="mfu",
        title="Model FLOPs utilization",
        unit="% of the peak",
        caption=f"Mean of {_SPEED_WINDOW} steps, of the dense peak of {', '.join(gpus)}.",
        description="MFU over steps.",
        lines=tuple(lines),
        from_zero=True,
    )


def _memory(runs: Sequence[TrainingRun]) -> Chart:
    """Peak memory, and of a run alone the estimate, where there is one."""
    peak = max((step.memory_bytes or 0 for run in runs for step in run.log.steps), default=0)
    unit, name = (_GIB, "GiB") if peak >= _GIB else (_MIB, "MiB")
    estimate = estimated_bytes(runs[0]) if len(runs) == 1 else None
    steps = [step.step for run in runs for step in run.log.steps]
    bands = (
        ()
        if estimate is None
        else (Band(label="estimate", points=tuple((step, estimate / unit) for step in steps), filled=False),)
    )
    return Chart(
        name="memory",
        title="Peak memory",
        unit=f"{name} on rank 0",
        caption="The most that was held up to each step: allocated on a GPU, or resident where there is none.",
        description="Peak memory over steps. ",
        lines=_plain(runs, lambda step: None if step.memory_bytes is None else step.memory_bytes / unit),
        bands=bands,
        from_zero=True,
    )


def _plain(runs: Sequence[TrainingRun], value: Value) -> tuple[Line, ...]:
    return tuple(
        Line(label=run.label, points=_known(run, value), tone=tone(index), key=f"k{index}", dash=dash(index))
        for index, run in enumerate(runs)
    )


def _smoothed(
    index: int, run: TrainingRun, points: tuple[Point, ...], window: int, *, alone: bool, what: str
) -> list[Line]:
    """The values, and over them their running mean; of several runs the mean alone, where there is one."""
    name = tone(index)
    if window < 2 or len(points) < 2 * window:
        return [Line(label=what if alone else run.label, points=points, tone=name, key=f"k{index}", dash=dash(index))]
    label = f"mean of {window} steps" if alone else run.label
    mean = Line(
        label=label, points=running_mean(points, window), tone=name, key=f"k{index}", dash=dash(index), width=2.2
    )
    if not alone:
        return [mean]
    return [Line(label=f"{what} of a step", points=points, tone="rerun", key="raw", width=1), mean]


def _events(runs: Sequence[TrainingRun]) -> tuple[Event, ...]:
    """Ticks on the step axis, of a run that stands alone: of several one could not tell whose they are."""
    if len(runs) != 1:
        return ()
    run = runs[0]
    skipped = [Event(step=step.step, kind="failed") for step in run.log.steps if step.skipped]
    return tuple(skipped + [Event(step=restart.at, kind="differs") for restart in run.log.restarts])[:400]


def _caption(lines: Sequence[Line], more: str) -> str:
    means = sorted({line.label for line in lines if line.label.startswith("mean of")})
    return f"{'Faint: each step. Strong: the ' + means[0] + '. ' if means else ''}{more}"


def _window(runs: Sequence[TrainingRun]) -> int:
    """Steps in a mean: the same for all runs, so that they compare."""
    return max(1, max(len(run.log.steps) for run in runs) // 30)


def _has_spikes(lines: Sequence[Line]) -> bool:
    """Whether a few values would press all others to the ground of a linear axis."""
    values = sorted(value for line in lines for _, value in line.points if value is not None)
    return bool(values) and values[0] > 0 and values[-1] > 8 * values[len(values) // 2]


def _ends(runs: Sequence[TrainingRun], value: Value) -> str:
    told = []
    for run in runs:
        known = _known(run, value)
        if known:
            told.append(
                f"{run.label}: from {known[0][1]:.4g} at step {known[0][0]} to {known[-1][1]:.4g} "
                f"at step {known[-1][0]}."
            )
    return " ".join(told)
