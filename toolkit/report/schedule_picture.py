"""Timelines of pipeline schedules as one SVG picture, light and dark: a row for each rank, all on one scale of time."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import repeat

from toolkit.config.pipeline_schedules import Schedule
from toolkit.config.simulate_schedule import TimedOperation, Timeline
from toolkit.report.chart import DARK, LIGHT

_WIDTH = 960
_LEFT = 74
_RIGHT = 118
_ROW = 24
_BAR = 20
_HEAD = 34
_FOOT = 14
_LEGEND = 44
_DIGIT = 6.6
"""Pixels of a digit: narrower bars have no number."""
_THINNEST_GAP = 3.0
"""Pixels: narrower bars have no gap between them."""
_TONES = {"F": "cool0", "D": "warm0", "B": "warm0", "W": "cool1"}
_NAMES = {"F": "forward", "D": "backward", "B": "for the input (B)", "W": "for the weights (W)"}
_TITLES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved 1F1B", "zb-h1": "ZB-H1", "zb-v": "ZB-V"}


def schedule_picture(timelines: Sequence[Timeline], names: Sequence[str] = ()) -> str:
    """The timelines below each other. `names`: words in front of the title of each."""
    longest = max(timeline.makespan for timeline in timelines)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    parts: list[str] = []
    top = _LEGEND
    titles = [_title(timeline, name) for timeline, name in zip(timelines, names or repeat(""), strict=False)]
    for timeline, title in zip(timelines, titles, strict=True):
        parts += _block(timeline, title, top, scale)
        top += _HEAD + _ROW * timeline.schedule.pp + _FOOT
    passes = [kind for kind in "FDBW" if any(_has(timeline.schedule, kind) for timeline in timelines)]
    label = "; ".join(titles)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" role="img" '
        f"aria-label=\"{escape(label)}\" font-family=\"system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif\">"
    )
    ground = f'<rect width="{_WIDTH}" height="{top}" class="ground"/>'
    has_chunks = any(timeline.schedule.virtual_stages > 1 for timeline in timelines)
    legend = _legend(passes, has_chunks=has_chunks)
    return "\n".join([head, f"<style>{_style()}</style>", ground, *legend, *parts, "</svg>", ""])


def _has(schedule: Schedule, kind: str) -> bool:
    return kind == "F" or (kind in "BW") == schedule.splits_backward


def _style() -> str:
    def rules(colors: dict[str, str]) -> str:
        fills = {"ground": "ground", "ink": "ink", "muted": "muted", "idle": "rule", "number": "ground"} | _TONES
        return "".join(f".{name}{{fill:{colors[tone]}}}" for name, tone in fills.items())

    sizes = "text{font-size:12px}.number{font-size:11px;text-anchor:middle}.title{font-size:14px;font-weight:600}"
    chunks = ".c1{fill-opacity:.76}"
    return f"{sizes}{chunks}{rules(LIGHT)}@media (prefers-color-scheme:dark){{{rules(DARK)}}}"


def _legend(passes: Sequence[str], *, has_chunks: bool) -> Iterator[str]:
    x = _LEFT
    for kind in passes:
        yield f'<rect x="{x}" y="14" width="14" height="14" class="{kind}"/>'
        name = f"backward {_NAMES[kind]}" if kind in "BW" and "D" not in passes else _NAMES[kind]
        yield f'<text x="{x + 20}" y="25" class="ink">{name}</text>'
        x += 46 + round(_DIGIT * len(name))
    note = "; lighter: odd chunks of a rank" if has_chunks else ""
    yield f'<rect x="{x}" y="14" width="14" height="14" class="idle"/>'
    yield f'<text x="{x + 20}" y="25" class="ink">bubble{note}</text>'


def _title(timeline: Timeline, kind: str) -> str:
    schedule = timeline.schedule
    name = f"{kind}: {_TITLES[schedule.kind]}" if kind else _TITLES[schedule.kind]
    chunks = f", {schedule.virtual_stages} virtual stages a rank" if schedule.virtual_stages > 1 else ""
    return f"{name}{chunks}: bubble {100 * timeline.bubble:.1f} %, step {timeline.step:.2f} F+B"


def _block(timeline: Timeline, title: str, top: float, scale: float) -> Iterator[str]:
    schedule = timeline.schedule
    right = _LEFT + timeline.makespan * scale
    yield f'<text x="{_LEFT}" y="{top + 20}" class="ink title">{escape(title)}</text>'
    yield f'<text x="{_WIDTH - 12}" y="{top + 20}" class="muted" text-anchor="end">in flight</text>'
    word = "stage" if schedule.virtual_stages == 1 else "rank"
    for rank in range(schedule.pp):
        y = top + _HEAD + _ROW * rank
        yield f'<text x="{_LEFT - 10}" y="{y + 14}" class="muted" text-anchor="end">{word} {rank}</text>'
        held = f"{schedule.in_flight[rank]:.4g}"
        yield f'<text x="{_WIDTH - 12}" y="{y + 14}" class="ink" text-anchor="end">{held}</text>'
        yield f'<rect x="{_LEFT}" y="{y}" width="{right - _LEFT:.2f}" height="{_BAR}" class="idle"/>'
        yield from _bars(timeline, rank, y, scale)


def _bars(timeline: Timeline, rank: int, y: float, scale: float) -> Iterator[str]:
    """One path for each kind of pass, which keeps a picture of many micro-batches small, and a number on each bar."""
    paths: dict[str, list[str]] = {}
    numbers = []
    for operation in timeline.operations(rank):
        width = (operation.end - operation.start) * scale
        gap = 0.8 if width >= _THINNEST_GAP else 0.0
        x = _LEFT + operation.start * scale
        shape = f"M{x:.2f} {y}h{width - gap:.2f}v{_BAR}H{x:.2f}z"
        paths.setdefault(_classes(timeline.schedule, operation), []).append(shape)
        text = str(operation.micro_batch)
        if width >= _DIGIT * len(text) + 2:
            numbers.append(f'<text x="{x + (width - gap) / 2:.1f}" y="{y + 14}" class="number">{text}</text>')
    for classes, shapes in paths.items():
        yield f'<path class="{classes}" d="{"".join(shapes)}"/>'
    yield from numbers


def _classes(schedule: Schedule, operation: TimedOperation) -> str:
    chunk = operation.stage // schedule.pp
    return operation.kind + " c1" * (chunk % 2)
